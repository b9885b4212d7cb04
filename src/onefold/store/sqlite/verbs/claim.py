"""Claim: due messages are given to one worker for a while, each with a higher fence."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Dead, Lane, Lease, damaged
from onefold.store.shared.rows import encode_failure, read_envelope
from onefold.store.sqlite.drivers import ERRORS, is_constraint
from onefold.store.sqlite.session import Row, RowLease, Session, as_json
from onefold.store.sqlite.verbs.gates import PRIORITY_STEP, Asked, Budget, Gates, Pick, Worth, in_turn, pass_on
from onefold.store.sqlite.verbs.journal import JournalTable

logger = logging.getLogger("onefold")

#: Chooses messages of one queue, and takes their places in the budget.
Choose = Callable[[Session, Asked, str, int, Budget], Iterable[Pick]]


def look(session: Session, gates: Gates, asked: Asked, *, for_all: bool) -> dict[str, Worth] | None:
    """Find the gates of each queue at which messages may be taken; only a read.

    With ``for_all`` look for other messages too, and for leases that have run out; None if a claim would find nothing.
    """
    now, kinds = session.clock.now(), gates.kinds(session, asked.queues)
    worth = {queue: gates.look(session, asked, queue, now, those) for queue, those in kinds.items()}
    if not for_all or any(worth.values()) or session.rows("claim_run_out", session.clock.steady())[0][0]:
        return worth
    budget = Budget(session, asked, now)
    plain = [queue for queue, those in kinds.items() if those.plain]
    return worth if any(_plain(session, asked, queue, now, budget) for queue in plain) else None


def claim(
    session: Session, gates: Gates, asked: Asked, worth: Mapping[str, Worth], *, lease: float, worker: str
) -> list[Lease]:
    """Take due messages, including those whose lease ran out: queues in the order given, the longest due first."""
    now, steady = session.clock.now(), session.clock.steady()
    expired = session.rows("claim_expired", steady)
    kinds = gates.kinds(session, asked.queues)
    budget = Budget(session, asked, now)
    leases: list[RowLease] = []
    for queue in asked.queues:
        if budget.room <= 0:
            break
        if queue not in kinds:
            continue
        found = worth.get(queue) or Worth()
        for where, gate, is_line in expired:
            if where == queue and gate is not None:
                found.add(gate, is_line=bool(is_line))
        ways: list[Choose] = [_plain]
        if found.lines:
            ways.append(partial(gates.lines, portions=[list(found.lines)]))
        if found.crowds:
            ways.append(partial(gates.crowds, portions=[list(found.crowds)]))
        taken: set[str] = set()
        for choose in in_turn(ways, gates.turn):
            picks = list(choose(session, asked, queue, now, budget))
            taken.update(pick.gate for pick in picks if pick.gate is not None)
            rows = session.rows("claim_rows", as_json([pick.seq for pick in picks])) if picks else []
            leases += [_lease_of(row, now, worker, pick) for row, pick in zip(rows, picks, strict=True)]
        if found:
            gates.served(asked, queue, found, taken)
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


def _plain(session: Session, asked: Asked, queue: str, now: int, budget: Budget) -> list[Pick]:
    """Choose those that wait at no gate, the longest due first; a step of priority counts as waiting for it."""
    number = budget.room
    if asked.lane is Lane.PROBATION:
        # Suspects ignore priority.
        waiting: Iterator[Row] = iter(session.rows("claim_crashed", queue, now, asked.known, number))
    else:
        heads = session.rows("claim_heads", queue, now, asked.known, asked.crashes_max)
        size = -(-number // max(len(heads), 1))
        lists = [_of_type(session, asked, queue, now, priority, kind, size) for priority, kind in heads]
        waiting = lists[0] if len(lists) == 1 else heapq.merge(*lists)
    picks = [Pick(seq) for _, seq in itertools.islice(waiting, number)]
    budget.room -= len(picks)
    return picks


def _of_type(
    session: Session, asked: Asked, queue: str, now: int, priority: int, message_type: str, size: int
) -> Iterator[Row]:
    """Read one type on one level of priority, a portion at a time and only as far as the claim goes."""
    known = queue, now, asked.crashes_max, priority, message_type
    after: Row = (-limits.INTEGER_MAX, 0)
    while True:
        rows = session.rows("claim_of_type", *known, *after, size)
        yield from ((due_at - priority * PRIORITY_STEP, seq) for due_at, seq in rows)
        if len(rows) < size:
            return
        after = rows[-1]


def _lease_of(row: Row, claimed_at: int, worker: str, pick: Pick) -> RowLease:
    """Return the lease of a row just claimed, which still shows the fence before the claim."""
    fence, attempt, crashes, replays, wake, seq = row[14:]
    envelope, damage = read_envelope(row)
    common = (envelope, fence + 1, attempt + 1, crashes, replays, claimed_at, worker, wake)
    return RowLease(*common, pick.gate, pick.gap, damage=damage, seq=seq)
