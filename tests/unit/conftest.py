"""An app on a store, opened for the length of a scenario, with a clock that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from onefold import App, Receipt
from onefold.store import Query, Record
from onefold.testing import HastyClock

#: A scenario takes milliseconds; one that hangs ends here.
SECONDS_MAX = 60


class Bench:
    """An app to declare tasks on, and a table ``effect`` for its handlers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = HastyClock()
        self.app = App(url, clock=self.clock)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Open the app, run the scenario in it, close the app."""
        asyncio.run(self._within(scenario))

    async def _within(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await self.app.migrate()
            async with self.app:
                async with self.app.transaction() as tx:
                    await tx.execute("CREATE TABLE effect (name TEXT NOT NULL)")
                await scenario()

    async def work(self) -> int:
        """Handle all due messages."""
        return await self.app.work(until_idle=True)

    def sql(self, statement: str) -> str:
        """Write a statement with the placeholders of this store's driver."""
        return statement if self.url.startswith("sqlite") else statement.replace("?", "%s")

    async def insert(self, inside: Any, name: str) -> None:
        """Write an effect through a context or a transaction."""
        await inside.execute(self.sql("INSERT INTO effect (name) VALUES (?)"), name)

    async def effects(self) -> list[str]:
        """Return the committed effects."""
        return [row[0] for row in await self.app.store.fetch("SELECT name FROM effect ORDER BY name")]

    async def record(self, receipt: Receipt[Any]) -> Record:
        """Return the stored record of a message."""
        return (await self.app.find(Query(ids=(receipt.id,))))[0]

    async def messages(self) -> list[Record]:
        """Return all messages, oldest first."""
        return await self.app.find(Query())

    async def purge(self) -> None:
        """Purge, as a worker does every minute."""
        async with self.app.store.transaction() as transaction:
            await transaction.purge()


@pytest.fixture
def bench(store_url: str) -> Bench:
    """A bench on each store in turn."""
    return Bench(store_url)


@pytest.fixture
def sqlite_bench(sqlite_url: str) -> Bench:
    """A bench on SQLite, for behaviour that is the same on every store."""
    return Bench(sqlite_url)
