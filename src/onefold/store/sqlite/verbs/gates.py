"""Claim, at gates: which messages are let through, found without reading those that wait behind them.

Gates of a queue are walked from where the last claim stopped, so each comes in its turn; a gate with many waiting costs
no more than one with few.  Nothing is written here until the claim takes what was chosen, within one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.message.envelope import Envelope
from onefold.store import Lane
from onefold.store.gates import Gating, Rate, name_of
from onefold.store.shared.token_bucket import Head, TokenBucket, has_gap
from onefold.store.sqlite.session import Row, Session, as_json

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

    def left(self, gate: str) -> int:
        """How many may pass this gate now."""
        gating = self._gatings.get(name_of(gate)) if self._gatings else None
        if gating is None:
            return self.room
        return min(self.room, self._at_once, self._left_of_name(gating), self._left_of_gate(gate, gating))

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
class Gates:
    """The gates of one store as its claims walk them."""

    #: Where the last walk of a kind stopped in each queue.
    stops: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Which kind of messages the next claim looks at first.
    turn: int = 0

    def lines(self, session: Session, asked: Asked, queue: str, now: int, budget: Budget) -> Iterator[Pick]:
        """Choose the first of each line if it may run."""
        for portion in self._walk(session, "lines", asked, queue, now, budget):
            gates = as_json([gate for (gate,) in portion])
            for gate, one_runs, last, *head in session.rows("line_heads", gates):
                if one_runs or budget.left(gate) <= 0:
                    continue
                gating = asked.gatings.get(name_of(gate), _UNLIMITED)
                if (pick := _turn(session, gate, Head(*head), gating, last, asked, now)) is not None:
                    budget.take(gate)
                    yield pick

    def crowds(self, session: Session, asked: Asked, queue: str, now: int, budget: Budget) -> Iterator[Pick]:
        """Choose from each gate in turn: first one of each, then the second ones."""
        for portion in self._walk(session, "crowds", asked, queue, now, budget):
            hungry: dict[str, int] = {gate: top for gate, top, *_ in portion}
            had = dict.fromkeys(hungry, 0)
            while hungry and budget.room > 0:
                share = -(-budget.room // len(hungry))
                rows: dict[str, list[int]] = {}
                for gate, top in hungry.items():
                    if (more := min(share, budget.left(gate))) > 0:
                        read = _reader(session, asked, queue, now, gate, top)
                        rows[gate] = read(had[gate] + more)[had[gate] :]
                for turn in range(share):
                    for gate, waiting in rows.items():
                        if turn < len(waiting) and budget.left(gate) > 0:
                            budget.take(gate)
                            had[gate] += 1
                            yield Pick(waiting[turn], gate)
                hungry = {gate: hungry[gate] for gate, waiting in rows.items() if len(waiting) >= share}

    def _walk(
        self, session: Session, kind: str, asked: Asked, queue: str, now: int, budget: Budget
    ) -> Iterator[list[Row]]:
        """Go once around the gates, a portion at a time, until there is no room left."""
        if asked.lane is Lane.PROBATION:
            if crashed := session.rows(f"{kind}_crashed", queue, now, limits.GATES_PER_CLAIM):
                yield crashed
            return
        start = stop = self.stops.get((queue, kind), "")
        budget.stopped_at = None
        is_around = False
        # As many as there is room for are enough, unless they are shut.
        size = min(limits.GATES_PER_CLAIM, max(budget.room, _PORTION_MIN))
        for number in range(limits.GATE_PORTIONS_MAX):
            # After a portion in vain (nothing due there, or shut), ask for the gates that have something due.
            in_vain = kind == "crowds" and number == 1 and budget.stopped_at is None
            if in_vain and (due := _all_due(session, queue, now)) is not None:
                yield [row for row in due if row[0] > start] + [row for row in due if row[0] <= start]
                stop = budget.stopped_at or start
                break
            portion = session.rows(f"{kind}_after", queue, stop, size)
            at_end = len(portion) < size
            if is_around:
                portion = [row for row in portion if row[0] <= start]
                at_end = at_end or len(portion) < size
            if portion:
                yield portion
                stop = portion[-1][0]
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


def _all_due(session: Session, queue: str, now: int) -> list[Row] | None:
    """Return every gate with messages that are due, or None when so many are due that a walk finds some soon."""
    gates = session.rows("crowds_due", queue, now, limits.GATES_PER_CLAIM)
    return gates if sum(number for _, _, number in gates) < limits.GATES_PER_CLAIM else None


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


def _reader(session: Session, asked: Asked, queue: str, now: int, gate: str, top: int) -> Callable[[int], list[int]]:
    """Return a function that reads the first so many messages at a gate, the longest waiting first."""
    statement = "crowd_crashed" if asked.lane is Lane.PROBATION else "crowd"

    def read(number: int) -> list[int]:
        given = (queue, now, asked.known, asked.crashes_max, number, gate)
        levels = [(level, session.rows(statement, *given, level)) for level in range(top, -1, -1)]
        return merged(levels, number)

    return read


def in_turn(kinds: list[Item], turn: int) -> list[Item]:
    """Let each kind be the first in its turn, so that none is starved by the others."""
    first = turn % len(kinds)
    return [*kinds[first:], *kinds[:first]]


def merged(levels: Sequence[tuple[int, Sequence[Row]]], number: int) -> list[int]:
    """Merge rows of several priorities, each in the order of their due times, as if each step were time waited."""
    if len(levels) == 1:
        return [seq for seq, _ in levels[0][1]]
    ranked = sorted((due_at - level * PRIORITY_STEP, seq) for level, rows in levels for seq, due_at in rows)
    return [seq for _, seq in ranked[:number]]


# what settling and operators do to gates


def pass_on(session: Session, ended: Sequence[Envelope], now: int) -> None:
    """Let the next numbers come: these messages have ended, however they did."""
    kept_until = now + LINE_RETENTION
    rows = [(e.gated_by, e.sequence, kept_until) for e in ended if e.sequence is not None and e.ordering_key]
    session.each("gate_passed", rows)
