"""Where a claim begins to look.

A row that was claimed or settled leaves a dead entry in the index, and while some other transaction stays open the
server may not remove it: a claim that began at the oldest entry every time would walk past all of them.
So it begins shortly before where the last one ended, now and then a good while before, and seldom at the beginning.
A process that leaves a message before that place, such as one handed back, says so when it notifies the others.
One statement claims, and says whether leases have run out; only then they cost another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import psycopg

from onefold.clock import MICROSECONDS, SystemClock
from onefold.store import Lane, Lease
from onefold.store.postgres.verbs.bad_rows import set_bad_rows_aside
from onefold.store.postgres.verbs.claim import Claimed, Claims, Wanted
from onefold.store.postgres.verbs.gates import Gates, is_limited
from onefold.store.postgres.verbs.journal import JournalTable
from onefold.store.postgres.wire.errors import is_about_rows
from onefold.store.postgres.wire.wire import Wire

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
#: Look for run-out leases this often within the length of one: a message that has waited for a whole lease can wait for
#: a tenth of one.
_EXPIRED_PER_LEASE = 10
#: But no more often than this, and no less often than the second figure.
_EXPIRED_SECONDS_MIN, _EXPIRED_SECONDS_MAX = 0.5, 5.0
#: Run-out leases released at once, which keeps the statement short for the claim that waits for it.
_EXPIRED_MAX = 1_000
_machine = SystemClock()


class Period:
    """Says when a periodic look is due."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._next = 0

    def is_due(self) -> bool:
        return _machine.steady() >= self._next

    def done(self, began_at: int) -> None:
        """Record that it was done: it is due again after its period, or later if it took long."""
        now = _machine.steady()
        self._next = now + max(round(self.seconds * MICROSECONDS), round((now - began_at) / _COST_MAX))

    def make_due(self) -> None:
        self._next = 0


