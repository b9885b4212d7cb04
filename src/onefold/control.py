"""Beside the flow: what a supervisor and its worker processes say to each other, one JSON object per line.

The supervisor speaks first, with its orders, and later says at most ``STOP``; its end of the line going dead means the
same.  The process says that it is ready, or why it never will be, and in the end how much it has settled.
What must be known even when the process can no longer speak is on the board; see ``slots.py``.
"""

from __future__ import annotations

import msgspec

#: Finish what runs, hand back the rest, and end.
STOP = b"stop\n"
#: No line is longer: the text of an error is cut before it is sent.
LINE_BYTES_MAX = 65_536


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker process must know to begin."""

    #: The supervisor's version of onefold: after an upgrade in place the two would not understand each other.
    version: str
    parent: int
    name: str
    queues: list[str]
    concurrency: int
    lease_seconds: float
    stop_seconds: float
    until_idle: bool
    lane: int
    capacity: int
    beat_seconds: float
    verbose: bool
    #: Another process of this supervisor was ready before it: a broker that must not be used now is waited for, as in
    #: that one, and does not keep this one from starting.
    follows: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All is open; it begins to claim."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It could not begin; ``later`` says that it may work another time."""

    reason: str
    stack: str
    later: bool


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """It has settled or handed back everything it had, and ends."""

    settled: int


Word = Ready | Failed | Stopped

_encode = msgspec.json.Encoder().encode
_decode_word = msgspec.json.Decoder(Word).decode
decode_orders = msgspec.json.Decoder(Orders).decode


def line_of(word: Word | Orders) -> bytes:
    """Write one line."""
    return _encode(word) + b"\n"


def word_of(line: bytes) -> Word:
    """Read one line that a process said."""
    word: Word = _decode_word(line)
    return word
