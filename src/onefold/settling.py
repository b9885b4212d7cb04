"""Stage 9, settle: ending what handlers have finished, many at once, for as long as it takes.

Handlers with SQL of their own have settled in their own commit; everything else comes through here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from onefold.errors import OnefoldError, StoreUnavailableError
from onefold.execution import Execution
from onefold.progress import Pulse
from onefold.status import cause_of
from onefold.store import Again, Dead, HandBack, Lease, Outcome, Query, Record, State, Store, damaged

logger = logging.getLogger("onefold")

#: Finished but unsettled messages: a crash runs them again, so there are never many.
UNSETTLED_MAX = 2_000
#: Messages settled by one statement.
_TOGETHER_MAX = 500
#: Failures let so many settles go first, unless nothing else is to be settled: they are few, and what is written for
#: them alone costs by the statement and the line rather than by the message.
_FAILURES_WAIT = 4
_FAILURES = (Again, Dead)
#: How long a store is asked why a lease is gone; it is only for the log.
_WHY_SECONDS = 2.0
#: When the store cannot be reached, try again after this long, doubling up to the second figure.
_BACK_OFF_SECONDS, _BACK_OFF_SECONDS_MAX = 0.1, 10.0
#: After so many failures in a row each message is tried alone: it may be one of them that cannot be settled ...
_TRIES = 3
#: ... but when the first so many all fail, the store is away.
_STUCK_MAX = 2


@dataclass(slots=True, eq=False)
class Held:
    """A lease in a worker's hands, from the claim until it is settled or lost."""

    lease: Lease
    #: When it runs out, on the steady clock; reckoned from before the claim was asked for, to be on the safe side.
    until: int
    runner: asyncio.Task[None] | None = None
    #: Where its beginning was published, if anywhere.
    slot: int | None = None
    #: No longer to be worked on: its time is up, the store says that somebody else has it, or the worker ends.
    lost: bool = False
    taken_over: bool = False
    #: Its outcome is known and on its way into the store.
    settling: bool = False
    #: What its handler says about itself, if it says anything.
    pulse: Pulse | None = None

    def lose(self) -> None:
        """Stop working on it: its handler, if it runs, is cancelled."""
        self.lost = True
        if self.runner is not None:
            self.runner.cancel()


Settlement = tuple[Held, Outcome]


async def log_lost(store: Store, leases: Sequence[Lease], why: object) -> None:
    """Log that leases are gone: as ``cancelled`` where a person took the message back, otherwise as a takeover.

    A store that does not answer soon is not waited for: what is lost then is logged as a takeover.
    """
    taken_back: set[str] = set()
    with suppress(OnefoldError, TimeoutError):
        async with asyncio.timeout(_WHY_SECONDS):
            for record in await store.find(Query(ids=tuple(lease.id for lease in leases), limit=_TOGETHER_MAX)):
                if await _was_taken_back(store, record):
                    taken_back.add(record.envelope.id)
    for lease in leases:
        if lease.id in taken_back:
            logger.info("cancelled message_id=%s message_type=%s", lease.id, lease.envelope.message_type)
        else:
            kind = lease.envelope.message_type
            logger.warning("lease_lost message_id=%s message_type=%s why=%s", lease.id, kind, why)


async def _was_taken_back(store: Store, record: Record) -> bool:
    """Whether a person took a message back; a saga goes on, to undo what it did."""
    if record.envelope.saga and not record.state.ended:
        return cause_of(await store.steps(record.envelope.id), record.replay_count) is not None
    return record.state is State.CANCELLED


