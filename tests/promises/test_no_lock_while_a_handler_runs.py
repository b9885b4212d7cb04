"""Slow work before the first write holds no lock, and a transaction that stays open too long is ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from onefold import Context, limits
from onefold.store import Query, State

if TYPE_CHECKING:
    from conftest import World


def test_others_write_while_a_handler_works_before_its_first_statement(world: World) -> None:
    app, other = world.app(), world.app()
    started, resume = asyncio.Event(), asyncio.Event()

    @app.task
    async def slow(ctx: Context) -> None:
        await ctx.fetch("SELECT name FROM effect")
        started.set()
        await resume.wait()
        await ctx.execute(world.insert_effect, "slow")

    @other.task
    async def quick() -> None: ...

    async def scenario() -> None:
        async with world.running(app, other):
            await slow.send()
            working = asyncio.create_task(app.work(until_idle=True))
            await started.wait()
            await quick.send()
            async with other.transaction() as tx:
                await tx.execute(world.insert_effect, "other")
            assert await other.work(until_idle=True) == 1
            resume.set()
            assert await working == 1
            assert await world.effects(app) == ["other", "slow"]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_claim_is_committed_before_the_handler_starts(world: World) -> None:
    app, other = world.app(), world.app()

    @app.task
    async def look(ctx: Context) -> None:
        (record,) = await other.find(Query(ids=(ctx.message.id,)))
        assert (record.state, record.fence) == (State.LEASED, ctx.fence)

    async def scenario() -> None:
        async with world.running(app, other):
            receipt = await look.send()
            await app.work(until_idle=True)
            assert (await world.record(app, receipt)).state is State.DONE

    asyncio.run(scenario())


def test_a_transaction_left_open_too_long_is_rolled_back_with_a_typed_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_SECONDS_MAX", 0.05)
    app, other = world.app(), world.app()
    ended = asyncio.Event()

    @app.task
    async def dawdle(ctx: Context) -> None:
        await ctx.execute(world.insert_effect, "dawdled")
        await ended.wait()

    async def scenario() -> None:
        async with world.running(app, other):
            receipt = await dawdle.send()
            working = asyncio.create_task(app.work(until_idle=True))
            while not (await app.count())["default"].leased:
                await asyncio.wait([working], timeout=0.01)
            async with other.transaction() as tx:
                await tx.execute(world.insert_effect, "other")
            asyncio.get_running_loop().call_later(0.2, ended.set)
            await working
            (attempt,) = await app.store.attempts(receipt.id)
            assert attempt.failure.error_type == "onefold.errors.TransactionTooLongError"
            assert await world.effects(app) == ["other"]

    asyncio.run(asyncio.wait_for(scenario(), 30))
