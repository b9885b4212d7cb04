"""The databases of the contenders: a new one for every measure, with the same table for handlers that write."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import apsw
import psycopg

from onefold.testing.servers import PostgresServer

_EFFECT = "CREATE TABLE effect (seq BIGINT NOT NULL PRIMARY KEY, note TEXT NOT NULL)"
_SCHEME = "sqlite:///"
_BUSY_MILLISECONDS = 30_000
#: Where the index of SQLite's log has the number of commits, the size of a page, and the number of pages in the log;
#: and how many bytes the log has for each page besides the page: https://sqlite.org/walformat.html
_LOG_INDEX = struct.Struct("=8xI2xHI")
FRAME_HEADER_BYTES = 24
PAGE_BYTES = 4096


def connect_sqlite(url: str) -> apsw.Connection:
    """Open the file as durably as onefold does."""
    connection = apsw.Connection(url.removeprefix(_SCHEME))
    connection.set_busy_timeout(_BUSY_MILLISECONDS)
    connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL").fetchall()
    return connection


def insert_effect(url: str) -> str:
    """Return the statement of a handler that writes, in the dialect of the store."""
    values = "?, ?" if url.startswith(_SCHEME) else "%s, %s"
    return f"INSERT INTO effect (seq, note) VALUES ({values})"


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How many commits have written to the engine's log, and how many bytes are in it."""

    commits: int
    size: int

    def since(self, before: LogPosition) -> tuple[int, int]:
        """Return commits and bytes since an earlier position; SQLite's log begins anew once it was copied back."""
        size = self.size - before.size
        return self.commits - before.commits, size if size >= 0 else self.size


class Engine(AbstractContextManager["Engine"], Protocol):
    """A source of empty databases."""

    name: str
    #: Environment variables for the contenders' processes.
    environment: dict[str, str]

    def create(self) -> str:
        """Make a database that is empty except for the handlers' table, and return its URL."""
        ...

    def calm(self, url: str) -> None:
        """Finish the engine's pending work after filling the database, so that the drain does not pay for it."""
        ...

    def tidy(self, url: str) -> None:
        """Leave the tables as a deployment has them after a while: cleaned, and with statistics."""
        ...

    def log_position(self, url: str) -> LogPosition: ...

    def execute(self, url: str, statement: str) -> list[tuple[Any, ...]]: ...

    def load(self, url: str, statements: Iterable[str]) -> None:
        """Execute statements that write very much, each in its own commit, which need not be durable at once."""
        ...

    def drop(self, url: str) -> None: ...

    def settings(self) -> str:
        """Return version and durability, for the report."""
        ...


class SQLite:
    """Files in the directory of the benchmark, each in a directory of its own, where peers may put theirs."""

    name = "sqlite"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self.environment = {"TMPDIR": str(directory)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the files go with their directory."""

    def create(self) -> str:
        directory = self._directory / f"sqlite-{next(self._numbers)}"
        directory.mkdir()
        url = f"{_SCHEME}{directory / 'store.db'}"
        self.execute(url, _EFFECT)
        return url

    def calm(self, url: str) -> None:
        self.execute(url, "PRAGMA wal_checkpoint(TRUNCATE)")

    def tidy(self, url: str) -> None:
        """Empty the log; there is nothing to clean, and onefold keeps no statistics."""
        self.calm(url)

    def log_position(self, url: str) -> LogPosition:
        """Read the log's index, which is a file beside the database."""
        with Path(f"{url.removeprefix(_SCHEME)}-shm").open("rb") as index:
            commits, page, frames = _LOG_INDEX.unpack(index.read(_LOG_INDEX.size))
        return LogPosition(commits, frames * (page + FRAME_HEADER_BYTES))

    def drop(self, url: str) -> None:
        shutil.rmtree(Path(url.removeprefix(_SCHEME)).parent, ignore_errors=True)

    def settings(self) -> str:
        return f"SQLite {apsw.sqlite_lib_version()}, WAL, synchronous=FULL"

    def execute(self, url: str, statement: str) -> list[tuple[Any, ...]]:
        connection = connect_sqlite(url)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def load(self, url: str, statements: Iterable[str]) -> None:
        connection = connect_sqlite(url)
        try:
            connection.execute("PRAGMA synchronous = OFF; PRAGMA cache_size = -200000")
            for statement in statements:
                connection.execute(statement)
        finally:
            connection.close()


class Postgres:
    """A private server with default settings: fsync and synchronous_commit are on."""

    name = "postgres"

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._numbers = itertools.count()
        self._directory = directory

    def __enter__(self) -> Self:
        self._server = self._stack.enter_context(PostgresServer())
        # A peer makes its schema with psql.
        path = f"{self._server.binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self.environment = {"TMPDIR": str(self._directory), "PATH": path}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def create(self) -> str:
        url = self._server.create_database(f"bench_{next(self._numbers)}")
        self.execute(url, _EFFECT)
        return url

    def calm(self, url: str) -> None:
        self.execute(url, "ANALYZE")
        self.execute(url, "CHECKPOINT")

    def tidy(self, url: str) -> None:
        self.execute(url, "VACUUM ANALYZE")
        self.execute(url, "CHECKPOINT")

    def log_position(self, url: str) -> LogPosition:
        """Ask the server, for all of its databases; the next transaction that writes gets the next number."""
        commits, size = self.execute(
            url,
            "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, "
            "(pg_current_wal_insert_lsn() - '0/0')::bigint",
        )[0]
        return LogPosition(commits, size)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Keep checkpoints and automatic cleaning out of what the log is counted for."""
        url = self._server.url()
        # The first change of a page after a checkpoint writes all of it; the next checkpoint is minutes away.
        self.execute(url, "CHECKPOINT")
        self._set_cleaning(url, "off")
        try:
            yield
        finally:
            self._set_cleaning(url, "on")

    def _set_cleaning(self, url: str, to: str) -> None:
        self.execute(url, f"ALTER SYSTEM SET autovacuum = {to}")
        self.execute(url, "SELECT pg_reload_conf()")

    def drop(self, url: str) -> None:
        self._server.drop_database(url.rpartition("/")[2])

    def settings(self) -> str:
        version = self.execute(self._server.url(), "SHOW server_version")[0][0]
        return f"PostgreSQL {version}, psycopg {psycopg.__version__}, fsync and synchronous_commit on"

    def execute(self, url: str, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def load(self, url: str, statements: Iterable[str]) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            for statement in statements:
                connection.execute(statement)

    def log_statements(self, url: str) -> None:
        """Log every statement of sessions that connect to this database from now on."""
        self.execute(url, f"ALTER DATABASE {url.rpartition('/')[2]} SET log_statement = 'all'")

    def logged_statements(self) -> int:
        """Count statements in the log, which is exact, while the server's counters count transactions."""
        data: str = self.execute(self._server.url(), "SHOW data_directory")[0][0]
        with (Path(data).parent / "log").open(errors="replace") as log:
            return sum("LOG:  statement: " in line or "LOG:  execute " in line for line in log)
