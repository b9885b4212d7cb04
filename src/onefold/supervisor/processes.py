"""Stage 6, lease: the worker processes below one supervisor, from their start until their messages are settled."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from typing import Any

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import StoreError
from onefold.store import Lane, Store
from onefold.supervisor.hand_back import Announce, Death, settle_dead_process, unannounced
from onefold.supervisor.ipc import WorkerFailed, WorkerOrders
from onefold.supervisor.process import WorkerProcess, start_process
from onefold.supervisor.settings import SupervisorSettings
from onefold.tasks.task import Task
from onefold.version import __version__
from onefold.worker.settler import UNSETTLED_MAX
from onefold.worker.worker_list import WorkerList, WorkerRecord, host_name, worker_name

logger = logging.getLogger("onefold")

#: When the store fails as a dead process is settled, the pause before the next try; it doubles up to the maximum.
_BACK_OFF_SECONDS, _BACK_OFF_SECONDS_MAX = 0.1, 5.0


class WorkerProcesses:
    """Starts worker processes and settles those that died; ``by_name`` has all that are not gone."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chance: random.Random,
        tasks: Mapping[str, Task[Any, Any]],
        settings: SupervisorSettings,
        announce: Announce = unannounced,
    ) -> None:
        self._announce = announce
        self._store = store
        self._clock = clock
        self._chance = chance
        self._tasks = tasks
        self._settings = settings
        self._worker_list = WorkerList(store, clock)
        self._attending: set[asyncio.Task[None]] = set()
        self._settled_before = 0
        self._was_ready = False
        self._entered: set[str] = set()
        self._entered_at = 0
        self.by_name: dict[str, WorkerProcess] = {}
        #: Set when a message waits for a process of its own, or a process has become ready.
        self.changed = asyncio.Event()
        #: Processes in a row that ended before they were ready, and the reason that the last of them gave.
        self.false_starts = 0
        self.failure: WorkerFailed | None = None
        #: Dead processes, each with the number of checks since: the store may still carry out their last claims.
        self.dead: dict[str, int] = {}
        #: Do not call a store again that failed: the operator asked a second time for the end.
        self.stop_now = False

    @property
    def settled(self) -> int:
        """How many messages were settled; by the processes that run, as far as they have reported."""
        return self._settled_before + sum(process.settled for process in self.by_name.values())

    def give_up(self) -> None:
        """Leave the messages of dead processes until their leases run out, because the store has not answered."""
        for task in self._attending:
            task.cancel()

    # starting

    async def start(self, lane: Lane) -> WorkerProcess:
        """Start one more process."""
        process, line = await start_process(
            self._settings.where, lambda pid: self._orders(pid, lane), self._capacity(lane), self._settings.directory
        )
        process.started_at, process.started_on = self._clock.steady(), self._clock.now()
        self.by_name[process.name] = process
        task = asyncio.create_task(self._attend(process, line), name=f"onefold-process-{process.pid}")
        self._attending.add(task)
        task.add_done_callback(self._attending.discard)
        return process

    def _orders(self, pid: int, lane: Lane) -> WorkerOrders:
        settings, alone = self._settings, lane is Lane.PROBATION
        return WorkerOrders(
            version=__version__,
            parent=os.getpid(),
            name=worker_name(pid, self._chance),
            queues=list(settings.queues),
            concurrency=1 if alone else settings.concurrency,
            lease_seconds=settings.lease_seconds,
            stop_seconds=settings.stop_seconds,
            # A process for suspects ends when there are none.
            until_idle=settings.until_idle or alone,
            lane=lane,
            capacity=self._capacity(lane),
            beat_seconds=settings.tick_seconds,
            verbose=settings.verbose,
            follows=self._was_ready or any(one.ready.is_set() for one in self.by_name.values()),
        )

    def _capacity(self, lane: Lane) -> int:
        """Return how many messages may be begun and not settled."""
        concurrency = 1 if lane is Lane.PROBATION else self._settings.concurrency
        batch = max((task.handler.batch or 1 for task in self._tasks.values()), default=1)
        return concurrency * batch + limits.CLAIM_MAX + UNSETTLED_MAX

    async def _attend(self, process: WorkerProcess, line: Any) -> None:
        """Attend a process until it has ended and its messages are settled or handed back."""
        try:
            await process.attend(line)
            self._count_start(process)
            await self._settle_dead(process)
        finally:
            self._settled_before += process.settled
            del self.by_name[process.name]
            process.close()
            process.gone.set()

    def _count_start(self, process: WorkerProcess) -> None:
        if process.ready.is_set():
            self.false_starts, self.failure, self._was_ready = 0, None, True
        elif not process.leaving:
            failure = process.failure or WorkerFailed(f"the process {process.ending()}", process.stacks(), later=False)
            # A store that is unavailable does not count: it is not the app's fault, and it comes back.
            self.false_starts += not failure.later
            self.failure = failure
            # Of an error that is not onefold's own only the type is logged: its text may hold a secret.
            reason = failure.reason.partition(":")[0] if failure.stack else failure.reason
            logger.warning("worker_not_started worker=%s reason=%s", process.name, reason)

    # settling

    async def _settle_dead(self, process: WorkerProcess) -> None:
        death = self._death(process)
        if process.stopped is None and process.ready.is_set():
            logger.error("worker_died worker=%s how=%s blamed=%d", process.name, process.ending(), len(death.blamed))
        patience = self._settings.lease_seconds
        if process.leaving:
            patience = min(patience, limits.STOP_STORE_SECONDS)
        give_up_at = self._clock.steady() + round(patience * MICROSECONDS)
        pause = _BACK_OFF_SECONDS
        while True:
            try:
                # Bounded, because the call may wait for a lock that another call holds while its COMMIT waits.
                async with asyncio.timeout(patience):
                    if await settle_dead_process(self._store, death, self._key_window, self._announce):
                        self.changed.set()
                    await self._worker_list.strike(process.name)
                break
            except (StoreError, TimeoutError) as error:
                logger.warning("store_failed doing=settle_dead worker=%s error=%s", process.name, error)
                if self.stop_now or self._clock.steady() >= give_up_at:
                    break  # its messages are claimed by others when its leases run out
                await self._clock.sleep(pause)
                pause = min(pause * 2, _BACK_OFF_SECONDS_MAX)
        self.dead[process.name] = 0

    def _death(self, process: WorkerProcess) -> Death:
        running = process.running()
        if process.blamed is not None:
            blamed = [slot for slot in running if slot in process.blamed]
        else:
            # A process that was leaving may have been ended with the whole service, so no message is blamed.
            blamed = [] if process.leaving else running
        now = self._clock.steady()
        texts = {
            (slot.id, slot.fence): (
                f"worker {process.name} {process.ending()}, while this message had been running for "
                f"{(now - slot.started_at) / MICROSECONDS:.1f} s beside {len(running) - 1} others"
            )
            for slot in blamed
        }
        return Death(process.name, texts, process.stacks())

    def _key_window(self, message_type: str) -> float:
        task = self._tasks.get(message_type)
        return limits.KEY_WINDOW if task is None else task.key_window

    # the list of workers

    async def enter_if_due(self) -> None:
        """Enter the processes into the list of workers: now and then, and as soon as there is a new one."""
        ready = [process for process in self.by_name.values() if process.ready.is_set()]
        names = {process.name for process in ready}
        due_at = self._entered_at + round(limits.WORKER_CHECK_SECONDS * MICROSECONDS)
        if names and (not names <= self._entered or self._clock.steady() >= due_at):
            await self._worker_list.enter([self._record(process) for process in ready])
            self._entered, self._entered_at = names, self._clock.steady()

    def _record(self, process: WorkerProcess) -> WorkerRecord:
        orders = process.orders
        return WorkerRecord(
            name=orders.name,
            host=host_name(),
            pid=process.pid,
            started_at=process.started_on,
            version=orders.version,
            queues=orders.queues,
            concurrency=orders.concurrency,
            lane=process.lane.name.lower(),
            parent=orders.parent,
            running=len(process.running()),
            settled=process.settled,
            checked_at=self._clock.now(),
            stalled_seconds=process.stalled_seconds,
        )
