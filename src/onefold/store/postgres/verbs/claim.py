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
#: Columns of a claimed row: its rank where it waited at no gate, the last two at gates.
#: The last row of a claim says in four others what else it saw.
_ID, _QUEUE, _DUE_AT = 0, MESSAGE_COLUMNS.index("queue"), len(MESSAGE_COLUMNS)
CLAIMED_AT, _RANK, GATE, ORDER = _DUE_AT + 7, _DUE_AT + 8, _DUE_AT + 8, _DUE_AT + 9
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
    #: Whether to walk through all gates even if that was in vain a moment ago.
    thorough: bool = True


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
    #: Whether as many were due as were wanted, so that more may be.
    full: bool


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

    async def claim(self, wanted: Wanted, floors: Sequence[int], *, lease_floor: int | None) -> Claimed:
        """Take due messages without a gate; of each queue only those that were due at its floor or later.

        With a ``lease_floor`` also look for leases that ran out since then.
        """
        statement = "claim_crashed" if wanted.lane is Lane.PROBATION else "claim"
        asked = {"floors": bigints(floors), "lease_floor": lease_floor}
        rows = await self.wire.rows(statement, {**self.asking(wanted), **asked})
        seen = rows.pop()
        return Claimed(_leases_of(rows, wanted), seen[CLAIMED_AT], *map(bool, seen[_SEEN]))

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


def _leases_of(rows: list[Row], wanted: Wanted) -> list[Lease]:
    """Return the leases, those of the first queue first, each queue's by due time and priority."""
    if len(wanted.queues) > 1:
        place = {queue: number for number, queue in enumerate(wanted.queues)}
        rows.sort(key=lambda row: (place[row[_QUEUE]], row[_RANK], row[_ID]))
    else:
        rows.sort(key=_by_rank)
    return [lease_of(row, claimed_at=row[CLAIMED_AT], worker=wanted.worker) for row in rows]


#: The order of most claims; itemgetter is quicker than a function of our own.
_by_rank = itemgetter(_RANK, _ID)
