"""Workflows and effects killed before and after every statement: each step takes effect once, on both stores."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from crash_scenarios import TABLES, Place
from tests.crash.decision_scenario import crash_decisions

from onefold import App, Context, Happened, NotHappened, Receipt, RetryPolicy, Run, State
from onefold.store import Query
from onefold.store.journal_lines import LineKind
from onefold.testing import HastyClock, drain
from onefold.testing.crash import CrashReport, Point, crash_points

#: By then every lease of the dead process has run out, and every sleep is over.
LATER = timedelta(days=3)


async def _migrated(place: Place) -> None:
    store = place.store(HastyClock())
    await store.migrate()
    await store.open()
    async with store.transaction() as transaction:
        for statement in TABLES:
            await transaction.execute(statement)
    await store.close()


@pytest.fixture
def place(database: Place) -> Place:
    asyncio.run(_migrated(database))
    return database


def judge(report: CrashReport, place: Place, record_property: Callable[[str, object], None], least: int) -> None:
    record_property(f"crash points on {place.name}", report.points)
    print(f"{place.name}: {report}")
    assert not report.failures, report
    assert {death.split()[0] for death in report.deaths} == {"before", "after"}
    assert report.points >= least


# a workflow


class Flow:
    """A workflow of five parts: a plain step, one with SQL, a sleep, a signal and a child."""

    def __init__(self, place: Place, key: str, *, trace: object = None, later: timedelta = timedelta()) -> None:
        self.place = place
        self.key = key
        self.clock = HastyClock()
        self.clock.advance(later)
        self.app = App(store=place.store(self.clock, trace), clock=self.clock)
        insert = place.sql("INSERT INTO effect VALUES (?, ?, ?)")

        @self.app.task(subject="{key}")
        async def child(ctx: Context, key: str) -> str:
            await ctx.execute(insert, f"child:{key}", ctx.message.id, ctx.fence)
            return f"child of {key}"

        async def create(key: str) -> str:
            return f"account of {key}"

        async def write(ctx: Context, name: str, key: str) -> str:
            await ctx.execute(insert, f"{name}:{key}", ctx.message.id, ctx.fence)
            return name

        @self.app.workflow(key="{key}", subject="{key}")
        async def flow(run: Run, key: str) -> str:
            account = await run.step(create, key)
            await run.step(write, "first", key)
            await run.sleep(days=1)
            answer = await run.signal("go", type=str)
            told = await run.child(child, key)
            return f"{account}, {await run.step(write, 'last', key)}, {answer}, {told}"

        self.flow = flow

    async def start(self) -> Receipt[str]:
        return await self.flow.send(self.key)

    async def signal(self, run_id: str) -> None:
        assert await self.app.signal(run_id, "go", "yes", id="the only one")

    async def wrong(self, run_id: str) -> str | None:
        """Return the difference from a run without a crash, or None."""
        found = await self.app.find(Query(correlation_id=run_id))
        records = {record.envelope.message_type: record for record in found}
        states = {name: record.state for name, record in records.items()}
        if states != {"flow": State.DONE, "child": State.DONE} or len(found) != 2:
            return f"{found}"
        expected = f'"account of {self.key}, last, yes, child of {self.key}"'.encode()
        if records["flow"].result != expected:
            return f"{records['flow'].result!r}"
        statement = self.place.sql("SELECT key, message FROM effect WHERE key LIKE ? ORDER BY key")
        rows = await self.app.store.fetch(statement, [f"%:{self.key}"])
        ids = {name: record.envelope.id for name, record in records.items()}
        effects = [("child", ids["child"]), ("first", ids["flow"]), ("last", ids["flow"])]
        if rows != [(f"{name}:{self.key}", id_) for name, id_ in effects]:
            return f"effects: {rows}"
        lines = [(step.name, step.kind.name) for step in await self.app.journal(run_id)]
        if sorted(line for line in lines if line != WAITED) != JOURNAL:
            return f"journal: {lines}"
        return None


JOURNAL = sorted(
    [
        ("create#1", "RESULT"),
        ("write#1", "RESULT"),
        ("sleep#1", "TIMER"),
        ("go/the only one", "SIGNAL"),
        ("go#1", "TAKEN"),
        ("child#1", "SENT"),
        ("child#1", "CHILD"),
        ("write#2", "RESULT"),
    ]
)
#: This line exists only if the run had to wait for the signal instead of finding it in the mailbox.
WAITED = ("go#1", "TIMER")


def test_a_workflow_killed_anywhere_takes_effect_once(
    place: Place, record_property: Callable[[str, object], None]
) -> None:
    """Fault 1, H1, H2, H7: any worker continues the run of the dead one."""

    def key(point: Point) -> str:
        return f"flow-{point.number}"

    async def act(point: Point) -> None:
        point.armed = False
        flow = Flow(place, key(point), trace=point.trace)
        async with flow.app as app:
            point.armed = True
            receipt = await flow.start()
            await app.work(until_idle=True)
            flow.clock.advance(timedelta(days=1))
            await app.work(until_idle=True)
            await flow.signal(receipt.id)
            await app.work(until_idle=True)
            point.armed = False

    async def recover(point: Point) -> object:
        flow = Flow(place, key(point), later=LATER)
        async with flow.app as app:
            receipt = await flow.start()
            # The same signal again; a run that has ended needs none.
            if receipt.state is not State.DONE:
                await flow.signal(receipt.id)
                await drain(app)
            return await flow.wrong(receipt.id)

    judge(crash_points(act, recover), place, record_property, least=40)


# an effect


class Outside:
    """A provider that records its calls: a file with one line per call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0

    async def do(self) -> str:
        with self.path.open("a") as file:
            file.write("done\n")
        return "receipt"

    async def ask(self) -> Happened[str] | NotHappened:
        return Happened("receipt") if len(self) else NotHappened()


