"""An occurrence of a schedule is put once, whichever worker finds it, however often or late, by whatever clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from onefold import App, Context, Query
from onefold.schedules.plan import Catchup
from onefold.schedules.ticker import Ticker
from onefold.store import Registered
from onefold.store.open import open_store
from onefold.testing.clock import FakeClock
from onefold.testing.faults import FaultyStore

if TYPE_CHECKING:
    from conftest import World

SCHEDULERS = 16
HOUR, YEAR = timedelta(hours=1), timedelta(days=366)


def declare_hourly(world: World, app: App, catchup: Catchup = "all") -> None:
    @app.recurring("0 * * * *", catchup=catchup, window=timedelta(days=2) if catchup == "all" else None)
    async def hourly(ctx: Context) -> None:
        assert ctx.scheduled_for is not None
        await ctx.execute(world.insert_effect, ctx.scheduled_for.astimezone(UTC).isoformat())


def hours(world: World, *numbers: int) -> list[str]:
    begin = FakeClock().moment
    return [(begin + number * HOUR).isoformat() for number in numbers]


def test_sixteen_schedulers_put_each_occurrence_once(world: World) -> None:
    """E7, fault 35: all of them look for occurrences at the same moment, again and again."""
    apps = [world.app() for _ in range(SCHEDULERS)]
    for app in apps:
        declare_hourly(world, app)

    async def scenario() -> None:
        async with world.running(*apps):
            for _ in range(5):
                await asyncio.gather(*(app.work(until_idle=True) for app in apps))
                world.clock.advance(HOUR)
            await asyncio.gather(*(app.work(until_idle=True) for app in apps))
            assert await world.effects(apps[0]) == hours(world, 1, 2, 3, 4, 5)
            assert len(await apps[0].find(Query())) == 5
            assert (await apps[0].schedules())["hourly"].fired == 5

    asyncio.run(scenario())


def test_a_schedule_made_by_sixteen_at_once_is_one_schedule(world: World) -> None:
    """E7, E9."""
    apps = [world.app() for _ in range(SCHEDULERS)]
    for app in apps:
        declare_hourly(world, app)

    async def scenario() -> None:
        async with world.running(*apps):
            made = [app.schedule(app.tasks["hourly"].call(), "30 * * * *", name="half") for app in apps]
            await asyncio.gather(*made)
            world.clock.advance(HOUR / 2)
            await asyncio.gather(*(app.work(until_idle=True) for app in apps))
            assert len(await apps[0].find(Query())) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("catchup", ["skip", "last", "all"])
def test_when_messages_and_keys_are_long_gone_nothing_fires_again(world: World, catchup: Catchup) -> None:
    """E7, fault 11: the schedule itself records what has fired, so the end of a key's window does not matter."""
    app = world.app()
    declare_hourly(world, app, catchup)

    async def scenario() -> None:
        async with world.running(app):
            for _ in range(4):
                await app.work(until_idle=True)
                world.clock.advance(HOUR)
            schedule = (await app.schedules())["hourly"]
            await schedule.pause()
            world.clock.advance(timedelta(days=60))
            async with app.store.transaction() as transaction:
                await transaction.purge()
            assert await app.find(Query()) == []
            await schedule.resume()
            world.clock.jump(-timedelta(days=60, hours=2))
            await app.work(until_idle=True)
            assert await world.effects(app) == hours(world, 1, 2, 3)

    asyncio.run(scenario())


class Stopped(FaultyStore):
    """The store of a worker that is paused after it has read the schedules."""

    read: dict[str, Registered] | None = None

    async def entries(self, kind: str) -> dict[str, Registered]:
        if kind != "schedule":
            return await super().entries(kind)
        self.read = self.read or await super().entries(kind)
        return self.read


