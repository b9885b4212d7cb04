"""Generated workflows and sagas, killed inside each of their steps and undos, at each statement, and at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
from crash_scenarios import Place
from test_workflow_crashes import LATER

from onefold import App
from onefold.store import Record
from onefold.testing import HastyClock
from onefold.testing.crash import CrashReport, Point, crash_points
from onefold.testing.programs.ending import bring_to_end, judge_all
from onefold.testing.programs.hazards import Hazards
from onefold.testing.programs.interpreter import Tasks, table
from onefold.testing.programs.outside import OutsideFile
from onefold.testing.programs.processes import ProgramProcesses
from onefold.testing.programs.worlds import draw_programs

RecordProperty = Callable[[str, object], None]
Kind = Literal["workflows", "sagas"]
KINDS: tuple[Kind, ...] = ("workflows", "sagas")

#: Seeds of programs with few crash points.
SHORT: dict[Kind, tuple[int, ...]] = {"workflows": (0, 6), "sagas": (1, 3)}


@pytest.fixture
def place(database: Place) -> Place:
    return database


class _CrashHazards(Hazards):
    """Faults that are the same in every run of a scenario, and a death at the point that is tried."""

    def __init__(self, outside: OutsideFile, seed: int, clock: HastyClock, point: Point | None) -> None:
        super().__init__(outside, random.Random(seed))
        self._clock = clock
        self._point = point
        self.calm = point is None

    def now(self) -> int:
        return self._clock.now()

    def risk_death(self, where: str) -> None:
        if self._point is not None:
            when, _, what = where.partition(" ")
            self._point.trace("before" if when == "before" else "after", what)

    async def dawdle(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


class Crashing:
    """One generated program that is killed at every point in turn."""

    def __init__(self, place: Place, folder: Path, kind: Kind, seed: int, *, at_statements: bool) -> None:
        self._place = place
        self._folder = folder
        self._seed = seed
        self._at_statements = at_statements
        self._task = "deal" if kind == "sagas" else "program"
        (self._body,) = draw_programs(seed, 1, sagas=kind == "sagas")

    def _app(self, point: Point, *, dies: bool) -> tuple[App, OutsideFile, HastyClock]:
        clock = HastyClock()
        if not dies:
            clock.advance(LATER)
        outside = OutsideFile(self._folder / f"outside-{self._seed}-{point.number}.jsonl")
        trace = point.trace if dies and self._at_statements else None
        app = App(store=self._place.store(clock, trace), clock=clock)
        Tasks(app, marker="?" if self._place.kind == "sqlite" else "%s")
        hazards = _CrashHazards(outside, self._seed, clock, point if dies else None)
        app.lifespan(lambda: nullcontext(hazards))
        return app, outside, clock

    async def migrate(self) -> None:
        app, _, _ = self._app(Point(0), dies=False)
        await app.migrate()
        async with app:
            async with app.transaction() as transaction:
                await transaction.execute(table("sqlite" if self._place.kind == "sqlite" else "postgres"))
            await app.subscribe()

    def _key(self, point: Point) -> str:
        return f"{self._task}-{self._seed}-{point.number}"

    async def act(self, point: Point) -> None:
        point.armed = False
        app, outside, clock = self._app(point, dies=True)
        async with app:
            await app.tasks[self._task].send(self._key(point), self._body)
            point.armed = True
            await bring_to_end(app, outside, clock)
            point.armed = False

    async def recover(self, point: Point) -> object:
        app, outside, clock = self._app(point, dies=False)
        async with app:
            sent = await app.tasks[self._task].send(self._key(point), self._body)
            await bring_to_end(app, outside, clock)

            def concerns(record: Record) -> bool:
                return sent.id in (record.envelope.id, record.envelope.correlation_id)

            number, violations = await judge_all(app, outside, concerns)
            return violations if number == 1 else f"{number} programs"

    def crash(self) -> CrashReport:
        return crash_points(self.act, self.recover)


def _crash_all(
    place: Place,
    folder: Path,
    kind: Kind,
    seeds: Iterable[int],
    record_property: RecordProperty,
    *,
    at_statements: bool,
) -> None:
    asyncio.run(Crashing(place, folder, kind, 0, at_statements=False).migrate())
    deaths = list[str]()
    for seed in seeds:
        report = Crashing(place, folder, kind, seed, at_statements=at_statements).crash()
        assert not report.failures, f"seed {seed}: {report}"
        deaths += report.deaths
    record_property(f"crash points on {place.name}", len(deaths))
    assert {death.split()[0] for death in deaths} == {"before", "after"}
    assert kind == "workflows" or any("undo" in death for death in deaths), deaths


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_program_killed_inside_its_functions_takes_effect_once(
    place: Place, kind: Kind, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Faults 1 and 37: killed before and after the effect of each step and each undo."""
    _crash_all(place, tmp_path, kind, SHORT[kind], record_property, at_statements=False)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_program_killed_anywhere_takes_effect_once(
    place: Place, kind: Kind, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Faults 1 and 37: more programs, killed at each of their statements too."""
    _crash_all(place, tmp_path, kind, range(20, 22), record_property, at_statements=True)


# real workers, killed at random


def _run_batch(
    place: Place, folder: Path, kind: Kind, seed: int, record_property: RecordProperty, **bounds: Any
) -> None:
    number = bounds.pop("number")
    batch = ProgramProcesses(place.url, folder, seed=seed, number=number, sagas=kind == "sagas")
    outcome = batch.run(**bounds)
    record_property(f"generated {kind} under kill -9 on {place.name}", outcome.judged)
    record_property("generated programs: processes killed", outcome.deaths)
    print(outcome)
    assert not outcome.violations, f"seed {seed}: {outcome}"
    assert outcome.judged == number
    assert outcome.deaths > 2


@pytest.mark.parametrize("kind", KINDS)
def test_generated_programs_survive_workers_that_are_killed(
    place: Place, kind: Kind, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Faults 1 and 37 with real processes: eight programs, and workers that die at any point."""
    _run_batch(place, tmp_path, kind, 1, record_property, number=8, deaths=8, seconds=2.0)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 108))
@pytest.mark.parametrize("kind", KINDS)
def test_many_generated_programs_survive_workers_that_are_killed(
    place: Place, kind: Kind, seed: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Faults 1 and 37: two hundred programs of each kind on each store, twenty-five at a time."""
    _run_batch(place, tmp_path, kind, seed, record_property, number=25, deaths=40, seconds=20.0)
