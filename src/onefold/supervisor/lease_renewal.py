"""Stage 6, lease: renew the leases of a worker process that hangs, so that no other worker takes its messages over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from onefold.store import Lease, Query, Record, State, Store
from onefold.worker.slots import Slot

#: Messages read at once; with the largest payloads these take some tens of megabytes.
_PAGE = 200


async def renew(store: Store, worker: str, begun: Sequence[Slot], *, lease: float) -> None:
    """Renew all leases of a worker, those of begun messages first: another worker must not run these a second time."""
    if begun:
        await store.extend(begun, lease=lease)
    async for page in held_by(store, worker):
        await store.extend(page, lease=lease)


async def held_by(store: Store, worker: str) -> AsyncIterator[list[Lease]]:
    """Yield the leases that a worker holds in the store, a page at a time."""
    after = ""
    while page := await store.find(Query(worker=worker, states=(State.LEASED,), after=after, limit=_PAGE)):
        yield [_lease_of(record, worker) for record in page]
        after = page[-1].envelope.id


def _lease_of(record: Record, worker: str) -> Lease:
    return Lease(
        record.envelope,
        record.fence,
        record.attempt + 1,
        record.crashes,
        record.replay_count,
        claimed_at=0,
        worker=worker,
    )
