"""Claims on one PostgreSQL connection: what every one of them is told, and those of messages without a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.gate import Gating
from onefold.store import HandBack, Lane, Lease
from onefold.stores.postgres.arrays import bigints, texts
from onefold.stores.postgres.settlements import settling
from onefold.stores.postgres.wire import Row, Wire
from onefold.stores.rows import lease_of

#: As a limit on a count.
_NO_LIMIT = 2**31 - 1
_PRIORITY_STEP = round(limits.PRIORITY_STEP_SECONDS * MICROSECONDS)
LINE_RETENTION = round(limits.LINE_RETENTION * MICROSECONDS)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one call of claim asks for."""

    queues: Sequence[str]
    types: Sequence[str]
    limit: int
    lease: float
    worker: str
    lane: Lane
    #: By which it is known should its answer be lost.
    call: int
    gatings: Mapping[str, Gating]
    at_once: int | None


class Claimed(NamedTuple):
    """What one statement has claimed, and what it saw beside it."""

    leases: list[Lease]
    #: The store's time.
    now: int
    #: Whether leases had run out, from the floor on.
    run_out: bool
    #: Whether there may be somebody in lines, and at gates without an order.
    lines: bool
    crowds: bool
    #: Whether anybody has a priority; then nobody was claimed, unless they were to be ranked.
    ranked: bool


class Leasing:
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
        """Return what every statement that claims is told."""
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
            # Whoever runs lanes reports by itself what was running when a process died.
            "suspect_after": limits.SUSPECT_AFTER if lane is Lane.ANY else _NO_LIMIT,
            "step": _PRIORITY_STEP,
        }

    async def claim(
        self, wanted: Wanted, floors: Sequence[int], *, lease_floor: int | None, ranked: bool = False
    ) -> Claimed:
        """Take due messages without a gate; of each queue only those that were due at its floor or later.

        With a ``lease_floor`` also look for leases that ran out since then.
        Nobody is taken if somebody has a priority, unless they are to be ``ranked``.
        """
        statement = "claim_crashed" if wanted.lane is Lane.PROBATION else "claim_ranked" if ranked else "claim"
        asked = {"floors": bigints(floors), "lease_floor": lease_floor, "top": limits.PRIORITY_MAX}
        rows = await self.wire.rows(statement, {**self.asking(wanted), **asked})
        seen = rows.pop()
        leases = _leases_of(rows, wanted, ranked=ranked)
        return Claimed(leases, seen[19], *(bool(one) for one in seen[12:16]))

    async def claimed(self, wanted: Wanted) -> list[Lease]:
        """Return what a call of claim has taken whose answer was lost.

        Those with a number are handed back: whether one before them was missing is not known any more.
        """
        rows = await self.wire.rows("claim_again", self.asking(wanted))
        leases = [lease_of(row, claimed_at=row[19], worker=wanted.worker, gate=row[20]) for row in rows]
        numbered = [lease for lease in leases if lease.gate is not None and lease.envelope.sequence is not None]
        if numbered:
            await self.wire.rows_of_each(list(settling([(lease, HandBack()) for lease in numbered])))
        return [lease for lease in leases if lease not in numbered]


def _leases_of(rows: list[Row], wanted: Wanted, *, ranked: bool) -> list[Lease]:
    """Return the leases, those of the first queue first, each queue's by due time and priority."""
    if ranked:
        place = {queue: number for number, queue in enumerate(wanted.queues)}
        leases = [lease_of(row, claimed_at=row[19], worker=wanted.worker) for row in rows]
        return sorted(leases, key=lambda lease: (place[lease.envelope.queue], *_rank(lease)))
    if len(wanted.queues) > 1:
        place = {queue: number for number, queue in enumerate(wanted.queues)}
        rows.sort(key=lambda row: (place[row[3]], row[12], row[0]))
    else:
        rows.sort(key=_by_due_time)
    return [lease_of(row, claimed_at=row[19], worker=wanted.worker) for row in rows]


def _rank(lease: Lease) -> tuple[int, str]:
    return lease.envelope.due_at - lease.envelope.priority * _PRIORITY_STEP, lease.id


def _by_due_time(row: tuple[Any, ...]) -> tuple[int, str]:
    return row[12], row[0]
