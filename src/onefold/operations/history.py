"""For operators: the history of a message: what it did and when, what it waits for, and which outcomes are uncertain.

The command line and the dashboard draw the same chronicle; ``history_builder.py`` makes it.
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
    """One failed attempt of a message or of a step."""

    at: datetime
    reason: str
    error_type: str
    error_message: str
    #: The seconds until the next attempt; None when it was the last.
    delay: float | None


class Letter(msgspec.Struct, frozen=True):
    """A signal in the mailbox that no wait has received yet."""

    name: str
    id: str
    at: datetime


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a message did or waits for, with the entries inside of it."""

    name: str
    kind: Kind
    state: Standing
    began_at: datetime | None = None
    ended_at: datetime | None = None
    #: When a wait is over, or the next attempt begins.
    due_at: datetime | None = None
    tries: tuple[Try, ...] = ()
    failure: Failure | None = None
    #: The message that was sent, or the run that was sent a signal.
    message_id: str | None = None
    #: The chronicle of that message.
    message: Chronicle | None = None
    #: The effects and the undo of a step, the branches of a gather, or the steps of a branch.
    entries: tuple[Entry, ...] = ()

    @property
    def seconds(self) -> float | None:
        """The time it took; None if it has not ended or its beginning is unknown."""
        if self.began_at is None or self.ended_at is None:
            return None
        return max(0.0, (self.ended_at - self.began_at).total_seconds())


class Chronicle(msgspec.Struct, frozen=True, kw_only=True):
    """A message and its history."""

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
    #: When it is due, if it waits for a time.
    due_at: datetime | None = None
    worker: str | None = None
    crashes: int = 0
    replay_count: int = 0
    #: Why it is dead, or parked for an operator.
    failure: Failure | None = None
    attempts: tuple[Try, ...] = ()
    entries: tuple[Entry, ...] = ()
    mailbox: tuple[Letter, ...] = ()
    #: False when its journal was not read, because it is too deep in the tree or there are too many messages.
    whole: bool = True

    def walk(self) -> Iterator[Entry]:
        """Iterate over the entries and those inside of them, but not over those of other messages."""
        waiting = list(reversed(self.entries))
        while waiting:
            entry = waiting.pop()
            yield entry
            waiting += reversed(entry.entries)

    @property
    def waits(self) -> list[Entry]:
        """The entries it waits for now, without those for an operator."""
        return [entry for entry in self.walk() if entry.state == "waiting" and entry.kind not in ("gather", "branch")]

    @property
    def unknown(self) -> list[Entry]:
        """The entries that an operator has to resolve: effects that are uncertain, and undos that are stuck."""
        wrong = {("effect", "uncertain"), ("undo", "stuck")}
        return [entry for entry in self.walk() if (entry.kind, entry.state) in wrong]


def make_head(record: Record) -> Chronicle:
    """Return the chronicle of a record without its journal."""
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
    """Return an instant as a ``datetime``, if there is one."""
    return None if instant is None else to_datetime(instant)
