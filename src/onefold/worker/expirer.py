"""Beside the flow: dead letters of expired messages that no worker of this app would ever claim.

A worker claims the types it has tasks for, and makes a dead letter of an expired message when it claims it.  A message
of a type without a task, because the task was removed or another program mistyped it, would wait for ever.  So workers
read the scheduled messages page by page, and claim those of any other type that expired long ago.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.store import Dead, HandBack, Lease, Outcome, Query, Record, State, Store
from onefold.store.gates import Gating, name_of
from onefold.worker.refusals import expired, is_expired
from onefold.worker.upkeep import Upkeep

logger = logging.getLogger("onefold")

_GRACE = round(limits.EXPIRY_GRACE_SECONDS * MICROSECONDS)


class Expirer:
    """Ends expired messages of other types than ``types``, for one worker."""

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
        """Look at a page every minute until cancelled."""
        await Upkeep(self._clock, "expire", limits.PURGE_SECONDS, self.look).run()

    async def look(self) -> int:
        """Look at the next page of scheduled messages, and return how many were ended."""
        page = await self._store.find(Query(states=(State.SCHEDULED,), after=self._after, limit=limits.PAGE))
        # Pages are in the order of age, so no message behind a young one has expired.
        is_more = len(page) == limits.PAGE and self._is_over(page[-1].envelope.created_at)
        self._after = page[-1].envelope.id if is_more else ""
        ended = 0
        for (queue, kind), gates in self._expired(page).items():
            while number := await self._end(queue, kind, gates):
                ended += number
        return ended

    def _expired(self, page: Sequence[Record]) -> dict[tuple[str, str], set[str]]:
        """Return the queues and types of expired messages, with the names of the gates at which they wait."""
        found: dict[tuple[str, str], set[str]] = {}
        for one in page:
            envelope = one.envelope
            # Only the code of a saga can undo the steps that it has begun.
            if envelope.claimed_as not in self._types and not envelope.saga and self._is_over(envelope.expires_at):
                gates = found.setdefault((envelope.queue, envelope.claimed_as), set())
                if envelope.gated_by is not None:
                    gates.add(name_of(envelope.gated_by))
        return found

    def _is_over(self, instant: int) -> bool:
        """Whether an instant is so long ago that a worker with a task for the message would have claimed it."""
        return 0 < instant <= self._clock.now() - _GRACE

    async def _end(self, queue: str, kind: str, gates: set[str]) -> int:
        """Claim messages of a type, the longest due first, and end those that have expired.

        Returns how many were ended, or 0 when the claim also took others: the next one would take only such.
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
