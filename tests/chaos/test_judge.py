"""The judge of chaos runs can fail: each kind of violation, planted in a correct run, is reported as that kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onefold import Record
from onefold.testing.chaos import demand
from onefold.testing.chaos.app import Action, Statements, Tasks, make_tables, make_tasks
from onefold.testing.chaos.demand import Demand
from onefold.testing.chaos.judge import Tables, Verdict, judge
from onefold.testing.chaos.process import Orders
from onefold.testing.chaos.run import all_records, read_tables
from onefold.testing.chaos.sender import Sender
from onefold.testing.checker import Journal

FIRST = demand.NUMBERS_PER_SENDER
#: Three messages of each kind; the number of the first is divisible by three, so a deposit sends a receipt.
DEMANDS = [
    Demand(kind, FIRST + 2 + 3 * place + times * 3 * len(demand.SENT))
    for times in range(3)
    for place, kind in enumerate(demand.SENT)
]


def nth(kind: str, place: int = 0) -> Demand:
    """Return the first, second or third message of a kind."""
    return [one for one in DEMANDS if one.kind == kind][place]


@dataclass
class Scene:
    """The input of the judge."""

    journal: Journal
    records: Sequence[Record]
    tables: dict[str, list[tuple[Any, ...]]]

    def judge(self, redriven: Sequence[str] = ()) -> Verdict:
        copy = Journal()
        copy.entries.extend(self.journal.entries)
        return judge(copy, self.records, self.tables, redriven=redriven)

    def record(self, one: Demand) -> Record:
        (found,) = [r for r in self.records if (r.envelope.message_type, r.envelope.subject) == (one[0], str(one[1]))]
        return found


async def play(url: str, folder: Path, after: Callable[[Tasks], Any] | None = None) -> Scene:
    """Send every demand, work until nothing is due, and return what the store contains then."""
    tasks, journal = make_tasks(url), Journal()
    await make_tables(tasks)
    sender = Sender(tasks, Orders(url=url, folder=str(folder), name="sender", seed="1"), journal)
    async with tasks.app as app:
        for one in DEMANDS:
            await sender.until_accepted(one)
        await app.work(until_idle=True)
        if after is not None:
            await after(tasks)
        records = await all_records(app)
    tables: Tables = read_tables(url)
    return Scene(journal, records, {name: list(rows) for name, rows in tables.items()})


def found(verdict: Verdict) -> dict[str, int]:
    """Return the violations by kind, without kinds that did not occur."""
    counts = {"lost": verdict.lost, "twice": verdict.twice, "wrong": verdict.wrong, "phantom": verdict.phantom}
    return {name: number for name, number in counts.items() if number}


@pytest.fixture
def scene(sqlite_url: str, tmp_path: Path) -> Scene:
    return asyncio.run(play(sqlite_url, tmp_path))


def test_a_run_in_which_all_went_well_is_found_right(store_url: str, tmp_path: Path) -> None:
    """Every kind of message on every store: each row, sum, place, result and follow-up is as expected."""
    scene = asyncio.run(play(store_url, tmp_path))
    verdict = scene.judge()
    assert not verdict.report, verdict.report
    # Three messages of seven kinds, and one more for each order, each trip and the first deposit.
    follow_ups = sum(one.follow_up is not None for one in DEMANDS)
    assert (verdict.accepted, verdict.messages) == (len(DEMANDS), len(DEMANDS) + follow_ups)
    assert {one.kind for one in DEMANDS} == set(demand.SENT)
    assert verdict.rows == sum(map(len, scene.tables.values()))
    assert all(scene.tables[name] for name in demand.ROW_TABLES if name != "misread")


def test_a_statement_that_ran_in_place_of_another_is_reported_as_wrong_rows(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement runs with the parameters of the next, as after a mix-up of prepared statements."""
    right, victim = Statements.account, nth("gift").number

    def mixed_up(self: Statements, number: int) -> Action:
        action = right(self, number)
        return action._replace(statement=self.audit(number).statement) if number == victim else action

    monkeypatch.setattr(Statements, "account", mixed_up)
    verdict = asyncio.run(play(store_url, tmp_path)).judge()
    # A row of the audit that no message implies, and an account that lacks an addition.
    assert found(verdict) == {"wrong": 2}, verdict.report
    account = demand.account_of(victim)
    assert [violation.key for violation in verdict.report.violations] == [
        f"?:{demand.amount_of(victim)}",
        f"account:{account}",
    ]


