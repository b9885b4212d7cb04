"""SQLite through the interpreter's own module, for programs that open the same file with it themselves."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onefold.errors import StoreError
from onefold.store.sqlite.drivers import Check, Row, Trace, Wait, is_busy

VERSION = sqlite3.sqlite_version_info

#: All of the store's statements, and as many of the caller's, stay compiled.
_STATEMENTS_MAX = 512
#: Nothing but white space, semicolons and comments.
_BLANK = re.compile(r"(?>[\s;]|--[^\n]*+|/\*.*?(?:\*/|\Z))*+", re.DOTALL)


def connect(path: str, *, trace: Trace | None = None, wait_seconds: float = 0) -> Connection:
    """Open the file."""
    connection = sqlite3.connect(
        path,
        timeout=wait_seconds,
        # Transactions are begun and ended by statements, never by the module.
        isolation_level=None,
        # One thread uses it at a time, but not always the same.
        check_same_thread=False,
        factory=Connection if trace is None else _Traced,
        cached_statements=_STATEMENTS_MAX,
    )
    if isinstance(connection, _Traced):
        connection.trace = trace
    return connection


class Connection(sqlite3.Connection):
    """A connection of the module with the methods that the store needs of every library."""

    sees_dangling = False
    _wait: Wait | None = None

    def run_each(self, statements: str, parameters: Any, check: Check) -> list[Row]:
        each = list(_split(statements))
        if len(each) > 1 and parameters and not isinstance(parameters, Mapping):
            raise StoreError(
                "with driver='sqlite3' several statements in one call cannot share positional parameters; name the "
                "parameters (:name), or run one statement per call"
            )
        rows: list[Row] = []
        for statement in each:
            check(statement)
            rows += self.execute(statement, parameters).fetchall()
        return rows

    def begin(self) -> None:
        self._waiting_for("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._waiting_for("COMMIT")

    def wait_with(self, wait: Wait) -> None:
        self._wait = wait

    def _waiting_for(self, statement: str) -> None:
        """Run a statement that can be repeated when it found the lock taken."""
        looks = 0
        while True:
            try:
                self.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or self._wait is None or not self._wait(looks):
                    raise
                looks += 1

    def total_changes(self) -> int:  # type: ignore[override]
        return _total_changes(self)

    def changes(self) -> int:
        return self._number("SELECT changes()")

    def last_insert_rowid(self) -> int:
        return self._number("SELECT last_insert_rowid()")

    def pragma(self, name: str) -> Any:
        row = self.execute(f"PRAGMA {name}").fetchone()
        return None if row is None else row[0]

    def close(self, force: bool = False) -> None:
        super().close()

    def has_dangling(self) -> bool:
        return False

    def become_writer(self) -> None:
        # The module cannot call back when a lock is taken, so ``begin`` and ``commit`` repeat their statements; inside
        # a transaction no lock is taken any more.
        self.execute("PRAGMA busy_timeout = 0")

    def empty_log(self) -> None:
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _number(self, statement: str) -> int:
        number: int = self.execute(statement).fetchone()[0]
        return number


def _total_changes(connection: sqlite3.Connection) -> int:
    """Read the attribute that the method of the same name hides."""
    number: int = sqlite3.Connection.total_changes.__get__(connection)
    return number


class _Traced(Connection):
    """Tells a test of every statement before and after it."""

    trace: Trace | None = None

    def execute(self, statement: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self.trace is not None:
            self.trace("before", statement)
        cursor = super().execute(statement, parameters)
        if self.trace is not None:
            self.trace("after", statement)
        return cursor

    def executemany(self, statement: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        if self.trace is not None:
            self.trace("before", statement)
        cursor = super().executemany(statement, parameters)
        if self.trace is not None:
            self.trace("after", statement)
        return cursor


def _split(statements: str) -> Iterator[str]:
    """Split at semicolons that end a statement, as SQLite's own scanner sees them."""
    start = position = 0
    while (position := statements.find(";", position) + 1) > 0:
        if sqlite3.complete_statement(statements[start:position]):
            yield statements[start:position]
            start = position
    if not _BLANK.fullmatch(statements, start):
        yield statements[start:]
