"""Stage 2, send: the open transaction a caller or a handler sees, and what is buffered in it.

Nothing sent inside a transaction has left before its commit; a crash before that leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from onefold.envelope import Envelope, derived_key, refuse_reserved
from onefold.errors import ConfigurationError, HandlerError, KeyReuseError, SignalError, TransactionOpenError
from onefold.inside import current
from onefold.journal import signal_note
from onefold.receipt import Receipt
from onefold.step import Note, signal_of
from onefold.store import Stored, Transaction
from onefold.task import Call, Sendable
from onefold.topic import Publishable

logger = logging.getLogger("onefold")

#: Duplicates of one commit that are logged one by one; a repeated batch may have ten thousand.
_DUPLICATES_LOGGED = 10

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: Makes the message of a call and the receipt for it; given by the app, which owns clock and chance.
Prepare = Callable[[Call[Any], Envelope | None, int], tuple[Envelope, Receipt[Any]]]


def log_duplicates(envelopes: Sequence[Envelope], stored: Sequence[Stored]) -> None:
    """Log what was not stored because its key was taken: each of the first few, and the number of the rest."""
    skipped = [pair for pair in zip(envelopes, stored, strict=True) if pair[1].duplicate and not pair[1].clash]
    for envelope, one in skipped[:_DUPLICATES_LOGGED]:
        logger.info(
            "duplicate_skipped message_id=%s message_type=%s idempotency_key=%s",
            one.id,
            envelope.message_type,
            envelope.idempotency_key,
        )
    if len(skipped) > _DUPLICATES_LOGGED:
        logger.info("duplicates_skipped messages=%d", len(skipped) - _DUPLICATES_LOGGED)


class Buffer:
    """What was sent but has not left."""

    def __init__(
        self,
        prepare: Prepare,
        parent: Envelope | None = None,
        *,
        unkeyed: int = 0,
        fresh_id: Callable[[], str] | None = None,
    ) -> None:
        self._prepare = prepare
        self._parent = parent
        self._fresh_id = fresh_id
        #: How many messages without a key were sent; with the parent's id the number is their key.
        self.unkeyed = unkeyed
        self._closed = False
        self.envelopes: list[Envelope] = []
        self.receipts: list[Receipt[Any]] = []
        self.notes: list[Note] = []

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Buffer one signal; without an id of its own, it is the same one when its handler is run again."""
        self._refuse_late()
        if id_ is not None:
            refuse_reserved("id", id_)
        elif self._parent is not None:
            id_ = derived_key("signal", f"{self._parent.id}/{len(self.notes)}")
        elif self._fresh_id is not None:
            id_ = self._fresh_id()
        self.notes.append(signal_note(run_id, name, value, id_ or ""))

    def start(self, call: Call[R], name: str, value: Any, id_: str | None) -> Receipt[R]:
        """Buffer a run and a signal for it, or for the run that holds its key when the commit comes."""
        refuse_task(call)
        receipt = self.add(call)
        self.tell(self.envelopes[-1].id, name, value, id_)
        self.notes[-1] = msgspec.structs.replace(self.notes[-1], started=True)
        return receipt

    def _refuse_late(self) -> None:
        if self._closed:
            raise HandlerError("the handler or transaction is over, so this message would never leave; await its tasks")

    def add(self, call: Call[R]) -> Receipt[R]:
        """Buffer one message; its receipt has an id at once."""
        if self._closed:
            self._refuse_late()
        if call.options and call.options.get("if_dead", "keep") != "keep":
            raise ConfigurationError("if_dead='redrive' reopens another message; send it outside of a transaction")
        envelope, receipt = self._prepare(call, self._parent, self.unkeyed)
        if call.key is None:
            self.unkeyed += 1
        if is_keyed(call):
            receipt.withhold()
        self.envelopes.append(envelope)
        self.receipts.append(receipt)
        return receipt

    def take(self, envelopes: Sequence[Envelope], notes: Sequence[Note]) -> None:
        """Add what was made elsewhere for the same parent, where it was counted on from here."""
        self.envelopes += envelopes
        self.notes += notes
        self.unkeyed += len(envelopes)

    def close(self) -> None:
        """Take no more: what comes from now on would be lost without a word."""
        self._closed = True

    async def leave(self, transaction: Transaction) -> list[Stored]:
        """Put and record what is buffered, as the last thing in a transaction."""
        return await leave(transaction, self.envelopes, self.notes)

    def refuse_clashes(self, stored: Sequence[Stored]) -> None:
        """Raise ``KeyReuseError`` for the first message whose key belongs to another payload."""
        for envelope, one in zip(self.envelopes, stored, strict=True):
            if one.clash:
                raise KeyReuseError(envelope.message_type, envelope.idempotency_key, one.id)

    def confirm(self, stored: Sequence[Stored]) -> None:
        """Complete the receipts, after the commit."""
        log_duplicates(self.envelopes, stored)
        for receipt, one in zip(self.receipts, stored, strict=True):
            receipt.confirm(one)


