"""Columns of a batch as PostgreSQL arrays, written out here because psycopg's own lists cost more than the statement.

A column is encoded when it is made; psycopg only passes the bytes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct

from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

_TEXT, _BYTEA = 25, 17
#: Dimensions, whether there are nulls, type of the elements, how many, and the number of the first.
_pack_head = Struct("!iiIii").pack
_pack_length = Struct("!i").pack
_NULL = _pack_length(-1)


class Column:
    """One array parameter, ready to be sent."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class _Texts(Column):
    __slots__ = ()


class _Blobs(Column):
    __slots__ = ()


class _Literal(Column):
    __slots__ = ()


def texts(items: Sequence[str | None]) -> Column:
    """Return a ``text[]``."""
    return _Texts(_binary(_TEXT, [None if item is None else item.encode() for item in items]))


def blobs(items: Sequence[bytes | None]) -> Column:
    """Return a ``bytea[]``."""
    return _Blobs(_binary(_BYTEA, items))


def numbers(items: Iterable[int | None]) -> Column:
    """Return an array of whichever integers the statement casts it to."""
    return _Literal("".join(("{", ",".join(["NULL" if n is None else str(n) for n in items]), "}")).encode())


def ids(items: Iterable[str]) -> Column:
    """Return a ``uuid[]``; the server refuses what is not one."""
    return _Literal("".join(("{", ",".join(items), "}")).encode())


def _binary(element: int, items: Sequence[bytes | None]) -> bytes:
    parts = [_pack_head(1, 1, element, len(items), 1)]
    for item in items:
        if item is None:
            parts.append(_NULL)
        else:
            parts.append(_pack_length(len(item)))
            parts.append(item)
    return b"".join(parts)


class _ColumnDumper(Dumper):
    def dump(self, obj: Column) -> Buffer:
        return obj.data


class _TextsDumper(_ColumnDumper):
    format = Format.BINARY
    oid = 1009


class _BlobsDumper(_ColumnDumper):
    format = Format.BINARY
    oid = 1001


class _LiteralDumper(_ColumnDumper):
    """Text without a type: the cast in the statement says which array it is."""


def teach(context: AdaptContext) -> None:
    """Let a connection, or one cursor of somebody else's connection, send columns."""
    for kind, dumper in (
        (_Texts, _TextsDumper),
        (_Blobs, _BlobsDumper),
        (_Literal, _LiteralDumper),
    ):
        context.adapters.register_dumper(kind, dumper)
