"""Beside the flow: the words between a supervisor and its worker processes, one JSON object per line.

The supervisor sends its orders first, and later ``STOP`` or nothing; a closed line means ``STOP`` too.
The process sends that it is ready, or why it cannot be, and in the end how many messages it has settled.
Facts that are needed even of a process that hangs or died are on the board; see ``worker/slots.py``.
"""

from __future__ import annotations

import msgspec

#: Finish what runs, hand back the rest, and end.
STOP = b"stop\n"
#: No line is longer, because the text of an error is cut before it is sent.
LINE_BYTES_MAX = 65_536


class WorkerOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker process."""

    #: The supervisor's version of onefold: after an upgrade in place the process would have another, and is refused.
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
    #: Another process of this supervisor was ready before, so a broker that is refused now does not keep this one from
    #: starting; it waits for the broker, as the others do.
    follows: bool = False


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The process has opened everything and begins to claim."""


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The process could not begin; ``later`` says that a later try may succeed."""

    reason: str
    stack: str
    later: bool


class WorkerStopped(msgspec.Struct, frozen=True, tag=True):
    """The process has settled or handed back all its messages, and ends."""

    settled: int


Word = WorkerReady | WorkerFailed | WorkerStopped

_encode = msgspec.json.Encoder().encode
_decode_word = msgspec.json.Decoder(Word).decode
decode_orders = msgspec.json.Decoder(WorkerOrders).decode


def line_of(word: Word | WorkerOrders) -> bytes:
    """Return a word as a line."""
    return _encode(word) + b"\n"


def word_of(line: bytes) -> Word:
    """Return the word in a line of a process."""
    word: Word = _decode_word(line)
    return word
