"""A lost lease cannot commit anything: no rows, no sends, no outcome and no extension."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from onefold import Context, LeaseLostError
from onefold.store import Again, Dead, Done, Failure, HandBack, Outcome, Query, State

if TYPE_CHECKING:
    from conftest import World

FAILURE = Failure(reason="failed", error_type="Error", error_message="late")
OUTCOMES = [Done(b"null"), Again(1.0, FAILURE), Dead(FAILURE), HandBack()]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_a_stale_lease_cannot_settle_or_extend(world: World, outcome: Outcome) -> None:
    app = world.app()

    @app.task
    async def ship(number: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            receipt = await ship.send(7)
            (stale,) = await app.store.claim(["default"], types=["ship"], limit=1, lease=30, worker="slow")
            world.clock.advance(31)
            (fresh,) = await app.store.claim(["default"], types=["ship"], limit=1, lease=30, worker="quick")
            assert fresh.fence > stale.fence
            assert await app.store.extend([stale], lease=30) == [False]
            assert await app.store.settle([(stale, outcome)]) == [False]
            record = await world.record(app, receipt)
            assert (record.state, record.fence, record.worker) == (State.LEASED, fresh.fence, "quick")
            assert await app.store.attempts(receipt.id) == []
            assert await app.store.settle([(fresh, Done(b"null"))]) == [True]

    asyncio.run(scenario())


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
def test_no_outcome_can_be_settled_twice(world: World, outcome: Outcome) -> None:
    app = world.app()

    @app.task
    async def ship(number: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            await ship.send(7)
            (lease,) = await app.store.claim(["default"], types=["ship"], limit=1, lease=30, worker="w")
            assert await app.store.settle([(lease, outcome)]) == [True]
            assert await app.store.settle([(lease, outcome)]) == [False]

    asyncio.run(scenario())


def test_a_stale_lease_in_a_batch_costs_only_itself(world: World) -> None:
    app = world.app()

    @app.task(key="{number}")
    async def ship(number: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            await app.send_many(ship.call(number) for number in range(3))
            leases = await app.store.claim(["default"], types=["ship"], limit=3, lease=30, worker="w")
            assert await app.cancel(leases[1].id, actor="ada", reason="not wanted")
            assert await app.store.settle([(lease, Done(b"null")) for lease in leases]) == [True, False, True]

    asyncio.run(scenario())


def test_the_rows_and_sends_of_a_handler_that_lost_its_lease_are_rolled_back(world: World) -> None:
    slow, quick = world.paused_app(), world.app()
    started, resume = asyncio.Event(), asyncio.Event()

    async def after(number: int) -> None: ...

    async def ship(ctx: Context, number: int) -> None:
        if ctx.fence == 2:
            started.set()
            await resume.wait()
        await ctx.execute(world.insert_effect, f"by fence {ctx.fence}")
        ctx.send(afters[ctx.fence], ctx.fence)

    slow_ship, quick_ship = slow.task(ship), quick.task(ship)
    afters = {2: slow.task(after), 3: quick.task(after)}

    async def scenario() -> None:
        async with world.running(quick, slow):
            await quick_ship.send(7)
            paused = asyncio.create_task(slow.work(until_idle=True, lease=30))
            await started.wait()
            world.clock.advance(31)
            await quick.work(until_idle=True)
            resume.set()
            await paused
            assert await world.effects(quick) == ["by fence 3"]
            sent = await quick.find(Query(message_type="after"))
            assert [record.envelope.payload_inline for record in sent] == [b'{"number":3}']

    assert slow_ship.name == quick_ship.name
    asyncio.run(scenario())


def test_a_cancelled_message_cannot_commit_what_its_handler_did(world: World) -> None:
    app = world.app()
    started, resume = asyncio.Event(), asyncio.Event()

    @app.task
    async def ship(ctx: Context, number: int) -> None:
        started.set()
        await resume.wait()
        await ctx.execute(world.insert_effect, "too late")

    async def scenario() -> None:
        async with world.running(app):
            receipt = await ship.send(7)
            working = asyncio.create_task(app.work(until_idle=True))
            await started.wait()
            assert await app.cancel(receipt.id, actor="ada", reason="not wanted")
            resume.set()
            assert await working == 0
            assert await world.effects(app) == []
            assert (await world.record(app, receipt)).state is State.CANCELLED

    asyncio.run(scenario())


def test_a_handler_can_ask_whether_it_still_owns_its_message(world: World) -> None:
    app = world.app()
    asked: list[type[BaseException] | None] = []

    @app.task
    async def ship(ctx: Context, number: int) -> None:
        await ctx.check()
        asked.append(None)
        await app.cancel(ctx.message.id, actor="ada", reason="not wanted")
        try:
            await ctx.check()
        except LeaseLostError as error:
            asked.append(type(error))
            raise

    async def scenario() -> None:
        async with world.running(app):
            await ship.send(7)
            assert await app.work(until_idle=True) == 0

    asyncio.run(scenario())
    assert asked == [None, LeaseLostError]
