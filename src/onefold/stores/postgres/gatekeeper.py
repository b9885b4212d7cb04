"""Claiming what waits at gates: which gates are looked at, who of those there may be next, and taking them.

Gates are looked at in portions, each claim beginning where the last one ended, so one with very many messages costs no
more than one with a single one, and none is forgotten.
What is seen is not yet taken: a line's head is taken by the fence it was seen with, so nobody needs a lock to look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from psycopg import errors

from onefold import limits
from onefold.clock import MICROSECONDS, SystemClock, system_random
from onefold.gate import Gating, name_of
from onefold.store import Lane, Lease
from onefold.stores.postgres.arrays import bigints, ids, texts
from onefold.stores.postgres.leasing import Leasing, Wanted
from onefold.stores.postgres.places import Places
from onefold.stores.postgres.wire import Row
from onefold.stores.rows import lease_of

#: How often a claim is made again that met others at the same gates, and how long it gives way to them.
_TRIES_MAX = 5
_GIVE_WAY_SECONDS = 0.003
#: Limited gates that are held at once: each is a row that others have to pass by meanwhile.
_HELD_MAX = 32

_machine = SystemClock()
_chance = system_random()


class Waiting(NamedTuple):
    """Somebody who may be next at a gate: the head of a line, or the first of those who wait without an order."""

    gate: str
    gating: Gating
    #: The head of a line, by id and fence; empty where there is no order.
    id: str = ""
    fence: int = 0
    gap: bool = False
    #: Where there is no order: in which queue, up to which priority, and how many may be taken.
    queue: str = ""
    top: int = 0
    number: int = 1


class _Portion(Protocol):
    """Looks at a portion of gates and takes what may pass; returns how many they were, and whether there are more."""

    async def __call__(self, *, first: bool) -> tuple[int, bool]: ...


class _Step(NamedTuple):
    """Where the next claim begins, where this one goes on, and whether there was no room for all who were ready."""

    stop: str
    next: str
    full: bool


class Cursor:
    """Where the next look begins: in the lines, and in each queue among the gates without an order."""

    def __init__(self) -> None:
        self.line = ""
        self.crowds: dict[str, str] = {}
        #: Whether lines are looked at first, which they are in every second look.
        self.lines_first = False


class Gatekeeper:
    """Claims for one store what waits at gates."""

    def __init__(self) -> None:
        self._cursors: dict[tuple[Lane, tuple[str, ...]], Cursor] = {}

    async def claim(self, leasing: Leasing, wanted: Wanted, *, lines: bool, crowds: bool) -> list[Lease]:
        """Take who may pass, no more than are wanted; of those with limits no more than can begin at once.

        ``lines`` and ``crowds`` say whether there may be anybody, with an order and without.
        """
        key = (wanted.lane, tuple(sorted(wanted.queues)))
        look = _Look(leasing, wanted, self._cursors.setdefault(key, Cursor()))
        return await look.claim(lines=lines, crowds=crowds)


class _Look:
    """One claim."""

    def __init__(self, leasing: Leasing, wanted: Wanted, cursor: Cursor) -> None:
        self._wire = leasing.wire
        self._wanted = wanted
        self._asked = leasing.asking(wanted)
        self._cursor = cursor
        self._limit = wanted.limit
        #: Gates that are looked at together: for lines, each of which gives one, as many as are wanted if that is more.
        self._portion = max(limits.GATES_PER_CLAIM, wanted.limit)
        #: How many with limits may still begin.
        self._room = wanted.limit if wanted.at_once is None else min(wanted.limit, wanted.at_once)
        self._leases: list[Lease] = []
        self._gatings: dict[str, Gating] = {}
        #: Gates with messages that are due were asked for, which one look does once at most.
        self._asked_for_due = False
        #: Names of gates that let nobody through any more.
        self._shut: set[str] = set()
        #: Where this look has got to.
        self._line, self._crowds = cursor.line, dict(cursor.crowds)

    async def claim(self, *, lines: bool, crowds: bool) -> list[Lease]:
        self._cursor.lines_first = not self._cursor.lines_first
        walks = [walk for walk, there in ((self._walk_lines, lines), (self._walk_crowds, crowds)) if there]
        for walk in walks if self._cursor.lines_first else reversed(walks):
            await self._walk(walk)
        return self._leases

    async def _walk(self, portion: _Portion) -> None:
        """Look at portions until one was worth it and the next may not be; or until all were looked at."""
        before = len(self._leases)
        for number in range(limits.GATE_PORTIONS_MAX):
            if self._limit == 0:
                return
            found = len(self._leases)
            try:
                seen, more = await portion(first=number == 0)
            except errors.UniqueViolation:
                # Somebody who backed off was let through meanwhile: what was seen is out of date.
                await self._give_way()
                continue
            few = seen >= self._portion and len(self._leases) - found < self._portion // 2
            if not more or (few and len(self._leases) > before):
                return

    # looking

    async def _walk_lines(self, *, first: bool) -> tuple[int, bool]:
        """Look at a portion of lines and take what may run."""
        after, is_crashed = self._line, self._wanted.lane is Lane.PROBATION
        asked = {**self._asked, "after": after, "portion": self._portion}
        rows = await self._wire.rows("lines_crashed" if is_crashed else "lines_after", asked)
        seen = [row[0] for row in rows]
        if behind := [row[0] for row in rows if row[4] and self._gating(row[0]).on_failure == "skip"]:
            asked = {**self._asked, "gates": texts(behind), "portion": limits.PASSED_OVER_MAX + 1}
            rows += await self._wire.rows("line_front", asked)
        heads = [head for row in rows if row[3] and (head := self._head(row)) is not None]
        taken = await self._take(heads)
        if is_crashed:
            return len(rows), False
        step = self._step(self._cursor.line, seen, [head.gate for head in heads], taken)
        self._cursor.line, self._line = step.stop, step.next
        return len(seen), not step.full and bool(step.next or (first and after))

    def _step(self, stop: str, seen: Sequence[str], ready: Sequence[str], taken: Sequence[str]) -> _Step:
        """Return where this look goes on, and where the next one begins; so far that was at ``stop``."""
        if taken and len(taken) < len(ready):
            return _Step(taken[-1], "", full=True)
        if len(seen) < self._portion:
            # Whoever was ready and could not be let through is still next.
            return _Step(stop if ready and not taken else "", "", full=False)
        name = name_of(seen[-1])
        # Behind all gates of a name that lets nobody through.
        after = f"{name};" if name in self._shut else seen[-1]
        return _Step(after, after, full=False)

    def _head(self, row: Row) -> Waiting | None:
        gate, id_, fence, _, _, gap, waited = row
        gating = self._gating(gate)
        if gap and gating.gap == "wait" and waited < gating.gap_seconds * MICROSECONDS:
            return None
        return Waiting(gate, gating, id_, fence, gap and gating.gap != "skip")

    async def _walk_crowds(self, *, first: bool) -> tuple[int, bool]:
        """The same for a portion of gates without an order."""
        queues, stops, is_crashed = self._wanted.queues, self._cursor.crowds, self._wanted.lane is Lane.PROBATION
        afters = [self._crowds.get(queue, "") for queue in queues]
        asked = {**self._asked, "afters": texts(afters), "portion": self._portion}
        rows = await self._wire.rows("crowds_crashed" if is_crashed else "crowds_after", asked)
        crowds = [Waiting(gate, self._gating(gate), queue=queue, top=top) for queue, gate, top, ready in rows if ready]
        # After a portion in vain, of gates that have nothing due or wanted, ask for those that have something due.
        if not crowds and len(rows) >= self._portion and not self._asked_for_due:
            self._asked_for_due = True
            if (due := await self._all_due()) is not None:
                await self._take_due(due)
                return len(due), False
        taken = set(await self._take(crowds))
        if is_crashed:
            return len(rows), False
        full, more = False, first and any(afters)
        for queue in queues:
            seen = [row[1] for row in rows if row[0] == queue]
            ready = [one.gate for one in crowds if one.queue == queue]
            step = self._step(stops.get(queue, ""), seen, ready, [gate for gate in ready if gate in taken])
            stops[queue], self._crowds[queue] = step.stop, step.next
            full, more = full or step.full, more or bool(step.next)
        return len(rows), more and not full

    async def _all_due(self) -> list[Waiting] | None:
        """Return every gate with messages that are due, or None when so many are due that a walk finds some soon."""
        rows = await self._wire.rows("crowds_due", {**self._asked, "portion": self._portion})
        read = Counter[str]()
        for queue, _, _, number in rows:
            read[queue] += number
        if any(number >= self._portion for number in read.values()):
            return None
        return [Waiting(gate, self._gating(gate), queue=queue, top=top) for queue, gate, top, _ in rows]

    async def _take_due(self, due: Sequence[Waiting]) -> None:
        """Take from these gates; in each queue those come first that stand behind the one served last."""
        stops = self._cursor.crowds
        in_turn = sorted(due, key=lambda one: (one.gate <= stops.get(one.queue, ""), one.gate))
        taken = set(await self._take(in_turn))
        stops.update({one.queue: one.gate for one in in_turn if one.gate in taken})

    def _gating(self, gate: str) -> Gating:
        name = name_of(gate)
        if (known := self._gatings.get(name)) is None:
            known = self._gatings[name] = self._wanted.gatings.get(name) or Gating(name=name)
        return known

    # taking

    async def _take(self, waiting: Sequence[Waiting]) -> list[str]:
        """Take as many as may be taken; return their gates in the order in which they were seen."""
        before = len(self._leases)
        named = {one.gating.name: one.gating.is_limited for one in waiting}
        limited = [one for one in waiting if named[one.gating.name]] if any(named.values()) else []
        await self._take_free([one for one in waiting if not named[one.gating.name]] if limited else waiting)
        while limited := [one for one in limited if one.gating.name not in self._shut]:
            if min(self._room, self._limit) <= 0:
                self._shut |= {one.gating.name for one in limited}
            else:
                await self._take_limited(limited[:_HELD_MAX])
                limited = limited[_HELD_MAX:]
        gates = {lease.gate for lease in self._leases[before:]}
        return [one.gate for one in waiting if one.gate in gates]

    async def _take_free(self, waiting: Sequence[Waiting]) -> None:
        """Take in turns, as long as there is room and somebody left."""
        while waiting and self._limit > 0:
            share = -(-self._limit // len(waiting))
            leases = await self._let_through([one if one.id else one._replace(number=share) for one in waiting])
            self._keep(leases)
            taken = Counter(lease.gate for lease in leases)
            waiting = [one for one in waiting if not one.id and taken[one.gate] >= share]

    async def _take_limited(self, waiting: Sequence[Waiting]) -> None:
        """Hold the gates' rows, count who runs, let through as many as there are places and tokens, and commit."""
        for _ in range(_TRIES_MAX):
            places = Places(self._wanted.gatings, [one.gate for one in waiting])
            async with self._wire.transaction():
                contested = await places.hold(self._wire, self._asked["now"])
                shares = places.allot([(one.gate, bool(one.id)) for one in waiting], min(self._room, self._limit))
                leases = await self._let_through(
                    [one._replace(number=number) for one, number in zip(waiting, shares, strict=True) if number]
                )
                await places.spend(self._wire, [lease.gate or "" for lease in leases])
            self._shut |= places.shut
            if leases or not contested:
                self._keep(leases)
                self._room -= len(leases)
                return
            await self._give_way()

    async def _let_through(self, waiting: Sequence[Waiting]) -> list[Lease]:
        heads = [one for one in waiting if one.id][: self._limit]
        others = [one for one in waiting if not one.id]
        statements: list[tuple[str, Mapping[str, Any]]] = []
        if heads:
            given = {"ids": ids([one.id for one in heads]), "fences": bigints([one.fence for one in heads])}
            statements.append(("claim_lines", {**self._asked, **given}))
        if others:
            gates: dict[str, Any] = {
                "queues": texts([one.queue for one in others]),
                "gates": texts([one.gate for one in others]),
                "tops": bigints([one.top for one in others]),
                "counts": bigints([one.number for one in others]),
                "limit": self._limit - len(heads),
            }
            statements.append(("claim_crowds", {**self._asked, **gates}))
        if not statements:
            return []
        rows = [row for answer in await self._wire.rows_of_each(statements) for row in answer]
        return self._in_turn(waiting, rows)

    def _in_turn(self, waiting: Sequence[Waiting], rows: Iterable[Row]) -> list[Lease]:
        """Return the leases: the first of each gate, then the second of each, and so on."""
        seen = {one.gate: (place, one.gap) for place, one in enumerate(waiting)}
        leases: dict[str, list[Lease]] = {}
        for row in sorted(rows, key=itemgetter(21)):
            gate = row[20]
            lease = lease_of(row, claimed_at=row[19], worker=self._wanted.worker, gate=gate, gap=seen[gate][1])
            leases.setdefault(gate, []).append(lease)
        turns: list[tuple[int, int, Lease]] = []
        for gate, those in leases.items():
            turns += [(turn, seen[gate][0], lease) for turn, lease in enumerate(those)]
        turns.sort(key=lambda turn: turn[:2])
        return [lease for _, _, lease in turns]

    def _keep(self, leases: Sequence[Lease]) -> None:
        self._leases += leases
        self._limit -= len(leases)

    async def _give_way(self) -> None:
        await _machine.sleep(_GIVE_WAY_SECONDS * _chance.uniform(0.5, 1.0))


def is_limited(gatings: Mapping[str, Gating], gate: str) -> bool:
    """Whether who is let through this gate takes something from others."""
    gating = gatings.get(name_of(gate))
    return gating is not None and gating.is_limited
