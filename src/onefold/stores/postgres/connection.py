"""Connecting to PostgreSQL safely, and the one place through which every statement goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from onefold.errors import ConfigurationError, StoreError, StoreUnavailableError
from onefold.stores.postgres.arrays import teach, texts
from onefold.stores.postgres.faults import is_lost
from onefold.stores.sql import load_statements

SQL = load_statements("onefold.stores.postgres")

#: Called before and after every statement, with its text; only tests use it.
Trace = Callable[[Literal["before", "after"], str], None]
Pooler = Literal["session", "transaction"]
Row = tuple[Any, ...]

#: Whatever the server's default is: the rules for keys and fences are made for this level.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_READING = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"

#: How a dead network or server is noticed; what the URL says wins.
_NETWORK = {
    "application_name": "onefold",
    "connect_timeout": "5",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    # Milliseconds that sent data may stay unacknowledged.
    "tcp_user_timeout": "15000",
}

#: A stopped process must not keep its locks for ever.
_EVERYWHERE = {"idle_in_transaction_session_timeout": "30s"}
#: Our own statements are all meant for an index.  Planned while the tables were still empty they would get none,
#: and a prepared statement keeps its plan.
_CONTROL = {**_EVERYWHERE, "enable_seqscan": "off", "default_transaction_isolation": "read committed"}

Role = Literal["control", "put", "settle", "spare", "handlers", "listen", "migrate"]

SETTINGS: Mapping[Role, Mapping[str, str]] = {
    "control": _CONTROL,
    # One sender who waits for a foreign transaction must not hold up those who share its statement.
    "put": {**_CONTROL, "lock_timeout": "100ms"},
    # What handlers sent is put while settling; a handler's whole transaction may be waited for, no more.
    "settle": {**_CONTROL, "lock_timeout": "3s"},
    # Extending a lease and waking others may be forgotten in a power failure: fences do not depend on them.
    "spare": {**_CONTROL, "synchronous_commit": "off"},
    "handlers": _EVERYWHERE,
    "listen": {},
    "migrate": {},
}

_EXCLUSIVE = ("control", "put", "settle", "spare")
#: These only insert: whatever is in the tables, there is one way to do it.
_PLANNED_ALIKE = frozenset({"put", "put_one", "put_key"})


class Wire:
    """One connection, and the one place through which every statement goes.

    An ``exclusive`` one is used by one caller at a time and keeps its cursor.
    ``prepared`` names those of our statements that are prepared.
    A ``joined`` one is the caller's: nothing is changed on it.
    """

    def __init__(
        self,
        connection: AsyncConnection[Any],
        *,
        trace: Trace | None,
        prepared: Container[str] = (),
        exclusive: bool = False,
        joined: bool = False,
    ) -> None:
        self.connection = connection
        self._trace = trace
        self._prepared = prepared
        self._joined = joined
        self._kept = connection.cursor(row_factory=tuple_row) if exclusive else None

    async def rows(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run one of our own statements."""
        cursor = self._kept or self.connection.cursor(row_factory=tuple_row)
        if self._joined:
            teach(cursor)
        await self._run(cursor, SQL[name], parameters, prepare=name in self._prepared, binary=True)
        return await _rows_of(cursor)

    async def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Run a statement that is not ours, or one of ours without parameters, the way the driver would."""
        cursor = self.connection.cursor(row_factory=tuple_row)
        await self._run(cursor, statement, parameters or None)
        return await _rows_of(cursor)

    async def _run(self, cursor: psycopg.AsyncCursor[Row], statement: str, parameters: Any, **how: Any) -> None:
        if self._trace is not None:
            self._trace("before", statement)
        await cursor.execute(statement, parameters, **how)
        if self._trace is not None:
            self._trace("after", statement)

    async def commit(self) -> None:
        """Commit; raises when the server could only roll back, which it does not call an error."""
        cursor = self.connection.cursor(row_factory=tuple_row)
        await self._run(cursor, COMMIT, None)
        if cursor.statusmessage != COMMIT:
            raise StoreError("a statement in this transaction had failed, so nothing of it was committed")

    async def commit_after(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Run one of our own statements and COMMIT in one round trip; if the statement fails there is no COMMIT."""
        if self._trace is not None:
            self._trace("before", SQL[name])
            self._trace("before", COMMIT)
        async with self.connection.pipeline():
            cursor = self.connection.cursor(row_factory=tuple_row)
            await cursor.execute(SQL[name], parameters, prepare=name in self._prepared, binary=True)
            ending = self.connection.cursor(row_factory=tuple_row)
            await ending.execute(COMMIT)
        if self._trace is not None:
            self._trace("after", SQL[name])
            self._trace("after", COMMIT)
        if ending.statusmessage != COMMIT:
            raise StoreError("a statement in this transaction had failed, so nothing of it was committed")

    async def rollback(self) -> None:
        """Leave no transaction open, if need be by closing the connection; never raises for a lost one."""
        try:
            if self.connection.pgconn.transaction_status != TransactionStatus.IDLE:
                await self.execute(ROLLBACK)
        except psycopg.Error:
            await self.connection.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Commit when the block ends, roll back when it raises."""
        await self.execute(BEGIN)
        try:
            yield
        except BaseException:
            await self.rollback()
            raise
        await self.commit()


async def _rows_of(cursor: psycopg.AsyncCursor[Row]) -> list[Row]:
    # Asking the cursor for its description would make an object for every column.
    result = cursor.pgresult
    return await cursor.fetchall() if result is not None and result.nfields else []


class Connector:
    """Makes connections to one database."""

    def __init__(self, url: str, *, pooler: Pooler, trace: Trace | None) -> None:
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # What the driver says quotes parts of the URL, which may be the password.
            raise ConfigurationError(
                "the PostgreSQL URL cannot be read; write postgresql://user:password@host/database, "
                "with special characters as %XX"
            ) from None
        self.conninfo = make_conninfo("", **{**_NETWORK, **given})
        self.pooler = pooler
        self.trace = trace

    @property
    def prepare_threshold(self) -> int | None:
        """Behind a transaction pooler the next transaction may run elsewhere, where nothing is prepared."""
        return None if self.pooler == "transaction" else 5

    async def connect(self, role: Role) -> Wire:
        """Return a new connection for one purpose."""
        connection = await AsyncConnection.connect(
            self.conninfo, autocommit=True, prepare_threshold=self.prepare_threshold
        )
        try:
            return await self.equip(connection, role)
        except BaseException:
            await connection.close()
            raise

    async def equip(self, connection: AsyncConnection[Any], role: Role) -> Wire:
        """Set what a fresh connection needs for its purpose."""
        teach(connection)
        wire = self.wire(connection, role)
        settings = SETTINGS[role]
        if settings and self.pooler == "session":
            names, values = texts(list(settings)), texts(list(settings.values()))
            await wire.rows("session_settings", {"names": names, "values": values})
        return wire

    def wire(self, connection: AsyncConnection[Any], role: Role, *, joined: bool = False) -> Wire:
        """Return the way to run statements on a connection.

        Handlers' connections keep the server's planner settings, so most plans are made for the tables as they are.
        """
        exclusive = role in _EXCLUSIVE
        prepared: Container[str] = ()
        if self.pooler == "session" and not joined:
            prepared = SQL if exclusive else _PLANNED_ALIKE
        return Wire(connection, trace=self.trace, prepared=prepared, exclusive=exclusive, joined=joined)


def refuse_foreign(connection: Any) -> AsyncConnection[Any]:
    """Return a caller's connection if its transaction can be joined; name what is accepted otherwise."""
    if not isinstance(connection, AsyncConnection):
        kind = type(connection)
        raise ConfigurationError(
            f"the PostgreSQL store cannot join a {kind.__module__}.{kind.__qualname__}; "
            "give it a psycopg.AsyncConnection with an open transaction"
        )
    if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
        raise ConfigurationError(
            "the psycopg.AsyncConnection is in autocommit mode and has no open transaction to join; "
            "use `async with connection.transaction():` around it"
        )
    return connection


def refuse_lost(error: psycopg.Error, connection: AsyncConnection[Any]) -> None:
    """Turn a lost connection into ``StoreUnavailableError``; errors of the caller's own SQL stay the driver's."""
    if is_lost(error, connection) and error.sqlstate != "25006":
        raise StoreUnavailableError(f"the connection was lost: {error}; nothing was committed") from error
