"""Which statement answers a query of the read side: the one that begins where the fewest messages are.  Pure."""

from __future__ import annotations

from onefold.store.records import Query
from onefold.store.states import State


def statement_for(query: Query) -> str:
    """Return the name of the statement; each asks for everything that a query can."""
    states = set(query.states or State)
    if query.ids is not None:
        return "find_ids"
    if query.worker is not None:
        return "find_leased"
    if query.crashes:
        return "find_crashed"
    if query.correlation_id is not None:
        return "find_correlated"
    if states == {State.DEAD}:
        return "find_dead"
    if any(state.ended for state in states):
        return "find_any"
    if states == {State.LEASED}:
        return "find_leased"
    if states == {State.PARKED}:
        return "find_parked"
    return "find_runs" if query.runs else "find_open"
