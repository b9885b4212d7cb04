"""Stage 6, lease: claiming, as much at a time as is worth the statement, and no claim half-way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import StoreUnavailableError
from onefold.fleet import WorkerSettings
from onefold.gate import Gating
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
        gatings: Mapping[str, Gating],
        settings: WorkerSettings,
        accept: Callable[[list[Lease], int], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._types = types
        self._gatings = gatings
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

    async def claim(self, wanted: int, at_once: int, in_hand: Callable[[str], int]) -> int | None:
        """Return how many were claimed, or None when the store could not be asked.

        ``at_once`` of them can begin at once; ``in_hand`` tells how many of a queue are here already.
        """
        asked_at = self._clock.steady()
        elapsed = max(asked_at - self._asked_at, 1) / MICROSECONDS
        self._rate = 0.5 * self._rate + 0.5 * self.started / elapsed
        self.started, self._asked_at = 0, asked_at
        try:
            for queues, most in self._portions(wanted, in_hand):
                leases = await self._claim_whole(queues, most, self._types, at_once)
                self._accept(leases, asked_at)
                if leases:
                    return len(leases)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=claim error=%s", error)
            await self._clock.sleep(_BACK_OFF_SECONDS)
            return None
        return 0

    async def claim_alike(self, message_type: str, wanted: int) -> None:
        """Claim more messages of one type, if there are any and the store can be asked; nobody waits for others."""
        asked_at = self._clock.steady()
        try:
            self._accept(await self._claim_whole(self._queues(), wanted, [message_type], wanted), asked_at)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=claim error=%s", error)

    async def _claim_whole(self, queues: Sequence[str], wanted: int, types: Sequence[str], at_once: int) -> list[Lease]:
        """Claim, and see it through even when the worker is stopped meanwhile: a lost answer would be a lost lease."""
        asked_at = self._clock.steady()
        claiming = asyncio.ensure_future(
            self._store.claim(
                queues,
                types=types,
                limit=wanted,
                lease=self._settings.lease_seconds,
                worker=self._settings.name,
                lane=self._settings.lane,
                gatings=self._gatings,
                at_once=at_once,
            )
        )
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.wait([claiming], timeout=limits.STOP_STORE_SECONDS)
            if not claiming.done():
                claiming.cancel()
                logger.warning("claim_given_up: the store did not answer in time; what it claimed is left to its lease")
            elif not claiming.cancelled() and claiming.exception() is None:
                self._accept(claiming.result(), asked_at)
            raise

    def _portions(self, wanted: int, in_hand: Callable[[str], int]) -> Iterator[tuple[list[str], int]]:
        """Return which queues to ask for how many: together those that share the worker's places, the others apart."""
        queues, places = self._queues(), self._settings.places
        if not places:
            yield queues, wanted
            return
        shared = [queue for queue in queues if queue not in places]
        for queue in queues:
            if queue in places:
                free = min(wanted, places[queue] - in_hand(queue))
                if free > 0:
                    yield [queue], free
            elif queue == shared[0]:
                yield shared, wanted

    def _queues(self) -> list[str]:
        """Return the queues; each comes first in its turn, so that a busy one cannot starve the others."""
        queues = self._settings.queues
        turn, self._turn = self._turn, (self._turn + 1) % len(queues)
        return [*queues[turn:], *queues[:turn]]
