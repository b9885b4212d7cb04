"""Stage 6, lease: hand back the messages a worker process had only fetched, settle those a dead one had begun.

The store has the leases of the process, and the board the messages it had begun; the others it had only fetched.
Every write here names a fence, so a message that the process settled in its last moment stays settled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from onefold import limits
from onefold.store import Again, Dead, Failure, HandBack, Lease, Outcome, Store
from onefold.supervisor.lease_renewal import held_by
from onefold.worker.slots import Slot

#: How long the key of a message of this type is kept after it ended.
KeyWindow = Callable[[str], float]
#: Adds the announcement to an outcome that makes a dead letter.
Announce = Callable[[Lease, Outcome], Outcome]


def unannounced(lease: Lease, outcome: Outcome) -> Outcome:
    """Return the outcome as it is."""
    return outcome


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker process, for settling its messages."""

    worker: str
    #: The messages that are blamed, by id and fence, and the error text for each.
    blamed: Mapping[tuple[str, int], str]
    #: The stacks of its threads, as far as it could write them.
    stacks: str = ""


async def hand_back(store: Store, worker: str, begun: Sequence[Slot] = ()) -> int:
    """Hand back the messages of a worker except those it has begun; returns how many."""
    known = {(slot.id, slot.fence) for slot in begun}
    number = 0
    async for page in held_by(store, worker):
        fetched = [lease for lease in page if (lease.id, lease.fence) not in known]
        number += sum(await store.settle([(lease, HandBack()) for lease in fetched])) if fetched else 0
    return number


async def settle_dead_process(
    store: Store, death: Death, key_window: KeyWindow, announce: Announce = unannounced
) -> int:
    """Settle all messages of a dead worker: the blamed are counted a crash, the others are handed back.

    Returns how many were counted a crash.  A crash in the middle leaves the rest to the next call, or to other workers
    when the leases run out.
    """
    crashes = 0
    async for page in held_by(store, death.worker):
        judged = [_settlement(lease, death, key_window) for lease in page]
        settlements = [(lease, announce(lease, outcome)) for lease, outcome in judged]
        settled = await store.settle(settlements)
        crashes += sum(
            ours and not isinstance(outcome, HandBack) for (_, outcome), ours in zip(settlements, settled, strict=True)
        )
    return crashes


def _settlement(lease: Lease, death: Death, key_window: KeyWindow) -> tuple[Lease, Outcome]:
    text = death.blamed.get((lease.id, lease.fence))
    if text is None:
        return lease, HandBack()
    crashes = lease.crashes + 1
    if crashes < limits.QUARANTINE_AFTER_SUPERVISED or lease.envelope.saga:
        # A saga must be undone before it ends: the worker that claims it next sees the crashes, and undoes it.
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
