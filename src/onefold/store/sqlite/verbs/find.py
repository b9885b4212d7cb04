"""The read side: one page of records, the attempts of a message, and how many there are."""

from __future__ import annotations

from typing import Any

from onefold import limits
from onefold.store import Attempt, Counts, Query, Record, State
from onefold.store.shared.finding import statement_for
from onefold.store.shared.rows import allows, attempt_of, record_of
from onefold.store.sqlite.numbers import number_of, numbers_of, stored_number
from onefold.store.sqlite.session import Session, as_json


def find(session: Session, query: Query) -> list[Record]:
    """Return one page of records, read from where there are the fewest."""
    if query.ids is not None:
        numbers = as_json(list(numbers_of(session, query.ids).values()))
        found = [record_of(row) for row in session.rows("find_ids", numbers, session.clock.now())]
        return [record for record in found if allows(query, record)]
    statement = statement_for(query)
    after = _number_after(session, query.after) if statement in _BY_NUMBER else query.after
    # Crashes are asked for among the living only.
    states = as_json([int(s) for s in query.states or State if query.crashes is None or not s.ended])
    limit = min(query.limit, limits.PAGE_MAX)
    given = [after, query.queue, query.message_type, query.correlation_id, limit, states]
    given += [session.clock.now(), query.runs]
    if statement == "find_leased":
        given += [query.worker, query.crashes]
    elif statement == "find_crashed":
        given += [query.crashes]
    elif statement == "find_correlated":
        # The first message of a chain has its own id as its correlation id.
        given += [stored_number(session, query.correlation_id or "")]
    return [record_of(row) for row in session.rows(statement, *given)]


#: Statements that page by number, which is the order of ids of version 7.
_BY_NUMBER = {"find_parked", "find_runs", "find_open", "find_any"}


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
