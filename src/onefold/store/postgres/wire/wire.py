"""Where our own statements go through: on a connection of ours, or on a caller's own that was joined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

import psycopg
from psycopg import AsyncConnection, abc
from psycopg.adapt import Transformer
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from onefold.errors import StoreError
from onefold.store.postgres.wire.arrays import teach
from onefold.store.postgres.wire.pipeline import Answer, Pipeline
from onefold.store.postgres.wire.statements import BEGIN, COMMIT, OURS, ROLLBACK, SQL, WireQuery

#: Called before and after every statement, with its text; only tests use it.
Trace = Callable[[Literal["before", "after"], str], None]
Row = tuple[Any, ...]
Parameters = Sequence[Any] | Mapping[str, Any]
#: A statement of ours by its name, with its parameters.
Named = tuple[str, Mapping[str, Any]]

FAILED_BEFORE = "a statement in this transaction had failed, so nothing of it was committed"

#: A ROLLBACK that gets no answer, because the server is gone: after this long the connection is closed instead.
_ROLLBACK_SECONDS = 5.0


class Speaker(Protocol):
    """Whatever our own statements can be run on."""

    @property
    def connection(self) -> AsyncConnection[Any]: ...

    async def rows(self, name: str, parameters: Mapping[str, Any] = ...) -> list[Row]:
        """Run one of our own statements."""
        ...

    async def rows_of_each(self, statements: Sequence[Named]) -> list[list[Row]]:
        """Run several of our own statements; in one round trip if there is a way."""
        ...


class Wire:
    """A connection of ours.

    An ``exclusive`` one is used for nothing but our own statements, by one caller at a time.
    ``prepared`` names those of our statements that are prepared.
    ``local`` sets what each transaction needs, where sessions cannot keep it: behind a transaction pooler.
    An answer is waited for no longer than ``answer_seconds``: then the connection counts as lost.
    """

    def __init__(
        self,
        connection: AsyncConnection[Any],
        *,
        trace: Trace | None,
        prepared: Container[str],
        exclusive: bool,
        answer_seconds: float,
        local: WireQuery | None = None,
    ) -> None:
        self._trace = trace
        self._local = local
        #: Whether a transaction was begun that is still to be ended.
        self._block = False
        self._prepared = prepared
        self._exclusive = exclusive
        self._answer_seconds = answer_seconds
        self._behind: WireQuery | None = None
        self._use(connection)

    def _use(self, connection: AsyncConnection[Any]) -> None:
        self.connection = connection
        self._pipeline = Pipeline(connection, owned=self._exclusive, answer_seconds=self._answer_seconds)
        self._transformer = Transformer.from_context(connection)

    # statements

    async def rows(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run one of our own statements."""
        return (await self.rows_of_each([(name, parameters or {})]))[0]

    async def rows_of_each(self, statements: Sequence[Named]) -> list[list[Row]]:
        """Run several of our own statements in one round trip; outside of a transaction they are one of their own."""
        results = await self._ask([self._query(*one) for one in statements], [SQL[name] for name, _ in statements])
        return [load_rows(self._transformer, result) for result in results]

    async def script(self, statement: str) -> None:
        """Run one statement of a migration."""
        await self._ask([WireQuery(statement.encode())], [statement])

    def _query(self, name: str, parameters: Mapping[str, Any]) -> WireQuery:
        return OURS[name].query(parameters, prepared=name in self._prepared)

    _last_query = _query

    def send_behind(self, statement: Named) -> None:
        """Let a statement follow right behind the next one, as a transaction of its own; the caller does not wait."""
        self._behind = self._query(*statement)

    async def _ask(self, queries: Sequence[WireQuery], texts: Sequence[str]) -> list[PGresult]:
        self._say("before", texts)
        # Outside of a transaction the statements of one request are one, so what is set there lasts as long.
        local = [] if self._local is None or self._block else [self._local]
        answer = self._pipeline.send([*local, *queries])
        if self._behind is not None:
            behind, self._behind = self._behind, None
            self._pipeline.send([behind]).add_done_callback(overlook)
        results = await answer
        self._say("after", texts)
        return results[len(local) :]

    def _say(self, moment: Literal["before", "after"], texts: Sequence[str]) -> None:
        if self._trace is not None:
            for text in texts:
                self._trace(moment, text)

    # transactions

    @property
    def _idle(self) -> bool:
        """Whether no transaction is open and nothing under way."""
        return self._pipeline.quiet and self.connection.pgconn.transaction_status == TransactionStatus.IDLE

    async def commit(self, *last: Named) -> None:
        """Commit, with the last statements in the same round trip: if one of them fails there is no COMMIT.

        Raises when the server could only roll back, which it does not call an error.
        """
        queries = [self._last_query(*one) for one in last]
        results = await self._ask([*queries, _COMMIT], [*(SQL[name] for name, _ in last), COMMIT])
        if results[-1].command_status != _COMMIT.text:
            raise StoreError(FAILED_BEFORE)
        self._block = False

    async def rollback(self) -> None:
        """Leave no transaction open, if need be by closing the connection; never raises for a lost one."""
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                if not self._idle:
                    await self._ask([_ROLLBACK], [ROLLBACK])
                self._block = False
        except (psycopg.Error, TimeoutError):
            await self.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Commit when the block ends, roll back when it raises, also while it only begins."""
        self._block = True
        try:
            await self._ask([_BEGIN] if self._local is None else [_BEGIN, self._local], [BEGIN])
            yield
        except BaseException:
            await self.rollback()
            raise
        await self.commit()

    # the connection

    @property
    def alive(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return not self.connection.closed and self._pipeline.alive

    async def close(self) -> None:
        self._pipeline.stop()
        await self.connection.close()


_BEGIN, _COMMIT, _ROLLBACK = (WireQuery(text.encode()) for text in (BEGIN, COMMIT, ROLLBACK))


class JoinedWire:
    """A caller's connection: nothing is changed on it, so its own driver runs our statements too."""

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self.connection = connection

    async def rows(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        cursor = self.connection.cursor(row_factory=tuple_row)
        teach(cursor)
        await cursor.execute(SQL[name], parameters, prepare=False, binary=True)
        return await cursor.fetchall() if cursor.description else []

    async def rows_of_each(self, statements: Sequence[Named]) -> list[list[Row]]:
        return [await self.rows(*one) for one in statements]

    async def execute(self, statement: str, parameters: Parameters = ()) -> list[Row]:
        cursor = self.connection.cursor(row_factory=tuple_row)
        await cursor.execute(statement, parameters or None)
        return await cursor.fetchall() if cursor.description else []


def overlook(answer: asyncio.Future[Answer]) -> None:
    """Retrieve the exception of an answer that is not waited for, so that asyncio does not log it."""
    if answer.done() and not answer.cancelled():
        answer.exception()


def load_rows(transformer: abc.Transformer, result: PGresult) -> list[Row]:
    """Return the rows of a result as Python values."""
    if not result.nfields:
        return []
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)
