"""Purge: bodies, then messages with their keys, whose time is over."""

from __future__ import annotations

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Purged
from onefold.store.postgres.session import Session


async def purge(session: Session, limit: int) -> Purged:
    given = {"now": session.now, "limit": limit}
    kept = round(limits.ACT_RETENTION * MICROSECONDS)
    # One kind after the other: while there are messages to remove whole, emptying them would be wasted effort.
    messages, has_turn = (await session.wire.rows("purge_messages", given))[0]
    if messages == limit or not has_turn:
        return Purged(messages=messages)
    bodies: int = (await session.wire.rows("purge_bodies", given))[0][0]
    if bodies >= limit:
        return Purged(messages=messages, bodies=bodies)
    return Purged(
        messages=messages,
        bodies=bodies,
        keys=len(await session.wire.rows("purge_keys", given)),
        gates=len(await session.wire.rows("purge_gates", given)),
        acts=len(await session.wire.rows("purge_acts", {**given, "kept": kept})),
        register=len(await session.wire.rows("purge_register", given)),
    )
