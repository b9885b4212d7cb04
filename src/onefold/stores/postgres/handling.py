"""A connection for callers: their own statements beside ours in one transaction, and the driver's own ways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, abc
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from onefold.stores.postgres.faults import is_gone
from onefold.stores.postgres.statements import OURS, Query, translated_statement
from onefold.stores.postgres.wire import Named, Parameters, Row, Wire, load_rows, overlook

#: Makes another connection in place of one that was lost before anything was done on it.
Renew = Callable[[], Awaitable[AsyncConnection[Any]]]

#: As with psycopg: a caller's statement is prepared when it was run this often.
_PREPARE_AFTER = 5
#: So many of them on one connection; whoever has more builds them from strings.
_PREPARED_MAX = 100


class HandlerWire(Wire):
    """A pooled connection.

    Its transaction begins together with the first statement, in one round trip.
    """

    #: Whether statements may be prepared; behind a transaction pooler they may not.
    prepares = True

    def _use(self, connection: AsyncConnection[Any]) -> None:
        super()._use(connection)
        self._in_transaction = False
        self._shared = False
        self._renew: Renew | None = None
        self._begin = ""
        self._callers: dict[tuple[bytes, tuple[int, ...]], _Use] = {}

    # transactions

    async def begin(self, renew: Renew, how: str) -> None:
        """Let a transaction begin with the next statement, on another connection if this one turns out to be lost."""
        # Ours until the driver's connection is shared: whoever gets that waits for what is under way.
        await self.connection.lock.acquire()
        self._in_transaction = True
        self._renew = renew
        self._begin = how

    @property
    def _opening(self) -> bool:
        """Whether the next statement is the first of its transaction."""
        return self._in_transaction and self._idle

    async def _ask(self, queries: Sequence[Query], texts: Sequence[str]) -> list[PGresult]:
        if not self._opening:
            if not self._shared:
                return await super()._ask(queries, texts)
            await self.connection.lock.acquire()
            try:
                return await super()._ask(queries, texts)
            finally:
                # Not before it was answered, even if nobody waits for that any more.
                self._exchange.when_quiet(self.connection.lock.release)
        try:
            return (await super()._ask([Query(self._begin.encode()), *queries], [self._begin, *texts]))[1:]
        except psycopg.Error as error:
            if self._shared or self._renew is None or not is_gone(error, self.connection):
                raise
        # Whatever became of it, it was never committed.
        await self._replace(self._renew)
        return await self._ask(queries, texts)

    async def _replace(self, renew: Renew) -> None:
        how = self._begin
        await self.close()
        connection = await renew()
        if not self._in_transaction:
            # Ended meanwhile, as by its limit: what comes too late must not begin another in its place.
            await connection.close()
            raise psycopg.OperationalError("the transaction was ended while its connection was lost")
        self._use(connection)
        await self.begin(renew, how)

    def share(self) -> AsyncConnection[Any]:
        """Return the driver's connection, inside the transaction if there is one."""
        if self._in_transaction and not self._shared:
            if self._opening:
                self._exchange.send([Query(self._begin.encode())]).add_done_callback(overlook)
            self._exchange.when_quiet(self.connection.lock.release)
        self._shared = True
        return self.connection

    async def commit(self, *last: Named) -> None:
        if last or not self._opening:
            await super().commit(*last)

    def _last_query(self, name: str, parameters: Mapping[str, Any]) -> Query:
        # Nothing of the caller's comes after these, so they may say how they are planned, and keep that plan.
        return OURS[name].query(parameters, prepared=self.prepares)

    async def end(self) -> None:
        """Leave the connection to the next caller, or closed."""
        if not self._idle:
            await self.rollback()
        if self._in_transaction and not self._shared:
            self.connection.lock.release()
        self._in_transaction = self._shared = False

    # statements of the caller's

    async def execute(self, statement: str, parameters: Parameters = ()) -> list[Row]:
        """Run a statement of the caller's, as the driver would."""
        prepared = self._callers_query(statement, parameters)
        if prepared is None:
            return await self._execute_by_driver(statement, parameters)
        query, transformer = prepared
        (result,) = await self._ask([query], [statement])
        return load_rows(transformer, result)

    async def _execute_by_driver(self, statement: str, parameters: Parameters) -> list[Row]:
        cursor = self.share().cursor(row_factory=tuple_row)
        self._say("before", [statement])
        await cursor.execute(statement, parameters or None)
        self._say("after", [statement])
        return await cursor.fetchall() if cursor.description else []

    def _callers_query(self, statement: str, parameters: Parameters) -> tuple[Query, abc.Transformer] | None:
        """Return a caller's statement for the short way; None for what is unusual, which the driver knows to handle."""
        translated = translated_statement(statement) if parameters else None
        values = translated and translated.arrange(parameters)
        if translated is None or values is None:
            return None
        transformer = Transformer.from_context(self.connection)
        data = transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
        types = tuple(transformer.types or ())
        name = self._name_of(translated.text, types)
        return Query(translated.text, data, transformer.formats, types, name, result_format=0), transformer

    def _name_of(self, text: bytes, types: tuple[int, ...]) -> bytes | None:
        """Return the name under which a caller's statement is prepared, once it is worth it."""
        use = self._callers.get((text, types))
        if use is None:
            if not self.prepares or len(self._callers) >= _PREPARED_MAX:
                return None
            use = self._callers[text, types] = _Use(b"onefold_caller_%d" % len(self._callers))
        use.times += 1
        return use.name if use.times > _PREPARE_AFTER else None


@dataclass(slots=True)
class _Use:
    """How often a caller's statement was run on this connection, and the name it is prepared under."""

    name: bytes
    times: int = 0
