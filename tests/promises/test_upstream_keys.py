"""Keys for outside providers: the same for the same work in one database, never shared by two of them."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from onefold import App, Batch, ConfigurationError, Context, Run
from onefold.operations.restored import restored
from onefold.tasks.task import Task
from onefold.testing import context, drain
from onefold.testing.servers import PostgresServer


def shop(url: str, name: str | None = None) -> tuple[App, Task[[int], str]]:
    """Return an app with a handler that returns the key it would give to a provider."""
    app = App(url, name=name)

    @app.task(key="{order}:charge")
    async def charge(ctx: Context, order: int) -> str:
        return ctx.upstream_key("stripe")

    return app, charge


async def key_of_order(url: str, order: int = 7, name: str | None = None) -> str:
    """Charge an order, and return the key that the provider would have received."""
    app, charge = shop(url, name)
    await app.migrate()
    async with app:
        receipt = await charge.send(order)
        await app.work(until_idle=True)
        return await receipt.result()


def two_databases_share_no_key(first: str, second: str) -> None:
    """Check that the same task with the same arguments has different keys in the two databases."""

    async def scenario() -> None:
        assert await key_of_order(first) == await key_of_order(first)
        assert await key_of_order(first) != await key_of_order(second)

    asyncio.run(scenario())


@pytest.fixture
def another_url(store_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a second database of the same kind."""
    if store_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path}/another.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    yield server.create_database("another")
    server.drop_database("another")


def test_two_databases_share_no_key(store_url: str, another_url: str) -> None:
    """Such as staging and production, two services that number their orders, or a recreated database."""
    two_databases_share_no_key(store_url, another_url)


def test_a_restored_database_keeps_its_keys(tmp_path: Path) -> None:
    """The provider recognises calls from before the restore, so running a message again has no second effect."""
    original, backup = tmp_path / "shop.db", tmp_path / "backup.db"

    async def scenario() -> None:
        before = await key_of_order(f"sqlite:///{original}")
        shutil.copy(original, backup)
        later = await key_of_order(f"sqlite:///{original}", 8)
        app, _ = shop(f"sqlite:///{backup}")
        async with app:
            await restored(app.store, actor="ada", reason="backup of Monday", at=1)
        assert await key_of_order(f"sqlite:///{backup}", 8) == later
        assert await key_of_order(f"sqlite:///{backup}") == before

    asyncio.run(scenario())


def test_a_copy_beside_its_original_gets_keys_of_its_own(store_url: str) -> None:
    """A copy, for staging for example, is given a new identity, so no key of the original is used again."""

    async def scenario() -> None:
        production = await key_of_order(store_url)
        app, charge = shop(store_url)
        async with app:
            before = app.origin
            async with context(charge, 7) as ctx:
                assert ctx.upstream_key("stripe") == production
            await restored(app.store, actor="ada", reason="staging", at=1, renew=random.Random(7))
        async with app, context(charge, 7) as ctx:
            assert ctx.upstream_key("stripe") != production
            assert app.origin.identity != before.identity
            assert app.origin.name == before.name

    asyncio.run(scenario())


def test_apps_that_open_a_new_database_at_once_agree(store_url: str) -> None:
    """The identity is drawn once, even if several processes open the database first."""

    async def scenario() -> None:
        apps = [App(store_url, name=name) for name in ("shop", "shop", None, None)]
        await apps[0].migrate()
        await asyncio.gather(*(app.open() for app in apps))
        try:
            assert len({app.origin for app in apps[:2]}) == 1
            assert len({app.origin.identity for app in apps}) == 1
        finally:
            for app in apps:
                await app.close()

    asyncio.run(scenario())


def test_the_name_is_kept_and_cannot_be_changed_once_there_are_messages(store_url: str) -> None:
    """The name is part of every key; an app without a name takes the stored one."""

    async def scenario() -> None:
        await App(store_url).migrate()
        async with App(store_url) as unnamed:
            assert unnamed.origin.name == "app"
        first = await key_of_order(store_url, name="shop")
        with pytest.raises(ConfigurationError, match=r"'store'.*'shop'.*App\(name='shop'\)"):
            await App(store_url, name="store").open()
        async with App(store_url) as unnamed:
            assert unnamed.origin.name == "shop"
        assert await key_of_order(store_url) == first

    asyncio.run(scenario())


def test_a_name_that_is_none_is_refused() -> None:
    """The app's constructor raises."""
    with pytest.raises(ConfigurationError, match="app name"):
        App("sqlite:///x.db", name="My Shop")


def test_the_identity_comes_from_the_source_of_chance_that_was_given(tmp_path: Path) -> None:
    """A simulated world therefore has the same keys in every run."""

    async def identity(path: Path, seed: int) -> str:
        async with App(f"sqlite:///{path}", chance=random.Random(seed)) as app:
            return app.origin.identity

    async def scenario() -> None:
        first, same, other = [await identity(tmp_path / f"{n}.db", seed) for n, seed in enumerate((1, 1, 2))]
        assert first == same != other

    asyncio.run(scenario())


def test_items_of_a_batch_and_steps_of_a_run_have_keys_of_their_database_too(tmp_path: Path) -> None:
    """For every kind of handler, another database gives another key."""

    async def keys_in(path: Path) -> list[str]:
        app, found = App(f"sqlite:///{path}"), []

        @app.task(key="{value}", batch=10)
        async def index(batch: Batch[int]) -> None:
            for item in batch:
                found.append(item.upstream_key("es"))
                item.done()

        async def step(ctx: Context, order: int) -> None:
            found.append(ctx.upstream_key("stripe"))

        @app.workflow(key="{order}")
        async def order_of(run: Run, order: int) -> None:
            await run.step(step, order)

        async with app:
            await index.send(7)
            await order_of.send(7)
            await drain(app)
        return sorted(found)

    async def scenario() -> None:
        first, second = await keys_in(tmp_path / "a.db"), await keys_in(tmp_path / "b.db")
        assert len(first) == 2
        assert not set(first) & set(second)

    asyncio.run(scenario())
