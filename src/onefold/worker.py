"""Stage 6, lease: claim, run, renew, settle, and stop without losing anything.

One claimer keeps a short supply of leases, a fixed number of runners work through it,
a settler ends what they finished in batches, and one renewer keeps every lease held here alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from onefold import limits
from onefold.clock import MICROSECONDS, give_way
from onefold.errors import LeaseLostError, StoreUnavailableError
from onefold.execution import Execution
from onefold.settling import UNSETTLED_MAX, Settler
from onefold.store import HandBack, Lease, Outcome

logger = logging.getLogger("onefold")

#: Messages a runner runs before it lets others have the event loop.
_IN_A_ROW_MAX = 32
#: When the store cannot be asked for work, ask again after this long.
_BACK_OFF_SECONDS = 0.5


@dataclass(slots=True)
class WorkerSettings:
    """How one worker works; see ``app.work``."""

    name: str
    queues: Sequence[str]
    concurrency: int = limits.CONCURRENCY
    lease_seconds: float = limits.LEASE
    stop_seconds: float = limits.STOP_SECONDS
    until_idle: bool = False

    def __post_init__(self) -> None:
        limits.check_range("concurrency", self.concurrency, 1, limits.CONCURRENCY_MAX)
        limits.check_range("lease", self.lease_seconds, limits.LEASE_MIN, limits.DAY)
        limits.check_name("worker", self.name)
        for queue in self.queues:
            limits.check_name("queue", queue)


@dataclass(slots=True)
class Held:
    """A lease in this worker's hands."""

    lease: Lease
    #: When it runs out, on the steady clock; reckoned from before the claim was asked for, to be on the safe side.
    until: int
    runner: asyncio.Task[None] | None = None
    #: No longer to be worked on: its time is up, or the store says that somebody else has it.
    lost: bool = False
    taken_over: bool = False


