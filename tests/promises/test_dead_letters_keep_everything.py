"""A dead letter keeps its message, its key and every failure, and can run again as if for the first time."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from onefold import App, Context, DeadLetter, Reject, RetentionOverError, RetryPolicy
from onefold.store import State
from onefold.tasks.task import Task

if TYPE_CHECKING:
    from conftest import World


def declare_charge(world: World, app: App, broken: list[bool]) -> Task[[int, int], str]:
    @app.task(key="{order}", retry=RetryPolicy(max_attempts=3, jitter=False))
    async def charge(ctx: Context, order: int, cents: int) -> str:
        await ctx.execute(world.insert_effect, str(order))
        if broken[0]:
            raise ConnectionError(f"attempt {ctx.attempt}: the provider is down")
        return "paid"

    return charge


async def run_to_the_end(world: World, app: App) -> None:
    for _ in range(6):
        await app.work(until_idle=True)
        world.clock.advance(300)


async def letters_of(app: App) -> list[DeadLetter]:
    return [letter async for letter in app.dead_letters()]


def test_a_dead_letter_has_its_message_and_every_failure(world: World) -> None:
    app = world.app()
    charge = declare_charge(world, app, [True])

    async def scenario() -> None:
        async with world.running(app):
            receipt = await charge.options(tags={"tenant": "acme"}).send(7, 500)
            await run_to_the_end(world, app)
            (letter,) = await letters_of(app)
            assert letter.id == receipt.id
            assert letter.message.payload_inline == b'{"order":7,"cents":500}'
            assert letter.message.tags == {"tenant": "acme"}
            assert letter.failure.reason == "attempts exhausted"
            assert letter.failure.error_type == "ConnectionError"
            assert "in charge" in letter.failure.stack
            assert [one.failure.error_message for one in await letter.attempts()] == [
                f"attempt {number}: the provider is down" for number in (1, 2, 3)
            ]
            assert [one.delay for one in await letter.attempts()] == [5.0, 10.0, None]
            assert await world.effects(app) == []
            written = json.loads(json.dumps(await letter.as_dict()))
            assert written["original_message"]["payload_inline"] == {"order": 7, "cents": 500}
            assert written["retry_count"] == 2

    asyncio.run(scenario())


def test_a_redriven_letter_runs_with_its_key_and_a_full_set_of_attempts(world: World) -> None:
    app = world.app()
    broken = [True]
    charge = declare_charge(world, app, broken)

    async def scenario() -> None:
        async with world.running(app):
            receipt = await charge.send(7, 500)
            await run_to_the_end(world, app)
            (letter,) = await letters_of(app)
            assert await letter.redrive(actor="ada", reason="the provider is back")
            assert not await letter.redrive(actor="bob", reason="me too")
            assert (await charge.send(7, 500)).duplicate
            await run_to_the_end(world, app)
            (letter,) = await letters_of(app)
            assert letter.replay_count == 1
            assert len(await letter.attempts()) == 6
            broken[0] = False
            assert await app.redrive([letter.id], actor="ada", reason="now really") == [letter.id]
            await run_to_the_end(world, app)
            assert await letters_of(app) == []
            assert await receipt.result() == "paid"
            assert await world.effects(app) == ["7"]

    asyncio.run(scenario())


def test_the_fence_of_a_redriven_letter_is_above_every_earlier_one(world: World) -> None:
    app = world.app()
    fences: list[int] = []

    @app.task
    async def fail(ctx: Context) -> None:
        fences.append(ctx.fence)
        raise Reject("no")

    async def scenario() -> None:
        async with world.running(app):
            receipt = await fail.send()
            for _ in range(3):
                await app.work(until_idle=True)
                await app.redrive([receipt.id], actor="ada", reason="again")
            assert fences == sorted(set(fences))

    asyncio.run(scenario())


def test_a_dead_letter_can_be_redriven_for_fourteen_days(world: World) -> None:
    app = world.app()
    charge = declare_charge(world, app, [True])

    async def scenario() -> None:
        async with world.running(app):
            receipt = await charge.send(7, 500)
            await run_to_the_end(world, app)
            ended_at = (await world.record(app, receipt)).ended_at
            assert ended_at is not None
            world.clock.advance((ended_at - world.clock.now()) / 1_000_000 + timedelta(days=14).total_seconds() - 1)
            await purge(app)
            assert (await world.record(app, receipt)).envelope.payload_inline is not None
            world.clock.advance(2)
            await purge(app)
            record = await world.record(app, receipt)
            assert (record.state, record.envelope.payload_inline) == (State.DEAD, None)
            assert record.failure is not None
            with pytest.raises(RetentionOverError, match="its body is no longer kept"):
                await app.redrive([receipt.id], actor="ada", reason="too late")

    asyncio.run(scenario())


async def purge(app: App) -> None:
    async with app.store.transaction() as transaction:
        await transaction.purge()
