"""The databases the contenders meet in: a fresh one for every measure, and the same table for handlers that write."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import apsw
import psycopg

from onefold.testing.servers import PostgresServer

_EFFECT = "CREATE TABLE effect (seq BIGINT NOT NULL PRIMARY KEY, note TEXT NOT NULL)"
_SCHEME = "sqlite:///"
_BUSY_MILLISECONDS = 30_000


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


class Engine(AbstractContextManager["Engine"], Protocol):
    """Where databases come from."""

    name: str

    def create(self) -> str:
        """Make an empty database but for the handlers' own table, and return its URL."""
        ...

    def calm(self, url: str) -> None:
        """Finish what filling the database left to do, so that it is not paid for by whoever drains."""
        ...

    def effects(self, url: str) -> int:
        """How many rows the handlers wrote."""
        ...

    def drop(self, url: str) -> None: ...

    def settings(self) -> str:
        """Return version and durability, for the report."""
        ...


class SQLite:
    """Files in the directory of the benchmark."""

    name = "sqlite"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The files go with their directory."""

    def create(self) -> str:
        url = f"{_SCHEME}{self._directory / f'{next(self._numbers)}.db'}"
        self._execute(url, _EFFECT)
        return url

    def calm(self, url: str) -> None:
        self._execute(url, "PRAGMA wal_checkpoint(TRUNCATE)")

    def effects(self, url: str) -> int:
        return int(self._execute(url, "SELECT count(*) FROM effect")[0][0])

    def drop(self, url: str) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(url.removeprefix(_SCHEME) + suffix).unlink(missing_ok=True)

    def settings(self) -> str:
        return f"SQLite {apsw.sqlite_lib_version()}, WAL, synchronous=FULL"

    def _execute(self, url: str, statement: str) -> list[tuple[Any, ...]]:
        connection = connect_sqlite(url)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()


class Postgres:
    """A private server, as it comes: fsync and synchronous_commit are on."""

    name = "postgres"

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self._server = self._stack.enter_context(PostgresServer())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def create(self) -> str:
        url = self._server.create_database(f"bench_{next(self._numbers)}")
        self._execute(url, _EFFECT)
        return url

    def calm(self, url: str) -> None:
        self._execute(url, "ANALYZE")
        self._execute(url, "CHECKPOINT")

    def effects(self, url: str) -> int:
        return int(self._execute(url, "SELECT count(*) FROM effect")[0][0])

    def drop(self, url: str) -> None:
        self._server.drop_database(url.rpartition("/")[2])

    def settings(self) -> str:
        version = self._execute(self._server.url(), "SHOW server_version")[0][0]
        return f"PostgreSQL {version}, psycopg {psycopg.__version__}, fsync and synchronous_commit on"

    def _execute(self, url: str, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []
