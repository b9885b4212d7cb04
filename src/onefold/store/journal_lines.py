"""Stage 5, rest: the lines of a journal, in which a message's owner and others write down what must not be done twice.

A line is never changed: of two with the same name and kind the first one stands.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from onefold import limits
from onefold.message.codec import ResultCodec


class LineKind(IntEnum):
    """The meaning of one line of a journal; the stores keep the numbers."""

    #: The value that a step returned.
    RESULT = 0
    #: How a step failed for good.
    FAILED = 1
    #: How a step failed, and when it is to be tried again.
    RETRY = 2
    #: An effect is about to be tried.
    INTENT = 3
    #: The value that the effect's call returned.
    EFFECT = 4
    #: The effect of an intent did not happen.
    VOID = 5
    #: How long to wait, from the moment this was recorded; null for a wait without an end.
    TIMER = 6
    #: A message that was sent.
    SENT = 7
    #: A signal to the run.
    SIGNAL = 8
    #: Which signal a wait was given, if any.
    TAKEN = 9
    #: How a child ended.
    CHILD = 10
    #: A person made the run go back to an earlier step.
    RESTART = 11
    #: A step of a saga is about to be called or sent: from here on it may have had an effect.
    BEGUN = 12
    #: A saga is to be undone, and why.
    UNDO = 13
    #: An undo has given up, and why.
    STUCK = 14
    #: A step of a saga is about to be undone: from here on it counts as undone, though nothing may have happened yet.
    UNDOING = 15


#: Kinds that others than the message's owner may record.
OUTSIDE = frozenset({LineKind.TIMER, LineKind.SIGNAL, LineKind.CHILD})


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line of a message's journal.  Name and kind tell it from the others; the first one recorded stands."""

    name: str
    kind: LineKind
    value: bytes
    #: Digest of what the step was asked to do; empty where there is nothing to compare.
    fingerprint: bytes = b""
    #: When it was recorded, and after which others; both are the store's to say.
    at: int = 0
    seq: int = 0

    def __repr__(self) -> str:
        # Without the value: what is printed or logged is no place for it.
        return f"<step {self.name} {self.kind.name.lower()}>"


class Note(msgspec.Struct, frozen=True, gc=False):
    """A line for the journal of another message: a signal, or the end of a child."""

    message_id: str
    step: Line
    #: The message is sent in the same commit, where another one may hold its key; that one is told instead.
    started: bool = False


def signal_of(line: Line) -> str:
    """Return the name of the signal that a line tells."""
    return line.name.partition("/")[0]


def answer_line(name: str, restarts: int) -> str:
    """Name the line in which a child is to report: after a restart it is not that of the child sent before."""
    return f"{name}@r{restarts}" if restarts else name


def asked_name(line: str) -> str:
    """Return the name under which the child was sent that reports in this line."""
    return line.partition("@")[0]


#: The value of a restart that went back behind undos.
UNDONE = b"true"
#: Begins the name under which a step is undone, so that its keys and its causation are not those of the step.
UNDO_PREFIX = "undo:"


def child_line(name: str, replay_count: int) -> str:
    """Name the line in which a child reports to its parent: one that was redriven has a second end to tell."""
    return f"{name}@{replay_count}" if replay_count else name


encode = msgspec.json.Encoder().encode


_signal_value = ResultCodec(Any, most=limits.PAYLOAD_BYTES_MAX, field="signal")


def signal_note(run_id: str, name: str, value: Any, id_: str) -> Note:
    """Return the line that tells a run something; two with the same name and id are one."""
    limits.check_bytes("run_id", run_id, limits.ID_BYTES_MAX)
    limits.check_bytes("id", id_, limits.ID_BYTES_MAX)
    line = f"{limits.check_step_name('signal', name)}/{id_}"
    return Note(run_id, Line(line, LineKind.SIGNAL, _signal_value.encode(value)))