class Overdue:
    """When to look for leases that ran out, and from where."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._round = Period(_EXPIRED_SECONDS_MIN)
        self._everywhere = Period(_EVERY_LEASE_SECONDS)
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
        """Record that none is left that ran out before this moment, except rows that are locked just now."""
        self._seen = now - round(_FURTHER_BACK_SECONDS * MICROSECONDS)


class PostgresClaimer:
    """Claims for one store; ``exact`` looks everywhere every time, for tests that move the clock."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._further = Period(_FURTHER_SECONDS)
        self._everywhere = Period(_EVERYWHERE_SECONDS)
        self._overdue = Overdue(exact=exact)
        self.gates = Gates()
        #: Where the last look of a kind ended in each queue, on the server's clock.
        self._seen: dict[tuple[Lane, tuple[str, ...]], dict[str, int]] = {}
        #: Whether the last look saw messages in lines, and at gates without an order.
        self._lines = self._crowds = False
        self._gates_first = False

    def look_everywhere(self) -> None:
        """Let the next look begin at the start: a message may have come back from before the end of the last one."""
        self._everywhere.make_due()

    def call(self, wanted: Wanted, now: int | None) -> Callable[[Wire, bool], Awaitable[list[Lease]]]:
        """Return one call of claim, which may have to be made more than once.

        It is several statements: if one fails because of other claims, those before it may have taken messages.
        """
        begun = False

        async def claim(wire: Wire, repeated: bool) -> list[Lease]:
            nonlocal begun
            repeated, begun = repeated or begun, True
            leases = await self._claim_past_bad_rows(Claims(wire, now), wanted, repeated)
            await JournalTable(wire, now, set()).read_claimed(leases)
            return leases

        return claim

    async def _claim_past_bad_rows(self, leasing: Claims, wanted: Wanted, repeated: bool) -> list[Lease]:
        """Claim; a row on which that fails is set aside, and the others are claimed."""
        try:
            return await self._claim_all(leasing, wanted, repeated)
        except psycopg.Error as error:
            if not is_about_rows(error) or not await set_bad_rows_aside(leasing, wanted):
                raise
        # Statements before the one that failed may have taken something.
        return await self._claim_all(leasing, wanted, repeated=True)

    async def _claim_all(self, leasing: Claims, wanted: Wanted, repeated: bool) -> list[Lease]:
        """Claim; leases that have run out are released, and their messages claimed as far as there is room.

        Messages at gates and all others take turns at being claimed first, as many as are wanted.
        A ``repeated`` call, whose first answer was lost, returns what it took then.
        """
        if repeated and (leases := await leasing.claimed(wanted)):
            return leases
        self._gates_first = (self._lines or self._crowds) and not self._gates_first
        looked = (self._lines, self._crowds) if self._gates_first else (False, False)
        leases = await self._claim_gated(leasing, wanted, *looked)
        if len(leases) < wanted.limit or self._overdue.floor(wanted.lease) is not None:
            more, released = await self._claim_open(leasing, _rest(wanted, leases))
            leases += more
            looked = (False, False) if released else looked
        # There may be messages at gates that the last look did not see.
        lines, crowds = self._lines and not looked[0], self._crowds and not looked[1]
        return leases + await self._claim_gated(leasing, _rest(wanted, leases), lines, crowds)

    async def _claim_gated(self, leasing: Claims, wanted: Wanted, lines: bool, crowds: bool) -> list[Lease]:
        if wanted.limit == 0 or not (lines or crowds):
            return []
        return await self.gates.claim(leasing, wanted, lines=lines, crowds=crowds)

    async def _claim_open(self, leasing: Claims, wanted: Wanted) -> tuple[list[Lease], int]:
        """Claim what has no gate, or with a limit of nothing only look around; return also how many were released."""
        began_at, floor = _machine.steady(), self._overdue.floor(wanted.lease)
        claimed, released = await self._claim(leasing, wanted, floor), 0
        if floor is not None:
            self._overdue.looked(floor, began_at)
            released = await leasing.release_expired(floor, _EXPIRED_MAX) if claimed.run_out else 0
            if released < _EXPIRED_MAX:
                self._overdue.none_before(claimed.now)
            if released:
                self.look_everywhere()
                self.gates.walk_soon()
        if claimed.run_out or (claimed.full and not claimed.leases):
            # Nothing was taken yet, because leases are released first, or because other claims held what was due.
            claimed = await self._claim(leasing, wanted, None)
        self._lines, self._crowds = claimed.lines, claimed.crowds
        return claimed.leases, released

    async def _claim(self, leasing: Claims, wanted: Wanted, lease_floor: int | None) -> Claimed:
        began_at = _machine.steady()
        everywhere, further = self._everywhere.is_due() or self._exact, self._further.is_due()
        back = round((_FURTHER_BACK_SECONDS if further else NEAR_SECONDS) * MICROSECONDS)
        seen = self._seen.setdefault((wanted.lane, tuple(wanted.types)), {})
        floors = [0 if everywhere else max(0, seen.get(queue, 0) - back) for queue in wanted.queues]
        claimed = await leasing.claim(wanted, floors, lease_floor=lease_floor)
        if everywhere:
            self._everywhere.done(began_at)
        if everywhere or further:
            self._further.done(began_at)
        seen.update(_ends(claimed.leases))
        if not (claimed.full or claimed.run_out):
            # The server looked at its clock after it was asked, so this is never too late.
            asked_at = claimed.now - (_machine.steady() - began_at)
            seen.update(dict.fromkeys(wanted.queues, asked_at))
        return claimed


def _ends(leases: Sequence[Lease]) -> dict[str, int]:
    """Return how far a claim has got in each queue: up to the last message of the type that is the furthest behind.

    A type of which it took none may have been passed, when other claims held much of the others: within a second the
    next look from the beginning finds it.
    """
    last: dict[tuple[str, str, int], int] = {}
    for lease in leases:  # in the order of their due times, so the last of each type remains
        one = lease.envelope
        if not one.priority:
            last[one.queue, one.message_type, one.schema_version] = one.due_at
    ends: dict[str, int] = {}
    for (queue, *_), due_at in last.items():
        ends[queue] = min(due_at, ends.get(queue, due_at))
    return ends


def _rest(wanted: Wanted, leases: list[Lease]) -> Wanted:
    """Return what is still wanted when these were taken."""
    if not leases:
        return wanted
    limited = sum(lease.gate is not None and is_limited(wanted.gatings, lease.gate) for lease in leases)
    at_once = None if wanted.at_once is None else wanted.at_once - limited
    return replace(wanted, limit=wanted.limit - len(leases), at_once=at_once)
