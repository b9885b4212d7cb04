"""Compare every row with those that the accepted messages imply.

The checker of all chaos tests reports lost, repeated and unrequested work from the journals, the final states of
messages and their effects.  This module adds the contents of the tables: a row that is not expected is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from onefold.store import Record, State
from onefold.testing.chaos import demand
from onefold.testing.chaos.demand import Demand, Row
from onefold.testing.checker import Effect, Final, Journal, Report, Violation, check

#: The rows of every table, by its name.
Tables = Mapping[str, Sequence[tuple[object, ...]]]


@dataclass(slots=True)
class Verdict:
    """The size of the comparison, and every violation that it found."""

    report: Report
    #: Messages accepted by senders; ended messages, including those that handlers sent; rows of all tables.
    accepted: int = 0
    messages: int = 0
    rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.counts.update(violation.kind for violation in self.report.violations)

    @property
    def lost(self) -> int:
        """Accepted messages that are missing, without their effect, or not ended."""
        return self.counts["lost"] + self.counts["stuck"]

    @property
    def twice(self) -> int:
        """Messages that have their effect more than once, and keys that two messages hold."""
        return self.counts["duplicated"]

    @property
    def wrong(self) -> int:
        """Rows that are missing, different or unexpected, and results that do not belong to their message."""
        return self.counts["wrong"] + self.counts["torn"]

    @property
    def phantom(self) -> int:
        """Messages and effects that no sender and no handler asked for."""
        return self.counts["phantom"]


def judge(journal: Journal, records: Sequence[Record], tables: Tables, *, redriven: Iterable[str] = ()) -> Verdict:
    """Compare; ``redriven`` are the ids of messages that were redriven and so lost their place in their line."""
    found = {Demand(r.envelope.message_type, int(r.envelope.subject)): r for r in records}
    accepted = len({entry.key for entry in journal.entries if entry.event == "ok"})
    _note_follow_ups(journal, found)
    rows = _Rows(tables)
    again = set(redriven)
    expected = _expected_rows(found, {one for one, r in found.items() if r.envelope.id in again}, rows)
    copies = {one: rows.copies(one, wanted) for one, wanted in expected.items()}
    effects = [Effect(one.key, r.envelope.id, r.fence) for one, r in found.items() for _ in range(copies[one])]
    finals = [Final(r.envelope.id, _key_of(r), r.state) for r in records]
    report = check(journal, effects, finals)
    report.violations += _wrong_rows(expected, copies, found, rows)
    report.violations += _wrong_sums(copies, rows, tables)
    report.violations += _wrong_results(records)
    return Verdict(report, accepted, len(records), sum(map(len, tables.values())))


class _Rows:
    """Every row that names its message: how often it occurs, and the rows of each message."""

    def __init__(self, tables: Tables) -> None:
        self.times = Counter((table, row) for table in demand.ROW_TABLES for row in tables[table])
        self.by_number = defaultdict[object, list[Row]](list)
        for row in self.times:
            self.by_number[row[1][0]].append(row)

    def copies(self, one: Demand, wanted: Iterable[Row]) -> int:
        """Return how often a handler's whole effect occurs; 1 if only a part of it does."""
        by_handler = [row for row in wanted if row[0] not in demand.WRITTEN_BY_SENDERS]
        # Each step of a workflow commits by itself and writes one row.
        commits = [[row] for row in by_handler] if one.kind == "trip" else [by_handler]
        whole = max(min((self.times[row] for row in commit), default=0) for commit in commits)
        return whole or int(any(row[0] not in demand.WRITTEN_BY_SENDERS for row in self.by_number[one.number]))


def _key_of(record: Record) -> str:
    return f"{record.envelope.message_type}:{record.envelope.subject}"


