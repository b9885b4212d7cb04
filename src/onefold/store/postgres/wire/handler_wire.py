"""A connection for callers: their own statements go through psycopg, ours beside them in the same transaction.

Callers' statements, with their adaptation, preparation and cancelling, are psycopg's business alone.
Our own statements take the short way of ``pipeline.py`` on the same connection, one or the other at a time.
A transaction is marked with a savepoint when it begins: without it, the caller has ended the transaction itself.
A session is reset before the next caller gets it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.abc import Query as CallersQuery
from psycopg.adapt import Transformer
from psycopg.pq import ConnStatus, ExecStatus, PGconn, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from onefold.clock import system_random
from onefold.errors import StoreError, StoreUnavailableError, TransactionEndedError, TransactionOpenError
from onefold.store.postgres.wire.errors import has_ended, is_adrift, is_stale_plan
from onefold.store.postgres.wire.pipeline import Answer
from onefold.store.postgres.wire.statements import COMMIT, OURS, ROLLBACK, SQL, WireQuery, ends_transaction
from onefold.store.postgres.wire.wire import FAILED_BEFORE, Named, Parameters, Row, Wire, overlook

ENDED = (
    "the code in the transaction has ended it by itself; what it committed stays, what came after that was rolled "
    "back: a person must look at it before it runs again"
)

#: A cancel is a connection of its own to the server; one that cannot be made within this time is not worth more.
CANCEL_SECONDS = 2.0
#: A COMMIT is never cancelled on the server; a caller that is cancelled meanwhile waits this long for its answer.
COMMIT_SECONDS = 5.0
#: A ROLLBACK that gets no answer, because the server is gone: after this long the connection is closed instead.
ROLLBACK_SECONDS = 5.0
#: As with psycopg: a caller's statement is prepared when it was run this often.
_PREPARE_AFTER = 5
#: Names of prepared statements that are remembered: a few for each connection.
_NAMES_MAX = 1_000
#: Enough that no caller's savepoint has the name of ours.
_NAME_BITS = 64

#: Everything that outlives a transaction, except prepared statements; their texts cannot do harm to the next caller.
_RESET = (
    "RESET ALL",
    # Also resets the role.
    "SET SESSION AUTHORIZATION DEFAULT",
    "CLOSE ALL",
    "UNLISTEN *",
    "DISCARD TEMP",
    "DISCARD SEQUENCES",
    "SELECT pg_catalog.pg_advisory_unlock_all()",
)
#: After these psycopg drops its prepared statements, or the caller has: ours may be gone with them.
_FORGETS = re.compile(r"DROP|ALTER|ROLLBACK|DISCARD|DEALLOCATE")

_chance = system_random()


def _closed_pgconn() -> Any:
    """Return a connection of libpq that is closed: its text cannot be read, so that nothing is tried."""
    closed = PGconn.connect_start(b"closed")
    closed.finish()
    return closed


_CLOSED = _closed_pgconn()


@lru_cache(_NAMES_MAX)
def _prepared_as(text: str) -> bytes:
    """Return the name under which one of the statements around a transaction is prepared: it stands for the text."""
    return b"onefold_" + hashlib.sha256(text.encode()).hexdigest()[:32].encode()


def retire(connection: AsyncConnection[Any]) -> None:
    """Leave a caller with a closed connection in its hands, whose session goes on without it."""
    connection.pgconn = _CLOSED


class CallersConnection(AsyncConnection[Any]):
    """The driver's connection as callers get it: plain psycopg, but it does not end the transaction it is in."""

    #: Whether a cancel was sent to the server.  It may strike late, so no other caller gets this session.
    was_cancelled = False

    async def commit(self) -> None:
        refuse_control("connection.commit()")

    async def rollback(self) -> None:
        refuse_control("connection.rollback()")

    async def close(self) -> None:
        refuse_control("connection.close()")

    async def cancel_safe(self, *, timeout: float = CANCEL_SECONDS) -> None:
        self.was_cancelled = True
        await super().cancel_safe(timeout=min(timeout, CANCEL_SECONDS))

    def cancel(self) -> None:
        self.was_cancelled = True
        super().cancel()


def refuse_control(what: str) -> NoReturn:
    """Refuse what would end a transaction that is not the caller's to end."""
    raise TransactionOpenError(
        f"{what} would end the transaction that commits together with the messages; it was not carried out: "
        "return or raise instead, and use savepoints (`async with connection.transaction():`) for parts of it"
    )


