"""A call made with ``ctx.once`` is not repeated while it is unknown whether it happened."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from onefold import Context, Happened, NotHappened
from onefold.store import State

if TYPE_CHECKING:
    from conftest import World


def test_a_worker_that_dies_during_the_call_leaves_it_to_a_person(world: World) -> None:
    dying, heir = world.paused_app(), world.app()
    calls: list[int] = []
    called, never = asyncio.Event(), asyncio.Event()

    async def call() -> str:
        calls.append(1)
        called.set()
        await never.wait()  # its worker dies before the answer comes
        return "receipt"

    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", call)

    sender = dying.task(pay)
    heir.task(pay)

    async def scenario() -> None:
        async with world.running(dying, heir):
            receipt = await sender.send()
            lost = asyncio.create_task(dying.work())
            await called.wait()
            world.clock.advance(31)
            await heir.work(until_idle=True)
            world.clock.advance(86_400)
            await heir.work(until_idle=True)
            assert (await world.record(heir, receipt)).state is State.PARKED
            assert calls == [1]
            (effect,) = await heir.ledger(receipt.id)
            assert (effect.name, effect.state) == ("charge", "uncertain")
            told = {"actor": "ada", "reason": "it is on the statement"}
            assert await heir.resolve(receipt.id, "charge", happened=True, value="found", **told)
            await heir.work(until_idle=True)
            assert await receipt.result() == "found"
            assert calls == [1]
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    asyncio.run(scenario())


def test_a_probe_answers_instead_where_there_is_one(world: World) -> None:
    app = world.app()
    outside: list[str] = []

    async def call() -> str:
        outside.append("charged")
        raise ConnectionError("the answer was lost")

    async def ask() -> Happened[str] | NotHappened:
        return Happened("found") if outside else NotHappened()

    @app.task
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", call, reconcile=ask)

    async def scenario() -> None:
        async with world.running(app):
            receipt = await pay.send()
            for _ in range(3):
                await app.work(until_idle=True)
                world.clock.advance(300)
            assert await receipt.result() == "found"
            assert outside == ["charged"]

    asyncio.run(scenario())
