"""Stage 6, lease: claim, run, renew, settle, and stop without losing anything.

A claimer keeps a short supply of leases, runners handle them, as many at once as are needed up to a limit, a settler
commits their outcomes in batches, a renewer extends every lease held here, and a reporter writes the progress of
handlers and cancels those of cancelled messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from onefold import limits
from onefold.brokers.intake import Intake
from onefold.clock import MICROSECONDS
from onefold.errors import StoreUnavailableError
from onefold.events.subscriptions import keep_subscribed
from onefold.handlers.lease import Held
from onefold.schedules.ticker import Ticker
from onefold.store import HandBack, Lane, Lease
from onefold.store.gates import limited_names, name_of, soonest_token
from onefold.worker.claimer import Claimer
from onefold.worker.execution import Execution
from onefold.worker.expirer import Expirer
from onefold.worker.purger import keep_purged, purge_as_much_as
from onefold.worker.renewer import Renewer
from onefold.worker.reporter import Reporter
from onefold.worker.runners import Runners, cancel
from onefold.worker.settings import WorkerSettings
from onefold.worker.settler import UNSETTLED_MAX, Settler
from onefold.worker.slots import Slots
from onefold.worker.thread_renewer import ThreadRenewer
from onefold.worker.worker_list import WorkerList, WorkerRecord, describe

logger = logging.getLogger("onefold")


class Worker:
    """Claims messages from a store and runs their handlers until it is stopped.

    It publishes the messages that it begins in ``slots``, for a supervisor that outlives it.
    """

    def __init__(
        self,
        execution: Execution,
        settings: WorkerSettings,
        slots: Slots | None = None,
        ticker: Ticker | None = None,
        intakes: Sequence[Intake] = (),
    ) -> None:
        self._execution = execution
        self._store = execution.store
        self._clock = execution.clock
        self._settings = settings
        self._slots = slots
        # A process for suspects may die at any moment; schedules and brokers are left to the other processes.
        self._ticker = None if settings.lane is Lane.PROBATION else ticker
        self._intakes = () if settings.lane is Lane.PROBATION else intakes
        self._gatings = execution.registry.gatings
        self._limited = limited_names(self._gatings)
        types = execution.registry.types()
        self._claimer = Claimer(self._store, self._clock, types, self._gatings, settings, self._accept)
        self._expirer = Expirer(self._store, self._clock, types, settings.name, execution.announce)
        #: Until this time others may wait for tokens of a rate, because this worker has run a message of it.
        self._tokens_until = 0
        self._held: dict[str, Held] = {}
        self._suspects: deque[Held] = deque()
        self._changed = asyncio.Event()
        self._settler = Settler(execution, self._forget)
        self._runners = Runners(execution, settings, slots, self._claimer, self._settler, self._changed, self._forget)
        # Never started below a supervisor, which renews for a process that hangs.
        self._guard = ThreadRenewer(self._store, self._clock, self._held, settings.lease_seconds)
        self._renewer = Renewer(
            self._store,
            self._clock,
            self._held,
            settings.lease_seconds,
            self._guard.renewed if slots is None else slots.renewed,
        )
        self._reporter = Reporter(self._store, self._clock, self._held, execution.registry)
        self._stopping = asyncio.Event()
        self._started_at = self._clock.now()

    @property
    def done(self) -> int:
        """How many messages were settled."""
        return self._runners.done_alone + self._settler.done

    def _describe(self) -> WorkerRecord:
        return describe(
            self._settings, self._started_at, self._clock.now(), running=self._runners.running, settled=self.done
        )

    def stop(self) -> None:
        """Stop gracefully: claim no more, let handlers finish, hand back messages that do not finish in time."""
        self._stopping.set()
        self._runners.stopping = True
        self._execution.processes.stop()
        self._changed.set()

    def wake_ticker(self) -> None:
        """Look at the schedules at once, because one was changed in this process."""
        if self._ticker is not None:
            self._ticker.wake()

    async def run(self) -> None:
        """Work until stopped, or until nothing is left to do.

        When it returns, every message it held is settled or handed back, if the store was available.  When it is
        cancelled or fails, messages that have not ended are handed back too: otherwise they would wait until their
        leases run out.
        """
        settler = asyncio.create_task(self._settler.run(), name="onefold-settler")
        others = [
            settler,
            asyncio.create_task(self._renewer.run(), name="onefold-renewer"),
            asyncio.create_task(self._reporter.run(), name="onefold-reporter"),
        ]
        if self._settings.alone:
            others.append(asyncio.create_task(keep_purged(self._store, self._clock), name="onefold-purger"))
        if self._settings.alone and not self._settings.until_idle:
            workers = WorkerList(self._store, self._clock)
            others.append(asyncio.create_task(workers.keep_entered(self._describe), name="onefold-register"))
        if not self._settings.until_idle and self._settings.lane is not Lane.PROBATION:
            others.append(asyncio.create_task(self._expirer.run(), name="onefold-expirer"))
        if self._ticker is not None and not self._settings.until_idle:
            others.append(asyncio.create_task(self._ticker.run(), name="onefold-ticker"))
        if not self._settings.until_idle:
            others += [asyncio.create_task(one.run(), name="onefold-intake") for one in self._intakes]
        claimer = asyncio.create_task(self._claim(), name="onefold-claimer")
        stopping = asyncio.create_task(self._stopping.wait(), name="onefold-stopping")
        try:
            await self._first_of(claimer, stopping, *others)
            await cancel([claimer, stopping])
            others.append(asyncio.create_task(self._wind_down(), name="onefold-stopper"))
            await self._first_of(*others)
        except BaseException:
            await cancel([claimer, stopping])
            await self._stop_runners()
            await self._hand_back_rest(settler)
            raise
        finally:
            await cancel([claimer, stopping])
            await self._stop_runners()
            await cancel(others, within=limits.STOP_STORE_SECONDS)
            self._runners.broken.cancel()
            await self._guard.stop()

    async def _first_of(self, *tasks: asyncio.Task[Any]) -> None:
        """Return when one of these is over; raise its error, or that of a runner."""
        done, _ = await asyncio.wait([*tasks, self._runners.broken], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and (error := task.exception()):
                raise error

    # claiming

    async def _claim(self) -> None:
        await keep_subscribed(self._store, self._clock, self._execution.registry)
        if self._ticker is not None and self._settings.until_idle:
            await self._ticker.catch_up()
        if self._settings.until_idle:
            await asyncio.gather(*(one.catch_up() for one in self._intakes))
        while not self._stopping.is_set():
            if self._suspects:
                await self._let_a_suspect_run()
                continue
            wanted = self._wanted()
            if wanted <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            # An outcome that is settled during the claim may bring new messages that the claim did not see.
            was_busy = self._busy
            if await self._claimer.claim(wanted, self._at_once(), self._in_hand) != 0:
                continue
            if not self._settings.until_idle:
                await self._wait()
            elif self._busy:
                self._changed.clear()
                await self._changed.wait()
            elif not was_busy:
                break
        if self._settings.alone and self._settings.until_idle and not self._stopping.is_set():
            await purge_as_much_as(self._store, self._clock, self.done)

    def _wanted(self) -> int:
        """Return how many to claim: the free places, or what will start within a moment at the measured rate."""
        if self._settings.lane is Lane.PROBATION:
            # One at a time, and settled before the next is claimed: messages held beside a suspect may die with it.
            return 0 if self._busy else 1
        ahead = self._claimer.ahead
        free = self._settings.concurrency - self._runners.running
        wanted = min(max(free, ahead), limits.CLAIM_MAX) - len(self._runners.supply)
        room = UNSETTLED_MAX - len(self._settler)
        # A small claim costs as much as a large one, so wait until half of the supply is used up.
        return min(wanted, room) if len(self._runners.supply) <= ahead // 2 else 0

    def _at_once(self) -> int:
        """Return how many can begin at once, at least one: under load no runner is ever free."""
        free = self._settings.concurrency - self._runners.running
        first = takewhile(lambda held: self._is_limited(held.lease), self._runners.supply)
        return max(free, 1) - sum(1 for _ in first)

    def _is_limited(self, lease: Lease) -> bool:
        """Whether it takes a place or a token that others need, so that it must begin soon."""
        return bool(self._limited) and lease.gate is not None and name_of(lease.gate) in self._limited

    def _in_hand(self, queue: str) -> int:
        return sum(1 for held in self._held.values() if held.lease.envelope.queue == queue)

    def _accept(self, leases: list[Lease], asked_at: int) -> None:
        until = asked_at + round(self._settings.lease_seconds * MICROSECONDS)
        for lease in leases:
            if lease.id in self._held:
                # An operator ended our older lease of it, and this worker claimed it again.
                self._held[lease.id].taken_over = True
                self._held[lease.id].lose()
            held = self._held[lease.id] = Held(lease, until)
            if self._runners.is_suspect(lease):
                self._suspects.append(held)
            elif self._is_limited(lease):
                self._runners.supply.appendleft(held)
                self._tokens_until = asked_at + round(limits.POLL_SECONDS * MICROSECONDS)
            else:
                self._runners.supply.append(held)
        if leases and self._settings.alone and self._slots is None:
            self._guard.start()
        if leases:
            self._reporter.wake()
        self._runners.call()

    async def _let_a_suspect_run(self) -> None:
        """Run one message that may have killed workers with no other beside it, so that no other is blamed."""
        await self._quiet_runners()
        self._runners.supply.append(self._suspects.popleft())
        self._runners.call()
        await self._quiet_runners()

    async def _quiet_runners(self) -> None:
        while self._runners.busy:
            self._changed.clear()
            await self._changed.wait()

    async def _wait(self) -> None:
        if self._settings.places and self._held:
            # A queue was left out if its places are taken, and only this worker knows when one of them is free.
            self._changed.clear()
            others = [asyncio.create_task(self._store_wait()), asyncio.create_task(self._changed.wait())]
            try:
                await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(others)
        else:
            await self._store_wait()

    async def _store_wait(self) -> None:
        timeout = limits.POLL_SECONDS
        if self._tokens_until > self._clock.steady():
            timeout = min(timeout, max(limits.TOKEN_SECONDS_MIN, soonest_token(self._gatings)))
        try:
            await self._store.wait(self._settings.queues, timeout=timeout)
        except StoreUnavailableError:
            await self._clock.sleep(limits.POLL_SECONDS)

    @property
    def _busy(self) -> bool:
        return bool(self._runners.busy or self._suspects or len(self._settler))

    def _forget(self, held: Held) -> None:
        # This worker may have claimed the message again meanwhile, as another lease.
        if self._held.get(held.lease.id) is held:
            del self._held[held.lease.id]
            if held.pulse is not None:
                self._reporter.hear_last(held)
        if held.slot is not None and self._slots is not None:
            self._slots.clear(held.slot)
            self._slots.count(self.done)
            held.slot = None
        self._changed.set()

    # stopping

    async def _wind_down(self) -> None:
        unstarted = [*self._runners.supply, *self._suspects]
        self._runners.supply.clear()
        self._suspects.clear()
        try:
            async with asyncio.timeout(self._settings.stop_seconds):
                await self._settler.hand_back(unstarted)
                await self._quiet()
                await self._execution.finish_late()
        except TimeoutError:
            await self._stop_runners()
        try:
            async with asyncio.timeout(limits.STOP_STORE_SECONDS):
                await self._settler.hand_back([held for held in self._held.values() if not held.settling])
                await self._quiet()
                await self._reporter.look()
        except TimeoutError:
            logger.warning("stopped_unsettled messages=%d: the store did not answer in time", len(self._held))

    async def _hand_back_rest(self, settler: asyncio.Task[None]) -> None:
        """Hand back messages that have not begun, and wait until those of cancelled handlers are handed back."""
        unstarted = [*self._runners.supply, *self._suspects]
        self._runners.supply.clear()
        self._suspects.clear()
        for held in unstarted:
            self._settler.add(held, HandBack())
        quiet = asyncio.create_task(self._quiet(), name="onefold-quiet")
        # The settler has ended if it failed, or if the event loop cancels all its tasks because it is about to close.
        try:
            await asyncio.wait([quiet, settler], timeout=limits.STOP_STORE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            quiet.cancel()

    async def _stop_runners(self) -> None:
        """Cancel running handlers; their leases are marked first, so that the cancellation counts as the worker's."""
        for held in self._held.values():
            held.lost = held.lost or held.runner is not None
        abandoned = await self._runners.cancel()
        for held in self._held.values():
            if held.runner in abandoned:
                logger.error(
                    "handler_ignores_cancellation message_id=%s type=%s: it goes on in this process and cannot commit",
                    held.lease.id,
                    held.lease.envelope.message_type,
                )

    async def _quiet(self) -> None:
        while self._busy:
            self._changed.clear()
            await self._changed.wait()
