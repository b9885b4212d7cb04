"""Statements ready for the wire: text with numbered places, parameters as bytes.

Our own are read from ``queries.sql`` once.  Those of the caller are translated the way psycopg does it; what is unusual
about them is left to psycopg.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import psycopg
from psycopg.abc import Buffer

from onefold.stores.postgres.arrays import BigintColumn, BlobColumn, IdColumn, LiteralColumn, TextColumn
from onefold.stores.sql import load_statements

SQL = {
    name: text
    for file in ("queries.sql", "steps.sql", "gates.sql")
    for name, text in load_statements("onefold.stores.postgres", file).items()
}

#: Whatever the server's default is: the rules for keys and fences are made for this level.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_READING = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"

_PLACE = re.compile(r"%\((\w+)\)s")
#: Everything psycopg would look at in a caller's statement; a lone sign is an error that psycopg is to report.
_CALLERS_PLACE = re.compile(r"%(?:\((?P<name>[^)]+)\)(?P<kind>[sbt])|(?P<plain>[sbt])|(?P<percent>%)|.?)", re.DOTALL)
#: Statements of callers whose translation is remembered.
_CALLERS_MAX = 500

_TEXT, _BINARY = 0, 1


class Query(NamedTuple):
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

    def query(self, parameters: Mapping[str, Any], *, prepared: bool) -> Query:
        """Return it with parameters; their types are all said in the statement itself."""
        pairs = [_ENCODERS[type(value)](value) for value in map(parameters.__getitem__, self.places)]
        return Query(
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


class CallersStatement(NamedTuple):
    """A caller's statement with numbered places, and the names of what belongs into them or only their number."""

    text: bytes
    number: int
    names: tuple[str, ...] | None

    def arrange(self, parameters: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any] | None:
        """Return the parameters in the order of their places; None when they do not fit, which psycopg explains."""
        if isinstance(parameters, Mapping):
            if self.names is None or not parameters.keys() >= set(self.names):
                return None
            return [parameters[name] for name in self.names]
        return parameters if self.names is None and len(parameters) == self.number else None


@lru_cache(_CALLERS_MAX)
def translated_statement(statement: str) -> CallersStatement | None:
    """Return a caller's statement with numbered places; None for one that only psycopg understands."""
    names: list[str] = []
    plain = 0

    def number(found: re.Match[str]) -> str:
        nonlocal plain
        if found["percent"]:
            return "%"
        if found["plain"] == "s":
            plain += 1
            return f"${plain}"
        if found["kind"] == "s":
            if found["name"] not in names:
                names.append(found["name"])
            return f"${names.index(found['name']) + 1}"
        raise _UnusualError

    try:
        text = _CALLERS_PLACE.sub(number, statement)
    except _UnusualError:
        return None
    if bool(names) == bool(plain):
        return None
    return CallersStatement(text.encode(), plain or len(names), tuple(names) if names else None)


class _UnusualError(Exception):
    """A placeholder that is psycopg's business."""
