"""Stage 6, lease: keeping what a worker holds, and letting go of what it has lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, give_way
from onefold.errors import StoreUnavailableError
from onefold.settling import Held
from onefold.store import Store

logger = logging.getLogger("onefold")

#: Leases renewed by one statement, so that ten thousand of them do not keep others from the store.
_TOGETHER_MAX = 1_000


class Renewer:
    """Renews every lease in ``held``, by message id; what is lost is marked so, and its handler cancelled.

    ``renewed`` is called with the moment at which every lease was known to be good.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        held: Mapping[str, Held],
        lease_seconds: float,
        renewed: Callable[[int], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._held = held
        self._lease_seconds = lease_seconds
        self._renewed = renewed

    async def run(self) -> None:
        """Renew again and again, until cancelled."""
        while True:
            asked_at = self._clock.steady()
            held = list(self._held.values())
            kept = await self._renew(held)
            if kept and (overdue := self._overdue(held)):
                # The answer took longer than a lease lasts: ask once more before giving them up.
                await self._renew(overdue)
            for one in self._overdue(held):
                one.lose()
            if kept:
                self._renewed(asked_at)
            await self._clock.sleep(self._pause())

    def _pause(self) -> float:
        """Until the next renewal, or until the first lease is over that could not be renewed."""
        pause = self._lease_seconds / limits.RENEWALS_PER_LEASE
        left = [one.until - self._clock.steady() for one in self._held.values() if not one.lost]
        return max(0.0, min([pause, *(microseconds / MICROSECONDS for microseconds in left)]))

    def _overdue(self, held: list[Held]) -> list[Held]:
        now = self._clock.steady()
        return [one for one in held if not one.lost and one.until <= now and self._held.get(one.lease.id) is one]

    async def _renew(self, held: list[Held]) -> bool:
        """Renew these; False when the store could not be asked about all of them, or did not answer in time."""
        for start in range(0, len(held), _TOGETHER_MAX):
            together = held[start : start + _TOGETHER_MAX]
            asked_at = self._clock.steady()
            try:
                kept = await self._answer_in_time(together)
            except StoreUnavailableError as error:
                logger.warning("store_unavailable doing=extend messages=%d error=%s", len(held) - start, error)
                return False
            until = asked_at + round(self._lease_seconds * MICROSECONDS)
            for one, mine in zip(together, kept, strict=True):
                if mine:
                    one.until = max(one.until, until)
                elif self._held.get(one.lease.id) is one:
                    one.taken_over = True
                    one.lose()
        return True

    async def _answer_in_time(self, held: list[Held]) -> list[bool]:
        """Ask the store, but wait no longer than the first of these leases lasts: its handler must be told by then."""
        extending = asyncio.ensure_future(self._store.extend([one.lease for one in held], lease=self._lease_seconds))
        left = (min(one.until for one in held) - self._clock.steady()) / MICROSECONDS
        # What is over already is asked about once more, which may take as long as any renewal.
        giving_up = asyncio.ensure_future(
            self._clock.sleep(left if left > 0 else self._lease_seconds / limits.RENEWALS_PER_LEASE)
        )
        try:
            await asyncio.wait({extending, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if not extending.done():
                # Whoever was stopped for a while finds an answer and the end of the wait at the same moment.
                await give_way()
                await give_way()
            if extending.done():
                return extending.result()
            raise StoreUnavailableError("no answer before the first of the leases was over")
        finally:
            giving_up.cancel()
            extending.cancel()
