"""Stage 6, lease: a supervisor's eyes on its processes, and its hand for the leases of one that hangs."""

from __future__ import annotations

import asyncio
import logging

from onefold import custody, limits
from onefold.clock import MICROSECONDS, Clock
from onefold.crew import Crew, SupervisorSettings
from onefold.errors import StoreError
from onefold.process import WorkerProcess
from onefold.slots import Slot
from onefold.store import Lane, Store

logger = logging.getLogger("onefold")

#: A supervisor that did not look for this long was itself at a standstill, and so perhaps was the whole machine.
_STANDSTILL_SECONDS = 5.0
#: A process that is not ready after this long hangs in the app's own code.
_START_SECONDS_MAX = 120.0
#: A process that has not renewed its leases for this part of their length needs help; the rest of it is left for that.
_HELP_AFTER = 0.5


class Watch:
    """Looks at every process of a crew again and again."""

    def __init__(self, crew: Crew, store: Store, clock: Clock, settings: SupervisorSettings) -> None:
        self._crew = crew
        self._store = store
        self._clock = clock
        self._settings = settings
        self.looked_at = clock.steady()
        self._awake_since = self.looked_at

    async def run(self) -> None:
        """Watch until cancelled; a store that does not answer keeps nobody from being watched."""
        await asyncio.gather(self._look(), self._help())

    # whether they are well

    async def _look(self) -> None:
        while True:
            await self._clock.sleep(self._settings.tick_seconds)
            now = self._clock.steady()
            if now - self.looked_at > _STANDSTILL_SECONDS * MICROSECONDS:
                # Nobody could move while the machine slept, so nobody is late.
                self._awake_since = now
            self.looked_at = now
            for process in list(self._crew.processes.values()):
                if process.code is None and process.killed_for is None:
                    self._look_at(process, now)

    def _look_at(self, process: WorkerProcess, now: int) -> None:
        silent = (now - max(process.board.beat_at, process.started_at, self._awake_since)) / MICROSECONDS
        overdue = frozenset(slot for slot in process.running() if self._is_overdue(slot, now))
        if overdue:
            process.kill_with_stacks("a handler ran past its timeout and did not stop when it was cancelled", overdue)
        elif self._is_late(process, now):
            process.kill("it did not stop in time", frozenset())
        elif silent > self._patience(process):
            process.kill_with_stacks(f"its event loop had not moved for {silent:.0f} s")
        elif silent > limits.STALL_WARNING_SECONDS and process.ready.is_set() and not process.stalled_seconds:
            logger.warning(
                "worker_stalled worker=%s seconds=%.0f running=%d", process.name, silent, len(process.running())
            )
        process.stalled_seconds = silent if silent > limits.STALL_WARNING_SECONDS else 0.0
        if self._is_worn(process):
            process.worn.set()

    def _is_overdue(self, slot: Slot, now: int) -> bool:
        # After a standstill its process must have a chance to notice that the time is over.
        reprieve = self._awake_since + round(limits.HARD_TIMEOUT_GRACE * MICROSECONDS)
        waited_for = reprieve if self._awake_since > slot.started_at else 0
        return slot.deadline > 0 and max(slot.deadline, waited_for) <= now

    def _patience(self, process: WorkerProcess) -> float:
        """How long it may be silent; while it imports the app it cannot speak."""
        seconds = self._settings.stall_seconds
        return seconds if process.ready.is_set() else max(seconds, _START_SECONDS_MAX)

    def _is_late(self, process: WorkerProcess, now: int) -> bool:
        seconds = self._settings.stop_seconds + limits.STOP_MARGIN_SECONDS
        return process.leaving_at is not None and now - process.leaving_at > seconds * MICROSECONDS

    def _is_worn(self, process: WorkerProcess) -> bool:
        settings, settled = self._settings, process.settled
        if process.lane is Lane.PROBATION or process.leaving or not settled:
            return False
        too_many = settings.max_messages is not None and settled >= settings.max_messages
        too_large = settings.max_memory_bytes is not None and process.board.memory >= settings.max_memory_bytes
        return too_many or too_large

    # whether their leases are

    async def _help(self) -> None:
        lease = self._settings.lease_seconds
        while True:
            await self._clock.sleep(min(lease / (2 * limits.RENEWALS_PER_LEASE), limits.LEASE))
            now = self._clock.steady()
            for process in list(self._crew.processes.values()):
                # To help the one before may have taken so long that this one has ended, and its board is gone.
                if process.code is not None or not process.ready.is_set():
                    continue
                if now - process.board.renewed_at > lease * _HELP_AFTER * MICROSECONDS:
                    await self._renew_for(process)

    async def _renew_for(self, process: WorkerProcess) -> None:
        """Keep what a process has begun; what it has only fetched others may have, once it would not begin it itself.

        It begins nothing whose lease has run out by its own reckoning, which is at most a lease after it last moved.
        """
        lease, board = self._settings.lease_seconds, process.board
        patience = lease + 2 * self._settings.tick_seconds
        try:
            await custody.keep(self._store, process.name, list(board.slots()), lease=lease)
            if process.code is None and self._clock.steady() - board.beat_at > patience * MICROSECONDS:
                await custody.hand_back(self._store, process.name, list(board.slots()))
        except StoreError as error:
            logger.warning("store_failed doing=extend worker=%s error=%s", process.name, error)
