"""Beside the flow: what a worker and the process of an isolated handler say to each other.

Each frame is a length and a record in MessagePack.  Nothing is pickled: a value that has no plain form is refused.
Whatever concerns a run names it, so that no message gets what was said for another.
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
from onefold.envelope import Envelope
from onefold.errors import HandlerError
from onefold.step import Note
from onefold.store import Failure, Lease

LENGTH = struct.Struct("!I")


class UnreadableError(Exception):
    """What came over the line is no frame."""


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One thing said."""


#: What is done in the worker: SQL, looking after the lease, and the lines of the effect ledger.
Verb = Literal["execute", "fetch", "check", "record", "steps"]


class Ready(_Frame, frozen=True):
    """From the process: it can run a handler."""


class Run(_Frame, frozen=True):
    """To the process: run this message with the task of that module."""

    #: How many messages this process was given, with this one.
    run: int
    module: str
    task: str
    lease: Lease
    #: Unkeyed messages that were sent before, by what wraps the handler.
    unkeyed: int
    deadline: int
    #: Where keys for outside providers come from.
    origin: str


class Begun(_Frame, frozen=True):
    """From the process: it has the message; should it die from now on, the message is to blame."""

    run: int


class Asked(_Frame, frozen=True):
    """From the process: do this for the handler."""

    run: int
    number: int
    verb: Verb
    statement: str = ""
    parameters: Any = ()


class Told(_Frame, frozen=True):
    """From the process: what the handler says about itself.  Nobody answers."""

    run: int
    percent: float | None
    message: str


class Raised(_Frame, frozen=True):
    """An exception, by its name."""

    module: str
    name: str
    text: str


class Answered(_Frame, frozen=True):
    """To the process: what came of it, and when the lease now runs out."""

    number: int
    rows: Any
    error: Raised | None
    deadline: int


class Returned(_Frame, frozen=True):
    """From the process: the handler has returned."""

    run: int
    result: bytes
    sends: list[Envelope]
    notes: list[Note]


class Failed(_Frame, frozen=True):
    """From the process: the handler has raised, and what that means.

    Without a delay the message is dead; without a failure the worker decides, because the handler was not found.
    """

    run: int
    kind: Literal["failed", "lost", "unavailable", "uncertain"]
    error: str
    text: str
    failure: Failure | None = None
    delay: float | None = None
    counted: bool = True


Frame = Ready | Run | Begun | Asked | Told | Answered | Returned | Failed

_MICROSECOND = dt.timedelta(microseconds=1)
#: What MessagePack does not know, by number: how it is written as text and read again.
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
    """Write one value of SQL so that it arrives as what it was; refuse what cannot."""
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
        return value  # an enum, or another child of a plain type
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
            f"a number is too large to pass between an isolated handler and its worker: {error}"
        ) from None
    if len(data) > limits.FRAME_BYTES_MAX:
        raise HandlerError(
            f"{len(data)} bytes cannot pass between an isolated handler and its worker; at most "
            f"{limits.FRAME_BYTES_MAX} can: read fewer rows at a time"
        )
    return LENGTH.pack(len(data)) + data


def length_of(head: bytes) -> int:
    """Return how long the frame is that follows; nothing larger is read than what may be written."""
    (length,) = LENGTH.unpack(head)
    if length > limits.FRAME_BYTES_MAX:
        raise UnreadableError(f"a frame of {length} bytes, where {limits.FRAME_BYTES_MAX} are the most")
    return int(length)


def read(data: bytes) -> Frame:
    """Return the frame that was written, without its length."""
    try:
        frame: Frame = _decoder.decode(data)
    except Exception as error:  # of the decoder, or of a value that its type refuses
        raise UnreadableError(f"{len(data)} bytes that are no frame: {error}") from error
    return frame


def raised(error: BaseException) -> Raised:
    """Name an exception."""
    return Raised(type(error).__module__, type(error).__qualname__, str(error))


def rebuilt(one: Raised) -> Exception:
    """Make an exception again by its name, so that a handler can catch it; without a stack or other details."""
    try:
        kind = getattr(importlib.import_module(one.module), one.name)
        error = kind(one.text)
    except Exception:
        error = None
    return error if isinstance(error, Exception) else HandlerError(f"{one.module}.{one.name}: {one.text}")
