"""Purge: bodies, then messages with their keys, whose time is over."""

from __future__ import annotations

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Purged
from onefold.store.sqlite.session import Session


def purge(session: Session, limit: int) -> Purged:
    """Remove what has outlived its time, oldest first, and one kind after the other: messages before their bodies."""
    now = session.clock.now()
    messages = _purge_messages(session, now, limit)
    if messages == limit:
        return Purged(messages=messages)
    bodies = _purge_bodies(session, now, limit)
    if bodies >= limit:
        return Purged(messages=messages, bodies=bodies)
    return Purged(
        messages=messages,
        bodies=bodies,
        keys=session.changes("purge_keys", [(now, limit)]),
        gates=session.changes("purge_gates", [(now, limit)]),
        acts=session.changes("purge_acts", [(now - round(limits.ACT_RETENTION * MICROSECONDS), limit)]),
        register=session.changes("purge_register", [(now, limit)]),
    )


def _purge_messages(session: Session, now: int, limit: int) -> int:
    """Remove messages whose keys are not kept any more, with everything that belongs to them; return how many."""
    number, last, *between = session.rows("purge_gone", now, limit)[0]
    if not number:
        return 0
    has_rows, has_steps = session.rows("purge_any", between[0], last, *between[1:])[0]
    session.each("purge_message_key", session.rows("purge_message_keys", now, limit))
    names = ["purge_attempts", "purge_progress"] if has_rows else []
    names += ["purge_steps", "purge_parts"] if has_steps else []
    for name in (*names, "purge_messages", "purge_outcomes"):
        session.run(name, now, limit)
    return int(number)


def _purge_bodies(session: Session, now: int, limit: int) -> int:
    """Empty messages that are kept only for their keys; return how many."""
    since, upto = session.rows("purge_range", now, limit)[0]
    emptied = session.changes("purge_bodies", [(since, upto)])
    session.run("purge_bodies_done", now, upto, emptied)
    return emptied
