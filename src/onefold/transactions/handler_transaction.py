"""Stage 7, handle: the transaction of one run of a handler, from its first verb to its commit or rollback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from onefold import limits
from onefold.current import outside
from onefold.errors import (
    HandlerError,
    LeaseLostError,
    OnefoldError,
    SessionLostError,
    StoreUnavailableError,
    TransactionTooLongError,
)
from onefold.message.envelope import Envelope
from onefold.store import Lease, Outcome, Store, Transaction
from onefold.store.journal_lines import Note
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import Call, Publishable, Sendable
from onefold.transactions.app_transaction import commits_apart
from onefold.transactions.buffer import Buffer, Prepare

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class HandlerTransaction:
    """The verbs of a handler, and the one transaction behind them, which begins with its first statement.

    Everything done through it commits together with the outcome when the handler returns, or not at all.
    Most runs use few of its parts, so each is made at its first use.
    """

    #: The handler has returned or was abandoned; no verb is accepted any more.
    over = False
    #: The functions given to ``after``, to be called after the commit.
    late: Sequence[Callable[[], Awaitable[object]]] = ()
    #: Tasks that were started inside the handler and are not done.
    tasks: set[asyncio.Task[Any]] | None = None
    #: The messages and signals that were sent; None as long as there are none.
    buffered: Buffer | None = None
    _begin: asyncio.Lock | None = None
    _opened: AbstractAsyncContextManager[Transaction] | None = None
    _transaction: Transaction | None = None
    _limit: asyncio.TimerHandle | None = None
    _ending: asyncio.Task[None] | None = None
    _session_lost: SessionLostError | None = None

    def __init__(
        self, leases: Sequence[Lease], store: Store, prepare: Prepare, resources: Any, unkeyed: int = 0
    ) -> None:
        self.leases = leases
        #: The value that the app's lifespan yielded for this worker.
        self.resources = resources
        self._store = store
        self._prepare = prepare
        self._unkeyed = unkeyed

    # verbs of the handler

    async def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the handler's transaction, which begins with the first call.

        Its changes commit together with the message's outcome, or are rolled back with everything else.
        """
        transaction = await self._open()
        try:
            return await transaction.execute(statement, parameters)
        except SessionLostError as error:
            self._session_lost = error
            raise
        except Exception as error:
            if self._ending is not None:
                # The transaction was ended for being open too long while the statement ran.
                raise _too_long() from error
            raise
        finally:
            self._start_limit()

    async def fetch(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Read without beginning a transaction; once one is open, read inside it."""
        if self._transaction is not None:
            return await self.execute(statement, *parameters)
        self._refuse_late()
        return await self._store.fetch(statement, parameters)

    async def connection(self) -> Any:
        """Return the driver's connection inside the handler's transaction (PostgreSQL only); do not commit it."""
        transaction = await self._open()
        self._start_limit()
        return transaction.connection

    async def register(self, kind: str, name: str, value: bytes | None, *, version: int) -> bool:
        """Compare and set an entry of the register in the handler's transaction; see ``Transaction.register``."""
        transaction = await self._open()
        try:
            return await transaction.register(kind, name, value, version=version)
        finally:
            self._start_limit()

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message that leaves only if this handler succeeds."""
        return self.buffer.add(task.call(*args, **kwargs))

    def publish(self, topic: Publishable[T], event: T) -> Receipt[int]:
        """Publish an event that leaves only if this handler succeeds."""
        return self.buffer.add(topic.call(event))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[Receipt[Any]]:
        """Send many messages that leave only if this handler succeeds."""
        return [self.buffer.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Send a signal to a run, which leaves only if this handler succeeds."""
        self.buffer.add_signal(run_id, name, value, id)

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Receipt[R]:
        """Start a run, or find the one that holds its key, and signal it, if this handler succeeds."""
        return self.buffer.add_start(call, name, value, id)

    def after(self, function: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Await ``function(…)`` after the commit, for work that may be missed: a cache to refresh, a page to ping.

        Best effort: it runs once at most, not at all if the handler fails or the process dies, and its errors are
        only logged.  A graceful stop waits for it.  For work that must happen, ``send`` a message.
        """
        self._refuse_late()
        self.late = [*self.late, partial(function, *args, **kwargs)]

    async def check(self) -> None:
        """Raise ``LeaseLostError`` if another worker owns the message now, so that no more work is wasted on it."""
        self.refuse("check()")
        self._refuse_late()
        extended = await self._store.extend(self.leases, lease=limits.LEASE)
        for lease, ours in zip(self.leases, extended, strict=True):
            if not ours:
                raise LeaseLostError(f"message {lease.id} was taken over by another worker; stop working on it")

    @property
    def in_transaction(self) -> bool:
        """Whether the handler's transaction has begun, even if it was ended for being open too long."""
        return self._transaction is not None

    # its parts

    @property
    def buffer(self) -> Buffer:
        """The messages and signals that are written with the commit."""
        if self.buffered is None:
            self.buffered = Buffer(self._prepare, self._cause(), unkeyed=self._unkeyed)
            if self.over:
                self.buffered.close()
        return self.buffered

    def _cause(self) -> Envelope:
        """Return the message that caused those sent in this run."""
        return self.leases[0].envelope

    @property
    def sends(self) -> tuple[Envelope, ...]:
        """The messages that are put with the commit."""
        return () if self.buffered is None else tuple(self.buffered.envelopes)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The lines for journals of other messages that are written with the commit."""
        return () if self.buffered is None else tuple(self.buffered.notes)

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside a handler."""
        return self.buffer.add(call)

    def add_signal(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside a handler."""
        self.buffer.add_signal(run_id, name, value, id_)

    def add_start(self, call: Call[R], name: str, value: Any, id_: str | None) -> Receipt[R]:
        """Start or find a run and signal it; what ``await app.signal_with_start(…)`` does inside a handler."""
        return self.buffer.add_start(call, name, value, id_)

    def refuse(self, verb: str) -> None:
        """Refuse a verb that commits by itself, once the transaction has begun."""
        if self._transaction is not None:
            raise commits_apart(verb)

    def note_task(self, task: asyncio.Task[Any]) -> None:
        """Note a task that was started inside the handler, until it is done."""
        if not self.over:
            if self.tasks is None:
                self.tasks = set()
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def cancel_tasks(self) -> None:
        """Cancel the tasks that were started inside the handler, also the verbs that its thread waits for."""
        for task in tuple(self.tasks or ()):
            task.cancel()

    async def _open(self) -> Transaction:
        if self._begin is None:
            self._begin = asyncio.Lock()
        # The lock keeps two statements of one handler, run concurrently, from opening two transactions.
        async with self._begin:
            if self._ending is not None:
                raise _too_long()
            self._refuse_late()
            return self._transaction or await self._enter()

    async def _enter(self) -> Transaction:
        # Set only once it has begun: ``_leave`` must not end a transaction that could not begin.
        opened = self._store.transaction(seconds=limits.TRANSACTION_SECONDS_MAX)
        self._transaction = await opened.__aenter__()
        self._opened = opened
        return self._transaction

    def _start_limit(self) -> None:
        # Called when the first statement has returned: until then it may have waited for the locks of others, and
        # only from then on may others wait for its own.
        if self._limit is None and not self.over:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(limits.TRANSACTION_SECONDS_MAX, self._end_overdue, context=outside())

    def _end_overdue(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._leave(_too_long()))

    def _refuse_late(self) -> None:
        if self.over:
            raise HandlerError("the handler has returned; nothing it does now can be part of its commit")

    # its end, for the worker

    @property
    def needs_transaction(self) -> bool:
        """Whether the outcome must be settled in this transaction, and not together with those of other messages."""
        return self._transaction is not None

    def close(self) -> None:
        """Accept no more verbs: the handler has returned, and tasks or threads it left must not join its commit."""
        self.over = True
        if self.buffered is not None:
            self.buffered.close()

    async def commit(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        """Settle in the handler's transaction and commit, all of it or nothing.

        Raises ``LeaseLostError`` when another worker owns one of the messages.
        """
        await self.commit_with(lambda transaction: transaction.conclude(settlements))

    async def commit_with(self, write: Callable[[Transaction], Awaitable[None]]) -> None:
        """Make the last writes in the handler's transaction and commit, all of it or nothing."""
        if self._ending is not None:
            await self._ending
            raise _too_long()
        transaction = self._transaction or await self._enter()
        self._stop_limit()
        try:
            await write(transaction)
        except BaseException as error:
            await self._leave(error)
            raise
        await self._leave(None)

    async def roll_back(self, error: BaseException) -> BaseException:
        """Undo everything the handler did in its transaction; does nothing when there is none.

        Returns the error to decide by: the transaction's, if it explains the handler's.
        """
        self._stop_limit()
        try:
            if self._ending is not None:
                await self._ending
                return _caused(_too_long(), error)
            await self._leave(error)
        except OnefoldError as known:
            return known
        # A handler in another process got only the name and text of the error, and may have raised another from it.
        return self._session_lost if self._session_lost and isinstance(error, StoreUnavailableError) else error

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


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    if isinstance(cause, type(error)):
        return cause
    error.__cause__ = cause
    return error


def _too_long() -> TransactionTooLongError:
    return TransactionTooLongError(
        f"the handler's transaction was open for more than {limits.TRANSACTION_SECONDS_MAX:g} s "
        "and was rolled back; do slow work before the first ctx.execute()"
    )
