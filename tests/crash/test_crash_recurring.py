"""Killed before and after every statement of a tick: each occurrence is put once, and none is lost.

Faults 1 and 35.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from crash_scenarios import Place

from onefold import App, Context, Query
from onefold.testing import HastyClock
from onefold.testing.crash import Point, crash_points

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
def place(database: Place) -> Place:
    asyncio.run(_migrated(database))
    return database


async def _migrated(place: Place) -> None:
    store = place.store(HastyClock())
    await store.migrate()
    await store.open()
    async with store.transaction() as transaction:
        await transaction.execute("CREATE TABLE ran (name TEXT NOT NULL, scheduled_for TEXT NOT NULL)")
    await store.close()


class Scene:
    """A recurring task for each crash point, on one database."""

    recurring: ClassVar[dict[str, Any]] = {"every": HOUR, "mode": "rate", "catchup": "all"}
    #: When the schedule is declared, when the child dies, and when another process recovers.
    acts_at, recovers_at = HOUR, HOUR + 30 * MINUTE

    def __init__(self, place: Place) -> None:
        self.place = place

    def app(self, number: int, at: timedelta, trace: Any = None) -> App:
        clock = HastyClock()
        clock.advance(at)
        app = App(store=self.place.store(clock, trace), clock=clock)
        insert = self.place.sql("INSERT INTO ran VALUES (?, ?)")

        @app.recurring(name=f"tick-{number}", **self.recurring)
        async def tick(ctx: Context) -> None:
            assert ctx.scheduled_for is not None
            await ctx.execute(insert, ctx.message.message_type, ctx.scheduled_for.isoformat())

        return app

    async def prepare(self, number: int) -> None:
        async with self.app(number, timedelta()) as app:
            await app.work(until_idle=True)

    async def act(self, point: Point) -> None:
        point.armed = False
        async with self.app(point.number, self.acts_at, point.trace) as app:
            point.armed = True
            await self.interrupted(app, point.number)
            point.armed = False

    async def interrupted(self, app: App, number: int) -> None:
        await app.work(until_idle=True)

    async def recover(self, point: Point) -> object:
        async with self.app(point.number, self.recovers_at) as app:
            await app.work(until_idle=True)
            return await self.look(app, point)

    async def look(self, app: App, point: Point) -> object:
        """Return a problem, or None."""
        return await self.compare(app, point.number, 1)

    async def compare(self, app: App, number: int, expected: int) -> object:
        name = f"tick-{number}"
        rows = await app.store.fetch(self.place.sql("SELECT scheduled_for FROM ran WHERE name = ?"), [name])
        messages = [one for one in await app.find(Query(message_type=name)) if one.state.ended]
        schedule = (await app.schedules())[name]
        figures = (len(rows), len(set(rows)), len(messages), schedule.fired)
        return None if figures == (expected,) * 4 else f"expected {expected}: {figures}, {rows}"


class Ticking(Scene):
    """A worker dies anywhere between reading the schedules and the end of the run."""


class TickingTogether(Scene):
    """Two workers read the schedules at the same moment, have several occurrences to put, and die together."""

    acts_at, recovers_at = 3 * HOUR, 3 * HOUR + 30 * MINUTE

    async def act(self, point: Point) -> None:
        point.armed = False
        one, other = (self.app(point.number, self.acts_at, point.trace) for _ in range(2))
        async with one, other:
            point.armed = True
            await asyncio.gather(*(app.work(queues=["another"], until_idle=True) for app in (one, other)))
            point.armed = False

    async def look(self, app: App, point: Point) -> object:
        return await self.compare(app, point.number, 3)


class Delaying(Scene):
    """A worker dies anywhere in a run of a schedule with a delay, whose end decides the time of the next run."""

    recurring: ClassVar = {"every": HOUR, "mode": "delay"}
    acts_at, recovers_at = HOUR, HOUR + MINUTE

    async def look(self, app: App, point: Point) -> object:
        async with self.app(point.number, 4 * HOUR) as later:
            if wrong := await self.compare(later, point.number, 1):
                return wrong
            for _ in range(2):
                await later.work(until_idle=True)
            return await self.compare(later, point.number, 2)


class Declaring(Scene):
    """A worker dies while it declares the schedules of its code in the register; the next start completes that."""

    acts_at, recovers_at = timedelta(), MINUTE

    async def prepare(self, number: int) -> None:
        """Declare nothing."""

    async def look(self, app: App, point: Point) -> object:
        async with self.app(point.number, HOUR) as later:
            await later.work(until_idle=True)
            return await self.compare(later, point.number, 1)


class Managing(Scene):
    """An operator's process dies while changing schedules, and the change is repeated."""

    acts_at, recovers_at = MINUTE, 2 * MINUTE

    async def interrupted(self, app: App, number: int) -> None:
        name = f"extra-{number}"
        task = app.tasks[f"tick-{number}"]
        made = await app.schedule(task.call(), "30 * * * *", name=name)
        await made.pause()
        await made.resume()
        await made.run_now()
        await app.unschedule(name)

    async def look(self, app: App, point: Point) -> object:
        await self.interrupted(app, point.number)
        if f"extra-{point.number}" in await app.schedules():
            return "it is still there"
        await app.work(until_idle=True)
        rows = self.place.sql("SELECT count(*) FROM ran WHERE name = ?")
        ((ran,),) = await app.store.fetch(rows, [f"tick-{point.number}"])
        # Requested by the process that died, perhaps, and by the one that repeated it.
        return None if ran in (1, 2) else f"{ran} runs were asked for"


