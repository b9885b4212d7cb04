"""Claims of messages that wait at gates: which gates are looked at, which messages may be next, and taking them.

Gates are looked at in portions, each claim beginning where the last one ended, so one with very many messages costs no
more than one with a single one, and none is forgotten.
A message that was seen is not yet taken: a line's head is taken by the fence it was seen with, so looking
needs no lock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from psycopg import errors

from onefold import limits
from onefold.clock import MICROSECONDS, SystemClock, system_random
from onefold.store import Lane, Lease
from onefold.store.gates import Gating, Rate, name_of
from onefold.store.postgres.verbs.claim import CLAIMED_AT, GATE, ORDER, Claims, Wanted
from onefold.store.postgres.wire.arrays import bigints, ids, numbers, texts
from onefold.store.postgres.wire.wire import Row, Wire
from onefold.store.shared.gate_pace import NEWS_MAX, GatePace, News, news_of
from onefold.store.shared.rows import lease_of
from onefold.store.shared.token_bucket import TokenBucket

#: How often a claim is made again that met other claims at the same gates, and the pause before that.
_TRIES_MAX = 5
_GIVE_WAY_SECONDS = 0.003
#: Limited gates whose rows are locked at once: other claims have to skip each of them meanwhile.
_HELD_MAX = 32

_machine = SystemClock()
_chance = system_random()


class Waiting(NamedTuple):
    """Messages that may be next at a gate: the head of a line, or the first of those that wait without an order."""

    gate: str
    gating: Gating
    #: The head of a line, by id and fence; empty where there is no order.
    id: str = ""
    fence: int = 0
    gap: bool = False
    #: Where there is no order: in which queue, and how many may be taken.
    queue: str = ""
    number: int = 1


class _Portion(Protocol):
    """Looks at a portion of gates and takes what may pass; returns how many they were, and whether there are more."""

    async def __call__(self, *, first: bool) -> tuple[int, bool]: ...


class _Step(NamedTuple):
    """Where the next claim begins, where this one goes on, and whether there was no room for all that were ready."""

    stop: str
    next: str
    full: bool


class GateCursor:
    """Where the next look begins: in the lines, and in each queue among the gates without an order."""

    def __init__(self) -> None:
        self.line = ""
        self.crowds: dict[str, str] = {}
        #: Whether lines are looked at first, which they are in every second look.
        self.lines_first = False


class Gates:
    """Claims messages that wait at gates, for one store."""

    def __init__(self) -> None:
        self._cursors: dict[tuple[Lane, tuple[str, ...]], GateCursor] = {}
        #: How often to walk, by lane, queues and the types that are asked for.
        self._paces: dict[tuple[Lane, tuple[str, ...], tuple[str, ...]], GatePace] = {}

    async def claim(self, leasing: Claims, wanted: Wanted, *, lines: bool, crowds: bool) -> list[Lease]:
        """Take messages that may pass, no more than are wanted; of those with limits no more than can begin at once.

        ``lines`` and ``crowds`` say whether there may be messages at gates with an order and without.
        """
        key = (wanted.lane, tuple(sorted(wanted.queues)))
        pace = self._paces.setdefault((*key, tuple(wanted.types)), GatePace())
        look = _Look(leasing, wanted, self._cursors.setdefault(key, GateCursor()), pace)
        follows = pace.is_rare and not wanted.thorough
        if follows:
            await look.follow_news()
        if wanted.thorough or wanted.lane is Lane.PROBATION or pace.is_walk_due(_machine.steady()):
            await look.walk(lines=lines, crowds=crowds)
            if pace.is_rare and not (look.leases or follows or wanted.thorough):
                # Messages may wait at gates to which this walk, the first one in vain, has not come.
                await look.follow_news()
        return look.leases

    def settled(self, leases: Iterable[Lease]) -> None:
        """Record where messages have ended or came back, so that the next one may pass."""
        if news := news_of(leases):
            for (_, queues, _), pace in self._paces.items():
                pace.settled(one for one in news if one.queue in queues)

    def walk_soon(self) -> None:
        """Let the next claims walk: messages have come back that another process had claimed."""
        for pace in self._paces.values():
            pace.walk_soon()


class _Look:
    """One claim."""

    def __init__(self, leasing: Claims, wanted: Wanted, cursor: GateCursor, pace: GatePace) -> None:
        self._wire = leasing.wire
        self._wanted = wanted
        self._asked = leasing.asking(wanted)
        self._cursor = cursor
        self._pace = pace
        self._limit = wanted.limit
        #: Gates that are looked at together: for lines, each of which gives one, as many as are wanted if that is more.
        self._portion = max(limits.GATES_PER_CLAIM, wanted.limit)
        #: How many with limits may still begin.
        self._room = wanted.limit if wanted.at_once is None else min(wanted.limit, wanted.at_once)
        self.leases: list[Lease] = []
        self._gatings: dict[str, Gating] = {}
        #: Names of gates that are shut: their limits are reached; and the gates that are shut.
        self._shut: set[str] = set()
        self._closed: set[str] = set()
        #: Where this look has got to.
        self._line, self._crowds = cursor.line, dict(cursor.crowds)
        #: How often it still goes to the last gate of each queue: twice if it does not begin with the first one.
        self._rounds = {queue: 2 if cursor.crowds.get(queue) else 1 for queue in wanted.queues}

    async def walk(self, *, lines: bool, crowds: bool) -> None:
        """Go from gate to gate, from where the last walk has stopped."""
        began_at, before = _machine.steady(), len(self.leases)
        self._cursor.lines_first = not self._cursor.lines_first
        walks = [walk for walk, there in ((self._walk_lines, lines), (self._walk_crowds, crowds)) if there]
        for walk in walks if self._cursor.lines_first else reversed(walks):
            await self._walk(walk)
        if self._wanted.lane is not Lane.PROBATION:
            self._pace.walked(began_at, _machine.steady(), taken=len(self.leases) - before)
            self._follow(self.leases[before:])

    async def follow_news(self) -> None:
        """Take what may pass where something has changed since the last look."""
        due, number, now = await self._due(self._pace.since(_machine.steady()), NEWS_MAX)
        self._pace.looked(now, found=number)
        news = list(dict.fromkeys([*self._pace.take_news(now), *due]))
        try:
            waiting = await self._waiting_at(news)
            taken = set(await self._take(waiting))
        except errors.UniqueViolation:
            # As in a walk: the next claim looks at these gates again.
            self._pace.settled(news)
            return
        if min(self._limit, self._room) <= 0:
            # There was no room for these, so it is their turn before that of the others.
            self._pace.settled(one for one in news if one.gate not in taken)
        else:
            # A head that may run and was not taken is locked by another transaction, unless its gate is shut.
            locked = {one.gate for one in waiting if one.id} - taken - self._closed
            self._pace.settled(one for one in news if one.is_line and one.gate in locked)
        self._follow(self.leases)

    def _follow(self, leases: Sequence[Lease]) -> None:
        """Look again where messages were taken without an order: more may wait there."""
        self._pace.settled(dict.fromkeys(one for one in news_of(leases) if not one.is_line))

    async def _walk(self, portion: _Portion) -> None:
        """Look at portions until one was worth it and the next may not be; or until all were looked at."""
        before, has_asked, conflicts = len(self.leases), False, 0
        for number in itertools.count():
            if self._limit == 0 or conflicts == _TRIES_MAX:
                return
            found = len(self.leases)
            try:
                seen, more = await portion(first=number == 0)
                few = seen >= self._portion and len(self.leases) - found < self._portion // 2
                if not more or (few and len(self.leases) > before):
                    return
                # After a portion in vain, of gates that are shut or have nothing due, ask for those that have.
                if few and not has_asked:
                    has_asked = True
                    if await self._take_all_due(portion) or not self._wanted.thorough:
                        return
            except errors.UniqueViolation:
                # A message that backed off was let through meanwhile, so the heads that were seen are out of date.
                conflicts += 1
                await self._give_way()

    # looking

    async def _walk_lines(self, *, first: bool) -> tuple[int, bool]:
        """Look at a portion of lines and take what may run."""
        after, is_crashed = self._line, self._wanted.lane is Lane.PROBATION
        asked = {**self._asked, "after": after, "portion": self._portion}
        rows = await self._wire.rows("lines_crashed" if is_crashed else "lines_after", asked)
        seen = [row[0] for row in rows]
        heads = await self._heads(rows)
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
            # Messages that were ready and could not be let through are still next.
            return _Step(stop if ready and not taken else "", "", full=False)
        name = name_of(seen[-1])
        # Behind all gates of a name that is shut.
        after = f"{name};" if name in self._shut else seen[-1]
        return _Step(after, after, full=False)

    async def _heads(self, rows: list[Row]) -> list[Waiting]:
        """Return the heads that may run; where they back off and may be passed over, those behind them."""
        if behind := [row[0] for row in rows if row[4] and self._gating(row[0]).on_failure == "skip"]:
            asked = {**self._asked, "gates": texts(behind), "portion": limits.PASSED_OVER_MAX + 1}
            rows = rows + await self._wire.rows("line_front", asked)
        return [head for row in rows if row[3] and (head := self._head(row)) is not None]

    def _head(self, row: Row) -> Waiting | None:
        gate, id_, fence, _, _, gap, waited = row
        gating = self._gating(gate)
        if gap and gating.gap == "wait" and waited < gating.gap_seconds * MICROSECONDS:
            return None
        return Waiting(gate, gating, id_, fence, gap and gating.gap != "skip")

    async def _walk_crowds(self, *, first: bool) -> tuple[int, bool]:
        """The same for a portion of gates without an order."""
        stops, is_crashed = self._cursor.crowds, self._wanted.lane is Lane.PROBATION
        queues = [queue for queue in self._wanted.queues if self._rounds[queue] > 0]
        afters = [self._crowds.get(queue, "") for queue in queues]
        asked = {**self._asked, "queues": texts(queues), "afters": texts(afters), "portion": self._portion}
        rows = await self._wire.rows("crowds_crashed" if is_crashed else "crowds_after", asked)
        crowds = [Waiting(gate, self._gating(gate), queue=queue) for queue, gate, ready in rows if ready]
        taken = set(await self._take(crowds))
        if is_crashed:
            return len(rows), False
        full = False
        for queue in queues:
            seen = [row[1] for row in rows if row[0] == queue]
            ready = [one.gate for one in crowds if one.queue == queue]
            step = self._step(stops.get(queue, ""), seen, ready, [gate for gate in ready if gate in taken])
            stops[queue], self._crowds[queue] = step.stop, step.next
            full = full or step.full
            if not step.next:
                self._rounds[queue] -= 1
        return len(rows), not full and any(self._rounds[queue] > 0 for queue in queues)

    async def _due(self, since: int, most: int) -> tuple[list[News], int, int]:
        """Return the gates of messages that became due since then, how many those are, and the time."""
        rows = await self._wire.rows("gates_due", {**self._asked, "since": since, "portion": most})
        now: int = rows.pop()[-1]
        return [News(*row[:3]) for row in rows], sum(row[3] for row in rows), now

    async def _waiting_at(self, news: Sequence[News]) -> list[Waiting]:
        """Return what may be next at these gates."""
        lines = [one.gate for one in news if one.is_line]
        rows = await self._wire.rows("lines_at", {**self._asked, "gates": texts(lines)}) if lines else []
        crowds = [Waiting(one.gate, self._gating(one.gate), queue=one.queue) for one in news if not one.is_line]
        return [*await self._heads(rows), *crowds]

    async def _take_all_due(self, portion: _Portion) -> bool:
        """Take at all gates of a kind that have something due, if those are few; False when a walk finds some soon.

        Those gates come first that stand behind the one where the last walk has stopped.
        """
        due, number, _ = await self._due(0, self._portion)
        if number >= self._portion:
            return False
        is_line, stops = portion == self._walk_lines, self._cursor.crowds
        last = {one: self._cursor.line if is_line else stops.get(one.queue, "") for one in due}
        in_turn = sorted(
            (one for one in due if one.is_line == is_line), key=lambda one: (one.gate <= last[one], one.gate)
        )
        taken = set(await self._take(await self._waiting_at(in_turn)))
        served = [one for one in in_turn if one.gate in taken]
        if is_line:
            self._cursor.line = served[-1].gate if served else self._cursor.line
        else:
            stops.update({one.queue: one.gate for one in served})
        return True

    def _gating(self, gate: str) -> Gating:
        name = name_of(gate)
        if (known := self._gatings.get(name)) is None:
            known = self._gatings[name] = self._wanted.gatings.get(name) or Gating(name=name)
        return known

    # taking

    async def _take(self, waiting: Sequence[Waiting]) -> list[str]:
        """Take as many as may be taken; return their gates in the order in which they were seen."""
        before = len(self.leases)
        named = {one.gating.name: one.gating.is_limited for one in waiting}
        limited = [one for one in waiting if named[one.gating.name]] if any(named.values()) else []
        await self._take_free([one for one in waiting if not named[one.gating.name]] if limited else waiting)
        limited = await self._open_among(limited)
        while limited := [one for one in limited if one.gating.name not in self._shut]:
            if min(self._room, self._limit) <= 0:
                self._shut |= {one.gating.name for one in limited}
            else:
                await self._take_limited(limited[:_HELD_MAX])
                limited = limited[_HELD_MAX:]
        gates = {lease.gate for lease in self.leases[before:]}
        return [one.gate for one in waiting if one.gate in gates]

    async def _take_free(self, waiting: Sequence[Waiting]) -> None:
        """Take in turns, as long as there is room and messages are left."""
        while waiting and self._limit > 0:
            share = -(-self._limit // len(waiting))
            leases = await self._let_through([one if one.id else one._replace(number=share) for one in waiting])
            self._keep(leases)
            taken = Counter(lease.gate for lease in leases)
            waiting = [one for one in waiting if not one.id and taken[one.gate] >= share]

    async def _open_among(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Return those whose gates look open, without a lock; shut gates cost a worker that waits there no write."""
        if not waiting or min(self._room, self._limit) <= 0:
            return list(waiting)
        places = Places(self._wanted.gatings, [one.gate for one in waiting])
        await places.look(self._wire, self._asked["now"])
        self._shut |= places.shut
        for one in waiting:
            if not places.is_open(one.gate):
                self._closed.add(one.gate)
                if (at := places.token_at(one.gate)) is not None:
                    self._pace.wait_for_token(News(one.queue, one.gate, bool(one.id)), at)
        return [one for one in waiting if one.gate not in self._closed]

    async def _take_limited(self, waiting: Sequence[Waiting]) -> None:
        """Lock the gates' rows, count the running messages, take as many as there are places and tokens, and commit."""
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
        for row in sorted(rows, key=itemgetter(ORDER)):
            gate = row[GATE]
            lease = lease_of(row, claimed_at=row[CLAIMED_AT], worker=self._wanted.worker, gate=gate, gap=seen[gate][1])
            leases.setdefault(gate, []).append(lease)
        turns: list[tuple[int, int, Lease]] = []
        for gate, those in leases.items():
            turns += [(turn, seen[gate][0], lease) for turn, lease in enumerate(those)]
        turns.sort(key=lambda turn: turn[:2])
        return [lease for _, _, lease in turns]

    def _keep(self, leases: Sequence[Lease]) -> None:
        self.leases += leases
        self._limit -= len(leases)

    async def _give_way(self) -> None:
        await _machine.sleep(_GIVE_WAY_SECONDS * _chance.uniform(0.5, 1.0))


