"""Stage 9, settle: outcomes of finished handlers are committed, many at once, retried for as long as it takes.

Handlers with SQL of their own have settled in their own commit; all other outcomes are settled here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from onefold.errors import OnefoldError, StoreUnavailableError
from onefold.handlers.lease import Held
from onefold.store import Dead, HandBack, Lease, Outcome, Query, Record, State, Store, damaged
from onefold.worker.execution import Execution
from onefold.workflows.saga import cause_of

logger = logging.getLogger("onefold")

#: Finished but unsettled messages: a crash would run them again, so they are limited.
UNSETTLED_MAX = 2_000
#: Messages settled by one statement.
_TOGETHER_MAX = 500
#: How long to wait for the store's reason why a lease was lost; it is only for the log.
_WHY_SECONDS = 2.0
#: The pause while the store is unavailable, doubling up to the second figure.
_BACK_OFF_SECONDS, _BACK_OFF_SECONDS_MAX = 0.1, 10.0
#: After so many failures in a row each message is settled alone, because only one of them may be the cause ...
_TRIES = 3
#: ... but when the first so many all fail, the store is unavailable.
_STUCK_MAX = 2


Settlement = tuple[Held, Outcome]


async def log_lost(store: Store, leases: Sequence[Lease], why: object) -> None:
    """Log lost leases: as ``cancelled`` where an operator cancelled the message, otherwise as a takeover.

    When the store does not answer soon, they are logged as takeovers.
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
    """Whether an operator cancelled a message; a cancelled saga goes on, to undo its steps."""
    if record.envelope.saga and not record.state.ended:
        return cause_of(await store.steps(record.envelope.id), record.replay_count) is not None
    return record.state is State.CANCELLED


class Settler:
    """Collects outcomes and settles them in batches; calls ``settled`` with each lease that is over."""

    def __init__(self, execution: Execution, settled: Callable[[Held], None]) -> None:
        self._execution = execution
        self._settled = settled
        self._waiting: deque[Settlement] = deque()
        self._under_way: list[Settlement] = []
        self._arrived = asyncio.Event()
        self._pause = _BACK_OFF_SECONDS
        #: Tasks that settle one message each, which failed while others were settled.
        self._alone: set[asyncio.Task[None]] = set()
        #: How many outcomes were committed; a message that is handed back has none.
        self.done = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way) + len(self._alone)

    def add(self, held: Held, outcome: Outcome) -> None:
        """Settle this with the next batch."""
        held.settling = True
        self._waiting.append((held, outcome))
        self._arrived.set()

    async def run(self) -> None:
        """Settle all outcomes that are added, until cancelled."""
        try:
            while True:
                while not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                together = self._under_way = [
                    self._waiting.popleft() for _ in range(min(len(self._waiting), _TOGETHER_MAX))
                ]
                left = await self._settle(together)
                self._under_way = []
                # They are tried again together with new outcomes: if those can be settled, the store is available.
                self._waiting.extendleft(reversed(left))
                # Called once more, because len() counted these as under way when it was called before.
                self._settled(together[-1][0])
        finally:
            for task in self._alone:
                task.cancel()
            await asyncio.gather(*self._alone, return_exceptions=True)

    async def hand_back(self, held: list[Held]) -> None:
        """Hand these back now, as if they had never been claimed."""
        if held:
            await self.settle([(one, HandBack()) for one in held])

    async def settle(self, settlements: list[Settlement]) -> None:
        """Settle now, and retry for as long as the store is unavailable: the outcome of a handler is never dropped."""
        while settlements:
            settlements = await self._settle(settlements)

    async def _settle(self, settlements: list[Settlement]) -> list[Settlement]:
        """Settle these, with a few tries; return those for which the store was unavailable each time."""
        for _ in range(_TRIES):
            try:
                won = await self._execution.store.settle([(held.lease, outcome) for held, outcome in settlements])
            except StoreUnavailableError as error:
                logger.warning("store_unavailable doing=settle messages=%d error=%s", len(settlements), error)
                await self._execution.clock.sleep(self._pause)
                self._pause = min(self._pause * 2, _BACK_OFF_SECONDS_MAX)
            except Exception as error:
                # Also an error that the store does not translate, such as for a number that is too large to be stored.
                await self._settle_apart(settlements, error)
                return []
            else:
                await self._record(settlements, won)
                return []
        return await self._settle_singly(settlements) if len(settlements) > 1 else settlements

    async def _settle_singly(self, settlements: list[Settlement]) -> list[Settlement]:
        """Settle each of these once, in case that only some rows are locked and the store is available.

        If any can be settled, those that cannot get tasks of their own, and no other waits for them.
        """
        stuck: list[tuple[Settlement, StoreUnavailableError]] = []
        for number, one in enumerate(settlements, start=1):
            try:
                won = await self._execution.store.settle([(one[0].lease, one[1])])
            except StoreUnavailableError as error:
                stuck.append((one, error))
                if number == len(stuck) == _STUCK_MAX:
                    # The store is unavailable.  The next try begins with the others.
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
        """Count and forget what the store has answered, and log leases that were lost."""
        self._pause = _BACK_OFF_SECONDS
        lost: list[Lease] = []
        for (held, outcome), mine in zip(settlements, won, strict=True):
            if isinstance(outcome, HandBack):
                pass  # it was to be given up, so it does not matter whether another claim has it
            elif mine:
                self.done += 1
            else:
                lost.append(held.lease)
            self._settled(held)
        if lost:
            await log_lost(self._execution.store, lost, "outcome not recorded")

    async def _settle_apart(self, settlements: list[Settlement], error: Exception) -> None:
        """Settle each of these alone after an error that is not about the connection; fail the one that causes it."""
        if len(settlements) > 1:
            for one in settlements:
                await self.settle([one])
            return
        held, outcome = settlements[0]
        if isinstance(outcome, Dead) and outcome.sends:
            # The messages to the hooks must not keep the letter from being written.
            logger.warning("dead_letter_not_told message_id=%s error=%s", held.lease.id, error)
            await self.settle([(held, replace(outcome, sends=()))])
            return
        if isinstance(outcome, Dead | HandBack):
            # Neither can be recorded.  It is left until its lease runs out: if the worker ended, all its other messages
            # would wait for that too, and the next worker would meet the same error.
            logger.error("cannot_settle message_id=%s error=%s", held.lease.id, type(error).__name__, exc_info=error)
            self._settled(held)
            return
        task = self._execution.registry.handler(held.lease.envelope)
        failed = self._execution.decide_failure(task, held.lease, error)
        if type(failed) is type(outcome) and not getattr(outcome, "sends", ()):
            # The failure cannot be recorded either, and another try would fail in the same way.
            logger.error("set_aside message_id=%s reason=damaged error=%s", held.lease.id, type(error).__name__)
            failed = Dead(damaged(f"it cannot be settled: {error}"), key_window=task.key_window)
        await self.settle([(held, failed)])
