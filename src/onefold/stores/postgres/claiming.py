"""Where a claim begins to look.

A row that was claimed or settled leaves a dead entry in the index, and while some other transaction stays open the
server may not remove it: a claim that began at the oldest entry every time would walk past all of them.
So it begins shortly before where the last one ended, and from the very beginning once in a while.
What comes to lie before that place, such as a message handed back elsewhere, waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.clock import MICROSECONDS, SystemClock
from onefold.store import Lane, Lease
from onefold.stores.postgres.session import Session

#: Look from the beginning this often, in seconds.
_EVERYWHERE_SECONDS = 1.0
#: For run-out leases it is only a precaution, because time itself moves on past them.
_EVERY_LEASE_SECONDS = 30.0
#: Looking from the beginning may cost this part of the time, so it becomes rarer the longer it takes.
_COST_MAX = 0.05
#: Look for run-out leases this often; nobody is in a hurry who waited for a whole lease.
_EXPIRED_SECONDS = 1.0
#: Run-out leases released at once, so that nobody waits long for the statement.
_EXPIRED_MAX = 1_000
#: A message is dated when it is put, and seen when that commits: begin this much before where the last look ended.
_SLACK = 3 * MICROSECONDS

_machine = SystemClock()


class Round:
    """Says when it is time to begin at the beginning."""

    def __init__(self, seconds: float) -> None:
        self._period = round(seconds * MICROSECONDS)
        self._next = 0
        self._began = 0

    def begin(self) -> bool:
        """Begin a look; True when it is to be from the beginning."""
        self._began = _machine.steady()
        return self._began >= self._next

    def end(self) -> None:
        """A look from the beginning is over."""
        now = _machine.steady()
        self._next = now + max(self._period, round((now - self._began) / _COST_MAX))

    def now(self) -> None:
        """Let the next look be from the beginning."""
        self._next = 0


class Claimer:
    """Claims for one store; ``exact`` looks everywhere every time, for tests that move the clock."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._messages = Round(_EVERYWHERE_SECONDS)
        self._leases = Round(_EVERY_LEASE_SECONDS)
        self._floors: dict[tuple[Lane, str], int] = {}
        self._lease_floor = 0
        self._expired_at = 0

    def look_everywhere(self) -> None:
        """Something may have come back before the place where the last look ended."""
        self._messages.now()

    async def claim(
        self,
        session: Session,
        queues: Sequence[str],
        *,
        types: Sequence[str],
        limit: int,
        lease: float,
        worker: str,
        lane: Lane,
    ) -> list[Lease]:
        await self._release_expired(session)
        everywhere = self._messages.begin() or self._exact
        floors = [0 if everywhere else self._floors.get((lane, queue), 0) for queue in queues]
        leases = await session.claim(queues, floors, types=types, limit=limit, lease=lease, worker=worker, lane=lane)
        if everywhere:
            self._messages.end()
        for one in leases:  # in the order of their due times, so the last of each queue remains
            self._floors[lane, one.envelope.queue] = one.envelope.due_at - _SLACK
        return leases

    async def _release_expired(self, session: Session) -> None:
        now = _machine.steady()
        if not self._exact and now < self._expired_at + _EXPIRED_SECONDS * MICROSECONDS:
            return
        self._expired_at = now
        everywhere = self._leases.begin() or self._exact
        looked_at, released = await session.release_expired(0 if everywhere else self._lease_floor, _EXPIRED_MAX)
        if everywhere:
            self._leases.end()
        if released:
            self.look_everywhere()
        if released < _EXPIRED_MAX:
            self._lease_floor = looked_at - _SLACK
