"""The rows that a handler writes through its context are committed once per key, however often the message is sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from onefold import Context, RetryPolicy
from onefold.store import State

if TYPE_CHECKING:
    from conftest import World


def test_sending_the_same_work_many_times_has_one_effect(world: World) -> None:
    app = world.app()

    @app.task(key="{order}")
    async def charge(ctx: Context, order: str) -> None:
        await ctx.execute(world.insert_effect, order)

    async def scenario() -> None:
        async with world.running(app):
            receipts = await asyncio.gather(*(charge.send("order-7") for _ in range(50)))
            assert sum(not receipt.duplicate for receipt in receipts) == 1
            assert len({receipt.id for receipt in receipts}) == 1
            await app.work(until_idle=True)
            assert (await charge.send("order-7")).duplicate
            await app.work(until_idle=True)
            assert await world.effects(app) == ["order-7"]

    asyncio.run(scenario())


def test_a_handler_that_failed_after_its_write_has_one_effect_when_it_is_retried(world: World) -> None:
    app = world.app()

    @app.task(key="{order}", retry=RetryPolicy(max_attempts=5))
    async def charge(ctx: Context, order: str) -> None:
        await ctx.execute(world.insert_effect, order)
        if ctx.attempt < 3:
            raise ConnectionError("the network went away after the write")

    async def scenario() -> None:
        async with world.running(app):
            receipt = await charge.send("order-7")
            for _ in range(3):
                await app.work(until_idle=True)
                world.clock.advance(300)
            assert (await world.record(app, receipt)).state is State.DONE
            assert len(await app.store.attempts(receipt.id)) == 2
            assert await world.effects(app) == ["order-7"]

    asyncio.run(scenario())


def test_two_workers_on_the_same_messages_have_one_effect_each(world: World) -> None:
    apps = [world.app(), world.app()]

    async def charge(ctx: Context, order: str) -> None:
        await ctx.execute(world.insert_effect, order)

    tasks = [app.task(key="{order}")(charge) for app in apps]
    orders = [f"order-{number:03}" for number in range(100)]

    async def scenario() -> None:
        async with world.running(*apps):
            await apps[0].send_many(tasks[0].call(order) for order in orders)
            done = await asyncio.gather(*(app.work(until_idle=True) for app in apps))
            assert sum(done) == len(orders)
            assert await world.effects(apps[0]) == orders

    asyncio.run(scenario())


def test_a_worker_that_lost_its_lease_adds_nothing_to_the_effect(world: World) -> None:
    slow, quick = world.paused_app(), world.app()
    started, resume = asyncio.Event(), asyncio.Event()

    async def charge(ctx: Context, order: str) -> None:
        if ctx.fence == 2:
            started.set()
            await resume.wait()
        await ctx.execute(world.insert_effect, order)

    slow_charge = slow.task(key="{order}")(charge)
    quick.task(key="{order}")(charge)

    async def scenario() -> None:
        async with world.running(slow, quick):
            await slow_charge.send("order-7")
            paused = asyncio.create_task(slow.work(until_idle=True, lease=30))
            await started.wait()
            world.clock.advance(31)
            assert await quick.work(until_idle=True) == 1
            resume.set()
            assert await paused == 0
            assert await world.effects(quick) == ["order-7"]

    asyncio.run(scenario())


def test_a_handler_without_rows_of_its_own_sends_its_children_once(world: World) -> None:
    app = world.app()

    @app.task
    async def leaf(ctx: Context, name: str) -> None:
        await ctx.execute(world.insert_effect, name)

    @app.task(key="{order}")
    async def fan_out(ctx: Context, order: str) -> None:
        for part in range(3):
            ctx.send(leaf, f"{order}-{part}")
        if ctx.attempt == 1:
            raise ConnectionError("after the sends")

    async def scenario() -> None:
        async with world.running(app):
            await fan_out.send("order-7")
            await app.work(until_idle=True)
            assert await world.effects(app) == []
            world.clock.advance(300)
            await app.work(until_idle=True)
            assert await world.effects(app) == ["order-7-0", "order-7-1", "order-7-2"]

    asyncio.run(scenario())
