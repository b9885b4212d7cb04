"""The SQLite libraries the store can run on, behind one small interface.

``apsw`` brings a current SQLite of its own; ``sqlite3`` is the interpreter's own module, for programs whose ORM or web
framework has the same file open: one process must not open one file with two libraries.
A connection is the library's own object with a few methods more, so that a statement costs what it costs there, and
errors are told apart by SQLite's result codes, which both libraries report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, Protocol

from apsw import Error as ApswError

from onefold.errors import ConfigurationError

Row = tuple[Any, ...]

#: Called before and after every statement, with its text; only tests use it.
Trace = Callable[[Literal["before", "after"], str], None]
#: Called with the number of times the lock was found taken so far; False gives up.
Wait = Callable[[int], bool]
#: Called with the text of each of the caller's statements before it is run; raises for one that is refused.
Check = Callable[[str], None]

#: SQLite's primary result codes, which the store tells apart.
BUSY, LOCKED, NOMEM, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, CONSTRAINT, NOTADB = 5, 6, 7, 8, 10, 11, 13, 14, 19, 26
#: After these little is known about the state of a connection: its transaction is given up and another takes its place.
_BREAKING = frozenset({NOMEM, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB})

#: Which library a store runs on, and how it keeps what is not committed yet.
Library = Literal["apsw", "sqlite3"]
Journal = Literal["wal", "delete"]

#: All that either library raises.
ERRORS: tuple[type[Exception], ...] = (ApswError,)
# An interpreter may have been built without its sqlite3 module.
with suppress(ImportError):
    from sqlite3 import Error as Sqlite3Error

    ERRORS = (ApswError, Sqlite3Error)


class Cursor(Protocol):
    """The rows of one statement."""

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """The part of a connection that the store uses; each library's own methods, and those below the line."""

    def execute(self, statement: str, parameters: Any = ..., /) -> Cursor: ...

    def executemany(self, statement: str, parameters: Iterable[Any], /) -> Cursor: ...

    def interrupt(self) -> None:
        """Make the statement that runs, perhaps in another thread, fail at its next opportunity."""
        ...

    def set_authorizer(self, authorizer: Callable[..., int] | None, /) -> None:
        """Ask this, with SQLite's action code and names, whenever a statement is compiled.

        Both libraries keep compiled statements by their text, and setting it anew makes SQLite compile all of them
        again: set it once, when the connection is made.
        """
        ...

    @property
    def in_transaction(self) -> bool: ...

    # ours

    def run_each(self, statements: str, parameters: Any, check: Check) -> list[Row]:
        """Run the caller's SQL, which may be several statements, each shown to ``check`` before it is run."""
        ...

    def begin(self) -> None:
        """Begin a transaction that may write, waiting for the lock as ``wait_with`` allows."""
        ...

    def commit(self) -> None:
        """Commit, waiting for readers where the journal makes that necessary."""
        ...

    def wait_with(self, wait: Wait) -> None:
        """Ask this whether to go on waiting when another connection has the lock, as far as the library can ask."""
        ...

    def total_changes(self) -> int: ...

    def changes(self) -> int: ...

    def last_insert_rowid(self) -> int: ...

    def pragma(self, name: str) -> Any: ...

    def close(self, force: bool = False) -> None: ...

    def has_dangling(self) -> bool:
        """Whether a deferred foreign key points nowhere; False too where the library cannot tell."""
        ...

    #: Whether ``has_dangling`` knows; otherwise a commit finds out, and fails for every caller that shares it.
    sees_dangling: bool

    def become_writer(self) -> None:
        """From now on only ``begin`` and ``commit`` wait for locks, and only as ``wait_with`` allows."""
        ...

    def empty_log(self) -> None:
        """Copy all of the log into the file and make it empty; while others use it, that may be an error."""
        ...


class Driver(Protocol):
    """One library: a module beside this one."""

    #: The version of the SQLite it brings.
    VERSION: tuple[int, int, int]

    def connect(self, path: str, *, trace: Trace | None = None, wait_seconds: float = 0) -> Connection:
        """Open the file; statements wait this long for a lock unless ``wait_with`` says otherwise."""
        ...


def load_driver(name: str) -> Driver:
    """Return the module of one library."""
    if name == "apsw":
        from onefold.store.sqlite.drivers import apsw as ours

        return ours
    if name == "sqlite3":
        try:
            from onefold.store.sqlite.drivers import sqlite3 as theirs
        except ImportError as error:
            raise ConfigurationError("this Python was built without its sqlite3 module; use driver='apsw'") from error
        return theirs
    raise ConfigurationError(f"driver is {name!r}; the SQLite store runs on 'apsw' or 'sqlite3'")


def has_safe_log(version: tuple[int, int, int]) -> bool:
    """Whether this SQLite is past the defect by which resetting the write-ahead log can damage a file.

    It was there from the first version with such a log on.
    """
    return version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)


def result_of(error: BaseException | None) -> int:
    """Return SQLite's primary result code, or 0 if this is not an error of SQLite."""
    if not isinstance(error, ERRORS):
        return 0
    # apsw names the primary code, sqlite3 the extended one, whose lowest byte is the primary one.
    code = getattr(error, "result", None) or getattr(error, "sqlite_errorcode", None) or 0
    return int(code) & 0xFF


def is_busy(error: BaseException | None) -> bool:
    """Whether another connection held a lock for too long."""
    return result_of(error) == BUSY


def is_breaking(error: BaseException | None) -> bool:
    """Whether the connection is not to be trusted after this."""
    return result_of(error) in _BREAKING


def is_constraint(error: BaseException | None) -> bool:
    """Whether a row broke a constraint of its table."""
    return result_of(error) == CONSTRAINT


def is_trouble(error: BaseException | None) -> bool:
    """Whether it is the store's trouble and not about the caller's SQL."""
    return is_busy(error) or is_breaking(error)