def paying(place: Place, outside: Outside, *, probe: bool, trace: object = None, later: timedelta = timedelta()) -> App:
    clock = HastyClock()
    clock.advance(later)
    app = App(store=place.store(clock, trace), clock=clock)

    @app.task(key="{key}", retry=RetryPolicy(max_attempts=5))
    async def pay(ctx: Context, key: str) -> str:
        return await ctx.once("charge", outside.do, reconcile=outside.ask if probe else None)

    return app


@pytest.mark.parametrize("probe", [True, False], ids=["with a probe", "without"])
def test_an_effect_killed_anywhere_happens_once_or_is_for_a_person(
    place: Place, probe: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """B20, B21: with a probe the provider has every call exactly once; without one no call is repeated."""
    parked = itertools.count()

    def outside(point: Point) -> Outside:
        return Outside(tmp_path / f"outside-{point.number}")

    async def act(point: Point) -> None:
        point.armed = False
        app = paying(place, outside(point), probe=probe, trace=point.trace)
        async with app:
            await app.tasks["pay"].send(f"pay-{point.number}")
            point.armed = True
            await app.work(until_idle=True)
            point.armed = False

    async def recover(point: Point) -> object:
        app = paying(place, outside(point), probe=probe, later=LATER)
        async with app:
            receipt = await app.tasks["pay"].send(f"pay-{point.number}")
            await drain(app)
            (record,) = await app.find(Query(ids=(receipt.id,)))
            calls = len(outside(point))
            if record.state is State.PARKED and not probe and calls <= 1:
                next(parked)
                (entry,) = await app.ledger(receipt.id)
                happened = await app.resolve(
                    receipt.id, entry.name, happened=bool(calls), value="receipt", actor="a", reason="looked"
                )
                await drain(app)
                (record,) = await app.find(Query(ids=(receipt.id,)))
                if not happened:
                    return "it could not be resolved"
            if (record.state, record.result, len(outside(point))) != (State.DONE, b'"receipt"', 1):
                return f"{record} {record.result!r}, {len(outside(point))} calls"
            kinds = [step.kind for step in await app.journal(receipt.id)]
            return None if kinds.count(LineKind.EFFECT) == 1 else f"{kinds}"

    judge(crash_points(act, recover), place, record_property, least=8)
    assert (next(parked) > 0) is not probe


# decisions


def test_a_run_killed_in_any_step_does_not_decide_anew_what_the_step_acted_on(
    place: Place, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """One key for a charge, refund or ship and never both, bank a or bank b and never both."""
    judge(crash_decisions(place.store, tmp_path), place, record_property, least=16)


@pytest.mark.deep
def test_a_run_killed_anywhere_does_not_decide_anew_what_it_has_acted_on(
    place: Place, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The same, killed at every statement."""
    judge(crash_decisions(place.store, tmp_path, at_statements=True), place, record_property, least=150)
