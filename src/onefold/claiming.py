"""Stage 6, lease: claiming, as much at a time as is worth the statement, and no claim half-way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import StoreUnavailableError
from onefold.fleet import WorkerSettings
from onefold.store import Lease, Store

logger = logging.getLogger("onefold")

#: When the store cannot be asked for work, ask again after this long.
_BACK_OFF_SECONDS = 0.5


class Claimer:
    """Claims for one worker; ``accept`` is called with every lease and when its claim was asked for."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        types: Sequence[str],
        settings: WorkerSettings,
        accept: Callable[[list[Lease], int], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._types = types
        self._settings = settings
        self._accept = accept
        self._turn = 0
        self._rate = 0.0
        self._asked_at = clock.steady()
        #: Messages begun since the last claim; counted by the worker.
        self.started = 0

    @property
    def ahead(self) -> int:
        """How many messages will start within a moment, at the measured rate."""
        return int(self._rate * limits.CLAIM_AHEAD_SECONDS)

    async def claim(self, wanted: int) -> int | None:
        """Return how many were claimed, or None when the store could not be asked."""
        asked_at = self._clock.steady()
        elapsed = max(asked_at - self._asked_at, 1) / MICROSECONDS
        self._rate = 0.5 * self._rate + 0.5 * self.started / elapsed
        self.started, self._asked_at = 0, asked_at
        try:
            leases = await self._claim_whole(wanted, self._types)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=claim error=%s", error)
            await self._clock.sleep(_BACK_OFF_SECONDS)
            return None
        self._accept(leases, asked_at)
        return len(leases)

    async def claim_alike(self, message_type: str, wanted: int) -> None:
        """Claim more messages of one type, if there are any and the store can be asked; nobody waits for others."""
        asked_at = self._clock.steady()
        try:
            self._accept(await self._claim_whole(wanted, [message_type]), asked_at)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=claim error=%s", error)

    async def _claim_whole(self, wanted: int, types: Sequence[str]) -> list[Lease]:
        """Claim, and see it through even when the worker is stopped meanwhile: a lost answer would be a lost lease."""
        asked_at = self._clock.steady()
        claiming = asyncio.ensure_future(
            self._store.claim(
                self._queues(),
                types=types,
                limit=wanted,
                lease=self._settings.lease_seconds,
                worker=self._settings.name,
                lane=self._settings.lane,
            )
        )
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.wait([claiming])
            if not claiming.cancelled() and claiming.exception() is None:
                self._accept(claiming.result(), asked_at)
            raise

    def _queues(self) -> list[str]:
        """Return the queues; each comes first in its turn, so that a busy one cannot starve the others."""
        queues = self._settings.queues
        turn, self._turn = self._turn, (self._turn + 1) % len(queues)
        return [*queues[turn:], *queues[:turn]]
