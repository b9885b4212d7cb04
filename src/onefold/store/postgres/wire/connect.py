"""Connecting to PostgreSQL: safely, each connection with what its purpose needs, and never all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from typing import Any, Literal, TypeVar

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from onefold.clock import SystemClock, system_random
from onefold.errors import ConfigurationError, SessionLostError
from onefold.store.postgres.wire.arrays import texts
from onefold.store.postgres.wire.errors import is_gone
from onefold.store.postgres.wire.handler_wire import HandlerWire
from onefold.store.postgres.wire.statements import OURS, SQL, WireQuery
from onefold.store.postgres.wire.wire import Named, Trace, Wire

Pooler = Literal["session", "transaction"]
AnyWire = TypeVar("AnyWire", bound=Wire)

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

#: Our statements are written in it; with another one, from the URL or the environment, their texts would be misread.
_ENCODING = {"client_encoding": "UTF8"}

#: A stopped process must not keep its locks for ever.
_EVERYWHERE = {
    "idle_in_transaction_session_timeout": "30s",
    # That a commit was not replicated is only a warning; a role's own setting must not silence it.
    "client_min_messages": "warning",
}
#: Our own statements are all meant for an index.  Planned while the tables were still empty they would get none,
#: and a prepared statement keeps its plan.
#:
#: Names in our statements mean what the server calls so, and not what some role has made in another schema.
#: Statements that run on a caller's connection, or behind a transaction pooler, cannot rely on it: they write out
#: ``pg_catalog`` before functions, and use operators only with types for which the server has one.
_CONTROL = {
    **_EVERYWHERE,
    "search_path": "pg_catalog, pg_temp",
    "enable_seqscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "default_transaction_isolation": "read committed",
}

#: A row that another transaction has locked must not hold up the messages that are settled with it.  Most transactions
#: are over in this time, and it is short beside a lease.
_SETTLE_LOCK_TIMEOUT = "250ms"
#: The messages that handlers have sent are put while settling: their keys may be held by another handler's transaction.
_PATIENT_LOCK_TIMEOUT = "3s"

Role = Literal["control", "put", "settle", "record", "spare", "handlers", "listen", "migrate"]

SETTINGS: Mapping[Role, Mapping[str, str]] = {
    "control": _CONTROL,
    # A sender that waits for a foreign transaction must not hold up the senders that share its statement.
    "put": {**_CONTROL, "lock_timeout": "100ms"},
    "settle": {**_CONTROL, "lock_timeout": _SETTLE_LOCK_TIMEOUT},
    # An owner's line waits for another's transaction on the same row, but no longer than a handler's usually takes.
    "record": {**_CONTROL, "lock_timeout": _PATIENT_LOCK_TIMEOUT},
    # Extensions and notifications may be forgotten in a power failure: fences do not depend on them.
    "spare": {**_CONTROL, "synchronous_commit": "off"},
    "handlers": _EVERYWHERE,
    "listen": {},
    # Views and functions that are made here keep the meaning that names have now.
    "migrate": {"search_path": "pg_catalog, pg_temp"},
}

#: Lets the rest of a transaction of the role "settle" wait for other transactions as long.
BE_PATIENT: Named = ("local_settings", {"names": texts(["lock_timeout"]), "values": texts([_PATIENT_LOCK_TIMEOUT])})

#: A statement of ours that is not answered within this time will not be: together with the time it takes to give up
#: connecting, this keeps no claim, extension or settle waiting for longer than a lease lasts.
ANSWER_SECONDS = 10.0
#: A put may wait for a foreign transaction that holds its key.
_ANSWER_SECONDS_HANDLERS = 60.0
#: A migration may wait for another machine's, and rebuild an index.
_ANSWER_SECONDS_MIGRATE = 3_600.0

#: While the server cannot be reached one connection is tried at a time, after a pause that doubles up to the second
#: figure; never regularly, because all clients lost the same server at the same moment.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.02, 1.0

#: These only insert: whatever is in the tables, there is one way to do it.
_PLANNED_ALIKE = frozenset({"put", "put_one", "put_key"})

#: The newest timeline that this process has seen, by the identifier that all servers of one history have in common.
_newest_timeline: dict[str, int] = {}

_machine = SystemClock()
_chance = system_random()


def _refuse_misread(url: str) -> None:
    """Refuse a URL whose password is cut short by a sign in it that should have been written as %XX.

    The rest of the password would be taken for a host or a database, and shown in errors.
    """
    authority, _, path = url.partition("://")[2].partition("/")
    if authority.count("@") > 1 or "@" in path.partition("?")[0]:
        raise psycopg.ProgrammingError


class Connector:
    """Makes connections to one database."""

    def __init__(self, url: str, *, pooler: Pooler, trace: Trace | None) -> None:
        try:
            _refuse_misread(url)
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # The driver's message quotes parts of the URL, which may be the password.
            raise ConfigurationError(
                "the PostgreSQL URL cannot be read; write postgresql://user:password@host/database, "
                "with special characters as %XX"
            ) from None
        self._conninfo = make_conninfo("", **{**_NETWORK, **given, **_ENCODING})
        #: Behind a transaction pooler the next transaction may run elsewhere, where nothing is prepared or set.
        self._prepares = pooler == "session"
        self._trace = trace
        self._failing: psycopg.OperationalError | None = None
        self._pause = 0.0
        self._trial: asyncio.Future[None] | None = None

    async def connect(self, role: Role) -> Wire:
        """Return a new connection for one purpose."""
        return await self._equip(Wire, await self._dial(), role)

    async def connect_handler(self) -> HandlerWire:
        """Return a new connection for callers."""
        wire = await self._equip(HandlerWire, await self._dial(), "handlers")
        wire.be_equipped(prepares=self._prepares, settings=_setting("session_settings", SETTINGS["handlers"]))
        return wire

    async def _dial(self) -> AsyncConnection[Any]:
        """Connect; while the server cannot be reached one tries on behalf of all."""
        if self._failing is None:
            return await self._try()
        if self._trial is not None:
            await asyncio.wait([self._trial])
            if self._failing is not None:
                raise psycopg.OperationalError(str(self._failing))
            return await self._try()
        self._trial = asyncio.get_running_loop().create_future()
        try:
            await _machine.sleep(self._pause * _chance.uniform(0.5, 1.0))
            return await self._try()
        finally:
            self._trial.set_result(None)
            self._trial = None

    async def _try(self) -> AsyncConnection[Any]:
        try:
            connection = await AsyncConnection.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            self._failing = error
            self._pause = min(max(self._pause * 2, _PAUSE_SECONDS), _PAUSE_SECONDS_MAX)
            raise
        self._failing, self._pause = None, 0.0
        return connection

    async def _equip(self, kind: type[AnyWire], connection: AsyncConnection[Any], role: Role) -> AnyWire:
        """Set what a fresh connection needs for its purpose.

        Handlers' connections keep the server's planner settings, so most plans are made for the tables as they are.
        """
        exclusive = kind is Wire and role != "listen"
        prepared: Container[str] = ()
        if self._prepares:
            prepared = SQL if exclusive else _PLANNED_ALIKE
        wire = kind(
            connection,
            trace=self._trace,
            prepared=prepared,
            exclusive=exclusive,
            answer_seconds=_ANSWERS.get(role, ANSWER_SECONDS),
            # The next transaction may run in another session, so each sets what it needs.
            local=None if self._prepares else _setting("local_settings", SETTINGS[role]),
        )
        try:
            settings = SETTINGS[role]
            if settings and self._prepares:
                await wire.rows("session_settings", _settings(settings))
            if role != "listen":
                await _refuse_old_primary(wire)
        except BaseException:
            await wire.close()
            raise
        return wire


async def _refuse_old_primary(wire: Wire) -> None:
    """Refuse a server on an older timeline than this process has seen of it: a primary that was replaced and came back.

    Messages that it accepts are in no backup or standby of the primary that took its place.  A process that has never
    seen that one cannot know.
    """
    try:
        ((server, timeline),) = await wire.rows("server_history")
    except (errors.InsufficientPrivilege, errors.UndefinedFunction):
        return  # some hosted servers do not tell
    if timeline is None:
        return  # a standby; what is to be written is refused by itself
    number = int(timeline, 16)
    newest = _newest_timeline.setdefault(server, number)
    if number < newest:
        raise psycopg.OperationalError(
            f"the server is a primary that was replaced and came back: its timeline is {number}, and this program has "
            f"seen {newest}; shut it down, or make it a standby of the new primary"
        )
    _newest_timeline[server] = number


def _settings(settings: Mapping[str, str]) -> dict[str, Any]:
    return {"names": texts(list(settings)), "values": texts(list(settings.values()))}


def _setting(name: str, settings: Mapping[str, str]) -> WireQuery | None:
    return OURS[name].query(_settings(settings), prepared=False) if settings else None


_ANSWERS: Mapping[Role, float] = {"handlers": _ANSWER_SECONDS_HANDLERS, "migrate": _ANSWER_SECONDS_MIGRATE}


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
    if connection.info.encoding != "utf-8":
        raise ConfigurationError(
            f"the psycopg.AsyncConnection has the client encoding {connection.info.encoding}, in which texts of "
            "messages would be misread; connect with client_encoding=UTF8"
        )
    return connection


def refuse_lost(error: psycopg.Error, connection: AsyncConnection[Any]) -> None:
    """Turn a lost connection into ``SessionLostError``; errors of the caller's own SQL stay the driver's."""
    if is_gone(error, connection):
        raise SessionLostError(
            f"the connection was lost while the statement ran: {error}; nothing was committed"
        ) from error
