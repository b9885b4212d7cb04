"""A key is kept while its message lives and for its window afterwards, even after the body was purged."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from onefold import App, ConfigurationError, Context, Reject
from onefold.store import State

if TYPE_CHECKING:
    from conftest import World


async def purge(app: App) -> None:
    async with app.store.transaction() as transaction:
        await transaction.purge()


def test_a_key_is_kept_for_23_days_after_the_end_and_outlives_its_body(world: World) -> None:
    app = world.app()

    @app.task(key="{order}")
    async def charge(order: int) -> str:
        return "paid"

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7)
            await app.work(until_idle=True)
            world.clock.advance(timedelta(days=7, seconds=1))
            await purge(app)
            assert (await world.record(app, first)).envelope.payload_inline is None
            world.clock.advance(timedelta(days=15, hours=23))
            await purge(app)
            again = await charge.send(7)
            assert (again.duplicate, again.id) == (True, first.id)
            assert await again.result() == "paid"
            world.clock.advance(timedelta(hours=2))
            await purge(app)
            assert not (await charge.send(7)).duplicate

    asyncio.run(scenario())


def test_the_window_starts_when_the_message_ends_not_when_it_is_sent(world: World) -> None:
    app = world.app()

    @app.task(key="{order}", expires=None)
    async def charge(order: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            first = await charge.send(7)
            world.clock.advance(timedelta(days=100))
            await purge(app)
            assert (await charge.send(7)).id == first.id
            await app.work(until_idle=True)
            world.clock.advance(timedelta(days=22))
            await purge(app)
            assert (await charge.send(7)).id == first.id

    asyncio.run(scenario())


def test_a_task_may_keep_its_keys_longer(world: World) -> None:
    app = world.app()

    @app.task(key="{order}", key_window=timedelta(days=90))
    async def charge(order: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            await charge.send(7)
            await app.work(until_idle=True)
            world.clock.advance(timedelta(days=89))
            await purge(app)
            assert (await charge.send(7)).duplicate
            world.clock.advance(timedelta(days=2))
            assert not (await charge.send(7)).duplicate

    asyncio.run(scenario())


def test_a_window_shorter_than_a_message_can_come_back_is_refused() -> None:
    app = App("sqlite:///never-opened.db")
    with pytest.raises(ConfigurationError, match="key_window"):

        @app.task(key="{order}", key_window=timedelta(days=20))
        async def charge(order: int) -> None: ...


def test_the_key_of_a_dead_letter_is_kept_too(world: World) -> None:
    app = world.app()

    @app.task(key="{order}")
    async def charge(ctx: Context, order: int) -> None:
        raise Reject("the card was refused")

    async def scenario() -> None:
        async with world.running(app):
            await charge.send(7)
            await app.work(until_idle=True)
            world.clock.advance(timedelta(days=22))
            await purge(app)
            again = await charge.send(7)
            assert (again.duplicate, again.state) == (True, State.DEAD)

    asyncio.run(scenario())


def test_a_deduplication_key_is_kept_for_its_own_shorter_window(world: World) -> None:
    app = world.app()

    @app.task
    async def digest(user: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            coalesced = digest.options(deduplicate="digest:42")
            first = await coalesced.send(42)
            assert (await coalesced.send(42)).id == first.id
            world.clock.advance(timedelta(hours=1, seconds=1))
            assert not (await coalesced.send(42)).duplicate

    asyncio.run(scenario())