def test_a_statement_that_answers_for_another_is_reported_as_wrong_rows(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read with an impossible answer is written to ``misread`` in the commit of its handler."""
    right, victim = Statements.price, nth("purchase").number

    def mixed_up(self: Statements, number: int) -> Action:
        return right(self, number)._replace(answer=[]) if number == victim else right(self, number)

    monkeypatch.setattr(Statements, "price", mixed_up)
    verdict = asyncio.run(play(sqlite_url, tmp_path)).judge()
    assert found(verdict) == {"wrong": 1}
    assert "answered" in str(verdict.report)


def test_a_message_that_was_accepted_and_is_not_there_is_reported_as_lost(scene: Scene) -> None:
    """The sender was told that it is accepted, and there is no such message."""
    scene.journal.invoke("sender", "deposit:777")
    scene.journal.ok("sender", "deposit:777", "an id")
    assert found(scene.judge()) == {"lost": 1}


def test_a_message_that_is_done_without_a_trace_is_reported_as_lost(scene: Scene) -> None:
    """The message is done without any of its rows; the sums that lack it are not reported again as wrong."""
    victim = nth("gift").number
    for table in ("audit", "trail"):
        scene.tables[table].remove((victim, demand.amount_of(victim)))
    account, amount = demand.account_of(victim), demand.amount_of(victim)
    scene.tables["account"] = [(i, b - amount if i == account else b) for i, b in scene.tables["account"]]
    assert found(scene.judge()) == {"lost": 1}


def test_a_message_that_is_not_through_is_reported_as_lost(sqlite_url: str, tmp_path: Path) -> None:
    """A message is still waiting although it had enough time."""

    async def send_one_more(tasks: Tasks) -> None:
        await tasks.by_kind["deposit"].send(FIRST + 1_001)

    scene = asyncio.run(play(sqlite_url, tmp_path, send_one_more))
    scene.journal.invoke("sender", f"deposit:{FIRST + 1_001}")
    assert found(scene.judge()) == {"lost": 1}


def test_a_second_effect_is_reported_as_twice(sqlite_url: str, tmp_path: Path) -> None:
    """The whole effect of a handler exists twice; the sums, which contain it twice, are not reported as wrong."""
    victim = nth("deposit").number

    async def do_it_again(tasks: Tasks) -> None:
        do = tasks.statements
        async with tasks.app.transaction() as transaction:
            for action in (do.audit(victim), do.trail(victim), do.account(victim), do.tally(victim)):
                await transaction.execute(action.statement, *action.parameters)

    assert found(asyncio.run(play(sqlite_url, tmp_path, do_it_again)).judge()) == {"twice": 1}


def test_a_second_message_with_the_same_key_is_reported_as_twice(scene: Scene) -> None:
    """Two messages hold one key."""
    record = scene.record(nth("deposit"))
    copy = msgspec.structs.replace(record, envelope=msgspec.structs.replace(record.envelope, id="another id"))
    scene.records = [*scene.records, copy]
    assert found(scene.judge()) == {"twice": 1}


@pytest.mark.parametrize("table", ["audit", "part", "note", "line", "orders"])
def test_a_row_that_is_missing_beside_others_is_reported_as_wrong(table: str, scene: Scene) -> None:
    """Half of a commit is missing; a message whose only row is missing, as in a line, is reported as lost instead."""
    scene.tables[table].pop()
    assert found(scene.judge()) == ({"lost": 1, "wrong": 1} if table == "line" else {"wrong": 1 + (table == "orders")})


def test_one_row_of_several_that_is_there_twice_is_reported_as_wrong(scene: Scene) -> None:
    """The message's other rows show that it ran once, so one of its statements ran twice or in another's place."""
    scene.tables["part"].append(scene.tables["part"][0])
    assert found(scene.judge()) == {"wrong": 1}


def test_a_row_with_another_content_is_reported_with_both(scene: Scene) -> None:
    """The report shows the existing row and the missing one."""
    number, place, amount = scene.tables["part"].pop()
    scene.tables["part"].append((number, place, amount + 1))
    verdict = scene.judge()
    assert found(verdict) == {"wrong": 2}
    assert f"part has no row {(number, place, amount)}" in str(verdict.report)
    assert str((number, place, amount + 1)) in str(verdict.report)


def test_messages_of_a_line_in_another_order_are_reported_as_wrong(scene: Scene) -> None:
    """Two messages of one line have swapped places; after a redrive that is allowed."""
    first, second = (
        one for one in (nth("place", 0), nth("place", 1), nth("place", 2)) if _line(one) == _line(nth("place"))
    )
    places = {number: place for number, _, place in scene.tables["line"]}
    swapped = {first.number: places[second.number], second.number: places[first.number]}
    scene.tables["line"] = [(n, line, swapped.get(n, place)) for n, line, place in scene.tables["line"]]
    assert found(scene.judge()) == {"wrong": 4}
    redriven = [scene.record(first).envelope.id]
    assert found(scene.judge(redriven)) == {}
    scene.tables["line"].append((first.number, _line(first), 9))
    assert found(scene.judge(redriven)) == {"wrong": 1}


def _line(one: Demand) -> int:
    return demand.line_of(one.number)


def test_a_result_of_another_message_is_reported_as_wrong(scene: Scene) -> None:
    """A message was settled with the answer of another one."""
    mine, other = scene.record(nth("gift", 0)), scene.record(nth("gift", 1))
    swapped = msgspec.structs.replace(mine, result=other.result)
    scene.records = [swapped if record is mine else record for record in scene.records]
    assert found(scene.judge()) == {"wrong": 1}


def test_a_message_that_was_taken_back_or_never_sent_is_reported_as_not_asked_for(scene: Scene) -> None:
    """A message of an abandoned transaction, and a message that is in no journal."""
    scene.journal.entries = [entry for entry in scene.journal.entries if entry.key != nth("gift").key]
    scene.journal.fail("sender", nth("parcel").key)
    assert found(scene.judge()) == {"phantom": 4}


def test_an_answer_that_never_came_is_right_either_way(scene: Scene) -> None:
    """An unanswered send may have been accepted or not."""
    victim = nth("gift").key
    scene.journal.entries = [entry for entry in scene.journal.entries if (entry.key, entry.event) != (victim, "ok")]
    scene.journal.unknown("sender", victim)
    scene.journal.invoke("sender", "gift:555")
    scene.journal.unknown("sender", "gift:555")
    assert not scene.judge().report
