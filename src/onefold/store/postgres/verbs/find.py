"""The read side: one page of records, the attempts of a message, and how many there are."""

from __future__ import annotations

from typing import Any

from onefold import limits
from onefold.store import Attempt, Counts, Query, Record, State
from onefold.store.postgres.session import FIRST_ID, Session
from onefold.store.postgres.verbs.journal import is_id
from onefold.store.postgres.wire.arrays import ids, numbers
from onefold.store.shared.finding import statement_for
from onefold.store.shared.rows import attempt_of, record_of


async def find(session: Session, query: Query) -> list[Record]:
    parameters: dict[str, Any] = {
        "now": session.now,
        "after": query.after or FIRST_ID,
        "queue": query.queue,
        "message_type": query.message_type,
        "correlation_id": query.correlation_id,
        "worker": query.worker,
        "crashes": query.crashes,
        "runs": query.runs,
        "limit": min(query.limit, limits.PAGE_MAX),
        "states": numbers([int(state) for state in query.states or State]),
        # An id that is not a UUID cannot be in the table, so it is not an error to look for it.
        "ids": ids([message_id for message_id in query.ids or () if is_id(message_id)]),
    }
    if (statement := statement_for(query)) == "find_correlated":
        parameters["root"] = query.correlation_id if is_id(query.correlation_id or "") else None
    return [record_of(row) for row in await session.wire.rows(statement, parameters)]


async def attempts(session: Session, message_id: str) -> list[Attempt]:
    if not is_id(message_id):
        return []
    return [attempt_of(row) for row in await session.wire.rows("attempts", {"id": message_id})]


async def count(session: Session) -> dict[str, Counts]:
    counts: dict[str, dict[str, Any]] = {}
    for queue, state, number in await session.wire.rows("count_alive"):
        counts.setdefault(queue, {})[State(state).name.lower()] = number
    for queue, number, oldest_at in await session.wire.rows("count_dead"):
        counts.setdefault(queue, {}).update(dead=number, oldest_dead_at=oldest_at)
    return {queue: Counts(**numbers) for queue, numbers in counts.items()}