async def leave(transaction: Transaction, sends: Sequence[Envelope], notes: Sequence[Note]) -> list[Stored]:
    """Let messages and signals leave with a transaction; a key that belongs to another payload fails it.

    A signal for a run that is sent with it goes to the run that holds the key, which may be another one.
    """
    stored = await transaction.put(sends) if sends else []
    for envelope, one in zip(sends, stored, strict=True):
        if one.clash:
            raise KeyReuseError(envelope.message_type, envelope.idempotency_key, one.id)
    kept = {envelope.id: one.id for envelope, one in zip(sends, stored, strict=True)}
    for note in notes:
        run_id = kept[note.message_id] if note.started else note.message_id
        if not await transaction.record(run_id, [note.step]) and note.started:
            raise SignalError.ended(run_id, signal_of(note.step))
    return stored


def is_keyed(call: Call[Any]) -> bool:
    """Whether another message may hold what the call is known by, so that its own message is never stored."""
    return call.key is not None or call.options.get("deduplicate") is not None


def refuse_task(call: Call[Any]) -> None:
    """Refuse to signal what takes no signals."""
    if not call.task.pinned:
        raise ConfigurationError(f"{call.task.name} is no workflow, so it waits for no signals; send it instead")


class AppTransaction:
    """The producer's side: own rows and messages in one commit.  Made by ``app.transaction()``."""

    def __init__(self, transaction: Transaction, buffer: Buffer) -> None:
        self._transaction = transaction
        self._buffer = buffer

    async def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the store's own dialect and return its rows; it stays only if the transaction commits."""
        return await self._transaction.execute(statement, parameters)

    fetch = execute

    def connection(self) -> Any:
        """Return the driver's connection inside the open transaction (PostgreSQL only); do not commit it."""
        return self._transaction.connection

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message that leaves only if the transaction commits."""
        return self._buffer.add(task.call(*args, **kwargs))

    def publish(self, topic: Publishable[T], event: T) -> Receipt[int]:
        """Publish an event that leaves only if the transaction commits."""
        return self._buffer.add(topic.call(event))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[Receipt[Any]]:
        """Send many messages that leave only if the transaction commits."""
        return [self._buffer.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Tell a run something if the transaction commits; ``id`` makes a second one with it the same signal."""
        self._buffer.tell(run_id, name, value, id)

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Receipt[R]:
        """Start a run, or find the one that holds its key, and tell it something, if the transaction commits."""
        return self._buffer.start(call, name, value, id)

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside the block."""
        self._buffer.tell(run_id, name, value, id_)

    def start(self, call: Call[R], name: str, value: Any, id_: str | None) -> Receipt[R]:
        """Start or find a run and tell it something; what ``await app.signal_with_start(…)`` does inside the block."""
        return self._buffer.start(call, name, value, id_)

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside the block."""
        return self._buffer.add(call)

    def refuse(self, verb: str) -> None:
        """Refuse a verb that commits by itself."""
        raise commits_apart(verb)


class JoinedSend(Coroutine[Any, Any, Receipt[R]]):
    """A send that has joined an open transaction: awaiting it gives the receipt, and need not be done.

    Code in a thread cannot await, and what it sends must not be lost for that.
    """

    def __init__(self, receipt: Receipt[R]) -> None:
        self._receipt = receipt

    def __await__(self) -> Generator[Any, Any, Receipt[R]]:
        return self._receipt
        yield

    def send(self, value: Any) -> Any:
        raise StopIteration(self._receipt)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        raise kind if value is None else value

    def close(self) -> None:
        """There is nothing to close."""


def commits_apart(verb: str) -> TransactionOpenError:
    """Return the error for a verb that commits by itself, used where it must not."""
    return TransactionOpenError(f"{verb} would commit apart from the open transaction; use it before or after")


def refuse_inside(verb: str) -> None:
    """Refuse a verb that commits by itself inside a handler or transaction: on SQLite it would wait for itself."""
    if (inside := current.get()) is not None:
        inside.refuse(verb)
