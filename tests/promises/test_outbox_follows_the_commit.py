"""A message sent inside a transaction or a handler is stored if, and only if, that commits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from onefold import App, Context, KeyReuseError, Reject
from onefold.store import Query, State
from onefold.tasks.task import Task

if TYPE_CHECKING:
    from conftest import World


def declare_receipt(world: World, app: App) -> Task[[str], None]:
    @app.task
    async def receipt(ctx: Context, order: str) -> None:
        await ctx.execute(world.insert_effect, f"receipt {order}")

    return receipt


def test_rows_and_message_of_a_transaction_appear_together(world: World) -> None:
    app = world.app()
    receipt = declare_receipt(world, app)

    async def scenario() -> None:
        async with world.running(app):
            async with app.transaction() as tx:
                await tx.execute(world.insert_effect, "order-7")
                sent = tx.send(receipt, "order-7")
                assert await app.find(Query(ids=(sent.id,))) == []
                assert await world.effects(app) == []
            assert sent.state is State.SCHEDULED
            assert not sent.duplicate
            await app.work(until_idle=True)
            assert await world.effects(app) == ["order-7", "receipt order-7"]

    asyncio.run(scenario())


def test_a_transaction_that_raises_leaves_neither_rows_nor_messages(world: World) -> None:
    app = world.app()
    receipt = declare_receipt(world, app)

    async def place_an_order_and_fail() -> None:
        async with app.transaction() as tx:
            await tx.execute(world.insert_effect, "order-7")
            tx.send(receipt, "order-7")
            raise RuntimeError("changed my mind")

    async def scenario() -> None:
        async with world.running(app):
            with pytest.raises(RuntimeError, match="changed my mind"):
                await place_an_order_and_fail()
            assert await app.find(Query()) == []
            assert await world.effects(app) == []

    asyncio.run(scenario())


def test_awaiting_send_inside_a_transaction_joins_it(world: World) -> None:
    app = world.app()
    receipt = declare_receipt(world, app)

    async def send_and_fail() -> None:
        async with app.transaction():
            await receipt.send("order-7")
            raise RuntimeError("changed my mind")

    async def scenario() -> None:
        async with world.running(app):
            with pytest.raises(RuntimeError, match="changed my mind"):
                await send_and_fail()
            assert await app.find(Query()) == []

    asyncio.run(scenario())


def test_a_key_that_belongs_to_another_payload_takes_the_whole_transaction_back(world: World) -> None:
    app = world.app()

    @app.task(key="{order}")
    async def charge(order: str, cents: int) -> None: ...

    async def send_another_amount() -> None:
        async with app.transaction() as tx:
            await tx.execute(world.insert_effect, "order-7")
            tx.send(charge, "order-7", 900)

    async def scenario() -> None:
        async with world.running(app):
            await charge.send("order-7", 500)
            with pytest.raises(KeyReuseError):
                await send_another_amount()
            assert await world.effects(app) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("with_rows", [True, False])
def test_what_a_failed_handler_sent_never_leaves(world: World, with_rows: bool) -> None:
    app = world.app()
    receipt = declare_receipt(world, app)

    @app.task
    async def charge(ctx: Context, order: str) -> None:
        if with_rows:
            await ctx.execute(world.insert_effect, order)
        ctx.send(receipt, order)
        await receipt.send(order)
        raise Reject("the card was refused")

    async def scenario() -> None:
        async with world.running(app):
            await charge.send("order-7")
            await app.work(until_idle=True)
            assert [record.envelope.message_type for record in await app.find(Query())] == ["charge"]
            assert await world.effects(app) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("with_rows", [True, False])
def test_what_a_handler_sent_leaves_with_its_outcome(world: World, with_rows: bool) -> None:
    app = world.app()
    receipt = declare_receipt(world, app)

    @app.task
    async def charge(ctx: Context, order: str) -> None:
        if with_rows:
            await ctx.execute(world.insert_effect, order)
        ctx.send(receipt, order)

    async def scenario() -> None:
        async with world.running(app):
            parent = await charge.send("order-7")
            await app.work(until_idle=True)
            child = (await app.find(Query(message_type="receipt")))[0]
            assert child.state is State.DONE
            assert child.envelope.causation_id == parent.id
            assert child.envelope.correlation_id == parent.id
            assert await world.effects(app) == (["order-7"] if with_rows else []) + ["receipt order-7"]

    asyncio.run(scenario())
