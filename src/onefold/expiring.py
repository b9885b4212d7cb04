"""Beside the flow: ending messages that are past their time and that no worker of this app would ever claim.

A worker claims the types it has tasks for, and finds out then that a message has expired.  One whose type has no task
any more, or was mistyped by another program, would wait for ever.  So workers look through what is scheduled, a page at
a time, and claim what has expired long ago, whatever its type is, to make a dead letter of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import StoreError
from onefold.gate import Gating, name_of
from onefold.refusing import expired, is_expired
from onefold.store import Dead, HandBack, Lease, Outcome, Query, Record, State, Store

logger = logging.getLogger("onefold")

_GRACE = round(limits.EXPIRY_GRACE_SECONDS * MICROSECONDS)


class Expirer:
    """Looks for expired messages of other types than ``types``, for one worker."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        types: Sequence[str],
        worker: str,
        announce: Callable[[Lease, Dead], Outcome],
    ) -> None:
        self._store = store
        self._clock = clock
        self._types = frozenset(types)
        self._worker = worker
        self._announce = announce
        self._after = ""

    async def run(self) -> None:
        """Look every minute until cancelled."""
        while True:
            await self._clock.sleep(limits.PURGE_SECONDS)
            try:
                await self.look()
            except StoreError as error:
                logger.warning("store_failed doing=expire error=%s", error)

    async def look(self) -> int:
        """Look at the next page of what is scheduled, and return how many messages were ended."""
        page = await self._store.find(Query(states=(State.SCHEDULED,), after=self._after, limit=limits.PAGE))
        # They come in the order of their age, so behind one that is young there is nothing to find.
        is_more = len(page) == limits.PAGE and self._is_over(page[-1].envelope.created_at)
        self._after = page[-1].envelope.id if is_more else ""
        ended = 0
        for (queue, kind), gates in self._expired(page).items():
            while number := await self._end(queue, kind, gates):
                ended += number
        return ended

    def _expired(self, page: Sequence[Record]) -> dict[tuple[str, str], set[str]]:
        """Return by queue and type where expired messages wait: the names of their gates, if they have any."""
        found: dict[tuple[str, str], set[str]] = {}
        for one in page:
            envelope = one.envelope
            # What a saga has begun must be undone, which only its own code can do.
            if envelope.claimed_as not in self._types and not envelope.saga and self._is_over(envelope.expires_at):
                gates = found.setdefault((envelope.queue, envelope.claimed_as), set())
                if envelope.gated_by is not None:
                    gates.add(name_of(envelope.gated_by))
        return found

    def _is_over(self, instant: int) -> bool:
        """Whether an instant was long ago: a worker that has a task for what expired then would have claimed it."""
        return 0 < instant <= self._clock.now() - _GRACE

    async def _end(self, queue: str, kind: str, gates: set[str]) -> int:
        """Claim messages of a type, the longest due first, and end those that are expired.

        Returns how many there were; 0 when others came with them, so that no more are claimed in vain.
        """
        leases = await self._store.claim(
            [queue],
            types=[kind],
            limit=limits.EXPIRY_BATCH,
            lease=limits.LEASE,
            worker=self._worker,
            gatings={name: Gating(name=name, gap="skip") for name in gates},
        )
        outcomes = [self._judge(lease) for lease in leases]
        if leases:
            await self._store.settle(list(zip(leases, outcomes, strict=True)))
        ended = sum(isinstance(outcome, Dead) for outcome in outcomes)
        if ended:
            logger.warning("expired_unclaimed messages=%d queue=%s message_type=%s", ended, queue, kind)
        return ended if ended == len(leases) else 0

    def _judge(self, lease: Lease) -> Outcome:
        envelope = lease.envelope
        if not is_expired(envelope, lease.claimed_at) or envelope.saga:
            return HandBack()
        return self._announce(lease, expired(limits.KEY_WINDOW))
