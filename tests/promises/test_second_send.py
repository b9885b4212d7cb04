"""The cases of a second send with the same key."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from onefold import App, CancelledMessageError, Context, DeadError, KeyReuseError, Reject
from onefold.store import State
from onefold.tasks.task import Task

if TYPE_CHECKING:
    from conftest import World


def declare_charge(app: App) -> Task[[int, int], str]:
    @app.task(key="{order}")
    async def charge(ctx: Context, order: int, cents: int = 100) -> str:
        if cents == 666:
            raise Reject("the card was refused")
        return f"paid {cents}"

    return charge


def test_while_the_first_is_scheduled_it_is_a_duplicate(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first, second = await charge.send(7, 500), await charge.send(7, 500)
            assert (first.duplicate, second.duplicate) == (False, True)
            assert (second.id, second.state) == (first.id, State.SCHEDULED)
            await app.work(until_idle=True)
            assert await second.result() == "paid 500"

    asyncio.run(scenario())


def test_while_the_first_is_running_it_is_a_duplicate(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 500)
            await app.store.claim(["default"], types=["charge"], limit=1, lease=30, worker="w")
            second = await charge.send(7, 500)
            assert (second.duplicate, second.id, second.state) == (True, first.id, State.LEASED)

    asyncio.run(scenario())


def test_when_the_first_is_done_it_returns_the_stored_result(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 500)
            await app.work(until_idle=True)
            second = await charge.send(7, 500)
            assert (second.duplicate, second.id, second.state) == (True, first.id, State.DONE)
            assert await second.result() == "paid 500"

    asyncio.run(scenario())


def test_when_the_first_is_dead_it_says_so_and_starts_nothing(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 666)
            await app.work(until_idle=True)
            second = await charge.send(7, 666)
            assert (second.duplicate, second.id, second.state) == (True, first.id, State.DEAD)
            assert await app.work(until_idle=True) == 0
            with pytest.raises(DeadError, match="the card was refused"):
                await second.result()

    asyncio.run(scenario())


def test_when_the_first_is_dead_a_sender_may_ask_to_reopen_it(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 666)
            await app.work(until_idle=True)
            second = await charge.options(if_dead="redrive").send(7, 666)
            assert (second.duplicate, second.id, second.state) == (True, first.id, State.SCHEDULED)
            assert (await world.record(app, first)).replay_count == 1

    asyncio.run(scenario())


def test_when_the_first_was_cancelled_before_it_ran_the_key_is_free(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 500)
            assert await app.cancel(first.id, actor="ada", reason="sent by mistake")
            second = await charge.send(7, 900)
            assert not second.duplicate
            await app.work(until_idle=True)
            assert await second.result() == "paid 900"

    asyncio.run(scenario())


def test_when_the_first_was_cancelled_while_it_ran_the_key_is_kept(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 500)
            await app.store.claim(["default"], types=["charge"], limit=1, lease=30, worker="w")
            assert await app.cancel(first.id, actor="ada", reason="not wanted")
            second = await charge.send(7, 500)
            assert (second.duplicate, second.id, second.state) == (True, first.id, State.CANCELLED)
            with pytest.raises(CancelledMessageError):
                await second.result()

    asyncio.run(scenario())


def test_when_the_first_was_discarded_the_key_is_free(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            await charge.send(7, 666)
            await app.work(until_idle=True)
            async for letter in app.dead_letters():
                assert await letter.discard(actor="ada", reason="a test order")
            second = await charge.send(7, 500)
            assert not second.duplicate
            await app.work(until_idle=True)
            assert await second.result() == "paid 500"

    asyncio.run(scenario())


def test_when_the_key_window_is_over_it_is_a_new_message_even_before_any_purge(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 500)
            await app.work(until_idle=True)
            world.clock.advance(timedelta(days=23, seconds=1))
            second = await charge.send(7, 900)
            assert not second.duplicate
            assert second.id != first.id

    asyncio.run(scenario())


def test_another_payload_under_the_same_key_is_refused(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7, 500)
            with pytest.raises(KeyReuseError) as refused:
                await charge.send(7, 900)
            assert (refused.value.first_id, refused.value.key) == (first.id, "7")
            assert (await app.count())["default"].scheduled == 1

    asyncio.run(scenario())


def test_a_defaulted_argument_does_not_make_another_payload(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first, second = await charge.send(7), await charge.send(7, 100)
            assert second.id == first.id

    asyncio.run(scenario())


def test_the_same_key_of_another_task_is_another_key(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    @app.task(key="{order}")
    async def refund(order: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            assert not (await charge.send(7)).duplicate
            assert not (await refund.send(7)).duplicate

    asyncio.run(scenario())


def test_without_a_key_every_send_is_work_of_its_own(world: World) -> None:
    app = world.app()

    @app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            first, second = await ping.send(), await ping.send()
            assert not second.duplicate
            assert first.id != second.id

    asyncio.run(scenario())


def test_a_batch_key_covers_the_whole_batch(world: World) -> None:
    app = world.app()

    @app.task
    async def ping(number: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            first = await app.send_many((ping.call(n) for n in range(3)), batch_key="import-1")
            again = await app.send_many((ping.call(n) for n in range(3)), batch_key="import-1")
            assert [one.id for one in again] == [one.id for one in first]
            assert all(one.duplicate for one in again)
            with pytest.raises(KeyReuseError):
                await app.send_many((ping.call(n) for n in range(4)), batch_key="import-1")
            assert (await app.count())["default"].scheduled == 3

    asyncio.run(scenario())


def test_in_a_large_batch_every_message_is_told_what_became_of_it(world: World) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            first = {order: (await charge.send(order)).id for order in range(0, 1_200, 97)}
            sent = await app.send_many(charge.call(order) for order in [*range(1_200), 0, 1, 1_199])
            assert [order for order, one in enumerate(sent) if one.duplicate] == [*first, 1_200, 1_201, 1_202]
            assert {order: sent[order].id for order in first} == first
            assert [one.id for one in sent[1_200:]] == [sent[0].id, sent[1].id, sent[1_199].id]
            assert (await app.count())["default"].scheduled == 1_200

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", [3, 700, 1_199])
def test_a_large_batch_with_one_key_of_another_payload_stores_nothing(world: World, wrong: int) -> None:
    app = world.app()
    charge = declare_charge(app)

    async def scenario() -> None:
        async with world.running(app):
            await charge.send(wrong, 500)
            with pytest.raises(KeyReuseError):
                await app.send_many(charge.call(order) for order in range(1_200))
            assert (await app.count())["default"].scheduled == 1

    asyncio.run(scenario())
