"""For operators: runs and other messages that have not ended: listing them, those of a worker, cancelling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from onefold import limits
from onefold.clock import MICROSECONDS, first_id
from onefold.operations.acts import make_act
from onefold.store import Query, Record, State, Store
from onefold.workflows.cancel import take_back

#: The states of messages that have not ended.
OPEN = (State.SCHEDULED, State.LEASED, State.PARKED)
#: The most by which the clock of a sender is assumed to differ from the store's; synchronised clocks differ far less.
_CLOCK_DIFFERENCE = 3_600 * MICROSECONDS


async def cancel(store: Store, message_id: str, *, actor: str, reason: str) -> bool:
    """Cancel a message.  One that runs can no longer commit, because its fence is raised.

    A saga goes no further and is undone; it ends when all of its steps are undone.
    """
    limits.check_bytes("id", message_id, limits.ID_BYTES_MAX)
    return await take_back(store, message_id, make_act(actor, reason))


async def held_by(store: Store, worker: str) -> list[Record]:
    """Return the messages that a worker has leased."""
    found: list[Record] = []
    while page := await store.find(
        Query(worker=worker, states=(State.LEASED,), after=found[-1].envelope.id if found else "")
    ):
        found += page
    return found


async def runs(
    store: Store,
    *,
    states: Sequence[State] = OPEN,
    message_type: str | None = None,
    created: tuple[int, int] = (0, limits.INSTANT_MAX),
    after: str = "",
) -> AsyncIterator[Record]:
    """Iterate over the runs of workflows, oldest first, page by page; ``created`` gives the first and last instant.

    Runs that have not ended are found by an index.  With states that have ended, all messages are looked at.
    """
    first, last = created
    # Ids begin with the time at which they were made, by the sender's clock.
    after = max(after, first_id(max(0, first - _CLOCK_DIFFERENCE)))
    asked = Query(states=tuple(states), message_type=message_type, runs=True, limit=limits.PAGE_MAX)
    while page := await store.find(replace(asked, after=after)):
        for record in page:
            if first <= record.envelope.created_at <= last:
                yield record
        after = page[-1].envelope.id
        if after > first_id(last + _CLOCK_DIFFERENCE):
            return
