"""Each step and undo of a saga takes effect once; the saga ends completed or compensated, or is shown as stuck."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from onefold import App, Context, Reject, Run, Saga, SagaError, SagaStatus

if TYPE_CHECKING:
    from conftest import World


def declare(app: App, world: World, calls: list[str], failing: set[str]) -> Saga[[], None]:
    async def write(ctx: Context, name: str) -> None:
        await ctx.execute(world.insert_effect, name)
        calls.append(name)
        if name in failing:
            raise Reject(f"{name} does not work")

    async def release(ctx: Context) -> None:
        await write(ctx, "release")

    async def refund(ctx: Context) -> None:
        await write(ctx, "refund")

    @app.step(undo=release)
    async def hold(ctx: Context) -> None:
        await write(ctx, "hold")

    @app.step(undo=refund)
    async def pay(ctx: Context) -> None:
        await write(ctx, "pay")

    @app.saga
    async def book(run: Run) -> None:
        await run.step(hold)
        await run.sleep(days=1)
        await run.step(pay)

    return book


async def die_with_it(world: World, app: App) -> None:
    """Let a worker claim the saga and die."""
    assert len(await app.store.claim(["default"], types=["book@1"], limit=1, lease=30.0, worker="dead")) == 1
    world.clock.advance(31)


def test_a_saga_goes_on_where_a_dead_worker_was_and_is_undone_in_reverse(world: World) -> None:
    app, calls = world.app(), list[str]()
    book = declare(app, world, calls, {"pay"})

    async def scenario() -> None:
        async with world.running(app):
            receipt = await book.send()
            await die_with_it(world, app)
            await app.work(until_idle=True)
            world.clock.advance(86_400)
            await die_with_it(world, app)
            await app.work(until_idle=True)
            assert calls == ["hold", "pay", "refund", "release"]
            assert await world.effects(app) == ["hold", "refund", "release"]
            saga = await app.saga_status(receipt.id)
            assert saga is not None
            assert saga.status is SagaStatus.COMPENSATED
            with pytest.raises(SagaError):
                await receipt.result()

    asyncio.run(scenario())


def test_a_saga_that_cannot_be_undone_is_stuck_until_a_person_acts(world: World) -> None:
    app, calls, failing = world.app(), list[str](), {"pay", "refund"}
    book = declare(app, world, calls, failing)

    async def scenario() -> None:
        async with world.running(app):
            receipt = await book.send()
            await app.work(until_idle=True)
            world.clock.advance(86_400)
            await app.work(until_idle=True)
            world.clock.advance(10 * 86_400)
            await app.work(until_idle=True)
            saga = await app.saga_status(receipt.id)
            assert saga is not None
            assert saga.status is SagaStatus.STUCK
            assert await world.effects(app) == ["hold"]
            failing.clear()
            assert await app.resume(receipt.id, actor="ada", reason="the bank is back")
            await app.work(until_idle=True)
            assert await world.effects(app) == ["hold", "refund", "release"]
            saga = await app.saga_status(receipt.id)
            assert saga is not None
            assert saga.status is SagaStatus.COMPENSATED

    asyncio.run(scenario())