def is_limited(gatings: Mapping[str, Gating], gate: str) -> bool:
    """Whether a message that passes this gate takes a place or a token from others."""
    gating = gatings.get(name_of(gate))
    return gating is not None and gating.is_limited


#: A row that was made only to be locked may be purged after this time.
_KEPT = round(limits.DAY * MICROSECONDS)


class Places:
    """The free places and tokens of these gates, while their rows are locked."""

    def __init__(self, gatings: Mapping[str, Gating], gates: Sequence[str]) -> None:
        self._gatings = gatings
        self._gates = gates
        #: How many may be taken, by the key of the row that is locked for it; there is no row where there is no limit.
        self._free: dict[str, int] = {}
        self._buckets: dict[str, tuple[Rate, TokenBucket]] = {}

    @property
    def shut(self) -> set[str]:
        """Names whose limits are reached, whatever the key."""
        return {key for key, free in self._free.items() if free <= 0 and ":" not in key}

    def _keys(self, gate: str) -> list[str]:
        """Return the keys of the rows to lock for a gate: its own and its name's, as far as they have limits."""
        gating = self._gatings[name_of(gate)]
        keys = [gating.name] if gating.max_running is not None or gating.rate is not None else []
        return [*keys, gate] if gating.max_running_each is not None or gating.rate_each is not None else keys

    def _limits(self, key: str) -> tuple[int | None, Rate | None]:
        gating = self._gatings[name_of(key)]
        return (gating.max_running, gating.rate) if key == gating.name else (gating.max_running_each, gating.rate_each)

    async def look(self, wire: Wire, now: int | None) -> None:
        """Count without a lock; until the rows are held, another claim may take what is free."""
        keys = self._all_keys()
        rows, running = await wire.rows_of_each(
            [("gate_read", {"now": now, "keys": texts(keys)}), ("gate_running", self._counted(keys))]
        )
        known = {row[0]: row for row in rows}
        self._count([known.get(key, (key, None, 0, 0)) for key in keys], running)

    async def hold(self, wire: Wire, now: int | None) -> bool:
        """Lock the rows that no other claim has locked, and count; True when another claim has locked some of them."""
        keys = self._all_keys()
        _, held, running = await wire.rows_of_each(
            [
                ("gate_make", {"now": now, "keys": texts(keys), "kept": _KEPT}),
                ("gate_hold", {"now": now, "keys": texts(keys)}),
                ("gate_running", self._counted(keys)),
            ]
        )
        self._count(held, running)
        return len(held) < len(keys)

    def _all_keys(self) -> list[str]:
        return sorted({key for gate in self._gates for key in self._keys(gate)})

    def _counted(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the parameters by which the running messages of gates and of names are counted."""
        return {
            "gates": texts([key for key in keys if key not in self._gatings]),
            "names": texts([key for key in keys if key in self._gatings]),
        }

    def _count(self, rows: Iterable[Row], running: Iterable[Row]) -> None:
        """Say how many are free at each key: of places, and of tokens."""
        counted: dict[str, int] = dict(running)
        for key, tokens, at, now_there in rows:
            most, rate = self._limits(key)
            free = limits.RUNNING_MAX if most is None else most - counted.get(key, 0)
            if rate is not None:
                # A bucket that was never used is full.
                known = TokenBucket(rate.saved, now_there) if tokens is None else TokenBucket(tokens, at)
                self._buckets[key] = rate, known.refilled(rate, now_there)
                free = min(free, int(self._buckets[key][1].tokens))
            self._free[key] = max(free, 0)

    def is_open(self, gate: str) -> bool:
        """Whether a message may pass this gate."""
        return all(self._free.get(key, 0) > 0 for key in self._keys(gate))

    def token_at(self, gate: str) -> int | None:
        """When the token comes that is missing at this gate, if one is."""
        known = [self._buckets[key] for key in self._keys(gate) if key in self._buckets]
        return max((bucket.next_at(rate) for rate, bucket in known if bucket.tokens < 1), default=None)

    def allot(self, waiting: Sequence[tuple[str, bool]], most: int) -> list[int]:
        """Say how many each may have, in turns; of a line, which is the second thing said of each, one."""
        given = [0] * len(waiting)
        going_on = True
        while going_on and most > 0:
            going_on = False
            for place, (gate, is_line) in enumerate(waiting):
                keys = self._keys(gate)
                full = most == 0 or (is_line and given[place]) or any(self._free.get(key, 0) <= 0 for key in keys)
                if full:
                    continue
                for key in keys:
                    self._free[key] -= 1
                given[place] += 1
                most -= 1
                going_on = True
        return given

    async def spend(self, wire: Wire, gates: Sequence[str]) -> None:
        """Write down the tokens that are left after these were let through."""
        spent = Counter(key for gate in gates for key in self._keys(gate) if key in self._buckets)
        if not spent:
            return
        left = {
            key: (rate, bucket._replace(tokens=bucket.tokens - spent[key]))
            for key, (rate, bucket) in self._buckets.items()
        }
        await wire.rows(
            "gate_tokens",
            {
                "keys": texts(list(left)),
                "tokens": numbers(bucket.tokens for _, bucket in left.values()),
                "at": next(bucket.at for _, bucket in left.values()),
                "full_ats": numbers(bucket.full_at(rate) for rate, bucket in left.values()),
            },
        )
