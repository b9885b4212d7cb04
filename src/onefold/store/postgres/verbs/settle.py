"""Settlements as columns: which statement ends which leases, and the messages and lines that leave with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onefold.clock import MICROSECONDS
from onefold.message.envelope import Envelope
from onefold.store import Again, Dead, Done, Fenced, HandBack, Lease, Outcome, Parked
from onefold.store.postgres.verbs.journal import parking
from onefold.store.postgres.wire.arrays import Column, bigints, blobs, flags, ids, texts
from onefold.store.shared.rows import encode_failure

Settlement = tuple[Lease, Outcome]

#: Outcomes that may leave messages.
_SENDING = (Done, Dead, Parked)


def sends_of(settlements: Iterable[Settlement]) -> list[Envelope]:
    """Return what the handlers of these settlements sent."""
    # Not a union, which would be made anew for each of a thousand settlements and cost more than the test.
    return [e for _, outcome in settlements if isinstance(outcome, _SENDING) for e in outcome.sends]


def brings_more(settlements: Iterable[Settlement]) -> bool:
    """Whether settling these writes more than where they stand, so that it needs a transaction."""
    for lease, outcome in settlements:
        if lease.envelope.reply_to is not None:
            return True
        if isinstance(outcome, Done):
            if outcome.sends or outcome.notes:
                return True
        elif isinstance(outcome, Dead):
            if outcome.sends:
                return True
        elif isinstance(outcome, Parked) and (outcome.sends or outcome.notes or outcome.steps):
            return True
    return False


def _microseconds(seconds: Sequence[float]) -> Column:
    known = {one: round(one * MICROSECONDS) for one in set(seconds)}
    return bigints([known[one] for one in seconds])


def fenced(leases: Sequence[Fenced]) -> dict[str, Column]:
    return {"ids": ids([lease.id for lease in leases]), "fences": bigints([lease.fence for lease in leases])}


def _ended(settlements: Sequence[tuple[Lease, Any]]) -> dict[str, Column]:
    leases = [lease for lease, _ in settlements]
    envelopes = [lease.envelope for lease in leases]
    return {
        "ids": ids([e.id for e in envelopes]),
        "fences": bigints([lease.fence for lease in leases]),
        "queues": texts([e.queue for e in envelopes]),
        "attempts": bigints([lease.attempt for lease in leases]),
        "crashes": bigints([lease.crashes for lease in leases]),
        "replay_counts": bigints([lease.replay_count for lease in leases]),
        "key_windows": _microseconds([outcome.key_window for _, outcome in settlements]),
        "body_windows": _microseconds([outcome.body_retention for _, outcome in settlements]),
    }


def _done(settlements: Sequence[tuple[Lease, Any]]) -> dict[str, Column]:
    return {**_ended(settlements), "results": blobs([outcome.result for _, outcome in settlements])}


def _dead(settlements: Sequence[tuple[Lease, Any]]) -> dict[str, Column]:
    return {
        **_ended(settlements),
        "failures": blobs([encode_failure(outcome.failure) for _, outcome in settlements]),
        # A message that expired or was quarantined did not run this time.
        "failed_runs": bigints([int(outcome.ran) for _, outcome in settlements]),
        "workers": texts([lease.worker for lease, _ in settlements]),
    }


def _again(settlements: Sequence[tuple[Lease, Any]]) -> dict[str, Column]:
    failures = [outcome.failure for _, outcome in settlements]
    return {
        **fenced([lease for lease, _ in settlements]),
        "attempts": bigints([lease.attempt for lease, _ in settlements]),
        "counted": bigints([lease.attempt if o.counted else lease.attempt - 1 for lease, o in settlements]),
        "crashed": bigints([int(o.crashed) for _, o in settlements]),
        "delays": _microseconds([o.delay for _, o in settlements]),
        "failures": blobs([None if failure is None else encode_failure(failure) for failure in failures]),
        "workers": texts([lease.worker for lease, _ in settlements]),
    }


def _handed_back(settlements: Sequence[tuple[Lease, Any]]) -> dict[str, Column]:
    return {
        **fenced([lease for lease, _ in settlements]),
        "gates": texts([outcome.gate for _, outcome in settlements]),
        "ordered": flags([outcome.ordered for _, outcome in settlements]),
    }


def is_numbered(settlement: Settlement) -> bool:
    """Whether a message with a number ends, for which later ones of its line may wait."""
    lease, outcome = settlement
    return lease.envelope.sequence is not None and isinstance(outcome, Done | Dead) and lease.gate is not None


def passing(settlements: Sequence[Settlement]) -> dict[str, Column]:
    """Return the numbers that end with these settlements."""
    return {
        "ids": ids([lease.id for lease, _ in settlements]),
        "gates": texts([lease.gate for lease, _ in settlements]),
        "sequences": bigints([lease.envelope.sequence or 0 for lease, _ in settlements]),
    }


#: Which statement settles which outcome, and with what.
_SETTLES: Mapping[type[Outcome], tuple[str, Callable[[Sequence[tuple[Lease, Any]]], dict[str, Column]]]] = {
    Done: ("settle_done", _done),
    Dead: ("settle_dead", _dead),
    Again: ("settle_again", _again),
    HandBack: ("settle_hand_back", _handed_back),
    Parked: ("settle_park", parking),
}


def settling(settlements: Sequence[Settlement]) -> Iterator[tuple[str, dict[str, Column]]]:
    """Return which statements settle these, and with what.

    Messages that are given a gate are settled one by one, because they join its line in this order.
    """
    for kind, (name, columns) in _SETTLES.items():
        those = [settlement for settlement in settlements if type(settlement[1]) is kind]
        if kind is HandBack:
            adopted = [one for one in those if isinstance(one[1], HandBack) and one[1].gate is not None]
            yield from ((name, columns([one])) for one in adopted)
            those = [one for one in those if one not in adopted] if adopted else those
        if those:
            yield name, columns(those)
