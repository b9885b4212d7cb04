"""Deliver: a message that has arrived gets the row under which it waits, runs and is told things.

A plain message that is due at once needs no such row before somebody looks at it, and to write a few of them together
is cheaper than each with its message.  So a put leaves it out, and whoever claims, moves or tells messages writes what
is missing first; whoever only reads takes a message that has neither a delivery nor an outcome for one that waits.
"""

from __future__ import annotations

from onefold.stores.sqlite.session import Session

#: A process that puts messages leaves fewer than so many of them without a delivery: whoever writes those that are
#: missing is done within a millisecond, and whoever looks for them reads little.
ARRIVALS_MAX = 250


def arrive(session: Session, messages: int) -> None:
    """Take note of messages just put; deliver when they have become many."""
    session.arrivals += messages
    if session.arrivals >= ARRIVALS_MAX:
        deliver(session)


def deliver(session: Session) -> None:
    """Write the deliveries that are missing; afterwards every message has its own, or an outcome."""
    session.arrivals = 0
    if session.rows("deliver_missing")[0][0]:
        session.run("deliver")
        session.run("deliver_mark")