def refuse_endings(statement: CallersQuery) -> None:
    """Refuse a statement that begins with COMMIT or the like; what hides such a one is noticed when it is done."""
    if keyword := ends_transaction(statement):
        refuse_control(keyword)


class HandlerWire(Wire):
    """A pooled connection, for one caller at a time."""

    _prepares = False
    _settings: WireQuery | None = None
    _resetting: Sequence[WireQuery] = ()
    #: Whether a table was changed under a prepared statement: other connections have the same plans.
    plans_changed = False

    def _use(self, connection: AsyncConnection[Any]) -> None:
        super()._use(connection)
        self._pgconn = connection.pgconn
        self._rewrap()
        #: Whether a transaction was begun for a caller, and its session was not reset since.
        self._begun = False
        #: Whether the transaction's savepoint must still be there.
        self._marked = False
        #: Whether anything was done in the transaction.
        self._used = False
        #: Whether the session may hold more than a plain reset removes.
        self._tainted = False
        self._lent = False
        self._running = 0
        self._given_up = False
        self._committing = False
        #: Whether what the caller left was removed together with its COMMIT.
        self._is_reset = False

    def be_equipped(self, *, prepares: bool, settings: WireQuery | None) -> None:
        """Say whether it may prepare statements, and what is set again when its session was reset.

        Behind a transaction pooler nothing may be prepared, and there is no session to reset.
        """
        self._prepares = prepares
        self._settings = settings
        self._resetting = [*_RESETTING, *([] if settings is None else [settings])] if prepares else []
        self._rewrap()

    def _rewrap(self) -> None:
        """Give the session another connection object, without anything that was set on the last one."""
        retire(self.connection)
        self.connection = connection = CallersConnection(self._pgconn)
        #: The name of the savepoint that marks each transaction, by which no caller can make one.
        self._mark = f"onefold_{_chance.getrandbits(_NAME_BITS):016x}"
        self._pipeline.hear(connection)
        connection.prepare_threshold = _PREPARE_AFTER if self._prepares else None
        self._transformer = Transformer.from_context(connection)

    @property
    def alive(self) -> bool:
        # The first look reads what the server said before it hung up, the second one sees that it did.
        return super().alive and super().alive

    # transactions

    async def begin(self, how: str) -> None:
        """Begin a caller's transaction, marked with a savepoint."""
        texts = [how, f"SAVEPOINT {self._mark}"]
        queries = [self._utility(text) for text in texts]
        if self._local is not None:
            queries.insert(1, self._local)
        self._block = True
        try:
            await self._ask(queries, texts)
        except errors.InvalidSqlStatementName:
            # The last caller has dropped what was prepared, from inside a function.
            self.drop()
            raise
        if self.connection.closed:
            raise psycopg.OperationalError("the session could not be reset")
        self._begun = self._marked = True
        self._used = False

    async def _ask(self, queries: Sequence[WireQuery], texts: Sequence[str]) -> list[PGresult]:
        self._used = True
        # While something of ours is under way the lock is ours, and more may follow in the same round trip.
        locks = self._pipeline.quiet
        lock = self.connection.lock
        if locks:
            await self._acquire(self._answer_seconds)
        try:
            return await super()._ask(queries, texts)
        finally:
            if locks:
                # Not before it was answered, even if the caller does not wait for that any more.
                self._pipeline.when_quiet(lock.release)

    async def _acquire(self, seconds: float) -> None:
        """Wait for what psycopg is doing on the connection."""
        lock = self.connection.lock
        if not lock.locked():
            await lock.acquire()
        else:
            try:
                async with asyncio.timeout(seconds):
                    await lock.acquire()
            except TimeoutError:
                raise StoreError(
                    f"a statement or stream on the lent connection was not finished within {seconds:g} s"
                ) from None
        if self._pgconn.status == ConnStatus.OK and self._pgconn.pipeline_status != PipelineStatus.OFF:
            lock.release()
            raise StoreError("the lent connection is inside connection.pipeline(); leave that block first")

    def share(self) -> AsyncConnection[Any]:
        """Lend the driver's connection, inside the transaction."""
        self._lent = self._used = True
        return self.connection

    async def commit(self, *last: Named) -> None:
        """Commit, if the transaction is still the one that was begun; see ``Wire.commit``.

        A caller that is cancelled while it waits leaves the COMMIT alone, which is never cancelled on the server.
        """
        if self._given_up:
            raise StoreError("a statement that was given up had been carried out; nothing was committed")
        if not self._begun:
            await super().commit(*last)
            return
        texts = [f"RELEASE SAVEPOINT {self._mark}", *(SQL[name] for name, _ in last), COMMIT]
        ours = [self._last_query(*one) for one in last]
        queries = [self._utility(texts[0]), *ours, self._utility(COMMIT)]
        # Settings and the like that an ordinary caller leaves are removed in the same round trip.
        resetting = self._resetting if self._keeps_plans else []
        lock = self.connection.lock
        await self._acquire(self._answer_seconds)
        try:
            self._say("before", texts)
            results = await self._answered(self._pipeline.send(queries, resetting))
        finally:
            self._pipeline.when_quiet(lock.release)
        self._say("after", texts)
        if results[len(queries) - 1].command_status != _COMMITTED:
            raise StoreError(FAILED_BEFORE)
        self._block = False
        self._is_reset = all(result.status in _DONE for result in results[len(queries) :]) if resetting else False

    async def _answered(self, answer: asyncio.Future[Answer]) -> Answer:
        """Wait for the answer to a COMMIT; a caller that is cancelled still waits for a while, so that it is known."""
        self._committing = True
        try:
            return await asyncio.shield(answer)
        except psycopg.Error as error:
            # An answer that says no: nothing is being committed any more.
            self._committing = self.connection.closed
            # Unless it was the first that failed, for the reason of an earlier statement, the savepoint was there.
            self._marked = is_adrift(error)
            raise
        except asyncio.CancelledError:
            await asyncio.wait([answer], timeout=COMMIT_SECONDS)
            answer.add_done_callback(overlook)
            raise

    def _utility(self, text: str) -> WireQuery:
        return WireQuery(text.encode(), name=_prepared_as(text) if self._keeps_plans else None)

    def _last_query(self, name: str, parameters: Mapping[str, Any]) -> WireQuery:
        # Nothing of the caller's comes after these, so they may say how they are planned, and keep that plan.
        return OURS[name].query(parameters, prepared=self._keeps_plans)

    def _query(self, name: str, parameters: Mapping[str, Any]) -> WireQuery:
        return OURS[name].query(parameters, prepared=name in self._prepared and self._keeps_plans)

    @property
    def _keeps_plans(self) -> bool:
        """Whether what was prepared on this session can be relied on."""
        return self._prepares and not (self._tainted or self._lent)

    async def rollback(self) -> None:
        """Leave no transaction open, if need be by closing the connection; never raises for a lost one.

        Whatever is under way is cancelled on the server, except a COMMIT.
        Raises ``TransactionEndedError`` when the caller had ended the transaction itself.
        """
        self._tainted = True
        try:
            async with asyncio.timeout(ROLLBACK_SECONDS):
                await self._interrupt()
                ended = await self._undo()
        except (psycopg.Error, StoreError, TimeoutError):
            await self.close()
            return
        if ended:
            raise TransactionEndedError(ENDED)

    async def _interrupt(self) -> None:
        """Cancel what runs on the server, so that its locks are free and its caller gets an answer."""
        # A statement may be under way although no caller waits for it any more, after a second cancellation.
        active = self._pgconn.transaction_status == TransactionStatus.ACTIVE
        if active and not self._committing:
            with suppress(psycopg.Error):
                await self.connection.cancel_safe(timeout=CANCEL_SECONDS)

    async def _undo(self) -> bool:
        """Roll back; return whether the transaction was no longer the one that was begun."""
        lock = self.connection.lock
        if self._pipeline.quiet:
            await self._acquire(ROLLBACK_SECONDS)
            free = lock.release
        else:
            free = _nothing
        try:
            if self._pipeline.quiet and self._pgconn.transaction_status == TransactionStatus.ACTIVE:
                # Such as a COPY that was begun and left.
                raise psycopg.OperationalError("a statement was left unfinished")
            return await self._roll_back()
        finally:
            self._pipeline.when_quiet(free)

    async def _roll_back(self) -> bool:
        # Both at once: between two requests the lock may go to a statement that waits for it.
        marked = self._marked and self._block and not self._committing
        mark = self._pipeline.send([WireQuery(f"ROLLBACK TO SAVEPOINT {self._mark}".encode())]) if marked else None
        self._say("before", [ROLLBACK])
        back = self._pipeline.send([_ROLLBACK])
        if mark is not None:
            mark.add_done_callback(overlook)
        await back
        self._say("after", [ROLLBACK])
        self._block = False
        # Answers come in their order, so this one has come.
        error = None if mark is None else mark.exception()
        return isinstance(error, psycopg.Error) and has_ended(error)

    # statements of the caller's

    async def execute(self, statement: CallersQuery, parameters: Parameters = ()) -> list[Row]:
        """Run a statement of the caller's."""
        if not self.connection.lock.locked() and not self.alive:
            raise StoreUnavailableError("the connection was lost; the statement was not sent, nothing was committed")
        first, self._used = not (self._used or self._running), True
        self._running += 1
        try:
            return await self._run(statement, parameters, None)
        except asyncio.CancelledError:
            # It was done before the cancel reached the server; committed, it would be a statement without a caller.
            self._given_up |= self._pgconn.transaction_status == TransactionStatus.INTRANS
            raise
        except psycopg.Error as error:
            self._tainted = True
            if not is_stale_plan(error) or _is_execute(statement):
                raise
            self.plans_changed = True
            if not first or self._running > 1:
                raise StoreUnavailableError(
                    "a table was changed under a prepared statement, which is forgotten now; "
                    "nothing was committed, try again"
                ) from error
            # Nothing was done yet, and the statement was not begun: it only lost its plan.
            await self._ask([WireQuery(f"ROLLBACK TO SAVEPOINT {self._mark}".encode())], [])
            return await self._run(statement, parameters, False)
        finally:
            self._running -= 1

    async def _run(self, statement: CallersQuery, parameters: Parameters, prepare: bool | None) -> list[Row]:
        said = [statement if isinstance(statement, str) else repr(statement)]
        connection = self.connection
        cursor = connection.cursor(row_factory=tuple_row)
        self._say("before", said)
        await cursor.execute(statement, parameters or None, prepare=prepare)  # type: ignore[arg-type]
        if cursor.pgresult is None:
            # Inside connection.pipeline(), where the answer is still to be fetched.
            async with connection.pipeline():
                pass
        self._say("after", said)
        rows: list[Row] = await cursor.fetchall() if cursor.description else []
        more: bool | None = True
        while more:
            self._tainted |= _FORGETS.match(cursor.statusmessage or "") is not None
            more = cursor.nextset()
        return rows

    # the next caller

    @property
    def clean(self) -> bool:
        """Whether nothing is under way and no transaction open, so that it can be given to the next caller."""
        return self._idle and not self._running and not self.connection.lock.locked()

    def reset(self) -> None:
        """Let the session be reset, without waiting for it: what is sent next comes after it."""
        if not self._begun:
            # Only statements of our own were run, which leave nothing.
            return
        connection = self.connection
        assert isinstance(connection, CallersConnection)
        if connection.was_cancelled:
            self.drop()
            return
        wiped = not self._is_reset
        self._begun = self._marked = self._tainted = self._lent = self._is_reset = False
        self._given_up = self._committing = False
        if wiped:
            self._rewrap()
            self._pipeline.forget()
        if wiped and self._prepares:
            # Everything there is, prepared statements too; a pipeline of its own, as the server wants it.
            self._pipeline.send([_DISCARD]).add_done_callback(self._must_succeed)
            if self._settings is not None:
                self._pipeline.send([self._settings]).add_done_callback(self._must_succeed)

    def _must_succeed(self, answer: asyncio.Future[Answer]) -> None:
        if not answer.cancelled() and answer.exception() is not None:
            self.drop()

    def drop(self) -> None:
        """Close the connection at once."""
        self._pipeline.stop()

    async def close(self) -> None:
        self.drop()


_COMMITTED = b"COMMIT"
_DONE = frozenset({ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK})
_ROLLBACK, _DISCARD = WireQuery(ROLLBACK.encode()), WireQuery(b"DISCARD ALL")
_RESETTING = [WireQuery(text.encode(), name=_prepared_as(text)) for text in _RESET]


def _nothing() -> None:
    """Do nothing."""


def _is_execute(statement: CallersQuery) -> bool:
    """Whether the caller prepared the statement by itself: its plans are its own business."""
    text = statement if isinstance(statement, str) else statement.decode() if isinstance(statement, bytes) else ""
    return text.lstrip()[:7].upper() == "EXECUTE"
