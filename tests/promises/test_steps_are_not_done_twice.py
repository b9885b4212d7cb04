"""The rows that a workflow's step wrote are committed once per run, whichever workers continue the run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from onefold import Context, Run
from onefold.store import State

if TYPE_CHECKING:
    from conftest import World


def test_a_run_goes_on_where_a_dead_worker_was_and_repeats_nothing(world: World) -> None:
    dying, heir = world.app(), world.app()
    steps: list[str] = []

    async def write(ctx: Context, name: str) -> str:
        await ctx.execute(world.insert_effect, name)
        steps.append(name)
        return name

    async def flow(run: Run) -> str:
        first = await run.step(write, "a")
        await run.sleep(days=30)
        second = await run.step(write, "b")
        answer = await run.signal("go", type=str)
        return f"{first} {second} {await run.step(write, answer)}"

    sender = dying.workflow(flow)
    heir.workflow(flow)

    async def scenario() -> None:
        async with world.running(dying, heir):
            receipt = await sender.send()
            await dying.work(until_idle=True)
            world.clock.advance(30 * 86_400)
            # A worker claims the run and dies.
            assert len(await dying.store.claim(["default"], types=["flow@1"], limit=1, lease=30.0, worker="dead")) == 1
            world.clock.advance(31)
            await heir.work(until_idle=True)
            await heir.signal(receipt.id, "go", "c")
            await heir.work(until_idle=True)
            assert (await world.record(heir, receipt)).state is State.DONE
            assert await receipt.result() == "a b c"
            assert await world.effects(heir) == steps == ["a", "b", "c"]

    asyncio.run(scenario())


def test_a_worker_that_lost_its_run_adds_nothing_to_it(world: World) -> None:
    slow, quick = world.paused_app(), world.app()
    started, resume = asyncio.Event(), asyncio.Event()

    async def write(ctx: Context, name: str) -> int:
        if ctx.fence == 2:
            started.set()
            await resume.wait()
        await ctx.execute(world.insert_effect, name)
        return ctx.fence

    async def flow(run: Run) -> int:
        return await run.step(write, "a")

    sender = slow.workflow(flow)
    quick.workflow(flow)

    async def scenario() -> None:
        async with world.running(slow, quick):
            receipt = await sender.send()
            paused = asyncio.create_task(slow.work(until_idle=True, lease=30))
            await started.wait()
            world.clock.advance(31)
            assert await quick.work(until_idle=True) == 1
            resume.set()
            assert await paused == 0
            assert await world.effects(quick) == ["a"]
            assert await receipt.result() == 3
            assert len(await quick.journal(receipt.id)) == 1

    asyncio.run(scenario())


def test_a_run_does_not_decide_anew_what_one_of_its_steps_acted_on(world: World) -> None:
    """The worker is paused inside the step, and another worker continues the run at another time."""
    slow, quick = world.paused_app(), world.app()
    started, resume = asyncio.Event(), asyncio.Event()
    keys: list[str] = []

    async def charge(ctx: Context, key: str) -> str:
        keys.append(key)
        if ctx.fence == 2:
            started.set()
            await resume.wait()
        return key

    async def flow(run: Run) -> str:
        return await run.step(charge, run.now().isoformat())

    sender = slow.workflow(flow)
    quick.workflow(flow)

    async def scenario() -> None:
        async with world.running(slow, quick):
            receipt = await sender.send()
            paused = asyncio.create_task(slow.work(until_idle=True, lease=30))
            await started.wait()
            world.clock.advance(31)
            assert await quick.work(until_idle=True) == 1
            resume.set()
            assert await paused == 0
            assert keys == [await receipt.result()] * 2

    asyncio.run(scenario())
