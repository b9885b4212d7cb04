"""Move: what operators do to messages: redrive, resume, discard, cancel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Act, State
from onefold.store.postgres.session import LINE_RETENTION, Session
from onefold.store.postgres.verbs.journal import is_id
from onefold.store.postgres.wire.arrays import ids

#: Looks for messages to be locked: one that ends meanwhile is found by the second.
_LOOKS = 2

_MOVES = {State.SCHEDULED: "move_redrive", State.DISCARDED: "move_discard", State.CANCELLED: "move_cancel"}


async def lock(session: Session, message_ids: Sequence[str]) -> dict[str, State]:
    """Return the states of messages, and lock their rows."""
    given = [message_id for message_id in message_ids if is_id(message_id)]
    found: dict[str, State] = {}
    # One that ended while the statement waited for its row is seen by the next statement only.
    for _ in range(_LOOKS):
        if missing := [message_id for message_id in given if message_id not in found]:
            rows = await session.wire.rows("lock", {"ids": ids(missing)})
            found |= {message_id: State(state) for message_id, state in rows}
    return found


async def move(session: Session, message_ids: Iterable[str], to: State, act: Act) -> dict[str, str]:
    """Move messages for which it is legal; return their ids and queues."""
    given = [message_id for message_id in message_ids if is_id(message_id)]
    if to not in _MOVES:
        raise ValueError(f"no operator may move a message to {to.name}")
    parameters: dict[str, Any] = {
        "now": session.now,
        "ids": ids(given),
        "actor": act.actor,
        "reason": act.reason,
        "key_window": round(limits.KEY_WINDOW * MICROSECONDS),
        "line_retention": LINE_RETENTION,
    }
    moved: dict[str, str] = dict(await session.wire.rows(_MOVES[to], parameters))
    if to is State.SCHEDULED:
        moved |= dict(await session.wire.rows("move_resume", parameters))
    elif moved:
        await session.journals.reply_for(list(moved), to)
    return {message_id: moved[message_id] for message_id in given if message_id in moved}
