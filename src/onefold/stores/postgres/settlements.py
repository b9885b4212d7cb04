"""What is settled, as columns: which statement ends which leases, and what else leaves with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onefold.clock import MICROSECONDS
from onefold.envelope import Envelope
from onefold.store import Again, Dead, Done, Fenced, HandBack, Lease, Outcome, Parked
from onefold.stores.postgres.arrays import Column, bigints, blobs, ids, texts
from onefold.stores.postgres.steps import parking
from onefold.stores.rows import encode_failure

Settlement = tuple[Lease, Outcome]


def sends_of(settlements: Iterable[Settlement]) -> list[Envelope]:
    """Return what the handlers of these settlements sent."""
    return [e for _, outcome in settlements if isinstance(outcome, Done | Dead | Parked) for e in outcome.sends]


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
    return fenced([lease for lease, _ in settlements])


#: Which statement settles which outcome, and with what.
SETTLES: Mapping[type[Outcome], tuple[str, Callable[[Sequence[tuple[Lease, Any]]], dict[str, Column]]]] = {
    Done: ("settle_done", _done),
    Dead: ("settle_dead", _dead),
    Again: ("settle_again", _again),
    HandBack: ("settle_hand_back", _handed_back),
    Parked: ("settle_park", parking),
}
