"""One SQLite connection with its named statements; the verbs on it are in the modules beside.

Everything here and there is plain blocking code inside a transaction that the writer has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import apsw
import msgspec

from onefold.clock import Clock
from onefold.stores.sql import load_statements

SQL = {**load_statements("onefold.stores.sqlite"), **load_statements("onefold.stores.sqlite", "gates.sql")}

Row = tuple[Any, ...]
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

    __slots__ = ("arrivals", "clock", "connection")

    def __init__(self, connection: apsw.Connection, clock: Clock) -> None:
        self.connection = connection
        self.clock = clock
        #: About how many messages have been put through it since deliveries were last written.
        self.arrivals = 0

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
