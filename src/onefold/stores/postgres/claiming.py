"""Where a claim begins to look.

A row that was claimed or settled leaves a dead entry in the index, and while some other transaction stays open the
server may not remove it: a claim that began at the oldest entry every time would walk past all of them.
So it begins shortly before where the last one ended, now and then a good while before, and seldom at the beginning.
Whoever leaves something before that place, such as a message handed back, says so when it wakes the others.
One statement claims, and says whether leases have run out; only then they cost another.
"""

from __future__ import annotations

from dataclasses import replace

from onefold.clock import MICROSECONDS, SystemClock
from onefold.store import Lane, Lease
from onefold.stores.postgres.session import Claimed, Session, Wanted

#: A message is dated when it is put, and seen when that commits: begin this much before where the last look ended.
NEAR_SECONDS = 0.25
#: This often begin further back, for what was put in a transaction that stayed open for as long as one may.
_FURTHER_SECONDS, _FURTHER_BACK_SECONDS = 0.25, 3.0
#: This often look from the beginning.
_EVERYWHERE_SECONDS = 1.0
#: For run-out leases it is only a precaution, because time itself moves on past them.
_EVERY_LEASE_SECONDS = 30.0
#: Looking further back may cost this part of the time, so it becomes rarer the longer it takes.
_COST_MAX = 0.05
#: Look for run-out leases this often within the length of one; nobody is in a hurry who waited for a whole lease.
_EXPIRED_PER_LEASE = 10
#: But no more often than this, and no less often than the second figure.
_EXPIRED_SECONDS_MIN, _EXPIRED_SECONDS_MAX = 0.5, 5.0
#: Run-out leases released at once, so that nobody waits long for the statement.
_EXPIRED_MAX = 1_000

_machine = SystemClock()


class Round:
    """Says when it is time for something that comes round."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._next = 0

    def is_due(self) -> bool:
        return _machine.steady() >= self._next

    def done(self, began_at: int) -> None:
        """It was done, and is due again after its period, or later if it took long."""
        now = _machine.steady()
        self._next = now + max(round(self.seconds * MICROSECONDS), round((now - began_at) / _COST_MAX))

    def make_due(self) -> None:
        self._next = 0


class Overdue:
    """When to look for leases that ran out, and from where."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._round = Round(_EXPIRED_SECONDS_MIN)
        self._everywhere = Round(_EVERY_LEASE_SECONDS)
        self._seen = 0

    def floor(self, lease: float) -> int | None:
        """Return where to begin, for leases of about this length; None when it is too soon."""
        self._round.seconds = min(max(lease / _EXPIRED_PER_LEASE, _EXPIRED_SECONDS_MIN), _EXPIRED_SECONDS_MAX)
        if not self._exact and not self._round.is_due():
            return None
        return 0 if self._everywhere.is_due() or self._exact else self._seen

    def looked(self, floor: int, began_at: int) -> None:
        self._round.done(began_at)
        if floor == 0:
            self._everywhere.done(began_at)

    def none_before(self, now: int) -> None:
        """There is none left that ran out before this moment, but for what was locked just now."""
        self._seen = now - round(_FURTHER_BACK_SECONDS * MICROSECONDS)


class Claimer:
    """Claims for one store; ``exact`` looks everywhere every time, for tests that move the clock."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._further = Round(_FURTHER_SECONDS)
        self._everywhere = Round(_EVERYWHERE_SECONDS)
        self._overdue = Overdue(exact=exact)
        #: Where the last look of a kind ended in each queue, on the server's clock.
        self._seen: dict[tuple[Lane, tuple[str, ...]], dict[str, int]] = {}

    def look_everywhere(self) -> None:
        """Something may have come back before the place where the last look ended."""
        self._everywhere.make_due()

    async def claim(self, session: Session, wanted: Wanted, repeated: bool) -> list[Lease]:
        """Claim; what others have let run out is released if there is any, and claimed as far as there is room."""
        began_at, floor = _machine.steady(), self._overdue.floor(wanted.lease)
        leases, now, run_out = await self._claim(session, wanted, floor, repeated)
        if now is None or floor is None:
            return leases
        self._overdue.looked(floor, began_at)
        released = await session.release_expired(floor, _EXPIRED_MAX) if run_out else 0
        if released < _EXPIRED_MAX:
            self._overdue.none_before(now)
        if released:
            self.look_everywhere()
        if released and len(leases) < wanted.limit:
            more = replace(wanted, limit=wanted.limit - len(leases))
            leases += (await self._claim(session, more, None, repeated=False)).leases
        return leases

    async def _claim(self, session: Session, wanted: Wanted, lease_floor: int | None, repeated: bool) -> Claimed:
        began_at = _machine.steady()
        everywhere, further = self._everywhere.is_due() or self._exact, self._further.is_due()
        back = round((_FURTHER_BACK_SECONDS if further else NEAR_SECONDS) * MICROSECONDS)
        seen = self._seen.setdefault((wanted.lane, tuple(wanted.types)), {})
        floors = [0 if everywhere else max(0, seen.get(queue, 0) - back) for queue in wanted.queues]
        claimed = await session.claim(wanted, floors, lease_floor=lease_floor, repeated=repeated)
        if everywhere:
            self._everywhere.done(began_at)
        if everywhere or further:
            self._further.done(began_at)
        for one in claimed.leases:  # in the order of their due times, so the last of each queue remains
            seen[one.envelope.queue] = one.envelope.due_at
        if claimed.now is not None and len(claimed.leases) < wanted.limit:
            # The server looked at its clock after it was asked, so this is never too late.
            asked_at = claimed.now - (_machine.steady() - began_at)
            seen.update(dict.fromkeys(wanted.queues, asked_at))
        return claimed