def test_a_scheduler_that_read_long_ago_puts_nothing(world: World) -> None:
    """E7, fault 35: the worker continues weeks later, when no key is left that could stop it."""
    app = world.app()
    stopped = App(store=Stopped(open_store(world.url, clock=world.clock)), clock=world.clock)
    for one in (app, stopped):
        declare_hourly(world, one)

    async def scenario() -> None:
        async with world.running(app, stopped):
            await stopped.work(until_idle=True)
            world.clock.advance(HOUR)
            await app.work(until_idle=True)
            world.clock.advance(timedelta(days=60))
            async with app.store.transaction() as transaction:
                await transaction.purge()
            ticker = Ticker(
                stopped.store,
                world.clock,
                stopped._chance,
                stopped.registry.recurring,
                stopped.registry.tasks,
                stopped._complete,
            )
            assert await ticker.tick() == 0  # another worker was quicker, so it has to read again
            assert await app.find(Query()) == []

    asyncio.run(scenario())


def test_an_older_state_of_a_schedule_fires_nothing_whose_key_is_kept(world: World) -> None:
    """E7: this is what happens when an operator restores the register alone."""
    app = world.app()
    declare_hourly(world, app)

    async def scenario() -> None:
        async with world.running(app):
            await app.work(until_idle=True)
            older = await app.store.registered("schedule", "hourly")
            for _ in range(3):
                world.clock.advance(HOUR)
                await app.work(until_idle=True)
            newer = await app.store.registered("schedule", "hourly")
            assert older is not None
            assert newer is not None
            async with app.store.transaction() as transaction:
                assert await transaction.register("schedule", "hourly", older.value, version=newer.version)
            await app.work(until_idle=True)
            assert await world.effects(app) == hours(world, 1, 2, 3)
            assert len(await app.find(Query())) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("catchup", ["skip", "last", "all"])
@pytest.mark.parametrize(
    "wrong", [HOUR, YEAR, -HOUR, -YEAR], ids=["hour ahead", "year ahead", "hour back", "year back"]
)
def test_a_clock_that_is_wrong_for_a_while_fires_nothing_twice(
    world: World, catchup: Catchup, wrong: timedelta
) -> None:
    """Fault 11: when the clock is right again, every occurrence that has not fired yet fires."""
    app = world.app()
    declare_hourly(world, app, catchup)

    async def scenario() -> None:
        async with world.running(app):
            for _ in range(3):
                await app.work(until_idle=True)
                world.clock.advance(HOUR)
            world.clock.jump(wrong)
            for _ in range(2):
                await app.work(until_idle=True)
                world.clock.advance(timedelta(minutes=10))
            world.clock.jump(-wrong)
            for _ in range(10):
                await app.work(until_idle=True)
                world.clock.advance(timedelta(minutes=20))
            # Messages that were put by the wrong clock are due at their real time, so they come last.
            effects = await world.effects(app)
            assert len(effects) == len(set(effects))
            assert set(hours(world, 1, 2, 5, 6)) <= set(effects)

    asyncio.run(scenario())


def test_a_worker_whose_clock_is_wrong_fires_by_the_stores(postgres_url: str) -> None:
    """C19, fault 11: the server's clock decides, not the worker's."""
    from onefold.store.postgres import PostgresStore

    fast = App(store=PostgresStore(postgres_url), clock=FakeClock(datetime(2099, 12, 31, tzinfo=UTC)))
    slow = App(store=PostgresStore(postgres_url), clock=FakeClock(datetime(1999, 12, 31, tzinfo=UTC)))
    for app in (fast, slow):

        @app.recurring("0 0 1 1 *", catchup="all")
        async def new_year() -> None: ...

    async def scenario() -> None:
        await fast.migrate()
        async with fast, slow:
            for app in (slow, fast):
                await app.work(until_idle=True)
                schedule = (await app.schedules())["new_year"]
                now = await app.store.now()
                assert abs(schedule.record.made_at - now) < 3_600 * 1_000_000
                assert schedule.record.watermark == schedule.record.made_at
                assert await app.find(Query()) == []

    asyncio.run(scenario())
