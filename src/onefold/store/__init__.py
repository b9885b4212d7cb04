"""Stage 5, rest: what a store promises, in onefold's own records.

A store keeps messages and nothing happens to one except through the verbs here.
Safety rests on the **fence**: an integer on each message that rises with every change of owner.
Every write for a message names the fence that its owner was given, and a write with an old fence changes nothing.
Time only decides when another worker may try; it comes from the store's clock, never from a worker's.

``onefold.testing.contracts`` is the suite every store must pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from onefold import limits
from onefold.message.envelope import Envelope
from onefold.store.gates import NO_GATINGS, Gating
from onefold.store.journal_lines import Line
from onefold.store.outcomes import (
    Again,
    Dead,
    Done,
    Ended,
    Failure,
    Fenced,
    HandBack,
    Lane,
    Lease,
    Outcome,
    Parked,
    damaged,
)
from onefold.store.records import (
    KEEP,
    Act,
    Attempt,
    Counts,
    Progress,
    Purged,
    PutOptions,
    Query,
    Record,
    Registered,
    Said,
    Stored,
)
from onefold.store.states import MOVES, State

__all__ = [
    "KEEP",
    "MOVES",
    "Act",
    "Again",
    "Attempt",
    "Capabilities",
    "Counts",
    "Dead",
    "Done",
    "Ended",
    "Failure",
    "Fenced",
    "HandBack",
    "Lane",
    "Lease",
    "Outcome",
    "Parked",
    "Progress",
    "Purged",
    "PutOptions",
    "Query",
    "Record",
    "Registered",
    "Said",
    "State",
    "Store",
    "Stored",
    "Transaction",
    "damaged",
]


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
    #: It took no writes when it was opened, such as a read replica: it can be read, and no worker can use it.
    read_only: bool = False


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
        """Store messages; one whose key is taken is reported, not stored.

        In a store that is shared several calls may be under way at once.
        """
        ...

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        """End claims.  True for each that still held its fence; a stale one changes nothing and costs only itself."""
        ...

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        """Settle these and commit in one go, as the last thing in the transaction.

        Raises ``LeaseLostError`` if one of them no longer held its fence; then everything is rolled back.
        """
        ...

    async def record(self, owner: Fenced | str, steps: Sequence[Line], *, act: Act | None = None) -> list[Line]:
        """Write lines into the journal of a message and return those that stand: the first of each name and kind.

        The owner gives its lease; raises ``LeaseLostError`` if the message has a higher fence now.
        Others give the message's id and may record kinds of ``OUTSIDE`` only: new lines wake the message if it is
        parked and enough have come.  Nothing is recorded, and nothing returned, for a message that has
        ended other than as a dead letter; a signal to one that is not there raises ``SignalError``.
        By an operator, with an ``act``: any kind, unless the message is leased; one that is parked is scheduled.
        An ``UNDO`` takes the message even from its worker: the fence rises, and it is scheduled unless it ended.
        """
        ...

    async def rewind(self, message_id: str, step: str, act: Act) -> list[Line]:
        """Remove the named step and what the owner recorded after it, as an operator, and schedule the message.

        The fence rises, so its worker cannot commit.  Signals stay.  A dead letter stays dead until it is moved.
        Returns what was removed; nothing is done to a message that has ended otherwise or has no such step.
        """
        ...

    async def lock(self, ids: Sequence[str]) -> dict[str, State]:
        """Return where messages stand, by id, and let nothing change that before the transaction ends.

        A message that is not kept is left out.
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

    def twin(self) -> Store | None:
        """Return another store on the same database, not opened, for a second event loop of this process.

        None when there can be none: the database is only in memory, or a test says what time it is.
        """
        ...

    async def migrate(self) -> list[str]:
        """Bring the schema to this version and return what was applied; safe when several processes call it at once."""
        ...

    def transaction(
        self, connection: Any = None, *, seconds: float | None = None
    ) -> AbstractAsyncContextManager[Transaction]:
        """Open a transaction: committed when the block ends, rolled back when it raises.

        Where there is one lock for all and the caller keeps it for longer than ``seconds``, it is rolled back under the
        caller's hands, and every further call raises ``TransactionTooLongError``.
        Given the caller's own connection, joins its transaction and leaves the commit and the time to the caller.
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

    async def record(self, owner: Fenced | str, steps: Sequence[Line]) -> list[Line]:
        """``Transaction.record`` with a commit of its own, which concurrent callers share."""
        ...

    async def steps(self, message_id: str) -> list[Line]:
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
        gatings: Mapping[str, Gating] = NO_GATINGS,
        at_once: int | None = None,
        thorough: bool = True,
    ) -> list[Lease]:
        """Take due messages, including those whose lease ran out: queues in the order given, the longest due first.

        A message that waits at a gate is taken only as the ``gatings`` allow, which are given by the gates' names:
        never more at once than may run, counted from the leases that are alive; in a line only the first of those that
        have not ended.  Gates take turns, however many messages wait at one of them.
        Of those that take a place or a token from others, at most ``at_once`` are taken: so many can begin now.
        Unless it is ``thorough``, a claim may pass over gates at which it has found nothing a moment ago and nothing
        has become due since, so that messages without a gate do not wait for a walk past thousands of them.
        A run comes with its journal if that is short; where it has none although there may be one, ``steps`` reads it.
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

        False for each message that is another owner's now: claimed, cancelled or gone.  One that its owner has ended
        is still the owner's.  A report of a stale owner changes nothing; the last report counts until the next claim.
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


async def read_journal(store: Store, lease: Lease) -> list[Line]:
    """Return the lines of a claimed message; the store is not asked when there can be none."""
    return await store.steps(lease.id) if lease.has_journal else []
