"""Settle: claims end, each by its own fence; a stale one changes nothing and costs only itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onefold.clock import MICROSECONDS
from onefold.errors import LeaseLostError
from onefold.message.envelope import Envelope
from onefold.store import Again, Dead, Done, HandBack, Lease, Outcome, Parked, State
from onefold.store.shared.journal import addressed, notes_of
from onefold.store.shared.rows import encode_failure
from onefold.store.sqlite.numbers import held_rows
from onefold.store.sqlite.session import ROW_BYTES, Row, Session, as_json, rows_for
from onefold.store.sqlite.verbs.gates import pass_on
from onefold.store.sqlite.verbs.journal import JournalTable
from onefold.store.sqlite.verbs.put import put_sends

_Held = tuple[int, Lease, Outcome]

_DONE, _DEAD = int(State.DONE), int(State.DEAD)


class _Sheet:
    """The rows to be written for messages whose claims end, table by table: most batches are of one kind only."""

    __slots__ = ("again", "attempts", "back", "ended", "numbered", "parked", "telling")

    def __init__(self) -> None:
        self.ended: list[Row] = []
        self.again: list[Row] = []
        self.attempts: list[Row] = []
        self.back: list[tuple[int, HandBack]] = []
        self.parked: list[tuple[int, Lease, Parked]] = []
        #: Messages whose end lets the next number of their line come, and messages that have something for others.
        self.numbered: list[Envelope] = []
        self.telling: list[_Held] = []

    def add(self, held: Iterable[_Held], now: int) -> None:
        """Add how these end."""
        for seq, lease, outcome in held:
            if isinstance(outcome, Done):
                self.ended.append(_done_row(seq, lease, outcome, now))
                envelope = lease.envelope
                if outcome.sends or outcome.notes or envelope.reply_to is not None:
                    self.telling.append((seq, lease, outcome))
                if envelope.sequence is not None:
                    self.numbered.append(envelope)
            elif isinstance(outcome, HandBack):
                self.back.append((seq, outcome))
            else:
                self._add_failed(seq, lease, outcome, now)

    def _add_failed(self, seq: int, lease: Lease, outcome: Again | Dead | Parked, now: int) -> None:
        """Add how one ends that has not succeeded, or not yet."""
        failure = None if outcome.failure is None else encode_failure(outcome.failure)
        delay = None
        if isinstance(outcome, Again):
            delay = outcome.delay
            self.again.append(_again_row(seq, lease, outcome, now))
        elif isinstance(outcome, Parked):
            delay = outcome.delay
            self.parked.append((seq, lease, outcome))
            self.telling.append((seq, lease, outcome))
        else:
            self.ended.append(_dead_row(seq, lease, outcome, failure, now))
            self.telling.append((seq, lease, outcome))
            if lease.envelope.sequence is not None:
                self.numbered.append(lease.envelope)
        if failure is not None:
            self.attempts.append((seq, lease.fence, lease.attempt, now, lease.worker, failure, delay))


def settle(session: Session, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
    """End claims; True for each that still held its fence."""
    now = session.clock.now()
    held = held_rows(session, [lease for lease, _ in settlements])
    mine: dict[int, _Held] = {}
    won: list[bool] = []
    for (lease, outcome), seq in zip(settlements, held, strict=True):
        # Asked a second time for the same message, the answer is no.
        won.append(seq is not None and seq not in mine)
        if seq is not None and won[-1]:
            mine[seq] = (seq, lease, outcome)
    sheet = _Sheet()
    sheet.add(mine.values(), now)
    _end(session, sheet, now)
    _postpone(session, sheet, now)
    session.each("settle_attempt", sheet.attempts)
    _tell_others(session, sheet.telling, now)
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
        elif isinstance(outcome, Again):
            continue
        if isinstance(outcome, Done | Dead | Parked):
            total += rows_for(outcome.sends, lambda e: e.payload_inline)
        if isinstance(outcome, Done | Parked):
            total += rows_for(outcome.notes, lambda note: note.step.value)
        if isinstance(outcome, Parked):
            total += rows_for(outcome.steps, lambda step: step.value)
    return total + size // ROW_BYTES


def settle_all(session: Session, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
    """Settle all of them, or refuse: then the work of a handler whose message was taken over is rolled back."""
    for (lease, _), held in zip(settlements, settle(session, settlements), strict=True):
        if not held:
            raise LeaseLostError(f"message {lease.id} was taken over; its handler's work was rolled back")


def _end(session: Session, sheet: _Sheet, now: int) -> None:
    if sheet.ended:
        session.run("settle_end", as_json([row[0] for row in sheet.ended]))
        session.each("settle_outcome", sheet.ended)
    if sheet.numbered:
        pass_on(session, sheet.numbered, now)


def _postpone(session: Session, sheet: _Sheet, now: int) -> None:
    session.each("settle_again", sheet.again)
    if back := [seq for seq, o in sheet.back if o.gate is None]:
        session.run("settle_hand_back", as_json(back))
    for seq, o in sheet.back:
        if o.gate is not None:
            session.run("gate_adopt", seq, o.gate, o.ordered)
    for seq, lease, parked in sheet.parked:
        steps = JournalTable(session)
        steps.park(seq, parked, now)
        steps.write(lease.id, parked.steps, now)


def _tell_others(session: Session, telling: Sequence[_Held], now: int) -> None:
    """Send and record what these settlements have for others."""
    sends = [e for _, _, o in telling if isinstance(o, Done | Dead | Parked) for e in o.sends]
    kept = put_sends(session, sends) if sends else {}
    if notes := notes_of((lease, o) for _, lease, o in telling):
        JournalTable(session).tell(addressed(notes, kept), now)


def _done_row(seq: int, lease: Lease, outcome: Done, now: int) -> Row:
    kept_until, body_until = _windows(outcome, now)
    # A run that succeeded is not a failed attempt, one that died of its last failure is.
    counts = (lease.fence, lease.attempt - 1, lease.crashes, lease.replay_count)
    return (seq, _DONE, *counts, now, kept_until, body_until, outcome.result, None, None)


def _dead_row(seq: int, lease: Lease, outcome: Dead, failure: bytes | None, now: int) -> Row:
    kept_until, body_until = _windows(outcome, now)
    counts = (lease.fence, lease.attempt if outcome.ran else lease.attempt - 1, lease.crashes, lease.replay_count)
    return (seq, _DEAD, *counts, now, kept_until, body_until, None, failure, lease.id)


def _windows(outcome: Done | Dead, now: int) -> tuple[int, int]:
    """Return until when its key is kept, and when the first of it is purged."""
    kept_until = now + round(outcome.key_window * MICROSECONDS)
    return kept_until, min(kept_until, now + round(outcome.body_retention * MICROSECONDS))


def _again_row(seq: int, lease: Lease, outcome: Again, now: int) -> Row:
    attempt = lease.attempt if outcome.counted else lease.attempt - 1
    return (attempt, int(outcome.crashed), now + round(outcome.delay * MICROSECONDS), seq)