def _note_follow_ups(journal: Journal, found: Mapping[Demand, Record]) -> None:
    """Record in the journal that a handler's send is accepted once the handler's message is done, and not before.

    A child of a workflow is requested before its parent is done, so it is recorded as requested at once.
    """
    for one, record in found.items():
        if (following := one.follow_up) is None:
            continue
        if record.state is State.DONE:
            journal.invoke(one.key, following.key)
            journal.ok(one.key, following.key)
        elif one.kind == "trip":
            journal.invoke(one.key, following.key)


def _expected_rows(found: Mapping[Demand, Record], redriven: set[Demand], rows: _Rows) -> dict[Demand, list[Row]]:
    expected = {one: demand.rows_of(one) for one in found}
    for line, numbers in demand.lines_of(found).items():
        demands = [Demand("place", number) for number in numbers]
        if redriven.isdisjoint(demands):
            for place, one in enumerate(demands, 1):
                expected[one] = [("line", (one.number, line, place))]
            continue
        # The later messages of the line passed a quarantined message, so its place is not known beforehand.
        for one in demands:
            anywhere = [row for row in rows.by_number[one.number] if row[0] == "line"]
            expected[one] = anywhere[:1] or [("line", (one.number, line, "any"))]
    return expected


def _wrong_rows(
    expected: Mapping[Demand, Sequence[Row]],
    copies: Mapping[Demand, int],
    found: Mapping[Demand, Record],
    rows: _Rows,
) -> Iterable[Violation]:
    """Yield rows that are missing or repeated, and rows that no message implies."""
    implied = set[Row]()
    for one, wanted in expected.items():
        implied.update(wanted)
        for row in wanted if found[one].state is State.DONE else ():
            times, id_ = rows.times[row], found[one].envelope.id
            # A message without any row of its handler counts as lost, which the checker reports.
            if not times and (copies[one] or row[0] in demand.WRITTEN_BY_SENDERS):
                instead = [other[1] for other in rows.by_number[one.number] if other[0] == row[0]]
                problem = f"{row[0]} has no row {row[1]}" + (f", but {instead}" if instead else "")
                yield Violation("wrong", one.key, (id_,), problem)
            elif times > max(copies[one], 1):
                yield Violation("wrong", one.key, (id_,), f"{row[0]} has the row {row[1]} {times} times")
    keys = {one.number: one.key for one in found}
    for (table, values), times in rows.times.items():
        if (table, values) not in implied:
            problem = f"{table} has a row that no message implies, {times} times: {values}"
            yield Violation("wrong", keys.get(values[0], f"?:{values[0]}"), (), problem)  # type: ignore[call-overload]


def _wrong_sums(copies: Mapping[Demand, int], rows: _Rows, tables: Tables) -> Iterable[Violation]:
    """Yield wrong sums; a message adds as often as it ran, so one that was lost or ran twice is not reported again."""
    sums = demand.first_sums()
    for one, times in copies.items():
        for table, id_, amounts in demand.sums_of(one):
            if table in demand.WRITTEN_BY_SENDERS:
                times_added = rows.times["orders", (one.number, demand.amount_of(one.number))]
            else:
                times_added = times
            if times_added:
                before = sums[table].get(id_, (0,) * len(amounts))
                sums[table][id_] = tuple(b + times_added * a for b, a in zip(before, amounts, strict=True))
    for table, wanted in sums.items():
        there: dict[object, object] = {row[0]: row[1:] for row in tables[table]}
        due: dict[object, object] = dict(wanted.items())
        for name in sorted({*due, *there}, key=str):
            if due.get(name) != there.get(name):
                problem = f"{table} {name} is {there.get(name)}, and the messages add up to {due.get(name)}"
                yield Violation("wrong", f"{table}:{name}", (), problem)


def _wrong_results(records: Iterable[Record]) -> Iterable[Violation]:
    for record in records:
        if record.state is State.DONE:
            result = msgspec.json.decode(record.result or b"null")
            wanted = demand.amount_of(int(record.envelope.subject))
            if result != wanted:
                problem = f"its result is {result!r}, and not {wanted}"
                yield Violation("wrong", _key_of(record), (record.envelope.id,), problem)
