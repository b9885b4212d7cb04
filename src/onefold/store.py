"""Stage 5, rest: what a store promises, in onefold's own records.

A store keeps messages and nothing happens to one except through the verbs here.
Safety rests on the **fence**: an integer on each message that rises with every change of owner.
Whoever writes for a message names the fence it was given, and a write with an old fence changes nothing.
Time only decides when somebody else may try; it comes from the store's clock, never from a worker's.

``onefold.testing.contracts`` is the suite every store must pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

import msgspec

from onefold import limits
from onefold.envelope import Envelope
from onefold.step import Note, Step


class State(IntEnum):
    """Where a message is in its life; the numbers are what the stores keep."""

    SCHEDULED = 0
    LEASED = 1
    PARKED = 2
    DONE = 3
    DEAD = 4
    CANCELLED = 5
    DISCARDED = 6

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the message by itself."""
        return self >= State.DONE


#: Every legal move, and who makes it.  The stores' SQL and constraints say the same; contract tests compare them.
MOVES: Mapping[tuple[State | None, State], str] = {
    (None, State.SCHEDULED): "put",
    (State.SCHEDULED, State.LEASED): "claim",
    (State.LEASED, State.LEASED): "claim, after the lease ran out",
    (State.LEASED, State.SCHEDULED): "settle (again, hand back)",
    (State.LEASED, State.PARKED): "settle (parked)",
    (State.PARKED, State.SCHEDULED): "record by somebody else, or operator",
    (State.PARKED, State.LEASED): "claim, when its time has come",
    (State.LEASED, State.DONE): "settle",
    (State.LEASED, State.DEAD): "settle",
    (State.SCHEDULED, State.CANCELLED): "operator",
    (State.PARKED, State.CANCELLED): "operator",
    (State.LEASED, State.CANCELLED): "operator, by raising the fence",
    (State.DEAD, State.SCHEDULED): "operator (redrive)",
    (State.DEAD, State.DISCARDED): "operator (discard)",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts about a store, not wishes; contract tests and the guarantees page ask it what to expect."""

    #: The handler's own rows and the message's outcome commit together.
    transactional: bool
    #: Several machines may use it at once.
    shared: bool
    #: A sender can wake a waiting worker in another process.
    notifies: bool
    #: The worst that accepted messages survive.
    durability: Literal["power loss", "process crash", "nothing"]


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an attempt did not succeed, as kept with the attempt and with a dead letter."""

    reason: str
    error_type: str
    error_message: str
    stack: str = ""
    status_code: int | None = None


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to settle one message, until somebody takes it over."""

    envelope: Envelope
    fence: int
    #: This run's number, counted from 1; crashes and snoozes do not count.
    attempt: int
    #: How often a worker died while this message may have been running.
    crashes: int
    replay_count: int
    claimed_at: int
    worker: str
    #: How much others had recorded for it when it was claimed; see ``Parked``.
    wake: int = 0

    @property
    def id(self) -> str:
        return self.envelope.id


class Fenced(Protocol):
    """What a lease is known by: a message and the fence it was claimed with."""

    @property
    def id(self) -> str: ...

    @property
    def fence(self) -> int: ...


class Lane(IntEnum):
    """Which messages a worker takes: a supervisor runs those that may have killed a worker apart from the others."""

    ANY = 0
    #: Only messages that no worker died with.
    MAIN = 1
    #: Only messages that a worker died with.
    PROBATION = 2


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a child ended, as its parent's journal says it."""

    id: str
    state: State
    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """It succeeded.  The result is kept as long as the key."""

    result: bytes
    sends: tuple[Envelope, ...] = ()
    key_window: float = limits.KEY_WINDOW
    body_retention: float = limits.MESSAGE_RETENTION
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Again:
    """It is to run again after ``delay`` seconds; ``counted`` says whether this run used up an attempt.

    ``crashed`` says that its process died while it ran: a crash is counted, apart from the attempts.
    """

    delay: float
    failure: Failure | None
    counted: bool = True
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class Dead:
    """It will not run again by itself."""

    failure: Failure
    key_window: float = limits.KEY_WINDOW
    body_retention: float = limits.DEAD_RETENTION
    #: Whether a run failed; a message that expired or was quarantined did not run this time.
    ran: bool = True
    #: What tells others of the letter, in the same commit; see ``App.on_dead``.
    sends: tuple[Envelope, ...] = ()


@dataclass(frozen=True, slots=True)
class HandBack:
    """It was not started, or was stopped for no fault of its own: as if it had never been claimed."""


@dataclass(frozen=True, slots=True)
class Parked:
    """It waits without a worker: for ``delay`` seconds, for what others record, or for a person.

    ``seen`` is the ``wake`` of the lease.  It is due as soon as others have recorded ``awaits`` more for it, and if
    they have done so already it is not parked at all; 0 says that nothing they record would help.
    Parking uses up no attempt, and a message that has parked does not expire.
    """

    delay: float | None
    seen: int
    awaits: int = 1
    #: Why it waits, when that is for somebody to look at; kept with the attempts.
    failure: Failure | None = None
    steps: tuple[Step, ...] = ()
    sends: tuple[Envelope, ...] = ()
    notes: tuple[Note, ...] = ()


Outcome = Done | Again | Dead | HandBack | Parked


class Stored(msgspec.Struct, frozen=True, gc=False):
    """What ``put`` found or made for one envelope."""

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
    kept_until: int | None = None
    result: bytes | None = None
    failure: Failure | None = None

    def __repr__(self) -> str:
        # Without payload and result: what is printed or logged is no place for them.
        return f"<record {self.envelope.id} {self.envelope.message_type} {self.state.name.lower()}>"


class Said(msgspec.Struct, frozen=True, gc=False):
    """What a handler says about itself while it runs; without a percentage only that it is moving."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Who did something to a message by hand, and why; kept for ever beside it."""

    actor: str
    reason: str


@dataclass(slots=True)
class Purged:
    """What one round of purging removed."""

    bodies: int = 0
    messages: int = 0
    register: int = 0

    @property
    def total(self) -> int:
        return self.bodies + self.messages + self.register


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


class Transaction(Protocol):
    """Everything in it commits together, or nothing does."""

    @property
    def connection(self) -> Any:
        """The driver's own connection, inside the open transaction."""
        ...

    async def execute(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Run the caller's SQL, untranslated, and return its rows."""
        ...

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = ...) -> list[Stored]:
        """Store messages; one whose key is taken is reported, not stored."""
        ...

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        """End claims.  True for each that still held its fence; a stale one changes nothing and costs only itself."""
        ...

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        """Settle these and commit in one go, as the last thing in the transaction.

        Raises ``LeaseLostError`` if one of them no longer held its fence; then everything is rolled back.
        """
        ...

    async def record(self, owner: Fenced | str, steps: Sequence[Step], *, act: Act | None = None) -> list[Step]:
        """Write lines into the journal of a message and return those that stand: the first of each name and kind.

        By the owner, who gives its lease; raises ``LeaseLostError`` if the fence is not its any more.
        By somebody else, who gives the message's id and may record kinds of ``OUTSIDE`` only: what is new wakes the
        message if it is parked and enough has come.  Nothing is recorded, and nothing returned, for a message that is
        not there or has ended other than as a dead letter.
        By an operator, with an ``act``: any kind, unless the message is leased; one that is parked is scheduled.
        """
        ...

    async def rewind(self, message_id: str, step: str, act: Act) -> list[Step]:
        """Remove the named step and what the owner recorded after it, as an operator, and schedule the message.

        The fence rises, so whoever runs it cannot commit.  Signals stay.  A dead letter stays dead until it is moved.
        Returns what was removed; nothing is done to a message that has ended otherwise or has no such step.
        """
        ...

    async def move(self, ids: Iterable[str], to: State, act: Act) -> list[str]:
        """Move messages as an operator: redrive or resume, discard, cancel.

        Returns the ids for which the move was legal.
        """
        ...

    async def register(
        self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None = None
    ) -> bool:
        """Compare and set one entry: written only if its version is still ``version`` (0: absent).  None removes it."""
        ...

    async def purge(self, *, limit: int = limits.PURGE_BATCH) -> Purged:
        """Remove what has outlived its time, oldest first, at most ``limit`` of each kind."""
        ...


class Store(Protocol):
    """Keeps messages; see the module's docstring for what that means."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def open(self) -> None:
        """Connect.  Raises ``SchemaError`` rather than write to a database it does not fully understand."""
        ...

    async def close(self) -> None:
        """Let go of every resource; calling it twice is harmless."""
        ...

    async def migrate(self) -> list[str]:
        """Bring the schema to this version and return what was applied; safe when several processes call it at once."""
        ...

    def transaction(self, connection: Any = None) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction: committed when the block ends, rolled back when it raises.

        Given the caller's own connection, joins its transaction and leaves the commit to the caller.
        """
        ...

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = ...) -> list[Stored]:
        """``Transaction.put`` with a commit of its own, which concurrent callers share.  Durable when it returns."""
        ...

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        """``Transaction.settle`` with a commit of its own; what those that held their fence sent goes with it.

        The end of a message with a ``reply_to`` is recorded in the journal it names, in the same commit.
        """
        ...

    async def record(self, owner: Fenced | str, steps: Sequence[Step]) -> list[Step]:
        """``Transaction.record`` with a commit of its own, which concurrent callers share."""
        ...

    async def steps(self, message_id: str) -> list[Step]:
        """Return the journal of one message in the order in which it was written."""
        ...

    async def claim(
        self,
        queues: Sequence[str],
        *,
        types: Sequence[str],
        limit: int,
        lease: float,
        worker: str,
        lane: Lane = Lane.ANY,
    ) -> list[Lease]:
        """Take due messages, including those whose lease ran out: queues in the order given, the longest due first.

        Committed when it returns, so no lock is held while a handler runs.
        """
        ...

    async def extend(self, leases: Sequence[Fenced], *, lease: float, starting: bool = False) -> list[bool]:
        """Keep leases for ``lease`` seconds from now.  False for each that was taken over.

        ``starting`` says that a suspect's handler is about to begin: from here on its worker's death counts against it.
        """
        ...

    async def report(self, reports: Sequence[tuple[Fenced, Said | None]]) -> list[bool]:
        """Keep what handlers say about themselves; None only asks.

        False for each message that is somebody else's now: claimed, cancelled or gone.  One that its owner has ended
        is still the owner's.  What a stale owner says changes nothing; its last word counts until the next claim.
        When all only ask, nothing is written and no lock is taken.
        """
        ...

    async def progress(self, ids: Sequence[str]) -> dict[str, Progress]:
        """Return, by id, how far messages are; of one that is leased, only what its present owner has said."""
        ...

    async def wait(self, queues: Sequence[str], *, timeout: float) -> None:
        """Return early when there may be work.  A hint only: correctness never depends on it."""
        ...

    async def fetch(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run a read of the caller's outside any transaction."""
        ...

    async def find(self, query: Query) -> list[Record]:
        """Return one page of records."""
        ...

    async def attempts(self, message_id: str) -> list[Attempt]:
        """Return the failed runs of one message, oldest first."""
        ...

    async def registered(self, kind: str, name: str) -> Registered | None:
        """Return one entry of the register unless it has expired."""
        ...

    async def entries(self, kind: str) -> dict[str, Registered]:
        """Return every entry of one kind in the register that has not expired, by name."""
        ...

    async def restored(self) -> int:
        """Shut out every worker that is still alive from before a restore from backup; return how many leases ended.

        Every fence rises far above what such a worker could hold, and every lease is over.
        """
        ...

    async def now(self) -> int:
        """Return the time on the store's own clock, by which everything in it is dated and becomes due."""
        ...

    async def count(self) -> dict[str, Counts]:
        """Return, per queue, how many messages wait, run, are parked and are dead."""
        ...
