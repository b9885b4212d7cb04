"""Journals on one SQLite connection, inside one open transaction.

Plain blocking code, like the session it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Act, Fenced, Lease, Parked, State
from onefold.store.journal_lines import Line, Note
from onefold.store.shared import journal as lines
from onefold.store.shared.journal import act_of, check_outside
from onefold.store.shared.rows import read_failure, read_reply_to
from onefold.store.sqlite.connection import TRANSLATED, is_unreadable
from onefold.store.sqlite.numbers import held_rows, stored_number
from onefold.store.sqlite.session import Session, as_json


class JournalTable:
    """The verbs on journals."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rows = session.rows

    # parking

    def park(self, seq: int, outcome: Parked, now: int) -> None:
        """Park a message that holds its fence."""
        failed = outcome.failure is not None
        self._rows("settle_park", lines.awaited(outcome), _due_at(outcome, now), now, seq, failed)

    # recording

    def by_others(self, message_id: str, steps: Sequence[Line], now: int) -> list[Line]:
        """Record for another's message, and wake it; returns nothing when it has ended other than as a dead letter."""
        seq = stored_number(self._session, message_id)
        if seq is None:
            lines.refuse_unknown(message_id, steps)
            return []
        if not self._rows("record_listens", seq):
            return []
        stand, new = self.write(message_id, steps, now)
        for (wake,) in self._rows("record_wake", new, now, seq) if new else ():
            lines.check_mailbox(message_id, wake, steps)
        return stand

    def by_hand(self, message_id: str, steps: Sequence[Line], now: int) -> list[Line]:
        """Record as an operator, for a message that waits or is dead; returns nothing for any other.

        A line that takes the message over is recorded for any message that is alive.
        """
        seq = stored_number(self._session, message_id)
        if lines.takes_over(steps):
            if not self._rows("rewind", now, seq):
                return []
        elif not self._rows("record_by_hand", now, seq) and not self._rows("record_dead", seq):
            return []
        return self.write(message_id, steps, now)[0]

    def tell(self, notes: Sequence[Note], now: int) -> None:
        """Write into the journals of others."""
        told = lines.by_message(notes)
        lines.refuse_unheard(notes, [id_ for id_, steps in told.items() if self.by_others(id_, steps, now)])

    def write(self, message_id: str, steps: Sequence[Line], now: int) -> tuple[list[Line], int]:
        """Write lines unless they are there; return those that stand, and how many of them are new."""
        connection, stand, new = self._session.connection, list[Line](), 0
        for step in steps:
            large = lines.is_large(step)
            before = connection.total_changes()
            value = None if large else step.value
            self._rows("record_step", message_id, step.name, int(step.kind), now, step.fingerprint, value)
            if connection.total_changes() == before:
                (row,) = self._rows("record_stands", message_id, step.name, int(step.kind))
                stand.append(self._whole(message_id, lines.step_of(row)))
                continue
            new += 1
            seq = connection.last_insert_rowid()
            stand.append(Line(step.name, step.kind, step.value, step.fingerprint, now, seq))
            for number, part in enumerate(lines.parts_of(step.value) if large else ()):
                self._rows("record_part", message_id, lines.blob_name(step), number, part)
        return stand, new

    # operators

    def rewind(self, message_id: str, name: str, now: int) -> list[Line]:
        """Forget a step and what came after it, and schedule the message; a dead one is left as it is."""
        steps = self.read(message_id)
        forgotten = lines.later_than(steps, name)
        if not forgotten:
            return []
        seq = stored_number(self._session, message_id)
        if not self._rows("rewind", now, seq) and not self._rows("record_dead", seq):
            return []
        for step in forgotten:
            self._rows("rewind_step", step.seq)
            self._rows("rewind_parts", message_id, lines.blob_name(step))
        self.write(message_id, [lines.restart_line(steps, forgotten)], now)
        return forgotten

    def resume(self, seq: int, now: int) -> bool:
        """Schedule a parked message."""
        return bool(self._rows("move_resume", now, seq))

    def reply_for(self, message_id: str, seq: int, state: State, now: int) -> None:
        """Tell the parent of a message that a person has ended it."""
        for headers, replay_count, failure in self._rows("move_reply", seq):
            if (reply_to := read_reply_to(headers)) is not None:
                known = None if failure is None else read_failure(failure)
                ended = lines.ended_by_hand(message_id, state, known)
                self.tell([lines.reply(reply_to, replay_count, ended)], now)

    # reading

    def read(self, message_id: str) -> list[Line]:
        """Return a journal in the order in which it was written."""
        return [self._whole(message_id, lines.step_of(row)) for row in self._rows("steps", message_id)]

    def read_claimed(self, leases: Sequence[Lease]) -> None:
        """Give runs just claimed their journals, as far as those are short."""
        if not (runs := lines.journaled(leases)):
            return
        most = (limits.CLAIMED_VALUE_BYTES_MAX, limits.CLAIMED_LINES_MAX)
        # A damaged journal is to fail its own run, when that reads it, and not the claim.
        try:
            lines.give_journals(runs, self._rows("claim_journals", as_json([lease.id for lease in runs]), *most))
        except TRANSLATED as error:
            if not is_unreadable(error):
                raise

    def _whole(self, message_id: str, step: Line) -> Line:
        """Put the value of a large line together."""
        if step.value is not None:
            return step
        parts = self._rows("parts", message_id, lines.blob_name(step))
        return msgspec.structs.replace(step, value=b"".join(part for (part,) in parts))


def _due_at(outcome: Parked, now: int) -> int:
    return limits.INSTANT_MAX if outcome.delay is None else now + round(outcome.delay * MICROSECONDS)


def record(session: Session, owner: Fenced | str, steps: Sequence[Line], act: Act | None = None) -> list[Line] | None:
    """Record in a journal for a lease, for another message or for a person; None when the lease is lost."""
    if not isinstance(owner, str):
        return record_by_owners(session, [(owner, steps)])[0]
    now, journal = session.clock.now(), JournalTable(session)
    if act is None:
        check_outside(steps)
        return journal.by_others(owner, steps, now)
    if stand := journal.by_hand(owner, steps, now):
        note_act(session, owner, act_of(steps), act)
    return stand


def record_by_owners(session: Session, recordings: Sequence[tuple[Fenced, Sequence[Line]]]) -> list[list[Line] | None]:
    """Record for leases; None for each that is not held any more."""
    now, journal = session.clock.now(), JournalTable(session)
    held = held_rows(session, [owner for owner, _ in recordings])
    return [
        None if seq is None else journal.write(owner.id, steps, now)[0]
        for (owner, steps), seq in zip(recordings, held, strict=True)
    ]


def rewind(session: Session, message_id: str, step: str, act: Act) -> list[Line]:
    """Let a run go back to a step."""
    if forgotten := JournalTable(session).rewind(message_id, step, session.clock.now()):
        note_act(session, message_id, "restart", act)
    return forgotten


def note_act(session: Session, message_id: str, kind: str, act: Act) -> None:
    """Record what a person did."""
    session.run("move_act", session.clock.now(), message_id, kind, act.actor, act.reason)
