"""Columns of a batch as PostgreSQL arrays, written out here because psycopg's own lists cost more than the statement.

A column is encoded when it is made; sending it only passes the bytes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct

from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

_TEXT, _BYTEA, _BIGINT, _UUID = 25, 17, 20, 2950
#: Dimensions, whether there are nulls, type of the elements, how many, and the number of the first.
_pack_head = Struct("!iiIii").pack
_pack_length = Struct("!i").pack
_pack_bigint = Struct("!q").pack
_NULL = _pack_length(-1)
#: The length before each of the ids, in the hexadecimal digits in which they are written.
_ID_BYTES = 16
_ID_LENGTH = _pack_length(_ID_BYTES).hex()


class Column:
    """One array parameter, ready to be sent."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class TextColumn(Column):
    """A ``text[]``."""

    __slots__ = ()


class BlobColumn(Column):
    """A ``bytea[]``."""

    __slots__ = ()


class BigintColumn(Column):
    """A ``bigint[]``."""

    __slots__ = ()


class IdColumn(Column):
    """A ``uuid[]``."""

    __slots__ = ()


class LiteralColumn(Column):
    """Written as text: the cast in the statement says which array it is."""

    __slots__ = ()


def texts(items: Sequence[str | None]) -> Column:
    """Return a ``text[]``."""
    if _all_the_same(items):
        return TextColumn(_repeated(_TEXT, None if items[0] is None else items[0].encode(), len(items)))
    return TextColumn(_binary(_TEXT, [None if item is None else item.encode() for item in items]))


def blobs(items: Sequence[bytes | None]) -> Column:
    """Return a ``bytea[]``."""
    if _all_the_same(items):
        return BlobColumn(_repeated(_BYTEA, items[0], len(items)))
    return BlobColumn(_binary(_BYTEA, items))


def bigints(items: Sequence[int | None]) -> Column:
    """Return a ``bigint[]``."""
    number = len(items)
    if _all_the_same(items):
        return BigintColumn(_repeated(_BIGINT, None if items[0] is None else _pack_bigint(items[0]), number))
    if None in items:
        return numbers(items)
    pairs: list[int | None] = [8] * (2 * number)
    pairs[1::2] = items
    return BigintColumn(_pack_head(1, 0, _BIGINT, number, 1) + Struct("!" + "iq" * number).pack(*pairs))


def numbers(items: Iterable[float | None]) -> Column:
    """Return an array of whichever numbers the statement casts it to."""
    return LiteralColumn("".join(("{", ",".join(["NULL" if n is None else str(n) for n in items]), "}")).encode())


def flags(items: Iterable[bool]) -> Column:
    """Return a ``boolean[]``."""
    return LiteralColumn("".join(("{", ",".join(["t" if item else "f" for item in items]), "}")).encode())


def ids(items: Sequence[str]) -> Column:
    """Return a ``uuid[]``; the server refuses what is not one."""
    try:
        data = bytes.fromhex(_ID_LENGTH.join(("", *items)).replace("-", ""))
    except ValueError:
        data = b""
    if len(data) != len(items) * (_ID_BYTES + 4):
        # An id that was not made here, which the server reads or refuses.
        return LiteralColumn("".join(("{", ",".join(items), "}")).encode())
    return IdColumn(_pack_head(1, 0, _UUID, len(items), 1) + data)


def _all_the_same(items: Sequence[object]) -> bool:
    """Whether one element stands for all: messages sent together have much in common, and counting is cheap."""
    return len(items) > 1 and items.count(items[0]) == len(items)


def _repeated(element: int, item: bytes | None, number: int) -> bytes:
    one = _NULL if item is None else _pack_length(len(item)) + item
    return _pack_head(1, 1, element, number, 1) + one * number


def _binary(element: int, items: Sequence[bytes | None]) -> bytes:
    """Write an array; without nulls, which are seldom, no item is touched by Python alone."""
    head = _pack_head(1, 1, element, len(items), 1)
    try:
        lengths = [*map(len, items)]  # type: ignore[arg-type]
    except TypeError:
        return head + b"".join([_NULL if item is None else _pack_length(len(item)) + item for item in items])
    if _all_the_same(lengths):
        return head + _pack_length(lengths[0]).join((b"", *items))  # type: ignore[arg-type]
    parts: list[bytes] = [b""] * (2 * len(items))
    parts[0::2] = map(_pack_length, lengths)
    parts[1::2] = items  # type: ignore[assignment]
    return head + b"".join(parts)


class _ColumnDumper(Dumper):
    def dump(self, obj: Column) -> Buffer:
        return obj.data


class _TextDumper(_ColumnDumper):
    format = Format.BINARY
    oid = 1009


class _BlobDumper(_ColumnDumper):
    format = Format.BINARY
    oid = 1001


class _BigintDumper(_ColumnDumper):
    format = Format.BINARY
    oid = 1016


class _IdDumper(_ColumnDumper):
    format = Format.BINARY
    oid = 2951


class _LiteralDumper(_ColumnDumper):
    """Text without a type."""


def teach(context: AdaptContext) -> None:
    """Let psycopg send columns, on a connection or only on one cursor of a caller's connection."""
    for kind, dumper in (
        (TextColumn, _TextDumper),
        (BlobColumn, _BlobDumper),
        (BigintColumn, _BigintDumper),
        (IdColumn, _IdDumper),
        (LiteralColumn, _LiteralDumper),
    ):
        context.adapters.register_dumper(kind, dumper)
