"""Settle: claims end, each by its own fence; a stale one changes nothing and costs only itself."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.clock import MICROSECONDS
from onefold.errors import LeaseLostError
from onefold.store import Again, Dead, Done, HandBack, Lease, Outcome, Parked, State
from onefold.stores.rows import encode_failure
from onefold.stores.sqlite.delivering import deliver
from onefold.stores.sqlite.gates import next_place, pass_on
from onefold.stores.sqlite.leasing import fences_of, rows_of
from onefold.stores.sqlite.putting import put_sends
from onefold.stores.sqlite.session import ROW_BYTES, Row, Session, as_json, rows_for
from onefold.stores.sqlite.steps import Steps
from onefold.stores.steps import notes_of

_Held = tuple[int, Lease, Outcome]

_DONE, _DEAD = int(State.DONE), int(State.DEAD)


def settle(session: Session, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
    """End claims; True for each that still held its fence."""
    now = session.clock.now()
    numbers = rows_of(session, [lease for lease, _ in settlements])
    fences = fences_of(session, numbers)
    won = [_wins(fences, lease, seq) for (lease, _), seq in zip(settlements, numbers, strict=True)]
    held = [
        (seq, lease, outcome)
        for (lease, outcome), seq, mine in zip(settlements, numbers, won, strict=True)
        if mine and seq is not None
    ]
    _end(session, held, now)
    _postpone(session, held, now)
    if failed := [row for seq, lease, o in held if (row := _attempt_row(seq, lease, o, now)) is not None]:
        session.each("settle_attempt", failed)
    _tell_others(session, held, now)
    return won


def rows_in(settlements: Sequence[tuple[Lease, Outcome]]) -> int:
    """Return how much settling these writes, with everything that goes with them, in rows of ordinary size."""
    total = len(settlements)
    size = 0
    for _, outcome in settlements:
        if isinstance(outcome, Done):
            size += len(outcome.result or b"")
            if not (outcome.sends or outcome.notes):
                continue  # as most are
        if isinstance(outcome, Done | Dead | Parked):
            total += rows_for(outcome.sends, lambda e: e.payload_inline)
        if isinstance(outcome, Done | Parked):
            total += rows_for(outcome.notes, lambda note: note.step.value)
        if isinstance(outcome, Parked):
            total += rows_for(outcome.steps, lambda step: step.value)
    return total + size // ROW_BYTES


def settle_all(session: Session, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
    """Settle all of them, or refuse: what is rolled back then is the work of somebody who was overtaken."""
    for (lease, _), held in zip(settlements, settle(session, settlements), strict=True):
        if not held:
            raise LeaseLostError(f"message {lease.id} was taken over; its handler's work was rolled back")


def _end(session: Session, held: Sequence[_Held], now: int) -> None:
    ended = [_outcome_row(seq, lease, o, now) for seq, lease, o in held if isinstance(o, Done | Dead)]
    if ended:
        session.run("settle_end", as_json([row[0] for row in ended]))
        session.each("settle_outcome", ended)
        pass_on(session, [lease.envelope for _, lease, o in held if isinstance(o, Done | Dead)], now)


def _postpone(session: Session, held: Sequence[_Held], now: int) -> None:
    session.each("settle_again", [_again_row(seq, lease, o, now) for seq, lease, o in held if isinstance(o, Again)])
    if back := [seq for seq, _, o in held if isinstance(o, HandBack) and o.gate is None]:
        session.run("settle_hand_back", as_json(back))
    for seq, _, o in held:
        if isinstance(o, HandBack) and o.gate is not None:
            session.run("gate_adopt", seq, o.gate, next_place(session) if o.ordered else None)
    for seq, lease, o in held:
        if isinstance(o, Parked):
            steps = Steps(session.connection)
            steps.park(seq, o, now)
            steps.write(lease.id, o.steps, now)


def _tell_others(session: Session, held: Sequence[_Held], now: int) -> None:
    """Send and record what these settlements have for others."""
    if sends := [e for _, _, o in held if isinstance(o, Done | Dead | Parked) for e in o.sends]:
        put_sends(session, sends)
    if notes := notes_of((lease, o) for _, lease, o in held):
        deliver(session)
        Steps(session.connection).tell(notes, now)


def _wins(fences: dict[int, tuple[int, int]], lease: Lease, seq: int | None) -> bool:
    """Whether this lease may settle; asked again for the same message, the answer is no."""
    if seq is None or fences.get(seq, (0, 0))[0] != lease.fence:
        return False
    del fences[seq]
    return True


def _outcome_row(seq: int, lease: Lease, outcome: Done | Dead, now: int) -> Row:
    kept_until = now + round(outcome.key_window * MICROSECONDS)
    purge_at = min(kept_until, now + round(outcome.body_retention * MICROSECONDS))
    fence, crashes, replays, times = lease.fence, lease.crashes, lease.replay_count, (now, kept_until, purge_at)
    if isinstance(outcome, Done):
        # A run that succeeded is not a failed attempt, one that died of its last failure is.
        return (seq, _DONE, fence, lease.attempt - 1, crashes, replays, *times, outcome.result, None, None)
    attempt = lease.attempt if outcome.ran else lease.attempt - 1
    return (seq, _DEAD, fence, attempt, crashes, replays, *times, None, encode_failure(outcome.failure), lease.id)


def _attempt_row(seq: int, lease: Lease, outcome: Outcome, now: int) -> Row | None:
    if isinstance(outcome, Done | HandBack) or outcome.failure is None:
        return None
    delay = None if isinstance(outcome, Dead) else outcome.delay
    return (seq, lease.fence, lease.attempt, now, lease.worker, encode_failure(outcome.failure), delay)


def _again_row(seq: int, lease: Lease, outcome: Again, now: int) -> Row:
    attempt = lease.attempt if outcome.counted else lease.attempt - 1
    return (attempt, int(outcome.crashed), now + round(outcome.delay * MICROSECONDS), seq)
