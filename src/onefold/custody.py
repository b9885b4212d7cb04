"""Stage 6, lease: what becomes of the messages of a worker process that hangs or has died.

The board says what the process had begun, the store says what it held; the difference it had only fetched.
Everything here names fences, so what the process settled in its last moment stays as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from onefold import limits
from onefold.slots import Slot
from onefold.store import Again, Dead, Failure, HandBack, Lease, Outcome, Query, Record, State, Store

#: Messages read at once; with the largest payloads these are some ten megabytes.
_PAGE = 200

#: How long the key of a message of this type is kept after it ended.
KeyWindow = Callable[[str], float]
#: Adds to the outcome of a message what tells of it, should it be a dead letter.
Announce = Callable[[Lease, Outcome], Outcome]


def unannounced(lease: Lease, outcome: Outcome) -> Outcome:
    """Tell nobody."""
    return outcome


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended, as far as its messages are concerned."""

    worker: str
    #: The messages that are to blame, by id and fence, and what is to be said about each.
    guilty: Mapping[tuple[str, int], str]
    #: Where its threads were, as far as it could still say.
    stacks: str = ""


async def keep(store: Store, worker: str, begun: Sequence[Slot], *, lease: float) -> None:
    """Renew everything a worker holds, what it has begun first, because nobody else may begin that now."""
    if begun:
        await store.extend(begun, lease=lease)
    async for page in _held_by(store, worker):
        await store.extend(page, lease=lease)


async def hand_back(store: Store, worker: str, begun: Sequence[Slot] = ()) -> int:
    """Hand back what a worker held except what it has begun; returns how many."""
    known = {(slot.id, slot.fence) for slot in begun}
    number = 0
    async for page in _held_by(store, worker):
        fetched = [lease for lease in page if (lease.id, lease.fence) not in known]
        number += sum(await store.settle([(lease, HandBack()) for lease in fetched])) if fetched else 0
    return number


async def bury(store: Store, death: Death, key_window: KeyWindow, announce: Announce = unannounced) -> int:
    """Settle everything a dead worker held: the guilty are counted a crash, the others are handed back.

    Returns how many were guilty.  A crash in the middle leaves the rest to its leases' end, or to the next call.
    """
    crashes = 0
    async for page in _held_by(store, death.worker):
        judged = [_settlement(lease, death, key_window) for lease in page]
        settlements = [(lease, announce(lease, outcome)) for lease, outcome in judged]
        won = await store.settle(settlements)
        crashes += sum(
            mine and not isinstance(outcome, HandBack) for (_, outcome), mine in zip(settlements, won, strict=True)
        )
    return crashes


def _settlement(lease: Lease, death: Death, key_window: KeyWindow) -> tuple[Lease, Outcome]:
    text = death.guilty.get((lease.id, lease.fence))
    if text is None:
        return lease, HandBack()
    crashes = lease.crashes + 1
    if crashes < limits.QUARANTINE_AFTER_SUPERVISED or lease.envelope.saga:
        # A saga is not ended before it is undone; who claims it next sees how often it crashed.
        return lease, Again(0.0, _failure("crash", text, death.stacks), counted=False, crashed=True)
    text = f"{text}; this was the last of {crashes} crashes with it"
    failure = _failure("quarantined", text, death.stacks)
    return replace(lease, crashes=crashes), Dead(failure, key_window=key_window(lease.envelope.message_type), ran=False)


def _failure(reason: str, text: str, stacks: str) -> Failure:
    return Failure(
        reason=reason,
        error_type="Crash",
        error_message=text[: limits.ERROR_TEXT_MAX],
        stack=stacks[: limits.STACK_TEXT_MAX],
    )


async def _held_by(store: Store, worker: str) -> AsyncIterator[list[Lease]]:
    """Go through what the store says a worker holds, a page at a time."""
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
