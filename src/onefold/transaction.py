"""Stage 2, send: the open transaction a caller or a handler sees, and what is buffered in it.

Nothing sent inside a transaction has left before its commit; a crash before that leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec

from onefold import limits
from onefold.clock import to_datetime
from onefold.effects import Ledger, Reconcile
from onefold.envelope import Envelope
from onefold.errors import (
    ConfigurationError,
    HandlerError,
    KeyReuseError,
    LeaseLostError,
    TransactionOpenError,
    TransactionTooLongError,
    UncertainError,
)
from onefold.identity import derived_key, upstream_key
from onefold.journal import read_journal, signal_note
from onefold.receipt import Receipt
from onefold.registry import BoundTask, Call, Task
from onefold.step import Note
from onefold.store import Lease, Outcome, Store, Stored, Transaction
from onefold.timetable import zone_of

P = ParamSpec("P")
R = TypeVar("R")

#: Makes the message of a call and the receipt for it; given by the app, which owns clock and chance.
Prepare = Callable[[Call[Any], Envelope | None, int], tuple[Envelope, Receipt[Any]]]


class Joined(Protocol):
    """Something with a commit to come, which code inside it joins instead of writing for itself."""

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call with that commit; what ``await task.send(…)`` does inside."""
        ...

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal with that commit; what ``await app.signal(…)`` does inside."""
        ...

    def refuse(self, verb: str) -> None:
        """Raise ``TransactionOpenError`` for a verb that would commit by itself, if it must not now."""
        ...


class Buffer:
    """What was sent but has not left."""

    def __init__(
        self, prepare: Prepare, parent: Envelope | None = None, *, fresh_id: Callable[[], str] | None = None
    ) -> None:
        self._prepare = prepare
        self._parent = parent
        self._fresh_id = fresh_id
        self._unkeyed = 0
        self._closed = False
        self.envelopes: list[Envelope] = []
        self.receipts: list[Receipt[Any]] = []
        self.notes: list[Note] = []

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Buffer one signal; without an id of its own, it is the same one when its handler is run again."""
        self._refuse_late()
        if id_ is None and self._parent is not None:
            id_ = derived_key(self._parent.id, len(self.notes))
        elif id_ is None and self._fresh_id is not None:
            id_ = self._fresh_id()
        self.notes.append(signal_note(run_id, name, value, id_ or ""))

    def _refuse_late(self) -> None:
        if self._closed:
            raise HandlerError("the handler or transaction is over, so this message would never leave; await its tasks")

    def add(self, call: Call[R]) -> Receipt[R]:
        """Buffer one message; its receipt has an id at once."""
        self._refuse_late()
        if call.options.get("if_dead", "keep") != "keep":
            raise ConfigurationError("if_dead='redrive' reopens another message; send it outside of a transaction")
        envelope, receipt = self._prepare(call, self._parent, self._unkeyed)
        if call.key is None:
            self._unkeyed += 1
        self.envelopes.append(envelope)
        self.receipts.append(receipt)
        return receipt

    def close(self) -> None:
        """Take no more: what comes from now on would be lost without a word."""
        self._closed = True

    def refuse_clashes(self, stored: Sequence[Stored]) -> None:
        """Raise ``KeyReuseError`` for the first message whose key belongs to another payload."""
        for envelope, one in zip(self.envelopes, stored, strict=True):
            if one.clash:
                raise KeyReuseError(envelope.message_type, envelope.idempotency_key, one.id)

    def confirm(self, stored: Sequence[Stored]) -> None:
        """Complete the receipts, after the commit."""
        for receipt, one in zip(self.receipts, stored, strict=True):
            receipt.confirm(one)


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

    def send(self, task: Task[P, R] | BoundTask[P, R], *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message that leaves only if the transaction commits."""
        return self._buffer.add(task.call(*args, **kwargs))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[Receipt[Any]]:
        """Send many messages that leave only if the transaction commits."""
        return [self._buffer.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Tell a run something if the transaction commits; ``id`` makes a second one with it the same signal."""
        self._buffer.tell(run_id, name, value, id)

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside the block."""
        self._buffer.tell(run_id, name, value, id_)

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside the block."""
        return self._buffer.add(call)

    def refuse(self, verb: str) -> None:
        """Refuse a verb that commits by itself."""
        raise _commits_apart(verb)


class Context:
    """What a handler receives: the message it runs for, and the only door for its effects.

    Everything done through it commits together with the message's outcome when the handler returns, or not at all.
    """

    def __init__(
        self,
        lease: Lease,
        store: Store,
        prepare: Prepare,
        resources: Any,
        held_until: Callable[[], int],
        step: StepScope | None = None,
    ) -> None:
        self.message = lease.envelope
        self.resources = resources
        self.attempt = lease.attempt if step is None else step.attempt
        self.fence = lease.fence
        self.buffer = Buffer(prepare, lease.envelope if step is None else step.cause(lease.envelope))
        #: The name of the step of a workflow that this is; None for a task.
        self.step = None if step is None else step.name
        self._ledger = None if step is None else step.ledger
        self._lease = lease
        self._store = store
        self._held_until = held_until
        self._opened: AbstractAsyncContextManager[Transaction] | None = None
        self._transaction: Transaction | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._begin = asyncio.Lock()
        self._over = False

    @property
    def idempotency_key(self) -> str:
        """The stable name of the work this message asks for."""
        return self.message.idempotency_key

    @property
    def scheduled_for(self) -> datetime | None:
        """The time this run was meant for, in its schedule's time zone; None when it was sent by hand."""
        occurrence = self.message.occurrence
        if occurrence is None:
            return None
        return to_datetime(occurrence.scheduled_for).astimezone(zone_of(occurrence.timezone))

    @property
    def missed(self) -> int:
        """How many earlier fire times had no run of their own, so that this one stands in for them."""
        return 0 if self.message.occurrence is None else self.message.occurrence.missed

    @property
    def deadline(self) -> datetime:
        """When the lease runs out unless it is renewed; renewed by itself while the worker lives."""
        return to_datetime(self._held_until())

    def upstream_key(self, effect: str) -> str:
        """Return a key for an outside provider: the same on every retry and redrive of this work."""
        work = self.idempotency_key if self.step is None else f"{self.idempotency_key}/{self.step}"
        return upstream_key(self.message.scope, work, effect)

    async def once(
        self,
        name: str,
        call: Callable[[], Awaitable[R]],
        *,
        reconcile: Reconcile[R] | None = None,
        provider_keeps_keys_for: timedelta | float | None = None,
    ) -> R:
        """Make a call to the outside whose effect must not happen twice, and return what it returned.

        The intent is recorded before, the outcome after, each with a commit of its own; a run that finds the outcome
        returns it without calling.  After a crash in between, or an exception from the call, whether the effect
        happened is uncertain.  Then ``reconcile`` is asked, which answers ``Happened(value)`` or ``NotHappened()``.
        Without it the call is made again only while ``provider_keeps_keys_for`` has not passed since the first one:
        so long the provider knows the call by ``upstream_key``.  Otherwise the message is parked until a person says
        what happened, with ``app.resolve``.
        A call that raises ``Retry``, ``Snooze`` or ``Reject`` says that it did nothing.
        """
        if self._transaction is not None:
            raise _commits_apart("once()")
        return await self._effects().once(name, call, reconcile, provider_keeps_keys_for)

    def _effects(self) -> Ledger:
        if self._ledger is None:
            lease, store = self._lease, self._store
            self._ledger = Ledger(
                lease.id, lambda: read_journal(store, lease), lambda steps: store.record(lease, steps)
            )
        return self._ledger

    @property
    def uncertain(self) -> UncertainError | None:
        """Why a person is needed before this can go on, if one is."""
        return None if self._ledger is None else self._ledger.uncertain

    async def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the handler's transaction, which begins with the first call.

        What it changes commits together with the message's outcome, or is rolled back with everything else.
        """
        return await (await self._open()).execute(statement, parameters)

    async def fetch(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Read without beginning a transaction; once one is open, read inside it."""
        if self._transaction is not None:
            return await self.execute(statement, *parameters)
        return await self._store.fetch(statement, parameters)

    async def connection(self) -> Any:
        """Return the driver's connection inside the handler's transaction (PostgreSQL only); do not commit it."""
        return (await self._open()).connection

    def send(self, task: Task[P, R] | BoundTask[P, R], *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message that leaves only if this handler succeeds."""
        return self.buffer.add(task.call(*args, **kwargs))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[Receipt[Any]]:
        """Send many messages that leave only if this handler succeeds."""
        return [self.buffer.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Tell a run something if this handler succeeds."""
        self.buffer.tell(run_id, name, value, id)

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside a handler."""
        self.buffer.tell(run_id, name, value, id_)

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside a handler."""
        return self.buffer.add(call)

    def refuse(self, verb: str) -> None:
        """Refuse a verb that commits by itself, once the transaction has begun."""
        if self.in_transaction:
            raise _commits_apart(verb)

    async def check(self) -> None:
        """Raise ``LeaseLostError`` if somebody else owns the message now, so that no more work is wasted on it."""
        if self._transaction is not None:
            raise TransactionOpenError("check() would commit apart from the open transaction; call it before execute()")
        if not (await self._store.extend([self._lease], lease=limits.LEASE))[0]:
            raise LeaseLostError(f"message {self.message.id} was taken over")

    # the transaction, as the execution of the handler drives it

    @property
    def in_transaction(self) -> bool:
        """Whether the handler's transaction has begun, even if it was ended for being too long."""
        return self._transaction is not None

    def close(self) -> None:
        """The handler has returned: tasks it left running can no longer reach its commit."""
        self._over = True
        self.buffer.close()

    async def _open(self) -> Transaction:
        # The lock keeps two statements of one handler, run concurrently, from opening two transactions.
        async with self._begin:
            if self._ending is not None:
                raise self._too_long()
            if self._over:
                raise HandlerError("the handler has returned; nothing it does now can be part of its commit")
            if self._transaction is None:
                # Kept only once it is entered: what could not begin cannot be left either.
                opened = self._store.transaction()
                self._transaction = await opened.__aenter__()
                self._opened = opened
                loop = asyncio.get_running_loop()
                self._limit = loop.call_later(limits.TRANSACTION_SECONDS_MAX, self._end_overdue)
            return self._transaction

    def _end_overdue(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._leave(self._too_long()))

    def _too_long(self) -> TransactionTooLongError:
        return TransactionTooLongError(
            f"the handler's transaction was open for more than {limits.TRANSACTION_SECONDS_MAX:g} s "
            "and was rolled back; do slow work before the first ctx.execute()"
        )

    async def commit(self, outcome: Outcome) -> None:
        """Settle the message in the handler's transaction and commit, all of it or nothing.

        Raises ``LeaseLostError`` when somebody else owns the message.
        """
        await self.commit_with(lambda transaction: transaction.conclude([(self._lease, outcome)]))

    async def commit_with(self, write: Callable[[Transaction], Awaitable[None]]) -> None:
        """Make the last writes in the handler's transaction and commit, all of it or nothing."""
        if self._ending is not None:
            await self._ending
            raise self._too_long()
        if self._transaction is None or self._opened is None:
            raise HandlerError("there is no transaction to commit")
        self._stop_limit()
        try:
            await write(self._transaction)
        except BaseException as error:
            await self._leave(error)
            raise
        await self._leave(None)

    async def roll_back(self, error: BaseException) -> None:
        """Undo everything the handler did in its transaction; harmless when there is none."""
        self._stop_limit()
        if self._ending is not None:
            await self._ending
        elif self._opened is not None:
            await self._leave(error)

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    async def _leave(self, error: BaseException | None) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            return
        if error is None:
            await opened.__aexit__(None, None, None)
            return
        try:
            await opened.__aexit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            if raised is not error:
                raise


class StepScope(msgspec.Struct, frozen=True):
    """What makes the context of a workflow's step different from that of a task."""

    name: str
    attempt: int
    ledger: Ledger | None
    #: How often a person made the run go back; what it sends then is new.
    restarts: int

    def cause(self, run: Envelope) -> Envelope:
        """Return whom the messages of this step go back to: they are named after it, and keyed by its name."""
        again = f"~{self.restarts}" if self.restarts else ""
        return msgspec.structs.replace(run, id=f"workflow:{run.id}{again}/{self.name}")


def _commits_apart(verb: str) -> TransactionOpenError:
    return TransactionOpenError(f"{verb} would commit apart from the open transaction; use it before or after")


def refuse_inside(verb: str) -> None:
    """Refuse a verb that commits by itself inside a handler or transaction: on SQLite it would wait for itself."""
    if (inside := current.get()) is not None:
        inside.refuse(verb)


#: What ``await task.send(…)`` joins, if the code runs inside something with a commit to come.
current: ContextVar[Joined | None] = ContextVar("onefold_transaction", default=None)
