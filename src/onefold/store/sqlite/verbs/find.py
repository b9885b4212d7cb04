"""The read side: one page of records, the attempts of a message, and how many there are."""

from __future__ import annotations

from typing import Any

from onefold import limits
from onefold.store import Attempt, Counts, Query, Record, State
from onefold.store.shared.rows import allows, attempt_of, record_of
from onefold.store.sqlite.numbers import number_of, numbers_of, stored_number
from onefold.store.sqlite.session import Row, Session, as_json


def find(session: Session, query: Query) -> list[Record]:
    """Return one page of records, read from where there are the fewest."""
    if query.ids is not None:
        numbers = as_json(list(numbers_of(session, query.ids).values()))
        found = [record_of(row) for row in session.rows("find_ids", numbers, session.clock.now())]
        return [record for record in found if allows(query, record)]
    return [record_of(row) for row in _rows(session, query)]


def _rows(session: Session, query: Query) -> list[Row]:
    limit = min(query.limit, limits.PAGE_MAX)
    given = (query.after, query.queue, query.message_type, query.correlation_id, limit)
    # Crashes are asked for among the living only.
    states = as_json([int(s) for s in query.states or State if query.crashes is None or not s.ended])
    if query.worker is not None:
        return session.rows("find_leased", query.worker, *given, states, query.crashes)
    if query.crashes:
        return session.rows("find_crashed", query.crashes, *given, states)
    if query.correlation_id is not None:
        # The first message of a chain has its own id as its correlation id.
        first = stored_number(session, query.correlation_id)
        return session.rows("find_correlated", *given, states, session.clock.now(), first)
    if query.states == (State.DEAD,):
        return session.rows("find_dead", *given)
    return session.rows("find_any", _number_after(session, query.after), *given[1:], states, session.clock.now())


def _number_after(session: Session, after: str) -> int:
    """Return the number behind which a page begins, also when that message is gone or never was."""
    if not after:
        return -1
    known = stored_number(session, after)
    return number_of(after) - 1 if known is None else known


def attempts(session: Session, message_id: str) -> list[Attempt]:
    """Return the failed runs of one message, oldest first."""
    return [attempt_of(row) for row in session.rows("attempts", stored_number(session, message_id))]


def count(session: Session) -> dict[str, Counts]:
    """Return, per queue, how many messages wait, run and are dead."""
    counts: dict[str, dict[str, Any]] = {}
    for queue, state, number in session.rows("count_alive"):
        counts.setdefault(queue, {})[State(state).name.lower()] = number
    for queue, number, oldest_at in session.rows("count_dead"):
        counts.setdefault(queue, {}).update(dead=number, oldest_dead_at=oldest_at)
    return {queue: Counts(**numbers) for queue, numbers in counts.items()}
