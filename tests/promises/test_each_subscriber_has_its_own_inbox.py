"""Each subscriber handles each event once; its retries and dead letters are separate from those of the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from onefold import App, Context, Reject, RetryPolicy, limits
from onefold.testing import drain

if TYPE_CHECKING:
    from conftest import World

SERVICES = 4
EVENTS = 20


def declare(world: World, app: App, name: str) -> None:
    @app.on("order.placed", name=name, queue=name)
    async def handle(ctx: Context, number: int) -> None:
        await ctx.execute(world.insert_effect, f"{name} {number:02}")


def test_services_with_several_workers_each_handle_each_event_once(world: World) -> None:
    """I12, J9: every event is published twice, and half of the workers start only afterwards."""
    shop = world.app()
    placed = shop.topic("order.placed", int, key="{event}")
    names = [f"service-{number}" for number in range(SERVICES)]
    workers = [world.app() for _ in range(2 * SERVICES)]
    for number, app in enumerate(workers):
        declare(world, app, names[number % SERVICES])

    async def scenario() -> None:
        async with world.running(shop, *workers):
            for app in workers[:SERVICES]:
                await app.subscribe()
            await asyncio.gather(*(placed.publish(number) for number in [*range(EVENTS)] * 2))
            for _ in range(2):
                await asyncio.gather(*(app.work(queues=["default"], until_idle=True) for app in workers[:2]))
            for _ in range(2):
                await asyncio.gather(*(app.work(until_idle=True) for app in workers))
            assert await world.effects(shop) == [f"{name} {number:02}" for name in names for number in range(EVENTS)]

    asyncio.run(scenario())


def test_what_one_of_them_cannot_handle_concerns_no_other(world: World) -> None:
    """J9, C1: one retries, one fails for good, one succeeds; only the owner of the dead letter handles its redrive."""
    app = world.app()
    placed = app.topic("order.placed", int)
    tries: list[str] = []

    declare(world, app, "good")

    @app.on(placed, retry=RetryPolicy(max_attempts=3))
    async def late(ctx: Context, number: int) -> None:
        tries.append("late")
        if tries.count("late") < 3:
            raise ConnectionError
        await ctx.execute(world.insert_effect, "late")

    @app.on(placed)
    async def bad(ctx: Context, number: int) -> None:
        tries.append("bad")
        if tries.count("bad") == 1:
            raise Reject("never")
        await ctx.execute(world.insert_effect, "bad")

    async def scenario() -> None:
        async with world.running(app):
            await placed.publish(7)
            await drain(app)
            assert await world.effects(app) == ["good 07", "late"]
            letters = [letter async for letter in app.dead_letters()]
            assert [letter.message.message_type for letter in letters] == ["bad"]
            await letters[0].redrive(actor="ada", reason="fixed")
            await drain(app)
            assert await world.effects(app) == ["bad", "good 07", "late"]
            assert sorted(tries) == ["bad", "bad", "late", "late", "late"]

    asyncio.run(scenario())


def test_a_stale_worker_that_copied_commits_nothing_and_the_next_copies_once(world: World) -> None:
    """I12: the worker is paused between reading the subscriptions and its commit."""
    shop, stale = world.app(), world.paused_app()
    declare(world, shop, "one")
    declare(world, stale, "one")
    placed = shop.topic("order.placed", int)
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    @stale.middleware
    async def stand_still(ctx: Context, proceed: object) -> object:
        result = await proceed()  # type: ignore[operator]
        if ctx.message.message_type == "order.placed":
            reached.set()
            await may_go_on.wait()
        return result

    async def scenario() -> None:
        async with world.running(shop, stale):
            await stale.subscribe()
            await placed.publish(7)
            slow = asyncio.create_task(stale.work(until_idle=True))
            await reached.wait()
            world.clock.advance(limits.LEASE + 1)
            await shop.work(until_idle=True)
            may_go_on.set()
            await slow
            await shop.work(until_idle=True)
            assert await world.effects(shop) == ["one 07"]

    asyncio.run(scenario())
