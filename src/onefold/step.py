"""Stage 5, rest: the lines of a journal, in which a message's owner and others write down what must not be done twice.

A line is never changed: of two with the same name and kind the first one stands.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class StepKind(IntEnum):
    """What one line of a journal says; the numbers are what the stores keep."""

    #: What a step returned.
    RESULT = 0
    #: How a step failed for good.
    FAILED = 1
    #: How a step failed, and when it is to be tried again.
    RETRY = 2
    #: An effect is about to be tried.
    INTENT = 3
    #: What the effect's call returned.
    EFFECT = 4
    #: The effect of an intent did not happen.
    VOID = 5
    #: How long to wait, from the moment this was recorded; null for a wait without an end.
    TIMER = 6
    #: A message that was sent.
    SENT = 7
    #: What somebody told the run.
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


#: What may be recorded by somebody who does not own the message.
OUTSIDE = frozenset({StepKind.TIMER, StepKind.SIGNAL, StepKind.CHILD})


class Step(msgspec.Struct, frozen=True, gc=False):
    """One line of a message's journal.  Name and kind tell it from the others; the first one recorded stands."""

    name: str
    kind: StepKind
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
    """A line for somebody else's journal: a signal, or the end of a child."""

    message_id: str
    step: Step


def answer_line(name: str, restarts: int) -> str:
    """Name the line in which a child is to report: after a restart it is not that of the child sent before."""
    return f"{name}@r{restarts}" if restarts else name


def asked_name(line: str) -> str:
    """Return the name under which the child was sent that reports in this line."""
    return line.partition("@")[0]


#: What the line of a restart says that went back behind undos.
UNDONE = b"true"
#: Begins the name under which a step is undone, so that its keys and its causation are not those of the step.
UNDO_PREFIX = "undo:"


def child_line(name: str, replay_count: int) -> str:
    """Name the line in which a child reports to its parent: one that was redriven has a second end to tell."""
    return f"{name}@{replay_count}" if replay_count else name
