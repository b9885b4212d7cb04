"""Claims on one PostgreSQL connection: the parameters of all of them, and those of messages without a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import HandBack, Lane, Lease
from onefold.store.gates import Gating
from onefold.store.postgres.verbs.settle import settling
from onefold.store.postgres.wire.arrays import bigints, texts
from onefold.store.postgres.wire.wire import Row, Wire
from onefold.store.shared.rows import MESSAGE_COLUMNS, lease_of

#: As a limit on a count.
_NO_LIMIT = 2**31 - 1
_PRIORITY_STEP = round(limits.PRIORITY_STEP_SECONDS * MICROSECONDS)
LINE_RETENTION = round(limits.LINE_RETENTION * MICROSECONDS)
#: Columns of a claimed row, the last two only at gates; the last row of a claim says in four others what else it saw.
_ID, _QUEUE, _DUE_AT = 0, MESSAGE_COLUMNS.index("queue"), len(MESSAGE_COLUMNS)
CLAIMED_AT, GATE, ORDER = _DUE_AT + 7, _DUE_AT + 8, _DUE_AT + 9
_SEEN = slice(_DUE_AT, _DUE_AT + 4)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of one call of claim."""

    queues: Sequence[str]
    types: Sequence[str]
    limit: int
    lease: float
    worker: str
    lane: Lane
    #: By which its leases are found if its answer is lost.
    call: int
    gatings: Mapping[str, Gating]
    at_once: int | None


class Claimed(NamedTuple):
    """The leases that one statement has claimed, and what else it saw."""

    leases: list[Lease]
    #: The store's time.
    now: int
    #: Whether leases had run out, from the floor on.
    run_out: bool
    #: Whether there may be messages in lines, and at gates without an order.
    lines: bool
    crowds: bool
    #: Whether any message has a priority; then none was claimed, unless they were to be ranked.
    ranked: bool


class Claims:
    """Claims on one connection, by the given clock; without one, by the server's."""

    def __init__(self, wire: Wire, now: int | None) -> None:
        self.wire = wire
        self._now = now

    async def release_expired(self, floor: int, limit: int) -> int:
        """Make messages claimable whose lease ran out since ``floor``; return how many they were."""
        rows = await self.wire.rows("claim_expired", {"now": self._now, "floor": floor, "limit": limit})
        released: int = rows[0][0]
        return released

    def asking(self, wanted: Wanted) -> dict[str, Any]:
        """Return the parameters that all claims share."""
        lane = wanted.lane
        return {
            "now": self._now,
            "queues": texts(wanted.queues),
            "types": texts(wanted.types),
            "limit": wanted.limit,
            "lease": round(wanted.lease * MICROSECONDS),
            "worker": wanted.worker,
            "call": wanted.call,
            "crashes_least": 1 if lane is Lane.PROBATION else 0,
            "crashes_most": 0 if lane is Lane.MAIN else _NO_LIMIT,
            # A supervisor, which runs lanes, reports by itself which messages were running when a process died.
            "suspect_after": limits.SUSPECT_AFTER if lane is Lane.ANY else _NO_LIMIT,
            "step": _PRIORITY_STEP,
        }

    async def claim(
        self, wanted: Wanted, floors: Sequence[int], *, lease_floor: int | None, ranked: bool = False
    ) -> Claimed:
        """Take due messages without a gate; of each queue only those that were due at its floor or later.

        With a ``lease_floor`` also look for leases that ran out since then.
        None is taken if any message has a priority, unless they are to be ``ranked``.
        """
        statement = "claim_crashed" if wanted.lane is Lane.PROBATION else "claim_ranked" if ranked else "claim"
        asked = {"floors": bigints(floors), "lease_floor": lease_floor, "top": limits.PRIORITY_MAX}
        rows = await self.wire.rows(statement, {**self.asking(wanted), **asked})
        seen = rows.pop()
        leases = _leases_of(rows, wanted, ranked=ranked)
        return Claimed(leases, seen[CLAIMED_AT], *map(bool, seen[_SEEN]))

    async def claimed(self, wanted: Wanted) -> list[Lease]:
        """Return the leases that a call of claim has taken whose answer was lost.

        Leases with a number are handed back: whether one before them was missing is not known any more.
        """
        rows = await self.wire.rows("claim_again", self.asking(wanted))
        leases = [lease_of(row, claimed_at=row[CLAIMED_AT], worker=wanted.worker, gate=row[GATE]) for row in rows]
        numbered = [lease for lease in leases if lease.gate is not None and lease.envelope.sequence is not None]
        if numbered:
            await self.wire.rows_of_each(list(settling([(lease, HandBack()) for lease in numbered])))
        return [lease for lease in leases if lease not in numbered]


def _leases_of(rows: list[Row], wanted: Wanted, *, ranked: bool) -> list[Lease]:
    """Return the leases, those of the first queue first, each queue's by due time and priority."""
    place = {queue: number for number, queue in enumerate(wanted.queues)}
    if not ranked and len(place) > 1:
        rows.sort(key=lambda row: (place[row[_QUEUE]], row[_DUE_AT], row[_ID]))
    elif not ranked:
        rows.sort(key=_by_due_time)
    leases = [lease_of(row, claimed_at=row[CLAIMED_AT], worker=wanted.worker) for row in rows]
    return sorted(leases, key=lambda lease: (place[lease.envelope.queue], *_rank(lease))) if ranked else leases


def _rank(lease: Lease) -> tuple[int, str]:
    """Return by what messages are ordered when a step of priority counts as much as waiting for it."""
    return lease.envelope.due_at - lease.envelope.priority * _PRIORITY_STEP, lease.id


#: The order of most claims; itemgetter is quicker than a function of our own.
_by_due_time = itemgetter(_DUE_AT, _ID)
