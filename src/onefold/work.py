"""Stage 7, handle: what one run of a handler does, from its first verb until it is committed or rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from onefold import limits
from onefold.envelope import Envelope
from onefold.errors import (
    HandlerError,
    LeaseLostError,
    OnefoldError,
    SessionLostError,
    StoreUnavailableError,
    TransactionTooLongError,
)
from onefold.inside import outside
from onefold.receipt import Receipt
from onefold.step import Note
from onefold.store import Lease, Outcome, Store, Transaction
from onefold.task import Call, Sendable
from onefold.topic import Publishable
from onefold.transaction import Buffer, Prepare, commits_apart

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Work:
    """The verbs of a handler, and the one transaction behind them, which begins with its first statement.

    Everything done through it commits together with the outcome when the handler returns, or not at all.
    Most runs need little of it, so everything is made when it is first used.
    """

    #: The handler has returned, or was given up; from then on nothing is accepted.
    over = False
    #: What is to run after the commit.
    late: Sequence[Callable[[], Awaitable[object]]] = ()
    #: Tasks that were started inside the handler and are not done.
    tasks: set[asyncio.Task[Any]] | None = None
    #: What was sent, if anything was.
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
        #: What the app's lifespan opened for this worker.
        self.resources = resources
        self._store = store
        self._prepare = prepare
        self._unkeyed = unkeyed

    # what a handler does

    async def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the handler's transaction, which begins with the first call.

        What it changes commits together with the message's outcome, or is rolled back with everything else.
        """
        transaction = await self._open()
        try:
            return await transaction.execute(statement, parameters)
        except SessionLostError as error:
            self._session_lost = error
            raise
        except Exception as error:
            if self._ending is not None:
                # The limit has ended the transaction while the statement ran.
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
        """Tell a run something if this handler succeeds."""
        self.buffer.tell(run_id, name, value, id)

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Receipt[R]:
        """Start a run, or find the one that holds its key, and tell it something, if this handler succeeds."""
        return self.buffer.start(call, name, value, id)

    def after(self, function: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Await ``function(…)`` after the commit, for what may also be missed: a cache to refresh, a page to ping.

        Best effort: it runs once at most, not at all if the handler fails or the process dies, and its errors are
        only logged.  A graceful stop waits for it.  What must happen is a message of its own: use ``send``.
        """
        self._refuse_late()
        self.late = [*self.late, partial(function, *args, **kwargs)]

    async def check(self) -> None:
        """Raise ``LeaseLostError`` if somebody else owns the message now, so that no more work is wasted on it."""
        self.refuse("check()")
        self._refuse_late()
        kept = await self._store.extend(self.leases, lease=limits.LEASE)
        for lease, mine in zip(self.leases, kept, strict=True):
            if not mine:
                raise LeaseLostError(f"message {lease.id} was taken over")

    @property
    def in_transaction(self) -> bool:
        """Whether the handler's transaction has begun, even if it was ended for being too long."""
        return self._transaction is not None

    # what belongs to it

    @property
    def buffer(self) -> Buffer:
        """What the handler has sent, which leaves with the commit."""
        if self.buffered is None:
            self.buffered = Buffer(self._prepare, self._cause(), unkeyed=self._unkeyed)
            if self.over:
                self.buffered.close()
        return self.buffered

    def _cause(self) -> Envelope:
        """Return whom the messages of this run go back to."""
        return self.leases[0].envelope

    @property
    def sends(self) -> tuple[Envelope, ...]:
        """The messages that leave with the commit."""
        return () if self.buffered is None else tuple(self.buffered.envelopes)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The lines for other journals that are written with the commit."""
        return () if self.buffered is None else tuple(self.buffered.notes)

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside a handler."""
        return self.buffer.add(call)

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside a handler."""
        self.buffer.tell(run_id, name, value, id_)

    def start(self, call: Call[R], name: str, value: Any, id_: str | None) -> Receipt[R]:
        """Start or find a run and tell it something; what ``await app.signal_with_start(…)`` does inside a handler."""
        return self.buffer.start(call, name, value, id_)

    def refuse(self, verb: str) -> None:
        """Refuse a verb that commits by itself, once the transaction has begun."""
        if self._transaction is not None:
            raise commits_apart(verb)

    def note_task(self, task: asyncio.Task[Any]) -> None:
        """Remember a task that was started inside the handler, until it is done."""
        if not self.over:
            if self.tasks is None:
                self.tasks = set()
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def cancel_tasks(self) -> None:
        """Cancel what was started inside the handler: its own tasks, and the verbs that its thread waits for."""
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
        # Kept only once it is entered: what could not begin cannot be left either.
        opened = self._store.transaction(seconds=limits.TRANSACTION_SECONDS_MAX)
        self._transaction = await opened.__aenter__()
        self._opened = opened
        return self._transaction

    def _start_limit(self) -> None:
        # Only now it may hold locks: before its first statement returned it may have waited for those of others.
        if self._limit is None and not self.over:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(limits.TRANSACTION_SECONDS_MAX, self._end_overdue, context=outside())

    def _end_overdue(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._leave(_too_long()))

    def _refuse_late(self) -> None:
        if self.over:
            raise HandlerError("the handler has returned; nothing it does now can be part of its commit")

    # what becomes of it, as the execution of the handler says

    @property
    def needs_transaction(self) -> bool:
        """Whether the outcome cannot be settled together with those of others."""
        return self._transaction is not None

    def close(self) -> None:
        """The handler has returned: tasks and threads it left running can no longer reach its commit."""
        self.over = True
        if self.buffered is not None:
            self.buffered.close()

    async def commit(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        """Settle in the handler's transaction and commit, all of it or nothing.

        Raises ``LeaseLostError`` when somebody else owns one of the messages.
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
        """Undo everything the handler did in its transaction; harmless when there is none.

        Returns what the failure means: the transaction may know more about it than the handler.
        """
        self._stop_limit()
        try:
            if self._ending is not None:
                await self._ending
                return _caused(_too_long(), error)
            await self._leave(error)
        except OnefoldError as known:
            return known
        # A handler in another process gets only a part of the error, and may have made something else of it.
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
