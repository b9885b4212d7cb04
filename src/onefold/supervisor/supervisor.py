"""Stage 6, lease: the parent of worker processes, which survives anything a handler does to its own process.

It runs no handler.  It replaces processes that end, starts processes apart for messages that others died with, and
when it stops, no message waits for the end of a lease.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import ConfigurationError, StoreError
from onefold.store import Lane, Query, Record, State, Store
from onefold.supervisor.hand_back import Announce, hand_back, unannounced
from onefold.supervisor.process import WorkerProcess
from onefold.supervisor.processes import WorkerProcesses
from onefold.supervisor.settings import SupervisorSettings
from onefold.supervisor.watchdog import Watchdog
from onefold.tasks.task import Task
from onefold.worker.purger import keep_purged
from onefold.worker.runners import cancel
from onefold.worker.settings import parse_queues

logger = logging.getLogger("onefold")

#: The first process that dies is replaced at once, the second after this pause, which then doubles up to the maximum.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.5, 30.0
#: A process that lived this long was healthy: the next death counts as the first again.
_HEALTHY_SECONDS = 60.0
#: So many processes in a row that end before they are ready show that none can start.
_FALSE_STARTS_MAX = 3
#: How often to look for messages that need a process of their own; after a crash here that is done at once.
_SUSPECTS_SECONDS = 5.0
#: A worn process stays while its successor cannot start, which is tried again after the pause of so many deaths.
_PAUSES_WHEN_WORN = 4
#: A store that failed is called again after the pause of so many deaths.
_PAUSES_WHEN_AWAY = 3
#: Within this time a killed process has ended and its messages are handed back: a little more than the wait for the
#: store.
_GONE_SECONDS = limits.STOP_STORE_SECONDS + 2.0
#: How often to look again for messages of a dead process, after they were handed back.
_LATE_CHECKS = 2


class Supervisor:
    """Keeps worker processes running until it is told to stop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chance: random.Random,
        tasks: Mapping[str, Task[Any, Any]],
        settings: SupervisorSettings,
        announce: Announce = unannounced,
    ) -> None:
        if store.capabilities.durability == "nothing":
            raise ConfigurationError(
                "a store in memory belongs to one process, so worker processes could not read it; "
                "use a file, or app.work() inside the process"
            )
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._settings = settings
        self._stopping = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._failure: ConfigurationError | None = None
        self._filled = 0
        self._on_ready: Callable[[], None] = lambda: None
        self.processes = WorkerProcesses(store, clock, chance, tasks, settings, announce)
        self._watchdog = Watchdog(self.processes, store, clock, settings)
        #: When the store last answered, on the steady clock.
        self.store_checked_at = clock.steady()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    @property
    def places(self) -> int:
        """How many processes there should be, not counting those for suspects."""
        return self._settings.processes

    @property
    def watched_at(self) -> int:
        """When it last checked its processes, on the steady clock."""
        return self._watchdog.checked_at

    def stop(self) -> None:
        """Stop gracefully; at the second call, at once."""
        if self._stopping.is_set():
            self.processes.stop_now = True
            self._stop_now.set()
        self._stopping.set()

    async def run(self, ready: Callable[[], None]) -> int:
        """Work until stopped, or until nothing is due; returns how many messages were settled.

        When it returns no process is left, and their messages are settled, or handed back unless the store failed.
        ``ready`` is called once every place is filled.  If this process is killed instead, its processes notice,
        settle or hand back their messages, and end.
        """
        self._on_ready = ready
        background = [
            asyncio.create_task(self._watchdog.run(), name="onefold-watch"),
            asyncio.create_task(self._housekeep(), name="onefold-housekeeper"),
            asyncio.create_task(keep_purged(self._store, self._clock), name="onefold-purger"),
        ]
        working = asyncio.create_task(self._work(), name="onefold-places")
        stopping = asyncio.create_task(self._stopping.wait(), name="onefold-stopping")
        try:
            done, _ = await asyncio.wait([working, stopping, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._wind_down(working)
        finally:
            for process in self.processes.by_name.values():
                process.kill("its supervisor failed", frozenset())
            # A commit of ``_housekeep`` may wait for a standby, and then cannot be cancelled.
            await cancel([working, stopping, *background], within=limits.STOP_STORE_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self.processes.settled

    async def _wind_down(self, working: asyncio.Task[None]) -> None:
        self._stopping.set()
        for process in self.processes.by_name.values():
            process.stop(at=self._clock.steady())
        stop_now = asyncio.create_task(self._stop_now.wait(), name="onefold-stop-now")
        all_gone = asyncio.create_task(self._wait_until_all_gone(), name="onefold-all-gone")
        # The watchdog has killed every late process by then; one that is not gone yet waits for the store.
        patience = self._settings.stop_seconds + limits.STOP_MARGIN_SECONDS + _GONE_SECONDS
        await asyncio.wait([all_gone, stop_now], return_when=asyncio.FIRST_COMPLETED, timeout=patience)
        for process in self.processes.by_name.values():
            process.kill("a second signal came" if self._stop_now.is_set() else "it did not stop in time", frozenset())
        if not (await asyncio.wait([all_gone], timeout=_GONE_SECONDS))[0]:
            self.processes.give_up()
            await all_gone
        stop_now.cancel()
        if (await asyncio.wait([working], timeout=limits.STOP_STORE_SECONDS))[0]:
            working.result()

    async def _wait_until_all_gone(self) -> None:
        while self.processes.by_name:
            await next(iter(self.processes.by_name.values())).gone.wait()

    # the places

    async def _work(self) -> None:
        await self._fill_places()
        while self._settings.until_idle and not self.stopping and await self._any_suspects():
            for process in self._probation_processes():
                await process.gone.wait()
            # A suspect may have sent messages that are for the other processes.
            await self._fill_places()

    async def _any_suspects(self) -> bool:
        """Start processes for suspects and return whether there are any; repeated until the store answers."""
        while not self.stopping:
            try:
                return await self._start_for_suspects()
            except StoreError as error:
                logger.warning("store_failed doing=supervise error=%s", error)
                await self._pause(_PAUSES_WHEN_AWAY)
        return False

    async def _fill_places(self) -> None:
        await asyncio.gather(*(self._fill_place() for _ in range(self._settings.processes)))

    async def _fill_place(self) -> None:
        """Keep one process running: with ``until_idle`` until nothing is due, otherwise for ever."""
        deaths = 0
        while not self.stopping:
            process = await self._start(Lane.MAIN)
            if process is not None:
                await _any_of(process.ready, process.gone)
                self._note_ready(process)
                process = await self._replace_while_worn(process)
            if process is not None and process.stopped is not None:
                if self._settings.until_idle:
                    return
                deaths = 0
                continue
            deaths = 1 if process is not None and self._was_healthy(process) else deaths + 1
            self._fail_if_none_can_start()
            await self._pause(deaths)

    async def _start(self, lane: Lane) -> WorkerProcess | None:
        try:
            process = await self.processes.start(lane)
        except OSError as error:
            logger.error("worker_not_started reason=%s", error)
            return None
        if self.stopping:
            process.stop(at=self._clock.steady())
        return process

    async def _replace_while_worn(self, process: WorkerProcess) -> WorkerProcess:
        """Wait until the process of this place ends, and return it; a worn one stops when its successor is ready."""
        while True:
            await _any_of(process.gone, process.worn)
            if process.gone.is_set():
                return process
            successor = await self._start(process.lane)
            if successor is not None:
                await _any_of(successor.ready, successor.gone)
            if successor is None or successor.gone.is_set():
                self._fail_if_none_can_start()
                await self._pause(_PAUSES_WHEN_WORN)
                continue
            logger.info("worker_replaced worker=%s successor=%s", process.name, successor.name)
            process.stop(at=self._clock.steady())
            process = successor

    def _was_healthy(self, process: WorkerProcess) -> bool:
        """Whether it settled a message or lived long, so that it is replaced at once."""
        lived = (self._clock.steady() - process.started_at) / MICROSECONDS
        return process.settled > 0 or (process.ready.is_set() and lived >= _HEALTHY_SECONDS)

    async def _pause(self, deaths: int) -> None:
        seconds = 0.0 if deaths <= 1 else min(_PAUSE_SECONDS * 2 ** min(deaths - 2, 16), _PAUSE_SECONDS_MAX)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _note_ready(self, process: WorkerProcess) -> None:
        if process.ready.is_set():
            self.processes.changed.set()
            self._filled += 1
            if self._filled == self._settings.processes:
                self._on_ready()

    def _fail_if_none_can_start(self) -> None:
        failure = self.processes.failure
        if failure is not None and self.processes.false_starts >= _FALSE_STARTS_MAX and self._failure is None:
            stack = f"\n{failure.stack.rstrip()}" if failure.stack else ""
            self._failure = ConfigurationError(f"no worker process can start: {failure.reason}{stack}")
            self._stopping.set()

    # suspects, late claims and the list of workers

    async def _housekeep(self) -> None:
        while True:
            self.processes.changed.clear()
            try:
                await self._start_for_suspects()
                await self._hand_back_late_claims()
                await self.processes.enter_if_due()
                self.store_checked_at = self._clock.steady()
            except StoreError as error:
                logger.warning("store_failed doing=supervise error=%s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SUSPECTS_SECONDS):
                    await self.processes.changed.wait()

    def _probation_processes(self) -> list[WorkerProcess]:
        return [process for process in self.processes.by_name.values() if process.lane is Lane.PROBATION]

    async def _start_for_suspects(self) -> bool:
        """Start a process for each suspect, a message that others died with, up to a limit; True if there are any."""
        if self.stopping:
            return False
        suspects, present = await self._count_suspects(), self._probation_processes()
        free = sum(not process.running() for process in present)
        for _ in range(min(suspects - free, self._settings.processes - len(present))):
            await self._start(Lane.PROBATION)
        self._fail_if_none_can_start()
        return bool(suspects or present)

    async def _count_suspects(self) -> int:
        """Count the suspects that are due, at most about as many as there may be processes for them."""
        found, after = 0, ""
        while page := await self._store.find(Query(crashes=1, states=(State.SCHEDULED,), after=after)):
            found += sum(self._is_due_here(record) for record in page)
            after = page[-1].envelope.id
            if found >= self._settings.processes or len(page) < limits.PAGE:
                break
        return found

    def _is_due_here(self, record: Record) -> bool:
        envelope = record.envelope
        due = envelope.due_at <= self._clock.now()
        return due and envelope.queue in parse_queues(self._settings.queues)[0] and envelope.message_type in self._tasks

    async def _hand_back_late_claims(self) -> None:
        """Hand back messages that a process claimed as it died: the store carried out the claim afterwards."""
        for name, checks in list(self.processes.dead.items()):
            if number := await hand_back(self._store, name):
                logger.warning("handed_back worker=%s messages=%d claimed as it died", name, number)
            if checks + 1 == _LATE_CHECKS:
                del self.processes.dead[name]
            else:
                self.processes.dead[name] = checks + 1


async def _any_of(*events: asyncio.Event) -> None:
    """Return when one of these is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
