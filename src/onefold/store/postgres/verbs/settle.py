"""Settle: claims end, each by its own fence, and the messages and lines that leave with them are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onefold.clock import MICROSECONDS
from onefold.message.envelope import Envelope
from onefold.store import Again, Dead, Done, Fenced, HandBack, Lease, Outcome, Parked
from onefold.store.postgres.session import LINE_RETENTION, Session
from onefold.store.postgres.verbs.journal import lines_of, parking
from onefold.store.postgres.verbs.put import put_sends
from onefold.store.postgres.wire.arrays import Column, bigints, blobs, flags, ids, texts
from onefold.store.postgres.wire.wire import Named
from onefold.store.shared.journal import addressed, notes_of
from onefold.store.shared.rows import encode_failure

Settlement = tuple[Lease, Outcome]

#: Outcomes that may leave messages.
_SENDING = (Done, Dead, Parked)


async def settle(session: Session, settlements: Sequence[Settlement], then: Sequence[Named] = ()) -> list[bool]:
    """Settle, run ``then`` in the same round trip, and write what leaves with these settlements."""
    if len(settlements) == 1 and isinstance(settlements[0][1], Done) and not is_numbered(settlements[0]):
        one: Named = ("settle_one", _ending_one(session, settlements[0][0], settlements[0][1]))
        won = [bool((await session.wire.rows_of_each([one, *then]))[0][0][0])]
    else:
        won = await _settle_many(session, settlements, then)
    if brings_more(settlements):
        await _bring_more(session, [one for one, is_held in zip(settlements, won, strict=True) if is_held])
    return won


async def lock_for_settling(session: Session, settlements: Sequence[Settlement]) -> set[str]:
    """Lock the rows of these messages; return the ids of those that another transaction has locked."""
    given = {"ids": ids([lease.id for lease, _ in settlements])}
    return {id_ for (id_,) in await session.wire.rows("settle_locked", given)}


async def _bring_more(session: Session, held: Sequence[Settlement]) -> None:
    """Write what leaves with these settlements: messages, lines of their own journals, and lines for others."""
    sends = sends_of(held)
    kept = await put_sends(session, sends) if sends else {}
    if own := lines_of(held):
        await session.journals.write(own)
    if notes := notes_of(held):
        await session.journals.tell(addressed(notes, kept))


def _passing(session: Session, ending: Sequence[Settlement]) -> Named:
    """Return the statement that lets messages through that wait for these numbers."""
    return "gate_passed", {**passing(ending), "now": session.now, "line_retention": LINE_RETENTION}


def concluding(session: Session, lease: Lease, outcome: Done) -> list[Named]:
    """Return what settles one success as the last thing in its transaction, or fails."""
    last: list[Named] = [
        ("settle_planned", {}),
        ("settle_one", _ending_one(session, lease, outcome, strictly=True)),
    ]
    return [*last, _passing(session, [(lease, outcome)])] if is_numbered((lease, outcome)) else last


def _ending_one(session: Session, lease: Lease, outcome: Done, *, strictly: bool = False) -> dict[str, Any]:
    return {
        "now": session.now,
        "id": lease.id,
        "fence": lease.fence,
        "key_window": round(outcome.key_window * MICROSECONDS),
        "body_window": round(outcome.body_retention * MICROSECONDS),
        "result": outcome.result,
        "strictly": strictly,
    }


async def _settle_many(session: Session, settlements: Sequence[Settlement], then: Sequence[Named]) -> list[bool]:
    """Settle in one round trip; a message that is given twice, by two of its leases, takes two."""
    won = [False] * len(settlements)
    left = list(range(len(settlements)))
    while left:
        once = {settlements[place][0].envelope.id: place for place in reversed(left)}
        those = [settlements[place] for place in sorted(once.values())]
        lost = await _settle_once(session, those, then)
        for place in once.values():
            lease = settlements[place][0]
            won[place] = not lost or (lease.envelope.id, lease.fence) not in lost
        left = [] if len(once) == len(left) else sorted(set(left).difference(once.values()))
    return won


async def _settle_once(
    session: Session, settlements: Sequence[Settlement], then: Sequence[Named]
) -> set[tuple[Any, ...]]:
    """Settle, each message once; return id and fence of those whose lease was stale."""
    statements: list[Named] = [(name, {**given, "now": session.now}) for name, given in settling(settlements)]
    if ending := [one for one in settlements if is_numbered(one)]:
        statements.append(_passing(session, ending))
    answers = await session.wire.rows_of_each([*statements, *then])
    lost = {lost for rows in answers[: len(statements)] for lost in rows}
    if any(fence < 0 for _, fence in lost):
        session.woken |= {lease.envelope.queue for lease, _ in settlements if (lease.envelope.id, -1) in lost}
    return lost


# what is to be settled


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
    # Asked of the message: a lease that a supervisor has made from a record has no gate.
    envelope = lease.envelope
    return envelope.sequence is not None and envelope.ordering_key is not None and isinstance(outcome, Done | Dead)


def passing(settlements: Sequence[Settlement]) -> dict[str, Column]:
    """Return the numbers that end with these settlements."""
    return {
        "ids": ids([lease.id for lease, _ in settlements]),
        "gates": texts([lease.envelope.gated_by for lease, _ in settlements]),
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
