"""Claim, at gates: which messages are let through, found without reading those that wait behind them.

Gates of a queue are walked from where the last claim stopped, so each comes in its turn; a gate with many waiting costs
no more than one with few.
The walk is on a connection for reading and returns the gates at which messages may be taken; the claim counts again at
those, in the transaction in which it takes them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.message.envelope import Envelope
from onefold.store import Lane, Lease
from onefold.store.gates import Gating, Rate, name_of
from onefold.store.shared.gate_pace import NEWS_MAX, GatePace, News, news_of
from onefold.store.shared.token_bucket import Head, TokenBucket, has_gap
from onefold.store.sqlite.session import Session, as_json

#: Fewer gates at a time are not worth a statement.
_PORTION_MIN = 16
Item = TypeVar("Item")

LINE_RETENTION = round(limits.LINE_RETENTION * MICROSECONDS)
PRIORITY_STEP = round(limits.PRIORITY_STEP_SECONDS * MICROSECONDS)


#: For gates whose name is not declared here.
_UNLIMITED = Gating(name="-")


@dataclass(frozen=True, slots=True)
class Asked:
    """The request of a claim."""

    queues: Sequence[str]
    types: frozenset[str]
    #: The same types, as a statement takes them.
    known: str
    limit: int
    lane: Lane
    gatings: Mapping[str, Gating]
    at_once: int | None
    #: Whether to walk through all gates even if that was in vain a moment ago.
    thorough: bool = True

    @property
    def crashes_max(self) -> int:
        return 0 if self.lane is Lane.MAIN else limits.INTEGER_MAX

    @property
    def crashes_min(self) -> int:
        return 1 if self.lane is Lane.PROBATION else 0


class Pick(NamedTuple):
    """A message that may be taken."""

    seq: int
    gate: str | None = None
    gap: bool = False


class Kinds(NamedTuple):
    """Whether messages wait in a queue at no gate, in lines, and in crowds."""

    plain: bool
    lined: bool
    crowded: bool


class Budget:
    """How many a claim may still take: in all, of a name, of a gate.  Counted when first asked for."""

    def __init__(self, session: Session, asked: Asked, now: int) -> None:
        self._session = session
        self._gatings = {name: one for name, one in asked.gatings.items() if one.is_limited}
        self._now = now
        self._at_once = asked.limit if asked.at_once is None else asked.at_once
        self._left: dict[str, int] = {}
        self._buckets: dict[str, tuple[Rate, TokenBucket]] = {}
        self.room = asked.limit
        #: The gate that took the last place in this walk.
        self.stopped_at: str | None = None
        #: Gates that were seen to be shut.
        self.shut: list[str] = []

    def left(self, gate: str) -> int:
        """How many may pass this gate now."""
        gating = self._gatings.get(name_of(gate)) if self._gatings else None
        if gating is None:
            return self.room
        return min(self.room, self._at_once, self._left_of_name(gating), self._left_of_gate(gate, gating))

    def is_open(self, gate: str) -> bool:
        """Whether a message may pass this gate; one that is shut is noted."""
        if self.left(gate) > 0:
            return True
        if self.room > 0:
            self.shut.append(gate)
        return False

    def token_at(self, gate: str) -> int | None:
        """When the token comes that is missing at this gate, if one is."""
        known = [self._buckets[key] for key in (name_of(gate), gate) if key in self._buckets]
        missing = [bucket.next_at(rate) for rate, bucket in known if bucket.tokens < 1]
        return max(missing, default=None)

    def is_shut(self, name: str) -> bool:
        """Whether all gates of this name are shut."""
        gating = self._gatings.get(name)
        return gating is not None and self._left_of_name(gating) <= 0

    def _left_of_name(self, gating: Gating) -> int:
        if gating.name not in self._left:
            span = f"{gating.name}:", f"{gating.name};"
            self._left[gating.name] = self._count(gating.name, span, gating.max_running, gating.rate)
        return self._left[gating.name]

    def _left_of_gate(self, gate: str, gating: Gating) -> int:
        if gate not in self._left:
            self._left[gate] = self._count(gate, (gate, gate), gating.max_running_each, gating.rate_each)
        return self._left[gate]

    def _count(self, key: str, span: tuple[str, str], most: int | None, rate: Rate | None) -> int:
        left = limits.INTEGER_MAX
        if most is not None:
            left = most - int(self._session.rows("gate_running", *span)[0][0])
        if rate is not None:
            known = self._session.rows("gate_bucket", key)
            bucket = TokenBucket(*known[0]).refilled(rate, self._now) if known else TokenBucket(rate.saved, self._now)
            self._buckets[key] = rate, bucket
            left = min(left, int(bucket.tokens))
        return left

    def take(self, gate: str) -> None:
        """Let one pass."""
        self.room -= 1
        self.stopped_at = gate
        gating = self._gatings.get(name_of(gate)) if self._gatings else None
        if gating is None:
            return
        self._at_once -= 1
        for key in (gating.name, gate):
            self._left[key] -= 1
            if key in self._buckets:
                rate, bucket = self._buckets[key]
                self._buckets[key] = rate, bucket._replace(tokens=bucket.tokens - 1)

    def spend(self) -> None:
        """Record the tokens that were taken."""
        rows = [(key, b.tokens, b.at, b.full_at(rate)) for key, (rate, b) in self._buckets.items()]
        self._session.each("gate_tokens", rows)


@dataclass(slots=True)
class Worth:
    """The gates of one queue at which messages may be taken, in the order of their turns."""

    lines: dict[str, None] = field(default_factory=dict)
    crowds: dict[str, None] = field(default_factory=dict)
    #: By kind: where the walk began that found them.
    starts: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.lines or self.crowds)

    def has(self, gate: str, *, is_line: bool) -> bool:
        """Whether a gate is among them."""
        return gate in (self.lines if is_line else self.crowds)

    def add(self, gate: str, *, is_line: bool) -> None:
        """Add a gate behind the others."""
        (self.lines if is_line else self.crowds).setdefault(gate)


@dataclass(slots=True)
class Gates:
    """The gates of one store as its claims walk them."""

    #: Where the last walk of a kind stopped in each queue.
    stops: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Which kind of messages the next claim looks at first.
    turn: int = 0
    #: How often to walk, by lane, queue and the types that are asked for.
    paces: dict[tuple[Lane, str, str], GatePace] = field(default_factory=dict)
    #: Whether the last claim saw messages at gates.
    are_used: bool = False

    def kinds(self, session: Session, queues: Sequence[str]) -> dict[str, Kinds]:
        """Return the kinds of messages that wait in each of these queues; those without any are left out."""
        found = {queue: Kinds(*map(bool, kinds)) for queue, *kinds in session.rows("claim_kinds", as_json(queues))}
        self.are_used = any(kinds.lined or kinds.crowded for kinds in found.values())
        return found

    def _pace(self, asked: Asked, queue: str) -> GatePace:
        return self.paces.setdefault((asked.lane, queue, asked.known), GatePace())

    def settled(self, leases: Iterable[Lease]) -> None:
        """Record where messages have ended or came back, so that the next one may pass."""
        if news := news_of(leases):
            for (_, queue, _), pace in [*self.paces.items()]:
                pace.settled(one for one in news if one.queue == queue)

    # looking: on a connection for reading, so that no writer waits for it

    def look(self, session: Session, asked: Asked, queue: str, now: int, kinds: Kinds) -> Worth:
        """Find gates at which messages may be taken; a walk in vain makes the next ones rare."""
        worth = Worth()
        if not (kinds.lined or kinds.crowded):
            return worth
        pace = self._pace(asked, queue)
        began_at = session.clock.steady()
        walks = asked.thorough or asked.lane is Lane.PROBATION or pace.is_walk_due(began_at)
        follows = pace.is_rare and not asked.thorough
        taken = self._find(session, asked, queue, now, kinds, worth, walks=walks, follows=follows)
        if walks and asked.lane is not Lane.PROBATION:
            pace.walked(began_at, session.clock.steady(), taken=taken)
            if pace.is_rare and not (worth or follows or asked.thorough):
                # Messages may wait at gates to which this walk, the first one in vain, has not come.
                self._find(session, asked, queue, now, kinds, worth, walks=False, follows=True)
        return worth

    def _find(
        self,
        session: Session,
        asked: Asked,
        queue: str,
        now: int,
        kinds: Kinds,
        worth: Worth,
        *,
        walks: bool,
        follows: bool,
    ) -> int:
        """Add gates with news, and those that a walk finds; return how many messages may be taken there."""
        pace, taken = self._pace(asked, queue), 0
        news = _news(session, asked, queue, now, pace) if follows else []
        for kind, is_line, is_there in (("lines", True, kinds.lined), ("crowds", False, kinds.crowded)):
            if not is_there:
                continue
            # For each kind as much room as if it were the only one: the claim divides it.
            budget = Budget(session, asked, now)
            portions: Iterable[list[str]] = [[one.gate for one in news if one.is_line == is_line]]
            if walks:
                worth.starts[kind] = self.stops.get((queue, kind), "")
                portions = itertools.chain(portions, self._walk(session, kind, asked, queue, now, budget))
            choose = self.lines if is_line else self.crowds
            for pick in choose(session, asked, queue, now, budget, portions):
                worth.add(str(pick.gate), is_line=is_line)
            taken += asked.limit - budget.room
            if budget.room <= 0:
                # There was no room to look at these, so it is their turn before that of the others.
                pace.settled(one for one in news if one.is_line == is_line and not worth.has(one.gate, is_line=is_line))
            for gate in budget.shut:
                if (at := budget.token_at(gate)) is not None:
                    pace.wait_for_token(News(queue, gate, is_line), at)
        return taken

    def served(self, asked: Asked, queue: str, worth: Worth, taken: Collection[str]) -> None:
        """Record at which of these gates messages were taken: where there was no room, the next claim goes on."""
        pace = self._pace(asked, queue)
        for kind, gates in (("lines", worth.lines), ("crowds", worth.crowds)):
            left = [gate for gate in gates if gate not in taken]
            if left and (start := worth.starts.get(kind)) is not None:
                passed = list(itertools.takewhile(lambda gate: gate in taken, gates))
                self.stops[queue, kind] = passed[-1] if passed else start
            # More may wait at a crowd; the next of a line may run when the one that was taken is settled.
            again = left if kind == "lines" else [*left, *(gate for gate in gates if gate in taken)]
            pace.settled(News(queue, gate, kind == "lines") for gate in again)

    # choosing

    def lines(
        self, session: Session, asked: Asked, queue: str, now: int, budget: Budget, portions: Iterable[list[str]]
    ) -> Iterator[Pick]:
        """Choose the first of each line if it may run."""
        for portion in portions:
            for gate, one_runs, last, *head in session.rows("line_heads", as_json(portion)):
                if one_runs or not budget.is_open(gate):
                    continue
                gating = asked.gatings.get(name_of(gate), _UNLIMITED)
                if (pick := _turn(session, gate, Head(*head), gating, last, asked, now)) is not None:
                    budget.take(gate)
                    yield pick

    def crowds(
        self, session: Session, asked: Asked, queue: str, now: int, budget: Budget, portions: Iterable[list[str]]
    ) -> Iterator[Pick]:
        """Choose from each gate in turn: first one of each, then the second ones."""
        for portion in portions:
            had = dict.fromkeys(portion, 0)
            hungry = list(portion)
            while hungry and budget.room > 0:
                share = -(-budget.room // len(hungry))
                rows: dict[str, list[int]] = {}
                for gate in hungry:
                    if budget.is_open(gate):
                        more = min(share, budget.left(gate))
                        rows[gate] = _crowd(session, asked, queue, now, gate, had[gate] + more)[had[gate] :]
                for turn in range(share):
                    for gate, waiting in rows.items():
                        if turn < len(waiting) and budget.left(gate) > 0:
                            budget.take(gate)
                            had[gate] += 1
                            yield Pick(waiting[turn], gate)
                hungry = [gate for gate, waiting in rows.items() if len(waiting) >= share]

    def _walk(
        self, session: Session, kind: str, asked: Asked, queue: str, now: int, budget: Budget
    ) -> Iterator[list[str]]:
        """Go once around the gates, a portion at a time, until there is no room left."""
        if asked.lane is Lane.PROBATION:
            if crashed := session.rows(f"{kind}_crashed", queue, now, limits.GATES_PER_CLAIM):
                yield [gate for (gate,) in crashed]
            return
        start = stop = self.stops.get((queue, kind), "")
        budget.stopped_at = None
        is_around = False
        # As many as there is room for are enough, unless they are shut.
        size = min(limits.GATES_PER_CLAIM, max(budget.room, _PORTION_MIN))
        for number in itertools.count():
            # After a portion in vain (nothing due there, or shut), ask for the gates that have something due.
            if number == 1 and budget.stopped_at is None:
                due = _all_due(session, asked, queue, now, is_line=kind == "lines")
                if due is not None:
                    yield [gate for gate in due if gate > start] + [gate for gate in due if gate <= start]
                    stop = budget.stopped_at or start
                    break
                if not asked.thorough:
                    break
            portion = [gate for (gate,) in session.rows(f"{kind}_after", queue, stop, size)]
            at_end = len(portion) < size
            if is_around:
                portion = [gate for gate in portion if gate <= start]
                at_end = at_end or len(portion) < size
            if portion:
                yield portion
                stop = portion[-1]
            if budget.room <= 0 or (at_end and (is_around or not start)):
                # The next walk begins behind the gate that was served last, not where this one ended: when a place
                # is free again, it is the next one's turn.
                stop = budget.stopped_at or start
                break
            if at_end:
                stop, is_around = "", True
            elif budget.is_shut(name_of(stop)):
                stop = f"{name_of(stop)};"  # behind all of its gates
            size = limits.GATES_PER_CLAIM
        self.stops[queue, kind] = stop


def _news(session: Session, asked: Asked, queue: str, now: int, pace: GatePace) -> list[News]:
    """Return the gates where something has changed since the last look."""
    rows = session.rows("gates_due", queue, asked.known, pace.since(session.clock.steady()), now, NEWS_MAX)
    pace.looked(now, found=sum(number for _, _, number in rows))
    return list(dict.fromkeys([*pace.take_news(now), *(News(queue, gate, bool(is_line)) for gate, is_line, _ in rows)]))


def _all_due(session: Session, asked: Asked, queue: str, now: int, *, is_line: bool) -> list[str] | None:
    """Return every gate with messages that are due, or None when so many are due that a walk finds some soon."""
    rows = session.rows("gates_due", queue, asked.known, -limits.INTEGER_MAX, now, limits.GATES_PER_CLAIM)
    if sum(number for _, _, number in rows) >= limits.GATES_PER_CLAIM:
        return None
    return [gate for gate, lined, _ in rows if bool(lined) is is_line]


def _turn(
    session: Session, gate: str, head: Head, gating: Gating, last: int | None, asked: Asked, now: int
) -> Pick | None:
    """Return the message of a line that may run, if there is one; none of the line runs now."""
    passed: int | None = None
    if head.backs_off(now) and gating.on_failure == "skip":
        front = [Head(*row) for row in session.rows("line_front", gate, limits.PASSED_OVER_MAX + 1)]
        passed = max(one.place for one in front if one.backs_off(now))
        head = next((one for one in front if not one.backs_off(now)), head)
    if head.due_at > now or head.message_type not in asked.types:
        return None
    if not asked.crashes_min <= head.crashes <= asked.crashes_max:
        return None
    gap = has_gap(head, gating, last, passed, now)
    return None if gap is None else Pick(head.seq, gate, gap)


def _crowd(session: Session, asked: Asked, queue: str, now: int, gate: str, number: int) -> list[int]:
    """Return the first so many messages at a gate that may be taken, those first that have waited for longest."""
    if asked.lane is Lane.PROBATION:
        rows = session.rows("crowd_crashed", queue, gate, now, asked.known, number)
        return [seq for _, seq, _ in sorted((due_at - level * PRIORITY_STEP, seq, 0) for due_at, seq, level in rows)]
    lists = [
        [
            (due_at - level * PRIORITY_STEP, seq)
            for due_at, seq in session.rows("crowd", queue, gate, level, kind, now, asked.crashes_max, number)
        ]
        for level, kind in session.rows("crowd_kinds", queue, gate)
        if kind in asked.types
    ]
    return [seq for _, seq in itertools.islice(heapq.merge(*lists), number)]


def in_turn(kinds: list[Item], turn: int) -> list[Item]:
    """Let each kind be the first in its turn, so that none is starved by the others."""
    first = turn % len(kinds)
    return [*kinds[first:], *kinds[:first]]


# what settling and operators do to gates


def pass_on(session: Session, ended: Sequence[Envelope], now: int) -> None:
    """Let the next numbers come: these messages have ended, however they did."""
    kept_until = now + LINE_RETENTION
    rows = [(e.gated_by, e.sequence, kept_until) for e in ended if e.sequence is not None and e.ordering_key]
    session.each("gate_passed", rows)
