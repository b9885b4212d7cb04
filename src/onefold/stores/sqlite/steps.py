"""Journals on one SQLite connection, inside one open transaction.

Plain blocking code, like the session it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.step import Note, Step
from onefold.store import Lease, Parked, State
from onefold.stores import steps as lines
from onefold.stores.rows import read_failure, read_reply_to
from onefold.stores.sql import load_statements
from onefold.stores.sqlite.connection import TRANSLATED, is_unreadable
from onefold.stores.sqlite.drivers import Connection
from onefold.stores.sqlite.session import as_json

SQL = load_statements("onefold.stores.sqlite", "steps.sql")


class Steps:
    """The verbs on journals."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _rows(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(SQL[name], parameters).fetchall()

    # parking

    def park(self, seq: int, outcome: Parked, now: int) -> None:
        """Park a message that holds its fence."""
        failed = outcome.failure is not None
        self._rows("settle_park", lines.awaited(outcome), _due_at(outcome, now), now, seq, failed)

    # recording

    def by_others(self, message_id: str, steps: Sequence[Step], now: int) -> list[Step]:
        """Record for a message of somebody else, and wake it; returns nothing when nobody listens."""
        if not self._rows("record_listens", message_id):
            if not self._rows("record_known", message_id):
                lines.refuse_unknown(message_id, steps)
            return []
        stand, new = self.write(message_id, steps, now)
        for (wake,) in self._rows("record_wake", new, now, message_id) if new else ():
            lines.check_mailbox(message_id, wake, steps)
        return stand

    def by_hand(self, message_id: str, steps: Sequence[Step], now: int) -> list[Step]:
        """Record as an operator, for a message that waits or is dead; returns nothing for any other.

        What takes it over is recorded for any that is alive.
        """
        if lines.takes_over(steps):
            if not self._rows("rewind", now, message_id):
                return []
        elif not self._rows("record_by_hand", now, message_id) and not self._rows("record_dead", message_id):
            return []
        return self.write(message_id, steps, now)[0]

    def tell(self, notes: Sequence[Note], now: int) -> None:
        """Write into the journals of others."""
        told = lines.by_message(notes)
        lines.refuse_unheard(notes, [id_ for id_, steps in told.items() if self.by_others(id_, steps, now)])

    def write(self, message_id: str, steps: Sequence[Step], now: int) -> tuple[list[Step], int]:
        """Write lines unless they are there; return those that stand, and how many of them are new."""
        connection, stand, new = self._connection, list[Step](), 0
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
            stand.append(Step(step.name, step.kind, step.value, step.fingerprint, now, seq))
            for number, part in enumerate(lines.parts_of(step.value) if large else ()):
                self._rows("record_part", message_id, lines.blob_name(step), number, part)
        return stand, new

    # operators

    def rewind(self, message_id: str, name: str, now: int) -> list[Step]:
        """Forget a step and what came after it, and schedule the message; a dead one is left as it is."""
        steps = self.read(message_id)
        forgotten = lines.later_than(steps, name)
        if not forgotten:
            return []
        if not self._rows("rewind", now, message_id) and not self._rows("record_dead", message_id):
            return []
        for step in forgotten:
            self._rows("rewind_step", step.seq)
            self._rows("rewind_parts", message_id, lines.blob_name(step))
        self.write(message_id, [lines.restart_line(steps, forgotten)], now)
        return forgotten

    def resume(self, message_id: str, now: int) -> bool:
        """Schedule a parked message."""
        return bool(self._rows("move_resume", now, message_id))

    def reply_for(self, message_id: str, state: State, now: int) -> None:
        """Tell the parent of a message that a person has ended it."""
        for headers, replay_count, failure in self._rows("move_reply", message_id):
            if (reply_to := read_reply_to(headers)) is not None:
                known = None if failure is None else read_failure(failure)
                ended = lines.ended_by_hand(message_id, state, known)
                self.tell([lines.reply(reply_to, replay_count, ended)], now)

    # reading

    def read(self, message_id: str) -> list[Step]:
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

    def _whole(self, message_id: str, step: Step) -> Step:
        """Put the value of a large line together."""
        if step.value is not None:
            return step
        parts = self._rows("parts", message_id, lines.blob_name(step))
        return msgspec.structs.replace(step, value=b"".join(part for (part,) in parts))


def _due_at(outcome: Parked, now: int) -> int:
    return limits.INSTANT_MAX if outcome.delay is None else now + round(outcome.delay * MICROSECONDS)
