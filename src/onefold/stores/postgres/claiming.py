"""Where a claim begins to look.

A row that was claimed or settled leaves a dead entry in the index, and while some other transaction stays open the
server may not remove it: a claim that began at the oldest entry every time would walk past all of them.
So it begins shortly before where the last one ended, now and then a good while before, and seldom at the beginning.
Whoever leaves something before that place, such as a message handed back, says so when it wakes the others.
"""

from __future__ import annotations

from onefold.clock import MICROSECONDS, SystemClock
from onefold.store import Lane, Lease
from onefold.stores.postgres.session import Session, Wanted

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


class Claimer:
    """Claims for one store; ``exact`` looks everywhere every time, for tests that move the clock."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._further = Round(_FURTHER_SECONDS)
        self._everywhere = Round(_EVERYWHERE_SECONDS)
        self._every_lease = Round(_EVERY_LEASE_SECONDS)
        self._expired = Round(_EXPIRED_SECONDS_MIN)
        #: Where the last look of a kind ended in each queue, on the server's clock.
        self._seen: dict[tuple[Lane, tuple[str, ...]], dict[str, int]] = {}
        self._leases_seen = 0
        #: How far the server's clock is ahead of this machine's steady one, at least.
        self._ahead: int | None = None

    def look_everywhere(self) -> None:
        """Something may have come back before the place where the last look ended."""
        self._everywhere.make_due()

    async def claim(self, session: Session, wanted: Wanted, repeated: bool) -> list[Lease]:
        self._expired.seconds = min(max(wanted.lease / _EXPIRED_PER_LEASE, _EXPIRED_SECONDS_MIN), _EXPIRED_SECONDS_MAX)
        await self._release_expired(session)
        began_at = _machine.steady()
        everywhere, further = self._everywhere.is_due() or self._exact, self._further.is_due()
        back = round((_FURTHER_BACK_SECONDS if further else NEAR_SECONDS) * MICROSECONDS)
        seen = self._seen.setdefault((wanted.lane, tuple(wanted.types)), {})
        floors = [0 if everywhere else max(0, seen.get(queue, 0) - back) for queue in wanted.queues]
        leases = await session.claim(wanted, floors, repeated)
        if everywhere:
            self._everywhere.done(began_at)
        if everywhere or further:
            self._further.done(began_at)
        for one in leases:  # in the order of their due times, so the last of each queue remains
            seen[one.envelope.queue] = one.envelope.due_at
        if len(leases) < wanted.limit and self._ahead is not None:
            seen.update(dict.fromkeys(wanted.queues, began_at + self._ahead))
        return leases

    async def _release_expired(self, session: Session) -> None:
        if not self._exact and not self._expired.is_due():
            return
        began_at = _machine.steady()
        everywhere = self._every_lease.is_due() or self._exact
        now, released = await session.release_expired(0 if everywhere else self._leases_seen, _EXPIRED_MAX)
        # The answer came after the server had looked at its clock, so this is never too much.
        self._ahead = now - _machine.steady()
        self._expired.done(began_at)
        if everywhere:
            self._every_lease.done(began_at)
        if released:
            self.look_everywhere()
        if released < _EXPIRED_MAX:
            self._leases_seen = now - round(_FURTHER_BACK_SECONDS * MICROSECONDS)
