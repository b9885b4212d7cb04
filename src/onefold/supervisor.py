"""Stage 6, lease: the parent of worker processes, which outlives whatever a handler does to its own.

It runs no handler.  It keeps its places filled, gives messages that a process died with a process for themselves,
and when it is told to stop it leaves nothing behind that anybody would have to wait for.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from onefold import custody, limits
from onefold.clock import MICROSECONDS, Clock
from onefold.crew import Crew, SupervisorSettings
from onefold.errors import ConfigurationError, StoreError
from onefold.fleet import parse_queues
from onefold.process import WorkerProcess
from onefold.purging import keep_purged
from onefold.runners import cancel
from onefold.store import Lane, Query, Record, State, Store
from onefold.task import Task
from onefold.watch import Watch

logger = logging.getLogger("onefold")

#: The first process that dies is replaced at once; from then on the pause doubles, up to the second figure.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.5, 30.0
#: A process that lived this long was well: the next death is a first one again.
_WELL_SECONDS = 60.0
#: Processes in a row that end before they are ready, until it is clear that none ever will be.
_FALSE_STARTS_MAX = 3
#: How often to look for messages that need a process for themselves; a death that is seen here is acted on at once.
_SUSPECTS_SECONDS = 5.0
#: A worn process whose successor could not start stays, and this many deaths' pause later it is tried again.
_PAUSES_WHEN_WORN = 4
#: A store that failed is asked again after this many deaths' pause.
_PAUSES_WHEN_AWAY = 3
#: A process that was killed is gone, and what it held is handed back, within this time: a little more than the store
#: is waited for.
_GONE_SECONDS = limits.STOP_STORE_SECONDS + 2.0
#: Looks at what a dead process held, after the one at its burial.
_LATE_LOOKS = 2


class Supervisor:
    """Keeps worker processes running until it is told to stop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chance: random.Random,
        tasks: Mapping[str, Task[Any, Any]],
        settings: SupervisorSettings,
        announce: custody.Announce = custody.unannounced,
    ) -> None:
        if store.capabilities.durability == "nothing":
            raise ConfigurationError(
                "a store in memory belongs to one process, so worker processes would see nothing of it; "
                "use a file, or app.work() inside the process"
            )
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._settings = settings
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._failure: ConfigurationError | None = None
        self._filled = 0
        self._tell_ready: Callable[[], None] = lambda: None
        self.crew = Crew(store, clock, chance, tasks, settings, announce)
        self._watch = Watch(self.crew, store, clock, settings)
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
        """When it last looked at its processes, on the steady clock."""
        return self._watch.looked_at

    def stop(self) -> None:
        """Stop gracefully; said a second time, at once."""
        if self._stopping.is_set():
            self.crew.in_haste = True
            self._hurrying.set()
        self._stopping.set()

    async def run(self, ready: Callable[[], None]) -> int:
        """Work until stopped, or until nothing is due; returns how many messages were settled.

        When it returns no process is left, and what they held is settled, or handed back if the store could be told.
        ``ready`` is called once every place is filled.  Should this process be killed instead, its processes notice,
        finish or hand back what they have, and end.
        """
        self._tell_ready = ready
        background = [
            asyncio.create_task(self._watch.run(), name="onefold-watch"),
            asyncio.create_task(self._keep_house(), name="onefold-housekeeper"),
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
            for process in self.crew.processes.values():
                process.kill("its supervisor failed", frozenset())
            # A commit of the housekeeper's may wait for a standby, and cannot be cancelled half-way.
            await cancel([working, stopping, *background], within=limits.STOP_STORE_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self.crew.settled

    async def _wind_down(self, working: asyncio.Task[None]) -> None:
        self._stopping.set()
        for process in self.crew.processes.values():
            process.stop(at=self._clock.steady())
        hurrying = asyncio.create_task(self._hurrying.wait(), name="onefold-hurrying")
        everybody = asyncio.create_task(self._everybody_is_gone(), name="onefold-last")
        # A process that is late is killed before this is over; then only the store can keep it from being forgotten.
        patience = self._settings.stop_seconds + limits.STOP_MARGIN_SECONDS + _GONE_SECONDS
        await asyncio.wait([everybody, hurrying], return_when=asyncio.FIRST_COMPLETED, timeout=patience)
        for process in self.crew.processes.values():
            process.kill("a second signal came" if self._hurrying.is_set() else "it did not stop in time", frozenset())
        if not (await asyncio.wait([everybody], timeout=_GONE_SECONDS))[0]:
            self.crew.give_up()
            await everybody
        hurrying.cancel()
        if (await asyncio.wait([working], timeout=limits.STOP_STORE_SECONDS))[0]:
            working.result()

    async def _everybody_is_gone(self) -> None:
        while self.crew.processes:
            await next(iter(self.crew.processes.values())).buried.wait()

    # the places

    async def _work(self) -> None:
        await self._fill_places()
        while self._settings.until_idle and not self.stopping and await self._any_suspects():
            for process in self._on_probation():
                await process.buried.wait()
            # What came of it may be for the others.
            await self._fill_places()

    async def _any_suspects(self) -> bool:
        """Have processes for suspects, if there are any; asked until the store answers."""
        while not self.stopping:
            try:
                return await self._staff_probation()
            except StoreError as error:
                logger.warning("store_failed doing=supervise error=%s", error)
                await self._pause(_PAUSES_WHEN_AWAY)
        return False

    async def _fill_places(self) -> None:
        await asyncio.gather(*(self._fill_place() for _ in range(self._settings.processes)))

    async def _fill_place(self) -> None:
        """Keep one process there: until it is idle if that was ordered, or for ever."""
        deaths = 0
        while not self.stopping:
            process = await self._employ(Lane.MAIN)
            if process is not None:
                await _any_of(process.ready, process.buried)
                self._note_ready(process)
                process = await self._follow(process)
            if process is not None and process.stopped is not None:
                if self._settings.until_idle:
                    return
                deaths = 0
                continue
            deaths = 1 if process is not None and self._was_well(process) else deaths + 1
            self._fail_if_hopeless()
            await self._pause(deaths)

    async def _employ(self, lane: Lane) -> WorkerProcess | None:
        try:
            process = await self.crew.employ(lane)
        except OSError as error:
            logger.error("worker_not_started reason=%s", error)
            return None
        if self.stopping:
            process.stop(at=self._clock.steady())
        return process

    async def _follow(self, process: WorkerProcess) -> WorkerProcess:
        """Return the process of this place that has ended; one that is worn leaves when its successor is ready."""
        while True:
            await _any_of(process.buried, process.worn)
            if process.buried.is_set():
                return process
            successor = await self._employ(process.lane)
            if successor is not None:
                await _any_of(successor.ready, successor.buried)
            if successor is None or successor.buried.is_set():
                self._fail_if_hopeless()
                await self._pause(_PAUSES_WHEN_WORN)
                continue
            logger.info("worker_replaced worker=%s successor=%s", process.name, successor.name)
            process.stop(at=self._clock.steady())
            process = successor

    def _was_well(self, process: WorkerProcess) -> bool:
        """Whether it got something done, so that replacing it at once brings everybody forward."""
        lived = (self._clock.steady() - process.started_at) / MICROSECONDS
        return process.settled > 0 or (process.ready.is_set() and lived >= _WELL_SECONDS)

    async def _pause(self, deaths: int) -> None:
        seconds = 0.0 if deaths <= 1 else min(_PAUSE_SECONDS * 2 ** min(deaths - 2, 16), _PAUSE_SECONDS_MAX)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _note_ready(self, process: WorkerProcess) -> None:
        if process.ready.is_set():
            self.crew.changed.set()
            self._filled += 1
            if self._filled == self._settings.processes:
                self._tell_ready()

    def _fail_if_hopeless(self) -> None:
        said = self.crew.failure
        if said is not None and self.crew.false_starts >= _FALSE_STARTS_MAX and self._failure is None:
            stack = f"\n{said.stack.rstrip()}" if said.stack else ""
            self._failure = ConfigurationError(f"no worker process can start: {said.reason}{stack}")
            self._stopping.set()

    # suspects, and the rest of the house

    async def _keep_house(self) -> None:
        while True:
            self.crew.changed.clear()
            try:
                await self._staff_probation()
                await self._look_after_the_late()
                await self.crew.enter_if_due()
                self.store_checked_at = self._clock.steady()
            except StoreError as error:
                logger.warning("store_failed doing=supervise error=%s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SUSPECTS_SECONDS):
                    await self.crew.changed.wait()

    def _on_probation(self) -> list[WorkerProcess]:
        return [process for process in self.crew.processes.values() if process.lane is Lane.PROBATION]

    async def _staff_probation(self) -> bool:
        """Have a process for each message that others died with, up to a limit; True when there are any."""
        if self.stopping:
            return False
        waiting, there = await self._suspects(), self._on_probation()
        free = sum(not process.running() for process in there)
        for _ in range(min(waiting - free, self._settings.processes - len(there))):
            await self._employ(Lane.PROBATION)
        self._fail_if_hopeless()
        return bool(waiting or there)

    async def _suspects(self) -> int:
        """Count the messages that wait for a process of their own, as far as there may be processes for them."""
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

    async def _look_after_the_late(self) -> None:
        """Hand back what was claimed for a process that was dead by then: the claim was under way when it died."""
        for name, looks in list(self.crew.late.items()):
            if number := await custody.hand_back(self._store, name):
                logger.warning("handed_back worker=%s messages=%d claimed as it died", name, number)
            if looks + 1 == _LATE_LOOKS:
                del self.crew.late[name]
            else:
                self.crew.late[name] = looks + 1


async def _any_of(*events: asyncio.Event) -> None:
    """Return when one of these is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
