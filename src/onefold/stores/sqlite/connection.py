"""Opening a SQLite file with the settings the promise rests on, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import apsw
import msgspec

from onefold.clock import Clock, pause, system_random
from onefold.errors import ConfigurationError, StoreError, StoreUnavailableError
from onefold.stores.sqlite.files import damaged
from onefold.stores.sqlite.schema import missing_migrations
from onefold.stores.sqlite.standstill import Standstill

#: Called before and after every statement, with its text; only tests use it.
Trace = Callable[[Literal["before", "after"], str], None]

#: Wait this long for the write lock of another process: longer than any handler's transaction may last, and as long as
#: Python's own driver does.
BUSY_SECONDS_MAX = 5.0
#: Others hold the write lock for a millisecond or so: look again after the first figure, then ever later up to the
#: second, give or take half of it, so that those who wait do not look at the same moment.
_BUSY_PAUSE_SECONDS, _BUSY_PAUSE_SECONDS_MAX = 0.0005, 0.01

#: What reading a damaged row raises: SQLite has no checksums, so damage may show only there.
UNREADABLE = (UnicodeDecodeError, msgspec.DecodeError)
#: After these little is known about the state of a connection: its transaction is given up and another takes its place.
BREAKING = (apsw.IOError, apsw.FullError, apsw.CorruptError, apsw.NotADBError, apsw.CantOpenError, apsw.NoMemError)


class Patience:
    """Waiting for another process's write lock: bounded, a little random, and never where it would block a loop."""

    def __init__(self, clock: Clock, *, allowed: bool) -> None:
        self.allowed = allowed
        self.standstill = Standstill(clock)
        self._waited = 0.0
        self._chance = system_random()

    def __call__(self, looks: int) -> bool:
        self.standstill.refused()
        if not self.allowed:
            return False
        self._waited = self._waited if looks else 0.0
        seconds = min(_BUSY_PAUSE_SECONDS * (1 + looks / 8), _BUSY_PAUSE_SECONDS_MAX) * self._chance.uniform(0.5, 1.5)
        pause(seconds)
        self._waited += seconds
        return not waited_enough(self._waited)


def waited_enough(seconds: float) -> bool:
    """Whether that was long enough to wait for another process's write lock."""
    return seconds >= BUSY_SECONDS_MAX


def open_connection(path: str, *, synchronous: str, patience: Patience, trace: Trace | None = None) -> apsw.Connection:
    """Open the file with the settings the promise rests on, and read them back.

    Raises ``SchemaError`` for a file that is not a sound SQLite database; nothing is ever written over one.
    """
    try:
        connection = apsw.Connection(path)
        try:
            _set_up(connection, path, synchronous, patience)
        except BaseException:
            connection.close(True)
            raise
    except apsw.Error as error:
        raise translated(error, path) from error
    if trace is not None:
        _install(connection, trace)
    return connection


def _set_up(connection: apsw.Connection, path: str, synchronous: str, patience: Patience) -> None:
    connection.set_busy_handler(patience)
    # Otherwise every statement is planned anew whenever a parameter changes, which takes longer than to run it.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    # A database that is not ours is refused before anything about it is changed.
    missing_migrations(connection)
    _turn_on_log(connection, patience)
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA foreign_keys = ON")
    # With the cache at 64 MB a claim of a thousand messages stays in memory.
    connection.execute("PRAGMA cache_size = -65536")
    if path != ":memory:" and connection.pragma("journal_mode") != "wal":
        raise ConfigurationError(f"{path}: SQLite could not turn on write-ahead logging here; use another file system")


def _turn_on_log(connection: apsw.Connection, patience: Patience) -> None:
    """When several processes open a new file at the same moment, SQLite fails for some of them without waiting."""
    looks = 0
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except apsw.BusyError:
            if not patience(looks):
                raise
            looks += 1


def _install(connection: apsw.Connection, trace: Trace) -> None:
    def report(event: dict[str, Any]) -> None:
        trace("before" if event["code"] == apsw.SQLITE_TRACE_STMT else "after", event["sql"])

    connection.trace_v2(apsw.SQLITE_TRACE_STMT | apsw.SQLITE_TRACE_PROFILE, report)


def translated(error: Exception, path: str) -> Exception:
    """Return the error of ours that says what a failure of SQLite means for the caller."""
    if isinstance(error, UNREADABLE):
        return damaged(path)
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreUnavailableError(f"{path}: another process held the write lock for too long; nothing was written")
    if isinstance(error, apsw.FullError):
        return StoreUnavailableError(f"{path}: the disk is full; nothing was written.  Free space, then try again")
    if isinstance(error, apsw.IOError | apsw.CantOpenError | apsw.NoMemError):
        return StoreUnavailableError(f"{path}: {error}; nothing was half-written, trying again is safe")
    if isinstance(error, apsw.ReadOnlyError):
        return StoreError(f"{path}: the file or its directory is read-only")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return damaged(path)
    if isinstance(error, apsw.Error):
        return StoreError(f"{path}: {error}")
    return error
