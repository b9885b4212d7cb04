"""Killed before and after every statement between publishing and the last subscriber's commit.

Faults 1 and 2: each subscriber handles the event once, and an order without its event, or an event without its order,
does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from crash_scenarios import Place

from onefold import App, Context, Topic
from onefold.testing import HastyClock
from onefold.testing.crash import Point, crash_points

LATER = timedelta(hours=1)
TABLES = (
    "CREATE TABLE placed (number INTEGER NOT NULL)",
    "CREATE TABLE ran (number INTEGER NOT NULL, subscriber TEXT NOT NULL)",
)
#: The handlers that run: two subscribe to the order, and one of these publishes an event for the third.
HANDLED = ["cancel", "mail", "reserve"]


@pytest.fixture
def place(database: Place) -> Place:
    asyncio.run(_migrated(database))
    return database


async def _migrated(place: Place) -> None:
    store = place.store(HastyClock())
    await store.migrate()
    await store.open()
    async with store.transaction() as transaction:
        for table in TABLES:
            await transaction.execute(table)
    await store.close()


class Scene:
    """A small choreography: an order is placed, its stock is refused, and the order is cancelled."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def app(self, at: timedelta, trace: Any = None) -> tuple[App, Topic[int]]:
        clock = HastyClock()
        clock.advance(at)
        app = App(store=self.place.store(clock, trace), clock=clock)
        placed = app.topic("order.placed", int, key="{event}")
        refused = app.topic("stock.refused", int)
        insert = self.place.sql("INSERT INTO ran VALUES (?, ?)")

        @app.on(placed)
        async def reserve(ctx: Context, number: int) -> None:
            await ctx.execute(insert, number, "reserve")
            ctx.publish(refused, number)

        for event, subscriber in ((placed, "mail"), (refused, "cancel")):

            @app.on(event, name=subscriber)
            async def handle(ctx: Context, number: int) -> None:
                await ctx.execute(insert, number, ctx.message.message_type)

        return app, placed

    async def act(self, point: Point) -> None:
        point.armed = False
        app, placed = self.app(timedelta(), point.trace)
        async with app:
            point.armed = True
            await self.interrupted(app, placed, point)
            point.armed = False

    async def interrupted(self, app: App, placed: Topic[int], point: Point) -> None:
        raise NotImplementedError

    async def recover(self, point: Point) -> object:
        app, placed = self.app(LATER)
        async with app:
            await self.repeat(app, placed, point)
            while await app.work(until_idle=True):
                pass
            return await self.look(app, point)

    async def repeat(self, app: App, placed: Topic[int], point: Point) -> None:
        """Publish again, as a sender without an answer does."""
        await placed.publish(point.number)

    async def look(self, app: App, point: Point) -> object:
        """Return a problem, or None."""
        ran = await self.rows(app, "SELECT subscriber FROM ran WHERE number = ? ORDER BY subscriber", point)
        left = [one.scheduled + one.leased + one.dead for one in (await app.count()).values()]
        return None if (ran, sum(left)) == (HANDLED, 0) else f"handled by {ran}, left {left}"

    async def rows(self, app: App, statement: str, point: Point) -> list[Any]:
        return [row[0] for row in await app.store.fetch(self.place.sql(statement), [point.number])]


class Outbox(Scene):
    """The process that places an order in one commit with its event dies and does not retry."""

    async def interrupted(self, app: App, placed: Topic[int], point: Point) -> None:
        async with app.transaction() as tx:
            await tx.execute(self.place.sql("INSERT INTO placed VALUES (?)"), point.number)
            tx.publish(placed, point.number)

    async def repeat(self, app: App, placed: Topic[int], point: Point) -> None:
        """Do nothing: this sender does not retry."""

    async def look(self, app: App, point: Point) -> object:
        orders = await self.rows(app, "SELECT number FROM placed WHERE number = ?", point)
        ran = await self.rows(app, "SELECT subscriber FROM ran WHERE number = ? ORDER BY subscriber", point)
        return None if ran == (HANDLED if orders else []) else f"{len(orders)} orders, handled by {ran}"


class Working(Scene):
    """One process publishes and works; it dies anywhere up to the commits of the subscribers, and publishes again."""

    async def interrupted(self, app: App, placed: Topic[int], point: Point) -> None:
        await placed.publish(point.number)
        await app.work(until_idle=True)


class Subscribing(Scene):
    """The first worker ever started dies while it subscribes, after the event was published."""

    async def interrupted(self, app: App, placed: Topic[int], point: Point) -> None:
        for event in ("order.placed", "stock.refused"):
            for one in ("reserve", "mail", "cancel"):
                await app.unsubscribe(event, one)
        await app.subscribe()


@pytest.mark.parametrize("scene", [Outbox, Working, Subscribing])
def test_killed_at_every_statement_of_a_choreography(
    scene: type[Scene], place: Place, record_property: Callable[[str, object], None]
) -> None:
    here = scene(place)
    report = crash_points(here.act, here.recover)
    record_property(f"crash points on {place.name}", report.points)
    print(f"{place.name} {scene.__name__}: {report}")
    assert not report.failures, report
    assert {death.split()[0] for death in report.deaths} == {"before", "after"}
