"""Claim: due messages are given to one worker for a while, each with a higher fence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Dead, Lane, Lease, damaged
from onefold.store.shared.rows import encode_failure, read_envelope
from onefold.store.sqlite.drivers import ERRORS, is_constraint
from onefold.store.sqlite.session import Row, RowLease, Session, as_json
from onefold.store.sqlite.verbs.gates import Asked, Budget, Gates, Pick, in_turn, merged, pass_on
from onefold.store.sqlite.verbs.journal import JournalTable

logger = logging.getLogger("onefold")

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


def claim(session: Session, gates: Gates, asked: Asked, *, lease: float, worker: str) -> list[Lease]:
    """Take due messages, including those whose lease ran out: queues in the order given, the longest due first."""
    now, steady = session.clock.now(), session.clock.steady()
    session.run("claim_expired", steady)
    budget = Budget(session, asked, now)
    leases: list[RowLease] = []
    for queue in asked.queues:
        if budget.room <= 0:
            break
        prioritised, lined, crowded = session.rows("claim_kinds", queue)[0]
        if not (prioritised or lined or crowded):
            rows = _plain(session, asked, queue, now, budget.room)
            budget.room -= len(rows)
            leases += [_lease_of(row, now, worker) for row in rows]
            continue
        # Suspects ignore priority.
        by_priority = _by_priority if prioritised and asked.lane is not Lane.PROBATION else None
        kinds = {by_priority: True, gates.lines: lined, gates.crowds: crowded}
        for choose in in_turn([choose for choose, is_there in kinds.items() if is_there], gates.turn):
            if choose is None:
                rows = _plain(session, asked, queue, now, budget.room)
                budget.room -= len(rows)
                leases += [_lease_of(row, now, worker) for row in rows]
                continue
            picks = list(choose(session, asked, queue, now, budget))
            rows = session.rows("claim_rows", as_json([pick.seq for pick in picks])) if picks else []
            leases += [_lease_of(row, now, worker, pick) for row, pick in zip(rows, picks, strict=True)]
        gates.turn += 1
    if leases:
        until = steady + round(lease * MICROSECONDS)
        suspect_after = limits.SUSPECT_AFTER if asked.lane is Lane.ANY else limits.INTEGER_MAX
        leases = _take(session, leases, now, (until, worker, suspect_after))
        budget.spend()
        JournalTable(session).read_claimed(leases)
    return list(leases)


def _take(session: Session, leases: list[RowLease], now: int, given: tuple[int, str, int]) -> list[RowLease]:
    """Take messages together; where a row is in the way, one by one, and that row is set aside."""
    # SQLite would make a number with a fraction of a fence that cannot rise any more.
    if all(one.fence <= limits.INTEGER_MAX for one in leases):
        try:
            session.run("claim_take", *given, as_json([one.seq for one in leases]))
        except ERRORS as error:
            if not is_constraint(error):
                raise
        else:
            return leases
    return [one for one in leases if _take_one(session, one, now, given)]


def _take_one(session: Session, lease: RowLease, now: int, given: tuple[int, str, int]) -> bool:
    damage = "its fence cannot rise any more"
    if lease.fence <= limits.INTEGER_MAX:
        try:
            session.run("claim_take", *given, as_json([lease.seq]))
        except ERRORS as error:
            if not is_constraint(error):
                raise
            damage = f"it cannot be claimed: {error}"
        else:
            return True
    dead = Dead(damaged(damage))
    windows = (round(dead.key_window * MICROSECONDS), round(dead.body_retention * MICROSECONDS))
    session.run("claim_set_aside", lease.seq, encode_failure(dead.failure), now, now + windows[0], now + min(windows))
    session.run("settle_end", as_json([lease.seq]))
    pass_on(session, [lease.envelope], now)
    logger.error("set_aside message_id=%s reason=damaged", lease.id)
    return False


def _plain(session: Session, asked: Asked, queue: str, now: int, number: int) -> list[Row]:
    """Read those that wait at no gate, the longest due first."""
    statement, *bounds = _SELECT_OF[asked.lane]
    return session.rows(statement, queue, now, asked.known, number, *bounds)


def _by_priority(session: Session, asked: Asked, queue: str, now: int, budget: Budget) -> Iterator[Pick]:
    """Choose those that wait at no gate, of which some have a priority."""
    given = (queue, now, asked.known, asked.crashes_max, budget.room)
    levels = [(0, session.rows("claim_level_plain", *given))]
    levels += [(level, session.rows("claim_level", *given, level)) for level in range(1, limits.PRIORITY_MAX + 1)]
    chosen = merged(levels, budget.room)
    budget.room -= len(chosen)
    return (Pick(seq) for seq in chosen)


def _lease_of(row: Row, claimed_at: int, worker: str, pick: Pick | None = None) -> RowLease:
    """Return the lease of a row just claimed, which still shows the fence before the claim."""
    fence, attempt, crashes, replays, wake, seq = row[14:]
    envelope, damage = read_envelope(row)
    common = (envelope, fence + 1, attempt + 1, crashes, replays, claimed_at, worker, wake)
    if pick is None:
        return RowLease(*common, damage=damage, seq=seq)
    return RowLease(*common, pick.gate, pick.gap, damage=damage, seq=seq)


def claim_possible(session: Session, gates: Gates, asked: Asked) -> bool:
    """Whether a claim might find something; only a read."""
    statement, *bounds = _POSSIBLE_OF[asked.lane]
    now, steady = session.clock.now(), session.clock.steady()
    if session.rows(statement, steady, as_json(asked.queues), now, asked.known, *bounds)[0][0]:
        return True
    budget = Budget(session, asked, now)
    for queue in asked.queues:
        _, lined, crowded = session.rows("claim_kinds", queue)[0]
        if (lined and any(True for _ in gates.lines(session, asked, queue, now, budget))) or (
            crowded and any(True for _ in gates.crowds(session, asked, queue, now, budget))
        ):
            return True
    return False
