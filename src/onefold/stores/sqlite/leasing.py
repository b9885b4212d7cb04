"""Claim and extend: due messages are given to one worker for a while, each with a higher fence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Fenced, Lane, Lease
from onefold.stores.rows import envelope_of
from onefold.stores.sqlite.session import Row, Session, as_json

#: The statement of each lane, and how many crashes it allows where it asks.
_SELECT_OF: dict[Lane, tuple[Any, ...]] = {
    Lane.ANY: ("claim_select", limits.INTEGER_MAX),
    Lane.MAIN: ("claim_select", 0),
    Lane.PROBATION: ("claim_select_crashed",),
}
_POSSIBLE_OF: dict[Lane, tuple[Any, ...]] = {
    Lane.ANY: ("claim_possible", limits.INTEGER_MAX),
    Lane.MAIN: ("claim_possible", 0),
    Lane.PROBATION: ("claim_possible_crashed",),
}


class RowLease(Lease, frozen=True, gc=False):
    """A lease that remembers the number of its row, which saves looking for it by the id."""

    seq: int = 0


def claim(
    session: Session, queues: Sequence[str], *, types: Sequence[str], limit: int, lease: float, worker: str, lane: Lane
) -> list[Lease]:
    """Take due messages, including those whose lease ran out: queues in the order given, the longest due first."""
    now, steady = session.clock.now(), session.clock.steady()
    session.run("claim_expired", steady)
    known = as_json(types)
    statement, *bounds = _SELECT_OF[lane]
    rows: list[Row] = []
    for queue in queues:
        rows += session.rows(statement, queue, now, known, limit - len(rows), *bounds)
        if len(rows) >= limit:
            break
    if rows:
        until = steady + round(lease * MICROSECONDS)
        suspect_after = limits.SUSPECT_AFTER if lane is Lane.ANY else limits.INTEGER_MAX
        session.run("claim_take", until, worker, suspect_after, as_json([row[19] for row in rows]))
    return [_lease_of(row, now, worker) for row in rows]


def _lease_of(row: Row, claimed_at: int, worker: str) -> Lease:
    """Return the lease of a row just claimed, which still shows the fence before the claim."""
    fence, attempt, crashes, replays, wake, seq = row[14:]
    return RowLease(envelope_of(row), fence + 1, attempt + 1, crashes, replays, claimed_at, worker, wake, seq=seq)


def claim_possible(session: Session, queues: Sequence[str], types: Sequence[str], lane: Lane) -> bool:
    """Whether a claim might find something; only a read."""
    statement, *bounds = _POSSIBLE_OF[lane]
    given = (session.clock.steady(), as_json(queues), session.clock.now(), as_json(types))
    return bool(session.rows(statement, *given, *bounds)[0][0])


def extend(session: Session, leases: Sequence[Fenced], lease: float, starting: bool) -> list[bool]:
    """Keep leases for ``lease`` seconds from now; False for each that was taken over or has run out."""
    numbers = rows_of(session, leases)
    leased = {seq: fence for seq, (fence, state) in fences_of(session, numbers).items() if state == 1}
    held = [seq is not None and leased.get(seq) == one.fence for one, seq in zip(leases, numbers, strict=True)]
    mine = [seq for seq, is_held in zip(numbers, held, strict=True) if is_held]
    if mine:
        until = session.clock.steady() + round(lease * MICROSECONDS)
        session.run("extend", until, int(starting), as_json(mine))
    return held


def rows_of(session: Session, leases: Sequence[Fenced]) -> list[int | None]:
    """Return the number of each lease's row, None where there is no such message any more."""
    unknown = [one.id for one in leases if not isinstance(one, RowLease)]
    found: dict[str, int] = dict(session.rows("lease_rows", as_json(unknown))) if unknown else {}
    return [one.seq if isinstance(one, RowLease) else found.get(one.id) for one in leases]


def fences_of(session: Session, numbers: Iterable[int | None]) -> dict[int, tuple[int, int]]:
    """Return fence and state of those that are alive."""
    asked = as_json([seq for seq in numbers if seq is not None])
    return {seq: (fence, state) for seq, fence, state in session.rows("lease_fences", asked)}