class Worker:
    """Takes messages from a store and runs their handlers until it is told to stop."""

    def __init__(self, execution: Execution, settings: WorkerSettings) -> None:
        self._execution = execution
        self._store = execution.store
        self._clock = execution.clock
        self._settings = settings
        self._types = execution.registry.types()
        self._held: dict[str, Held] = {}
        self._supply: deque[Held] = deque()
        self._suspects: deque[Held] = deque()
        self._turn = 0
        self._supplied = asyncio.Event()
        self._running = 0
        self._changed = asyncio.Event()
        self._settler = Settler(execution, self._forget)
        self._stopping = asyncio.Event()
        self._started = 0
        self._rate = 0.0
        self._last_claim = self._clock.steady()
        self._done_alone = 0

    @property
    def done(self) -> int:
        """How many messages were settled."""
        return self._done_alone + self._settler.done

    def stop(self) -> None:
        """Ask for a graceful stop: claim nothing more, finish what runs, hand back what does not finish in time."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Work until stopped, or until nothing is left to do.

        When it returns, every message it had is settled or handed back.
        """
        runners = [
            asyncio.create_task(self._run_supply(), name=f"onefold-runner-{n}")
            for n in range(self._settings.concurrency)
        ]
        others = [
            asyncio.create_task(self._settler.run(), name="onefold-settler"),
            asyncio.create_task(self._renew(), name="onefold-renewer"),
        ]
        if not self._settings.until_idle:
            others.append(asyncio.create_task(self._purge(), name="onefold-purger"))
        claimer = asyncio.create_task(self._claim(), name="onefold-claimer")
        stopping = asyncio.create_task(self._stopping.wait())
        watched: set[asyncio.Task[object]] = {claimer, stopping, *others, *runners}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            await _cancel([claimer, stopping])
            for task in watched:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error
            await self._wind_down(runners)
        finally:
            await _cancel([claimer, stopping, *runners, *others])

    # claiming

    async def _claim(self) -> None:
        while not self._stopping.is_set():
            if self._suspects:
                await self._let_a_suspect_run()
                continue
            wanted = self._wanted()
            if wanted <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            # What is settled while the store is asked may leave new messages that its answer does not know of yet.
            was_busy = self._busy
            if await self._claim_some(wanted) != 0:
                continue
            if not self._settings.until_idle:
                await self._wait()
            elif self._busy:
                self._changed.clear()
                await self._changed.wait()
            elif not was_busy:
                return

    def _wanted(self) -> int:
        """How many to claim: what is free now, and what will start within a moment at the measured rate."""
        ahead = int(self._rate * limits.CLAIM_AHEAD_SECONDS)
        free = self._settings.concurrency - self._running
        wanted = min(max(free, ahead), limits.CLAIM_MAX) - len(self._supply)
        room = UNSETTLED_MAX - len(self._settler)
        # Small claims cost as much as large ones, so wait until half of the supply is used up.
        return min(wanted, room) if len(self._supply) <= ahead // 2 else 0

    async def _claim_some(self, wanted: int) -> int | None:
        """Return how many were claimed, or None when the store could not be asked."""
        asked_at = self._clock.steady()
        elapsed = max(asked_at - self._last_claim, 1) / MICROSECONDS
        self._rate = 0.5 * self._rate + 0.5 * self._started / elapsed
        self._started, self._last_claim = 0, asked_at
        try:
            leases = await self._claim_whole(wanted)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=claim error=%s", error)
            await self._clock.sleep(_BACK_OFF_SECONDS)
            return None
        self._accept(leases, asked_at)
        return len(leases)

    async def _claim_whole(self, wanted: int) -> list[Lease]:
        """Claim, and see it through even when the worker is stopped meanwhile: a lost answer would be a lost lease."""
        settings = self._settings
        queues = [*settings.queues[self._turn :], *settings.queues[: self._turn]]
        # Each queue comes first in its turn, so that a busy one cannot starve the others.
        self._turn = (self._turn + 1) % len(queues)
        asked_at = self._clock.steady()
        claiming = asyncio.ensure_future(
            self._store.claim(
                queues, types=self._types, limit=wanted, lease=settings.lease_seconds, worker=settings.name
            )
        )
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.wait([claiming])
            if not claiming.cancelled() and claiming.exception() is None:
                self._accept(claiming.result(), asked_at)
            raise

    def _accept(self, leases: list[Lease], asked_at: int) -> None:
        until = asked_at + round(self._settings.lease_seconds * MICROSECONDS)
        for lease in leases:
            held = self._held[lease.id] = Held(lease, until)
            (self._suspects if _suspected(lease) else self._supply).append(held)
        self._supplied.set()

    async def _let_a_suspect_run(self) -> None:
        """Let one message that may have killed workers run with nothing beside it, so that no other is blamed."""
        await self._quiet_runners()
        self._supply.append(self._suspects.popleft())
        self._supplied.set()
        await self._quiet_runners()

    async def _quiet_runners(self) -> None:
        while self._supply or self._running:
            self._changed.clear()
            await self._changed.wait()

    async def _wait(self) -> None:
        try:
            await self._store.wait(self._settings.queues, timeout=limits.POLL_SECONDS)
        except StoreUnavailableError:
            await self._clock.sleep(limits.POLL_SECONDS)

    @property
    def _busy(self) -> bool:
        return bool(self._running or self._supply or self._suspects or len(self._settler))

    # running

    async def _run_supply(self) -> None:
        me, in_a_row = asyncio.current_task(), 0
        while True:
            while not self._supply:
                in_a_row = 0
                self._supplied.clear()
                await self._supplied.wait()
            await self._run_one(self._supply.popleft(), me)
            in_a_row += 1
            if in_a_row == _IN_A_ROW_MAX:
                # Handlers that never wait would keep the claimer, the renewer and a stop from their turn.
                in_a_row = 0
                await give_way()

    async def _run_one(self, held: Held, runner: asyncio.Task[None] | None) -> None:
        lease = held.lease
        if held.lost:
            self._drop(held)
            return
        self._running += 1
        self._started += 1
        held.runner = runner
        try:
            if _suspected(lease):
                await self._mark_started(lease)
            outcome = await self._execution.run(lease, lambda: self._deadline(held))
        except LeaseLostError as error:
            logger.warning("lease_lost message_id=%s error=%s", lease.id, error)
            self._forget(lease)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=start message_id=%s error=%s", lease.id, error)
            self._settler.add(lease, HandBack())
        except asyncio.CancelledError:
            if not held.lost:
                raise
            # The renewer found the lease gone and cancelled the handler; this runner goes on.
            _uncancel()
            logger.warning("lease_lost message_id=%s handler cancelled", lease.id)
            self._drop(held)
        else:
            await self._finish(lease, outcome)
        finally:
            held.runner = None
            self._running -= 1
            self._changed.set()

    async def _mark_started(self, lease: Lease) -> None:
        """Write down that a suspect begins: should this process die now, the suspect is to blame."""
        if not (await self._store.extend([lease], lease=self._settings.lease_seconds, starting=True))[0]:
            raise LeaseLostError(f"message {lease.id} was taken over before it began")

    async def _finish(self, lease: Lease, outcome: Outcome | None) -> None:
        if outcome is None:
            self._done_alone += 1
            self._forget(lease)
            return
        if self._execution.registry.tasks[lease.envelope.message_type].settle == "now":
            await self._settler.settle([(lease, outcome)])
        else:
            self._settler.add(lease, outcome)

    def _deadline(self, held: Held) -> int:
        return self._clock.now() + held.until - self._clock.steady()

    def _forget(self, lease: Lease) -> None:
        held = self._held.get(lease.id)
        # The same worker may have claimed its own message again meanwhile; that lease is another.
        if held is not None and held.lease.fence == lease.fence:
            del self._held[lease.id]
        self._changed.set()

    def _drop(self, held: Held) -> None:
        """Let go of a message that is no longer ours, or no longer surely so."""
        if held.taken_over:
            self._forget(held.lease)
        else:
            # Time is up by our own reckoning, yet the store may still wait for us: the fence decides.
            self._settler.add(held.lease, HandBack())

    # keeping

    async def _renew(self) -> None:
        interval = self._settings.lease_seconds / limits.RENEWALS_PER_LEASE
        while True:
            await self._clock.sleep(interval)
            if held := list(self._held.values()):
                await self._renew_these(held)
            if overdue := self._overdue(held):
                # The answer may have taken longer than a lease lasts: ask once more before giving them up.
                await self._renew_these(overdue)
            for one in self._overdue(held):
                self._lose(one)

    def _overdue(self, held: list[Held]) -> list[Held]:
        now = self._clock.steady()
        return [one for one in held if not one.lost and one.until <= now and self._held.get(one.lease.id) is one]

    async def _renew_these(self, held: list[Held]) -> None:
        asked_at = self._clock.steady()
        try:
            kept = await self._store.extend([one.lease for one in held], lease=self._settings.lease_seconds)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=extend messages=%d error=%s", len(held), error)
            return
        until = asked_at + round(self._settings.lease_seconds * MICROSECONDS)
        for one, mine in zip(held, kept, strict=True):
            if mine:
                one.until = until
            elif self._held.get(one.lease.id) is one:
                one.taken_over = True
                self._lose(one)

    def _lose(self, held: Held) -> None:
        held.lost = True
        if held.runner is not None:
            held.runner.cancel()

    async def _purge(self) -> None:
        while True:
            await self._clock.sleep(limits.PURGE_SECONDS)
            try:
                async with self._store.transaction() as transaction:
                    await transaction.purge()
            except StoreUnavailableError as error:
                logger.warning("store_unavailable doing=purge error=%s", error)

    # stopping

    async def _wind_down(self, runners: list[asyncio.Task[None]]) -> None:
        unstarted = [held.lease for held in (*self._supply, *self._suspects)]
        self._supply.clear()
        self._suspects.clear()
        if unstarted:
            await self._settler.settle([(lease, HandBack()) for lease in unstarted])
        try:
            async with asyncio.timeout(self._settings.stop_seconds):
                await self._quiet()
        except TimeoutError:
            await _cancel(runners)
            left = [held.lease for held in self._held.values()]
            await self._settler.settle([(lease, HandBack()) for lease in left if lease not in self._settler])
            await self._quiet()

    async def _quiet(self) -> None:
        while self._busy:
            self._changed.clear()
            await self._changed.wait()


def _suspected(lease: Lease) -> bool:
    return lease.crashes >= limits.SUSPECT_AFTER


async def _cancel(tasks: Sequence[asyncio.Task[object]] | list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
