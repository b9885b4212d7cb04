"""Stage 5, rest: what stores are asked, and what they answer, in onefold's own records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from onefold import limits
from onefold.message.envelope import Envelope
from onefold.store.outcomes import Failure
from onefold.store.states import State


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The message that ``put`` found or made for one envelope."""

    id: str
    state: State
    duplicate: bool = False
    #: The key belongs to a message with another payload; nothing was stored.
    clash: bool = False


class Record(msgspec.Struct, frozen=True):
    """A message as people see it: its envelope and where it stands."""

    envelope: Envelope
    state: State
    fence: int
    attempt: int
    crashes: int
    replay_count: int
    worker: str | None = None
    ended_at: int | None = None
    #: Until when its key is taken, and its outcome known.
    kept_until: int | None = None
    result: bytes | None = None
    failure: Failure | None = None
    #: How many sends were duplicates of it by its key; counted when messages are found by their correlation id.
    suppressed: int = 0
    #: Until when a dead letter can be redriven, which is sooner; None for one whose body is gone.
    redrive_until: int | None = None

    def __repr__(self) -> str:
        # Without payload and result: what is printed or logged is no place for them.
        return f"<record {self.envelope.id} {self.envelope.message_type} {self.state.name.lower()}>"


class Said(msgspec.Struct, frozen=True, gc=False):
    """A handler's word about itself while it runs; without a percentage only that it is moving."""

    percent: float | None = None
    message: str = ""


class Progress(msgspec.Struct, frozen=True):
    """How far a message is, as its handler last said."""

    message_type: str
    fence: int
    #: Whether its handler may be running now.
    running: bool
    #: From 0 to 100.
    percent: float
    message: str
    #: When that was said; None if the handler has only beaten.
    at: int | None
    #: When the handler last gave any sign of life.
    beat_at: int
    #: It runs and gives none, for longer than its task allows.
    stalled: bool = False


class Attempt(msgspec.Struct, frozen=True):
    """One failed run."""

    attempt: int
    fence: int
    at: int
    worker: str
    failure: Failure
    delay: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which messages are meant; every condition given must hold."""

    ids: tuple[str, ...] | None = None
    states: tuple[State, ...] | None = None
    queue: str | None = None
    message_type: str | None = None
    correlation_id: str | None = None
    #: Leased by this worker.
    worker: str | None = None
    #: Alive, and at least so many workers died with it.
    crashes: int | None = None
    #: Only runs of workflows.
    runs: bool = False
    #: Continue after this id; records come in the order of their ids.
    after: str = ""
    limit: int = limits.PAGE

    def __post_init__(self) -> None:
        for name in ("queue", "message_type", "correlation_id"):
            if (text := getattr(self, name)) is not None:
                limits.check_text(name, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """How a whole ``put`` behaves."""

    if_dead: Literal["keep", "redrive"] = "keep"
    #: Covers all envelopes at once: the second put of the same batch stores nothing.  The envelopes need keys of
    #: their own, by which the second put finds the messages of the first.
    batch_key: str | None = None


#: The options of most puts.
KEEP = PutOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A person's act on a message, and its reason; kept for a year (``limits.ACT_RETENTION``), beyond the message."""

    actor: str
    reason: str


@dataclass(slots=True)
class Purged:
    """How much one round of purging removed."""

    bodies: int = 0
    messages: int = 0
    keys: int = 0
    gates: int = 0
    acts: int = 0
    register: int = 0

    @property
    def total(self) -> int:
        return self.bodies + self.messages + self.keys + self.gates + self.acts + self.register

    def is_full(self, limit: int) -> bool:
        """Whether as many of one kind were removed as were asked for, so that more may be left."""
        return max(self.bodies, self.messages, self.keys, self.gates, self.acts, self.register) >= limit


@dataclass(frozen=True, slots=True)
class Registered:
    """An entry of the register."""

    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Counts:
    """How many messages of one queue are in each state that needs attention."""

    scheduled: int = 0
    leased: int = 0
    dead: int = 0
    parked: int = 0
    #: When the oldest of its dead letters became one.
    oldest_dead_at: int | None = None
