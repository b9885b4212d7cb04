"""Stages 6 to 9: the states of a message, the lease on it, and the outcomes that end a lease.

Safety rests on the **fence**: an integer on each message that rises with every change of owner.
Every write for a message names the fence that its owner was given, and a write with an old fence changes nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import msgspec

from onefold import limits
from onefold.message.envelope import Envelope
from onefold.store.journal_lines import Line, Note
from onefold.store.states import State


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an attempt did not succeed, as kept with the attempt and with a dead letter."""

    reason: str
    error_type: str
    error_message: str
    stack: str = ""
    status_code: int | None = None


def damaged(what: str) -> Failure:
    """Return the failure of a stored message that cannot be claimed, read or settled as it is."""
    return Failure(reason="damaged", error_type="Damaged", error_message=what)


#: The fence of the first claim: a worker that holds it knows that the message had no owner before.
_FIRST_CLAIM = 2


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to settle one message, until another worker takes it over."""

    envelope: Envelope
    fence: int
    #: This run's number, counted from 1; crashes and snoozes do not count.
    attempt: int
    #: How often a worker died while this message may have been running.
    crashes: int
    replay_count: int
    claimed_at: int
    worker: str
    #: How much others had recorded for it when it was claimed; see ``Parked``.
    wake: int = 0
    #: The gate it came through, and whether it comes although one before it in its sequence is missing.
    gate: str | None = None
    gap: bool = False
    #: The journal of a run that was claimed, where the claim has read it; None is to be read when it is needed.
    journal: tuple[Line, ...] | None = None
    #: The damage of the stored message, which then must not run; empty for all that are in order.
    damage: str = ""

    @property
    def id(self) -> str:
        return self.envelope.id

    @property
    def has_journal(self) -> bool:
        """Whether there can be lines: the message had an owner before, or was told something."""
        return self.fence > _FIRST_CLAIM or self.wake > 0


class Fenced(Protocol):
    """A lease as it is known by: a message and the fence it was claimed with."""

    @property
    def id(self) -> str: ...

    @property
    def fence(self) -> int: ...


class Lane(IntEnum):
    """Which messages a worker takes: a supervisor runs those that may have killed a worker apart from the others."""

    ANY = 0
    #: Only messages that no worker died with.
    MAIN = 1
    #: Only messages that a worker died with.
    PROBATION = 2


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a child ended, as its parent's journal says it."""

    id: str
    state: State
    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


class Done(msgspec.Struct, frozen=True, gc=False):
    """It succeeded.  The result is kept as long as the key."""

    result: bytes
    sends: tuple[Envelope, ...] = ()
    key_window: float = limits.KEY_WINDOW
    body_retention: float = limits.MESSAGE_RETENTION
    notes: tuple[Note, ...] = ()


class Again(msgspec.Struct, frozen=True, gc=False):
    """It is to run again after ``delay`` seconds; ``counted`` says whether this run used up an attempt.

    ``crashed`` says that its process died while it ran: a crash is counted, apart from the attempts.
    """

    delay: float
    failure: Failure | None
    counted: bool = True
    crashed: bool = False


class Dead(msgspec.Struct, frozen=True, gc=False):
    """It will not run again by itself."""

    failure: Failure
    key_window: float = limits.KEY_WINDOW
    body_retention: float = limits.DEAD_RETENTION
    #: Whether a run failed; a message that expired or was quarantined did not run this time.
    ran: bool = True
    #: Messages that tell others of the letter, in the same commit; see ``App.on_dead``.
    sends: tuple[Envelope, ...] = ()


class HandBack(msgspec.Struct, frozen=True, gc=False):
    """It was not started, or was stopped for no fault of its own: as if it had never been claimed.

    One that was sent before its task had a ``gate`` waits there from now on; if ``ordered``, at the end of the line.
    """

    gate: str | None = None
    ordered: bool = False


class Parked(msgspec.Struct, frozen=True, gc=False):
    """It waits without a worker: for ``delay`` seconds, for what others record, or for a person.

    ``seen`` is the ``wake`` of the lease.  It is due as soon as others have recorded ``awaits`` more for it, and if
    they have done so already it is not parked at all; 0 says that nothing they record would help.
    Parking uses up no attempt, and a message that has parked does not expire.
    """

    delay: float | None
    seen: int
    awaits: int = 1
    #: Why it waits, when a person is to look at that; kept with the attempts.
    failure: Failure | None = None
    steps: tuple[Line, ...] = ()
    sends: tuple[Envelope, ...] = ()
    notes: tuple[Note, ...] = ()


Outcome = Done | Again | Dead | HandBack | Parked
