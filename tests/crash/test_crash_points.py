"""Killed before and after every statement: nothing accepted is lost, nothing happens twice, on both stores."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_scenarios import SCENARIOS, TABLES, Place, Scenario, finish, send, verdict

from onefold.testing import HastyClock
from onefold.testing.checker import Journal
from onefold.testing.crash import CrashReport, Point, crash_points
from onefold.testing.servers import PostgresServer

_numbers = itertools.count(1)


async def _migrated(place: Place) -> None:
    store = place.store(HastyClock())
    await store.migrate()
    await store.open()
    async with store.transaction() as transaction:
        for statement in TABLES:
            await transaction.execute(statement)
    await store.close()


@pytest.fixture(scope="module")
def postgres_template(postgres_server: PostgresServer) -> str:
    """A migrated database to copy, so that no scenario waits for the migration."""
    asyncio.run(_migrated(Place("postgres", postgres_server.create_database("crash_template"))))
    return "crash_template"


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        place = Place("sqlite", f"sqlite:///{tmp_path}/crash.db")
        asyncio.run(_migrated(place))
        yield place
        return
    template = request.getfixturevalue("postgres_template")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = f"crash_{next(_numbers)}"
    yield Place("postgres", server.create_database(name, template=template))
    server.drop_database(name)


def _judge(report: CrashReport, place: Place, record_property: Callable[[str, object], None], name: str) -> None:
    record_property(f"crash points on {place.kind}", report.points)
    print(f"{place.kind} {name}: {report}")
    assert not report.failures, report
    # A trace that missed one side of the statements would let every scenario pass.
    assert {death.split()[0] for death in report.deaths} == {"before", "after"}
    assert report.points >= 2


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_statement(
    scenario: type[Scenario], place: Place, record_property: Callable[[str, object], None]
) -> None:
    scene = scenario(place)
    report = crash_points(scene.act, scene.recover, prepare=scene.prepare)
    _judge(report, place, record_property, scenario.__name__)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_migration_killed_midway_is_done_by_the_next(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    server: PostgresServer | None = request.getfixturevalue("postgres_server") if kind == "postgres" else None

    def place(number: int) -> Place:
        if server is None:
            return Place(kind, f"sqlite:///{tmp_path}/migrated-{number}.db")
        return Place(kind, server.url(f"migrated_{number}"))

    async def prepare(number: int) -> None:
        if server is not None:
            server.create_database(f"migrated_{number}")

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
