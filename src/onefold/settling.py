"""Stage 9, settle: ending what handlers have finished, many at once, for as long as it takes.

Handlers with SQL of their own have settled in their own commit; everything else comes through here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from onefold.errors import OnefoldError, StoreUnavailableError
from onefold.execution import Execution
from onefold.store import HandBack, Lease, Outcome

logger = logging.getLogger("onefold")

#: Finished but unsettled messages: a crash runs them again, so there are never many.
UNSETTLED_MAX = 2_000
#: Messages settled by one statement.
_TOGETHER_MAX = 500
#: When the store cannot be reached, try again after this long, doubling up to the second figure.
_BACK_OFF_SECONDS, _BACK_OFF_SECONDS_MAX = 0.1, 10.0


class Settler:
    """Collects outcomes and settles them in batches; ``settled`` is called with every lease that is over."""

    def __init__(self, execution: Execution, settled: Callable[[Lease], None]) -> None:
        self._execution = execution
        self._settled = settled
        self._waiting: deque[tuple[Lease, Outcome]] = deque()
        self._under_way: list[tuple[Lease, Outcome]] = []
        self._arrived = asyncio.Event()
        #: Messages whose outcome is recorded; those handed back have none.
        self.done = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def __contains__(self, lease: Lease) -> bool:
        return any(one is lease for one, _ in (*self._waiting, *self._under_way))

    def add(self, lease: Lease, outcome: Outcome) -> None:
        """Settle this soon, together with others."""
        self._waiting.append((lease, outcome))
        self._arrived.set()

    async def run(self) -> None:
        """Settle whatever is added, until cancelled."""
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            number = min(len(self._waiting), _TOGETHER_MAX)
            together = self._under_way = [self._waiting.popleft() for _ in range(number)]
            await self.settle(together)
            self._under_way = []
            # Told again, because only now nothing is under way any more.
            self._settled(together[-1][0])

    async def settle(self, settlements: list[tuple[Lease, Outcome]]) -> None:
        """Settle now, for as long as it takes: what handlers have done is not dropped because the store is away."""
        pause = _BACK_OFF_SECONDS
        while True:
            try:
                won = await self._execution.store.settle(settlements)
                break
            except StoreUnavailableError as error:
                logger.warning("store_unavailable doing=settle messages=%d error=%s", len(settlements), error)
                await self._execution.clock.sleep(pause)
                pause = min(pause * 2, _BACK_OFF_SECONDS_MAX)
            except OnefoldError as error:
                await self._settle_apart(settlements, error)
                return
        for (lease, outcome), mine in zip(settlements, won, strict=True):
            if not mine:
                logger.warning("lease_lost message_id=%s outcome not recorded", lease.id)
            self.done += mine and not isinstance(outcome, HandBack)
            self._settled(lease)

    async def _settle_apart(self, settlements: list[tuple[Lease, Outcome]], error: OnefoldError) -> None:
        """One of several cannot be settled as it is: settle each alone, and fail the one that is to blame."""
        if len(settlements) > 1:
            for one in settlements:
                await self.settle([one])
            return
        lease, outcome = settlements[0]
        task = self._execution.registry.tasks[lease.envelope.message_type]
        failed = self._execution.decide_failure(task, lease, error)
        if type(failed) is type(outcome):
            raise error  # the failure itself cannot be recorded: a defect, not to be repeated for ever
        await self.settle([(lease, failed)])
