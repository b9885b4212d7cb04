"""One SQLite connection with its named statements; the verbs on it are in the modules beside.

Everything here and there is plain blocking code inside a transaction that the writer has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from onefold.clock import Clock
from onefold.store import Lease
from onefold.store.shared.rows import MESSAGE_COLUMNS
from onefold.store.shared.sql import load_statements
from onefold.store.shared.token_bucket import FIRST_PLACE
from onefold.store.sqlite.caller_rights import Rights
from onefold.store.sqlite.drivers import Connection
from onefold.store.sqlite.drivers import Row as Row

#: Two ids may have the same number; the second message takes the next one that is free, up to so many further on.
#: A millisecond has a million numbers and seldom more than ten thousand messages, so that more are hardly ever needed,
#: and would only make it slower to look for an id that is not there.
TRIES = 16

_NAMES = {
    "message_values": ", ".join("?" * len(MESSAGE_COLUMNS)),
    "tries": str(TRIES),
    "first_place": str(FIRST_PLACE),
}
SQL = load_statements("onefold.store.sqlite", "queries.sql", "gates.sql", "steps.sql", names=_NAMES)

Item = TypeVar("Item")

_encode = msgspec.json.Encoder().encode

#: So many rows of ours are written on the event loop, which takes ten milliseconds at the most.
HERE_ROWS = 1_000
#: A row of ordinary size; a larger one takes as long as several.
ROW_BYTES = 4_096


def as_json(values: Sequence[Any]) -> str:
    """Write a list for ``json_each``, so that one statement serves many rows."""
    return _encode(values).decode()


def rows_for(items: Sequence[Item], body: Callable[[Item], bytes | None]) -> int:
    """Return how many rows of ordinary size these are, large as they may be; more than are written here if many."""
    if len(items) > HERE_ROWS:
        return len(items)
    return len(items) + sum([len(body(item) or b"") for item in items]) // ROW_BYTES


class Session:
    """One connection and the clock that dates what is written through it."""

    __slots__ = ("_rights", "clock", "connection")

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self.connection = connection
        self.clock = clock
        self._rights: Rights | None = None

    def run_callers(self, statements: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
        """Run the caller's own SQL; what it must not do here is a ``StoreError``."""
        if self._rights is None:
            # Not before it is needed: it makes SQLite compile every statement again.
            self._rights = Rights()
            self.connection.set_authorizer(self._rights)
        return self._rights.run(self.connection, statements, parameters)

    def rows(self, name: str, *parameters: Any) -> list[Row]:
        """Run a named statement and return its rows."""
        return self.connection.execute(SQL[name], parameters).fetchall()

    def run(self, name: str, *parameters: Any) -> None:
        """Run a named statement that returns nothing."""
        self.connection.execute(SQL[name], parameters)

    def each(self, name: str, parameters: Sequence[Row]) -> None:
        """Run a named statement that returns nothing, once per row of parameters."""
        if len(parameters) == 1:
            self.connection.execute(SQL[name], parameters[0])
        elif parameters:
            self.connection.executemany(SQL[name], parameters)

    def changes(self, name: str, parameters: Sequence[Row]) -> int:
        """Like ``each``, and return how many rows it wrote; cheaper than to ask for each."""
        before = self.connection.total_changes()
        self.each(name, parameters)
        return self.connection.total_changes() - before


class RowLease(Lease, frozen=True, gc=False):
    """A lease that remembers the number of its row, which saves looking for it by the id."""

    seq: int = 0
