"""Beside the flow: the frames between a worker and the process of an isolated handler.

Each frame is a length and a record in MessagePack.  Nothing is pickled: a value that has no plain form is refused.
Every frame about a run has its number, so that no message gets the answer for another.
"""

from __future__ import annotations

import datetime as dt
import importlib
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import msgspec

from onefold import limits
from onefold.errors import HandlerError
from onefold.message.envelope import Envelope
from onefold.store import Failure, Lease
from onefold.store.journal_lines import Note

LENGTH = struct.Struct("!I")


class UnreadableError(Exception):
    """The bytes on the line are no frame."""


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all frames."""


#: The verbs that the worker does for a handler: SQL, checking the lease, and the journal's lines.
Verb = Literal["execute", "fetch", "check", "record", "steps"]


class ReadyFrame(_Frame, frozen=True):
    """From the process: it is ready to run a handler."""


class RunFrame(_Frame, frozen=True):
    """To the process: run this message with the task of that module."""

    #: The number of this run among those of the process, from 1.
    run: int
    module: str
    task: str
    lease: Lease
    #: How many messages without a key the middleware sent already; see ``Buffer.unkeyed``.
    unkeyed: int
    deadline: int
    #: The database and the app, as a part of every upstream key.
    origin: str


class BegunFrame(_Frame, frozen=True):
    """From the process: it has begun the run; if it dies from now on, the message is to blame."""

    run: int


class AskedFrame(_Frame, frozen=True):
    """From the process: do this verb for the handler."""

    run: int
    number: int
    verb: Verb
    statement: str = ""
    parameters: Any = ()


class ToldFrame(_Frame, frozen=True):
    """From the process: progress or a beat of the handler.  It gets no answer."""

    run: int
    percent: float | None
    message: str


class RaisedFrame(_Frame, frozen=True):
    """An exception, as its class's name and its text."""

    module: str
    name: str
    text: str


class AnsweredFrame(_Frame, frozen=True):
    """To the process: the result of a verb, and when the lease runs out now."""

    number: int
    rows: Any
    error: RaisedFrame | None
    deadline: int


class ReturnedFrame(_Frame, frozen=True):
    """From the process: the handler has returned."""

    run: int
    result: bytes
    sends: list[Envelope]
    notes: list[Note]


class FailedFrame(_Frame, frozen=True):
    """From the process: the handler has raised, with the outcome that follows.

    Without a delay the message is dead; without a failure the worker decides, because the handler was not found.
    """

    run: int
    kind: Literal["failed", "lost", "unavailable", "uncertain"]
    error: str
    text: str
    failure: Failure | None = None
    delay: float | None = None
    counted: bool = True


Frame = ReadyFrame | RunFrame | BegunFrame | AskedFrame | ToldFrame | AnsweredFrame | ReturnedFrame | FailedFrame

_MICROSECOND = dt.timedelta(microseconds=1)
#: Types that MessagePack does not have, by number: each with the functions that write it as text and read it.
_TEXTS: Sequence[tuple[type, Callable[[Any], str], Callable[[str], Any]]] = (
    (dt.datetime, dt.datetime.isoformat, dt.datetime.fromisoformat),
    (dt.date, dt.date.isoformat, dt.date.fromisoformat),
    (dt.time, dt.time.isoformat, dt.time.fromisoformat),
    (dt.timedelta, lambda d: str(d // _MICROSECOND), lambda text: int(text) * _MICROSECOND),
    (Decimal, str, Decimal),
    (UUID, str, UUID),
)
_TUPLE = len(_TEXTS)
_PLAIN = {str, int, float, bool, bytes, type(None)}


def pack(value: Any) -> Any:
    """Return one SQL value in a form that is read as the same value again; refuse one that has none."""
    if type(value) in _PLAIN:
        return value
    for number, (kind, write, _) in enumerate(_TEXTS):
        if isinstance(value, kind):
            return msgspec.msgpack.Ext(number, write(value).encode())
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, _encoder.encode([pack(item) for item in value]))
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        return {pack(name): pack(item) for name, item in value.items()}
    if isinstance(value, str | int | float):
        return value  # an enum, or another subclass of a plain type
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    kind = type(value)
    raise HandlerError(
        f"a {kind.__module__}.{kind.__qualname__} cannot pass between an isolated handler and its worker; "
        "convert it in the statement or before"
    )


def _unpack(number: int, data: memoryview) -> Any:
    if number == _TUPLE:
        return tuple(_plain.decode(data))
    return _TEXTS[number][2](bytes(data).decode())


_encoder = msgspec.msgpack.Encoder()
_plain = msgspec.msgpack.Decoder(ext_hook=_unpack)
_decoder = msgspec.msgpack.Decoder(Frame, ext_hook=_unpack)


def write(frame: Frame) -> bytes:
    """Return a frame as bytes, with its length before it."""
    try:
        data = _encoder.encode(frame)
    except OverflowError as error:
        raise HandlerError(
            f"a number is too large to pass between an isolated handler and its worker, at most 64 bits: {error}; "
            "convert it in the statement or before"
        ) from None
    if len(data) > limits.FRAME_BYTES_MAX:
        raise HandlerError(
            f"{len(data)} bytes cannot pass between an isolated handler and its worker; at most "
            f"{limits.FRAME_BYTES_MAX} can: read fewer rows at a time"
        )
    return LENGTH.pack(len(data)) + data


def length_of(head: bytes) -> int:
    """Return the length of the frame that follows; refuse one that is longer than ``write`` allows."""
    (length,) = LENGTH.unpack(head)
    if length > limits.FRAME_BYTES_MAX:
        raise UnreadableError(f"a frame of {length} bytes, where at most {limits.FRAME_BYTES_MAX} are allowed")
    return int(length)


def read(data: bytes) -> Frame:
    """Return the frame in these bytes, which do not include its length."""
    try:
        frame: Frame = _decoder.decode(data)
    except Exception as error:  # the decoder's own, or that of a type which refuses a value
        raise UnreadableError(f"{len(data)} bytes that are no frame: {error}") from error
    return frame


def pack_error(error: BaseException) -> RaisedFrame:
    """Return the name and text of an exception."""
    return RaisedFrame(type(error).__module__, type(error).__qualname__, str(error))


def unpack_error(one: RaisedFrame) -> Exception:
    """Return an exception of that class and text, so that a handler can catch it; without a stack or other details."""
    try:
        kind = getattr(importlib.import_module(one.module), one.name)
        error = kind(one.text)
    except Exception:
        error = None
    return error if isinstance(error, Exception) else HandlerError(f"{one.module}.{one.name}: {one.text}")
