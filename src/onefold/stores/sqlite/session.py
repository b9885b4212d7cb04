"""One SQLite connection with its named statements; the verbs on it are in the modules beside.

Everything here and there is plain blocking code inside a transaction that the writer has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from onefold.clock import Clock
from onefold.stores.sql import load_statements

SQL = load_statements("onefold.stores.sqlite")

Row = tuple[Any, ...]

_encode = msgspec.json.Encoder().encode


def as_json(values: Sequence[Any]) -> str:
    """Write a list for ``json_each``, so that one statement serves many rows."""
    return _encode(values).decode()


class Session:
    """One connection and the clock that dates what is written through it."""

    __slots__ = ("clock", "connection")

    def __init__(self, connection: apsw.Connection, clock: Clock) -> None:
        self.connection = connection
        self.clock = clock

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
