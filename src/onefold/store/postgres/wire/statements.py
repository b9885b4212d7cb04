"""Our own statements, ready for the wire: text with numbered places, parameters as bytes.

They are read from the ``.sql`` files once.  Statements of callers go through psycopg as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg.abc import Buffer

from onefold.store.postgres import columns
from onefold.store.postgres.wire.arrays import BigintColumn, BlobColumn, IdColumn, LiteralColumn, TextColumn
from onefold.store.shared.rows import MESSAGE_COLUMNS
from onefold.store.shared.sql import NAMES, load_statements

#: Names that statements of several files use: the time, which only tests give; a reading of it that stays the same; the
#: rows whose id and fence are given, looked up by id; the element of an array that stands where a row's id stands among
#: the ids; and the columns of ``message`` in an answer.
_SHARED = {
    "now": columns.NOW,
    "clock": f"clock AS MATERIALIZED (SELECT {columns.NOW} AS now)",
    "has_given_fence": "id = ANY (%(ids)s::uuid[]) AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE",
    "of_this_id": "[pg_catalog.array_position(%(ids)s::uuid[], id)]",
    "columns_of_m": NAMES["columns_of_m"].replace("m.id", "m.id::text", 1),
    "nulls_of_m": ", ".join("NULL" for _ in MESSAGE_COLUMNS),
    **columns.NAMES,
}

SQL = load_statements("onefold.store.postgres", "queries.sql", "gates.sql", "claim.sql", "steps.sql", names=_SHARED)

#: Whatever the server's default is: the rules for keys and fences are made for this level.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_READING = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"

_PLACE = re.compile(r"%\((\w+)\)s")
#: A statement that begins or ends a transaction, behind comments; ``ROLLBACK TO`` a savepoint does neither.
_CONTROL = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|;)*"
    r"(BEGIN|START\s+TRANSACTION|COMMIT|END|ABORT|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)

_TEXT, _BINARY = 0, 1


class WireQuery(NamedTuple):
    """One statement with its parameters, as libpq takes them."""

    text: bytes
    values: Sequence[Buffer | None] = ()
    formats: Sequence[int] | None = None
    types: Sequence[int] | None = None
    #: Under which it is prepared; None runs it as it is.
    name: bytes | None = None
    result_format: int = _BINARY


@dataclass(frozen=True, slots=True)
class Statement:
    """One of our own statements: its name, its text with numbered places, and what belongs into them."""

    name: bytes
    text: bytes
    places: tuple[str, ...]

    def query(self, parameters: Mapping[str, Any], *, prepared: bool) -> WireQuery:
        """Return it with parameters; their types are all said in the statement itself."""
        pairs = [_ENCODERS[type(value)](value) for value in map(parameters.__getitem__, self.places)]
        return WireQuery(
            self.text, [data for data, _ in pairs], [form for _, form in pairs], name=self.name if prepared else None
        )


def _compiled(name: str, text: str) -> Statement:
    places = tuple(dict.fromkeys(_PLACE.findall(text)))
    numbered = _PLACE.sub(lambda found: f"${places.index(found[1]) + 1}", text)
    return Statement(f"onefold_{name}".encode(), numbered.encode(), places)


def _text(value: str) -> tuple[Buffer, int]:
    if "\0" in value:
        # libpq would end the text there without a word.
        raise psycopg.DataError("PostgreSQL text cannot hold NUL characters")
    return value.encode(), _TEXT


_ENCODERS: Mapping[type, Callable[[Any], tuple[Buffer | None, int]]] = {
    type(None): lambda _: (None, _TEXT),
    bool: lambda value: (b"t" if value else b"f", _TEXT),
    int: lambda value: (b"%d" % value, _TEXT),
    str: _text,
    bytes: lambda value: (value, _BINARY),
    TextColumn: lambda value: (value.data, _BINARY),
    BlobColumn: lambda value: (value.data, _BINARY),
    BigintColumn: lambda value: (value.data, _BINARY),
    IdColumn: lambda value: (value.data, _BINARY),
    LiteralColumn: lambda value: (value.data, _TEXT),
}

OURS: Mapping[str, Statement] = {name: _compiled(name, text) for name, text in SQL.items()}


def ends_transaction(statement: object) -> str | None:
    """Return the keyword of a statement that would begin or end a transaction, or None.

    Only texts are looked at, and only their beginning: this is for a good error message.
    The proof that a transaction is still the one that was begun is its savepoint.
    """
    if isinstance(statement, bytes):
        statement = statement.decode(errors="replace")
    found = _CONTROL.match(statement) if isinstance(statement, str) else None
    return " ".join(found[1].upper().split()) if found else None
