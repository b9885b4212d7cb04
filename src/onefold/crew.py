"""Stage 6, lease: the worker processes below one supervisor, from their start to the settling of what they leave."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onefold import custody, limits
from onefold.clock import MICROSECONDS, Clock
from onefold.control import Failed, Orders
from onefold.custody import Death
from onefold.errors import StoreError
from onefold.fleet import Roll, WorkerRecord, host_name, parse_queues, worker_name
from onefold.process import WorkerProcess, start_process
from onefold.settling import UNSETTLED_MAX
from onefold.store import Lane, Store
from onefold.task import Task
from onefold.version import __version__

logger = logging.getLogger("onefold")

#: Beats within a lease: so many that one may be late and the supervisor still steps in before the lease is over.
_BEATS_PER_LEASE = 6
_BEAT_SECONDS_MAX = 1.0
#: When the store cannot be told about a death, tell it again after this long, doubling up to the second figure.
_BACK_OFF_SECONDS, _BACK_OFF_SECONDS_MAX = 0.1, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """How a supervisor and its worker processes work; see ``onefold worker --help``."""

    #: Where the processes find the app: MODULE:APP.
    where: str
    queues: Sequence[str]
    #: Where they begin; that of this process when it is None.
    directory: str | None = None
    processes: int = 1
    concurrency: int = limits.CONCURRENCY
    lease_seconds: float = limits.LEASE
    stop_seconds: float = limits.STOP_SECONDS
    stall_seconds: float = limits.STALL_SECONDS
    max_messages: int | None = None
    max_memory_bytes: int | None = None
    until_idle: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        limits.check_range("processes", self.processes, 1, limits.PROCESSES_MAX)
        limits.check_range("concurrency", self.concurrency, 1, limits.CONCURRENCY_MAX)
        limits.check_range("lease", self.lease_seconds, limits.LEASE_MIN, limits.DAY)
        limits.check_range("stop_after", self.stop_seconds, 0, limits.DAY)
        limits.check_range("stall_after", self.stall_seconds, 1, limits.DAY)
        parse_queues(self.queues)

    @property
    def tick_seconds(self) -> float:
        """How often a process shows that it is alive, and the supervisor looks."""
        return min(_BEAT_SECONDS_MAX, self.lease_seconds / _BEATS_PER_LEASE)


class Crew:
    """Starts worker processes and buries them; ``processes`` has all that are not buried, by name."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chance: random.Random,
        tasks: Mapping[str, Task[Any, Any]],
        settings: SupervisorSettings,
        announce: custody.Announce = custody.unannounced,
    ) -> None:
        self._announce = announce
        self._store = store
        self._clock = clock
        self._chance = chance
        self._tasks = tasks
        self._settings = settings
        self._roll = Roll(store, clock)
        self._lives: set[asyncio.Task[None]] = set()
        self._settled_before = 0
        self._was_ready = False
        self._entered: set[str] = set()
        self._entered_at = 0
        self.processes: dict[str, WorkerProcess] = {}
        #: Somebody is to be looked after: a message waits for a process of its own, or a process has become ready.
        self.changed = asyncio.Event()
        #: Processes in a row that ended before they were ready, and what the last of them said.
        self.false_starts = 0
        self.failure: Failed | None = None
        #: Names of the dead: a claim that was under way when they died may be carried out afterwards.
        self.late: dict[str, int] = {}
        #: Give up on the store soon: a person is waiting for the end.
        self.in_haste = False

    @property
    def settled(self) -> int:
        """How many messages were settled, by those that are alive as far as they have said so."""
        return self._settled_before + sum(process.settled for process in self.processes.values())

    def give_up(self) -> None:
        """Leave what dead processes held to its leases: the store has not answered for as long as it may."""
        for life in self._lives:
            life.cancel()

    # living

    async def employ(self, lane: Lane) -> WorkerProcess:
        """Start one more process."""
        process, line = await start_process(
            self._settings.where, lambda pid: self._orders(pid, lane), self._capacity(lane), self._settings.directory
        )
        process.started_at, process.started_on = self._clock.steady(), self._clock.now()
        self.processes[process.name] = process
        life = asyncio.create_task(self._live(process, line), name=f"onefold-process-{process.pid}")
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        return process

    def _orders(self, pid: int, lane: Lane) -> Orders:
        settings, alone = self._settings, lane is Lane.PROBATION
        return Orders(
            version=__version__,
            parent=os.getpid(),
            name=worker_name(pid, self._chance),
            queues=list(settings.queues),
            concurrency=1 if alone else settings.concurrency,
            lease_seconds=settings.lease_seconds,
            stop_seconds=settings.stop_seconds,
            # A process for suspects is there as long as there are any.
            until_idle=settings.until_idle or alone,
            lane=lane,
            capacity=self._capacity(lane),
            beat_seconds=settings.tick_seconds,
            verbose=settings.verbose,
            follows=self._was_ready or any(one.ready.is_set() for one in self.processes.values()),
        )

    def _capacity(self, lane: Lane) -> int:
        """How many messages may be begun and not settled."""
        concurrency = 1 if lane is Lane.PROBATION else self._settings.concurrency
        batch = max((task.handler.batch or 1 for task in self._tasks.values()), default=1)
        return concurrency * batch + limits.CLAIM_MAX + UNSETTLED_MAX

    async def _live(self, process: WorkerProcess, line: Any) -> None:
        try:
            await process.attend(line)
            self._count_start(process)
            await self._bury(process)
        finally:
            self._settled_before += process.settled
            del self.processes[process.name]
            process.close()
            process.buried.set()

    def _count_start(self, process: WorkerProcess) -> None:
        if process.ready.is_set():
            self.false_starts, self.failure, self._was_ready = 0, None, True
        elif not process.leaving:
            said = process.failure or Failed(f"the process {process.ending()}", process.stacks(), later=False)
            # The store being away is no fault of the app: it comes back.
            self.false_starts += not said.later
            self.failure = said
            # Of an error that is not onefold's own only the type: its text may hold anything.
            reason = said.reason.partition(":")[0] if said.stack else said.reason
            logger.warning("worker_not_started worker=%s reason=%s", process.name, reason)

    # dying

    async def _bury(self, process: WorkerProcess) -> None:
        death = self._death(process)
        if process.stopped is None and process.ready.is_set():
            logger.error("worker_died worker=%s how=%s guilty=%d", process.name, process.ending(), len(death.guilty))
        patience = self._settings.lease_seconds
        if process.leaving:
            patience = min(patience, limits.STOP_STORE_SECONDS)
        give_up_at = self._clock.steady() + round(patience * MICROSECONDS)
        pause = _BACK_OFF_SECONDS
        while True:
            try:
                # A store call may wait for a lock that another call of ours holds while its COMMIT waits.
                async with asyncio.timeout(patience):
                    if await custody.bury(self._store, death, self._key_window, self._announce):
                        self.changed.set()
                    await self._roll.strike(process.name)
                break
            except (StoreError, TimeoutError) as error:
                logger.warning("store_failed doing=bury worker=%s error=%s", process.name, error)
                if self.in_haste or self._clock.steady() >= give_up_at:
                    break  # its leases run out, which is as good, only later
                await self._clock.sleep(pause)
                pause = min(pause * 2, _BACK_OFF_SECONDS_MAX)
        self.late[process.name] = 0

    def _death(self, process: WorkerProcess) -> Death:
        running = process.running()
        if process.guilty is not None:
            guilty = [slot for slot in running if slot in process.guilty]
        else:
            # While it leaves, whatever stops the service may have ended it, and no message is blamed for that.
            guilty = [] if process.leaving else running
        now = self._clock.steady()
        texts = {
            (slot.id, slot.fence): (
                f"worker {process.name} {process.ending()}, while this message had been running for "
                f"{(now - slot.started_at) / MICROSECONDS:.1f} s beside {len(running) - 1} others"
            )
            for slot in guilty
        }
        return Death(process.name, texts, process.stacks())

    def _key_window(self, message_type: str) -> float:
        task = self._tasks.get(message_type)
        return limits.KEY_WINDOW if task is None else task.key_window

    # for people

    async def enter_if_due(self) -> None:
        """Write into the register who is alive, now and then, and as soon as somebody is new."""
        ready = [process for process in self.processes.values() if process.ready.is_set()]
        names = {process.name for process in ready}
        due_at = self._entered_at + round(limits.WORKER_CHECK_SECONDS * MICROSECONDS)
        if names and (not names <= self._entered or self._clock.steady() >= due_at):
            await self._roll.enter([self._record(process) for process in ready])
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
