"""Killed before and after every statement: nothing accepted is lost, nothing happens twice, on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_scenarios import SCENARIOS, TABLES, Place, Scenario, finish, send, verdict

from onefold.testing import HastyClock
from onefold.testing.checker import Journal
from onefold.testing.crash import CrashReport, Point, crash_points
from onefold.testing.servers import PostgresServer


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


def _judge(report: CrashReport, place: Place, record_property: Callable[[str, object], None], name: str) -> None:
    record_property(f"crash points on {place.name}", report.points)
    print(f"{place.name} {name}: {report}")
    assert not report.failures, report
    # If the trace reported only one side of the statements, half of the points would not be tried.
    assert {death.split()[0] for death in report.deaths} == {"before", "after"}
    assert report.points >= 2


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_statement(
    scenario: type[Scenario], place: Place, record_property: Callable[[str, object], None]
) -> None:
    scene = scenario(place)
    report = crash_points(scene.act, scene.recover, prepare=scene.prepare)
    _judge(report, place, record_property, scenario.__name__)


@pytest.mark.parametrize("kind", ["sqlite", "postgres", pytest.param("sqlite3", marks=pytest.mark.deep)])
def test_a_migration_killed_midway_is_done_by_the_next(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    server: PostgresServer | None = request.getfixturevalue("postgres_server") if kind == "postgres" else None

    def place(number: int) -> Place:
        if server is None:
            options = "?driver=sqlite3" if kind == "sqlite3" else ""
            return Place("sqlite", f"sqlite:///{tmp_path}/migrated-{number}.db{options}")
        return Place(kind, server.url(f"migrated_{number}"))

    async def prepare(number: int) -> None:
        if server is not None:
            server.create_database(f"migrated_{number}", by_files=True)

    async def act(point: Point) -> None:
        store = place(point.number).store(HastyClock(), point.trace)
        await store.migrate()
        await store.close()

    async def recover(point: Point) -> object:
        here = place(point.number)
        await _migrated(here)
        journal = Journal()
        async with here.app() as app:
            await send(app, journal, "pay", "k")
            await finish(app)
            wrong = await verdict(here, app, journal, "k")
        if server is not None:
            server.drop_database(f"migrated_{point.number}")
        return wrong

    report = crash_points(act, recover, prepare=prepare)
    _judge(report, place(0), record_property, "migrating")