class Settler:
    """Collects outcomes and settles them in batches; ``settled`` is called with everything that is over."""

    def __init__(self, execution: Execution, settled: Callable[[Held], None]) -> None:
        self._execution = execution
        self._settled = settled
        self._waiting: deque[Settlement] = deque()
        #: Those of them that have failed, and how many settles they have let go first.
        self._failed: deque[Settlement] = deque()
        self._let_go = 0
        self._under_way: list[Settlement] = []
        self._arrived = asyncio.Event()
        self._pause = _BACK_OFF_SECONDS
        #: Settle one message each, which could not be settled when others could.
        self._alone: set[asyncio.Task[None]] = set()
        #: Messages whose outcome is recorded; those handed back have none.
        self.done = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._failed) + len(self._under_way) + len(self._alone)

    def add(self, held: Held, outcome: Outcome) -> None:
        """Settle this soon, together with others."""
        held.settling = True
        (self._failed if isinstance(outcome, _FAILURES) else self._waiting).append((held, outcome))
        self._arrived.set()

    async def run(self) -> None:
        """Settle whatever is added, until cancelled."""
        try:
            while True:
                while not (self._waiting or self._failed):
                    self._arrived.clear()
                    await self._arrived.wait()
                together = self._under_way = self._next()
                left = await self._settle(together)
                self._under_way = []
                # Together with what has come meanwhile: if the others can be settled, the store is not away.
                self._waiting.extendleft(reversed(left))
                # Told again, because only now nothing is under way any more.
                self._settled(together[-1][0])
        finally:
            for task in self._alone:
                task.cancel()
            await asyncio.gather(*self._alone, return_exceptions=True)

    def _next(self) -> list[Settlement]:
        together: list[Settlement] = []
        if self._failed and (self._let_go >= _FAILURES_WAIT or not self._waiting):
            self._let_go = 0
            self._execution.log_failures()
            together = _take(self._failed, _TOGETHER_MAX)
        elif self._failed:
            self._let_go += 1
        return together + _take(self._waiting, _TOGETHER_MAX - len(together))

    async def hand_back(self, held: list[Held]) -> None:
        """Give these back now, as if they had never been claimed."""
        if held:
            await self.settle([(one, HandBack()) for one in held])

    async def settle(self, settlements: list[Settlement]) -> None:
        """Settle now, for as long as it takes: what handlers have done is not dropped because the store is away."""
        self._execution.log_failures()
        while settlements:
            settlements = await self._settle(settlements)

    async def _settle(self, settlements: list[Settlement]) -> list[Settlement]:
        """Settle these, with a few tries; return those for which the store was away each time."""
        for _ in range(_TRIES):
            try:
                won = await self._execution.store.settle([(held.lease, outcome) for held, outcome in settlements])
            except StoreUnavailableError as error:
                logger.warning("store_unavailable doing=settle messages=%d error=%s", len(settlements), error)
                await self._execution.clock.sleep(self._pause)
                self._pause = min(self._pause * 2, _BACK_OFF_SECONDS_MAX)
            except Exception as error:
                # Also what no store expects of a value, such as a number too large to be written.
                await self._settle_apart(settlements, error)
                return []
            else:
                await self._record(settlements, won)
                return []
        return await self._settle_singly(settlements) if len(settlements) > 1 else settlements

    async def _settle_singly(self, settlements: list[Settlement]) -> list[Settlement]:
        """Find out whether the store is away, or only cannot settle one of these, such as one whose row is locked.

        If any can be settled alone, those that cannot are left to tasks of their own, and no other waits for them.
        """
        stuck: list[tuple[Settlement, StoreUnavailableError]] = []
        for number, one in enumerate(settlements, start=1):
            try:
                won = await self._execution.store.settle([(one[0].lease, one[1])])
            except StoreUnavailableError as error:
                stuck.append((one, error))
                if number == len(stuck) == _STUCK_MAX:
                    # None can be settled.  The next time others are tried first.
                    return settlements[number:] + settlements[:number]
            except Exception as error:
                await self._settle_apart([one], error)
            else:
                await self._record([one], won)
        if len(stuck) == len(settlements):
            return settlements
        for one, why in stuck:
            logger.error("settle_blocked message_id=%s error=%s", one[0].lease.id, why)
            task = asyncio.create_task(self.settle([one]), name="onefold-settle-alone")
            self._alone.add(task)
            task.add_done_callback(self._end_alone)
        return []

    def _end_alone(self, task: asyncio.Task[None]) -> None:
        self._alone.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("cannot_settle error=%s", type(error).__name__, exc_info=error)

    async def _record(self, settlements: list[Settlement], won: list[bool]) -> None:
        """Tell the worker of what the store has settled."""
        self._pause = _BACK_OFF_SECONDS
        lost: list[Lease] = []
        for (held, outcome), mine in zip(settlements, won, strict=True):
            if isinstance(outcome, HandBack):
                pass  # whoever has it now, it is not lost
            elif mine:
                self.done += 1
            else:
                lost.append(held.lease)
            self._settled(held)
        if lost:
            await log_lost(self._execution.store, lost, "outcome not recorded")

    async def _settle_apart(self, settlements: list[Settlement], error: Exception) -> None:
        """One of several cannot be settled as it is: settle each alone, and fail the one that is to blame."""
        if len(settlements) > 1:
            for one in settlements:
                await self.settle([one])
            return
        held, outcome = settlements[0]
        if isinstance(outcome, Dead) and outcome.sends:
            # Telling others of a letter must not keep it from being written.
            logger.warning("dead_letter_not_told message_id=%s error=%s", held.lease.id, error)
            await self.settle([(held, replace(outcome, sends=()))])
            return
        if isinstance(outcome, Dead | HandBack):
            # Not even that can be recorded.  It is left to its lease, because a worker that ended would take all the
            # others with it, and the next one would meet it again.
            logger.error("cannot_settle message_id=%s error=%s", held.lease.id, type(error).__name__, exc_info=error)
            self._settled(held)
            return
        task = self._execution.registry.handler(held.lease.envelope)
        failed = self._execution.decide_failure(task, held.lease, error)
        if type(failed) is type(outcome) and not getattr(outcome, "sends", ()):
            # The failure itself cannot be recorded, and trying again would not change that.
            logger.error("set_aside message_id=%s reason=damaged error=%s", held.lease.id, type(error).__name__)
            failed = Dead(damaged(f"it cannot be settled: {error}"), key_window=task.key_window)
        await self.settle([(held, failed)])


def _take(settlements: deque[Settlement], most: int) -> list[Settlement]:
    return [settlements.popleft() for _ in range(min(len(settlements), most))]
