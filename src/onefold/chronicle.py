"""For people: a message as it can be read: what it did and when, what it waits for, and what nobody knows.

The command line and the dashboard draw the same chronicle; ``scribe`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Literal

import msgspec

from onefold import limits
from onefold.clock import to_datetime
from onefold.store import Failure, Record, State

Kind = Literal[
    "step",
    "undo",
    "effect",
    "sleep",
    "wait",
    "child",
    "send",
    "signal",
    "gather",
    "branch",
    "now",
    "checkpoint",
    "restart",
]
Standing = Literal["done", "failed", "waiting", "uncertain", "not done", "timed out", "stuck", "begun", "left"]


class Try(msgspec.Struct, frozen=True):
    """One failed try of a message or of a step."""

    at: datetime
    reason: str
    error_type: str
    error_message: str
    #: How long was waited before the next; None when there was to be none.
    delay: float | None


class Letter(msgspec.Struct, frozen=True):
    """A signal that lies in the mailbox and was not asked for yet."""

    name: str
    id: str
    at: datetime


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a message did or waits for, with what lies inside of it."""

    name: str
    kind: Kind
    state: Standing
    began_at: datetime | None = None
    ended_at: datetime | None = None
    #: When a wait is over, or the next try comes.
    due_at: datetime | None = None
    tries: tuple[Try, ...] = ()
    failure: Failure | None = None
    #: The message that was sent, or the run that was told something.
    message_id: str | None = None
    #: What is known of that message.
    message: Chronicle | None = None
    #: Effects of a step and what undid it, branches of a gather, steps of a branch.
    entries: tuple[Entry, ...] = ()

    @property
    def seconds(self) -> float | None:
        """How long it took."""
        if self.began_at is None or self.ended_at is None:
            return None
        return max(0.0, (self.ended_at - self.began_at).total_seconds())


class Chronicle(msgspec.Struct, frozen=True, kw_only=True):
    """A message and everything it did."""

    id: str
    message_type: str
    version: int
    queue: str
    subject: str
    correlation_id: str
    causation_id: str
    state: str
    created_at: datetime
    ended_at: datetime | None = None
    #: When it is claimed next, if that is a matter of time.
    due_at: datetime | None = None
    worker: str | None = None
    crashes: int = 0
    replay_count: int = 0
    #: Why it is dead, or waits for a person.
    failure: Failure | None = None
    attempts: tuple[Try, ...] = ()
    entries: tuple[Entry, ...] = ()
    mailbox: tuple[Letter, ...] = ()
    #: False when only its head was read, because it lies too deep or there are too many.
    whole: bool = True

    def walk(self) -> Iterator[Entry]:
        """Go through the entries and what lies inside of them, but not into other messages."""
        waiting = list(reversed(self.entries))
        while waiting:
            entry = waiting.pop()
            yield entry
            waiting += reversed(entry.entries)

    @property
    def waits(self) -> list[Entry]:
        """What it waits for now, other than a person."""
        return [entry for entry in self.walk() if entry.state == "waiting" and entry.kind not in ("gather", "branch")]

    @property
    def unknown(self) -> list[Entry]:
        """What a person has to find out: effects that are uncertain, and undos that are stuck."""
        wrong = {("effect", "uncertain"), ("undo", "stuck")}
        return [entry for entry in self.walk() if (entry.kind, entry.state) in wrong]


def make_head(record: Record) -> Chronicle:
    """Return what a record alone tells."""
    envelope, waits = record.envelope, record.state in (State.SCHEDULED, State.PARKED)
    return Chronicle(
        id=envelope.id,
        message_type=envelope.message_type,
        version=envelope.schema_version,
        queue=envelope.queue,
        subject=envelope.subject,
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
        state=record.state.name.lower(),
        created_at=to_datetime(envelope.created_at),
        ended_at=moment(record.ended_at),
        due_at=moment(envelope.due_at) if waits and envelope.due_at < limits.INSTANT_MAX else None,
        worker=record.worker,
        crashes=record.crashes,
        replay_count=record.replay_count,
        failure=record.failure,
        whole=False,
    )


def moment(instant: int | None) -> datetime | None:
    """Return what people read for an instant, if there is one."""
    return None if instant is None else to_datetime(instant)
