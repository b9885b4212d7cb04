"""Stage 6, lease: checks the worker processes, kills those that hang, and renews the leases of those that stall."""

from __future__ import annotations

import asyncio
import logging

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import StoreError
from onefold.store import Lane, Store
from onefold.supervisor.hand_back import hand_back
from onefold.supervisor.lease_renewal import renew
from onefold.supervisor.process import WorkerProcess
from onefold.supervisor.processes import WorkerProcesses
from onefold.supervisor.settings import SupervisorSettings
from onefold.worker.slots import Slot

logger = logging.getLogger("onefold")

#: If the supervisor itself did not run for this long, the whole machine may have stood still.
_STANDSTILL_SECONDS = 5.0
#: A process that is not ready after this long hangs in the app's own code.
_START_SECONDS_MAX = 120.0
#: If a process has not renewed its leases for this part of their length, the supervisor does; the rest is time for it.
_RENEW_AFTER = 0.5


class Watchdog:
    """Checks every process of a supervisor, again and again."""

    def __init__(self, processes: WorkerProcesses, store: Store, clock: Clock, settings: SupervisorSettings) -> None:
        self._processes = processes
        self._store = store
        self._clock = clock
        self._settings = settings
        #: When it last checked the processes, on the steady clock.
        self.checked_at = clock.steady()
        self._awake_since = self.checked_at

    async def run(self) -> None:
        """Watch until cancelled; processes are checked even while the store, which renewing needs, does not answer."""
        await asyncio.gather(self._check_processes(), self._renew_leases())

    # processes

    async def _check_processes(self) -> None:
        while True:
            await self._clock.sleep(self._settings.tick_seconds)
            now = self._clock.steady()
            if now - self.checked_at > _STANDSTILL_SECONDS * MICROSECONDS:
                # The processes may have stood still too, so their silence is counted anew from here.
                self._awake_since = now
            self.checked_at = now
            for process in list(self._processes.by_name.values()):
                if process.code is None and process.killed_for is None:
                    self._check(process, now)

    def _check(self, process: WorkerProcess, now: int) -> None:
        silent = (now - max(process.board.beat_at, process.started_at, self._awake_since)) / MICROSECONDS
        overdue = frozenset(slot for slot in process.running() if self._is_overdue(slot, now))
        if overdue:
            process.kill_with_stacks("a handler ran past its timeout and did not stop when it was cancelled", overdue)
        elif self._is_late(process, now):
            process.kill("it did not stop in time", frozenset())
        elif silent > self._silence_allowed(process):
            process.kill_with_stacks(f"its event loop had not moved for {silent:.0f} s")
        elif silent > limits.STALL_WARNING_SECONDS and process.ready.is_set() and not process.stalled_seconds:
            logger.warning(
                "worker_stalled worker=%s seconds=%.0f running=%d", process.name, silent, len(process.running())
            )
        process.stalled_seconds = silent if silent > limits.STALL_WARNING_SECONDS else 0.0
        if self._is_worn(process):
            process.worn.set()

    def _is_overdue(self, slot: Slot, now: int) -> bool:
        # After a standstill the process itself gets time first to cancel a handler that is past its timeout.
        reprieve = self._awake_since + round(limits.HARD_TIMEOUT_GRACE * MICROSECONDS)
        earliest = reprieve if self._awake_since > slot.started_at else 0
        return slot.deadline > 0 and max(slot.deadline, earliest) <= now

    def _silence_allowed(self, process: WorkerProcess) -> float:
        """Return for how many seconds its event loop need not move; longer while it imports the app."""
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

    # leases

    async def _renew_leases(self) -> None:
        lease = self._settings.lease_seconds
        while True:
            await self._clock.sleep(min(lease / (2 * limits.RENEWALS_PER_LEASE), limits.LEASE))
            now = self._clock.steady()
            for process in list(self._processes.by_name.values()):
                # It may have ended, and its board be closed, while the leases of the one before were renewed.
                if process.code is not None or not process.ready.is_set():
                    continue
                if now - process.board.renewed_at > lease * _RENEW_AFTER * MICROSECONDS:
                    await self._renew_for(process)

    async def _renew_for(self, process: WorkerProcess) -> None:
        """Renew the leases of a process; once it cannot begin those it has only fetched, hand those back.

        A process begins no message after the lease has run out by its own clock.  It renewed the leases last while its
        event loop moved, so a lease's length after that it can begin none.
        """
        lease, board = self._settings.lease_seconds, process.board
        silence_allowed = lease + 2 * self._settings.tick_seconds
        try:
            await renew(self._store, process.name, list(board.slots()), lease=lease)
            if process.code is None and self._clock.steady() - board.beat_at > silence_allowed * MICROSECONDS:
                await hand_back(self._store, process.name, list(board.slots()))
        except StoreError as error:
            logger.warning("store_failed doing=extend worker=%s error=%s", process.name, error)