class Triggering(Scene):
    """A process dies between two triggers and the one message that they are combined into."""

    recurring: ClassVar = {"every": timedelta(days=365), "mode": "rate"}
    acts_at, recovers_at = timedelta(), HOUR

    def app(self, number: int, at: timedelta, trace: Any = None) -> App:
        app = super().app(number, at, trace)
        insert = self.place.sql("INSERT INTO ran VALUES (?, ?)")

        @app.task(name=f"digest-{number}")
        async def digest(ctx: Context, note: str) -> None:
            await ctx.execute(insert, ctx.message.message_type, note)

        self.quiet = app.debounce(digest, key=lambda note: "all", wait=30, at_most=60)
        return app

    async def act(self, point: Point) -> None:
        point.armed = False
        async with self.app(point.number, self.acts_at, point.trace):
            point.armed = True
            for note in "ab":
                await self.quiet.trigger(note)
                point.journal.ok("producer", note)
            point.armed = False

    async def look(self, app: App, point: Point) -> object:
        accepted = [entry.key for entry in point.journal.entries]
        rows = self.place.sql("SELECT scheduled_for FROM ran WHERE name = ?")
        ran = [row[0] for row in await app.store.fetch(rows, [f"digest-{point.number}"])]
        # The last accepted trigger, or the one without an answer.
        allowed = {"": [[], ["a"]], "a": [["a"], ["b"]], "ab": [["b"]]}["".join(accepted)]
        return None if ran in allowed else f"accepted {accepted}, ran {ran}"


class Carrying(Triggering):
    """A worker dies while it sends the message of the triggers."""

    async def prepare(self, number: int) -> None:
        async with self.app(number, timedelta()):
            await self.quiet.trigger("a")

    async def act(self, point: Point) -> None:
        point.armed = False
        async with self.app(point.number, MINUTE, point.trace) as app:
            point.armed = True
            await app.work(until_idle=True)
            point.armed = False

    async def look(self, app: App, point: Point) -> object:
        point.journal.ok("producer", "a")
        return await super().look(app, point) or await self._left(app, point.number)

    async def _left(self, app: App, number: int) -> object:
        messages = await app.find(Query(message_type=f"digest-{number}"))
        return None if len(messages) == 1 else f"sent {len(messages)} times"


SCENES = [Ticking, TickingTogether, Delaying, Declaring, Managing, Triggering, Carrying]


@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_every_statement_of_a_schedule(
    scene: type[Scene], place: Place, record_property: Callable[[str, object], None]
) -> None:
    here = scene(place)
    report = crash_points(here.act, here.recover, prepare=here.prepare)
    record_property(f"crash points on {place.name}", report.points)
    print(f"{place.name} {scene.__name__}: {report}")
    assert not report.failures, report
    assert {death.split()[0] for death in report.deaths} == {"before", "after"}
    # The entry and the message are written between these statements.
    assert any("register" in death for death in report.deaths)
