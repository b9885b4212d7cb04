"""Fixtures of every promise: a store with a table of effects beside it, and a clock that the test controls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from onefold import App, Receipt
from onefold.store import Query, Record
from onefold.testing.clock import FakeClock


class World:
    """One database, several apps on it, and the rows that their handlers wrote."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = FakeClock()

    def app(self) -> App:
        """Return another app on the same database, as another process would have."""
        return App(self.url, clock=self.clock)

    def paused_app(self) -> App:
        """Return an app on a clock that stands still: its worker renews no lease, as if its process were stopped."""
        return App(self.url, clock=FakeClock())

    @asynccontextmanager
    async def running(self, *apps: App) -> AsyncIterator[None]:
        """Open the apps on a database that has the table ``effect``."""
        await apps[0].migrate()
        for app in apps:
            await app.open()
        try:
            async with apps[0].transaction() as tx:
                await tx.execute("CREATE TABLE IF NOT EXISTS effect (name TEXT NOT NULL)")
            yield
        finally:
            for app in apps:
                await app.close()

    def sql(self, statement: str) -> str:
        """Write a statement with the placeholders of this store's driver."""
        return statement if self.url.startswith("sqlite") else statement.replace("?", "%s")

    @property
    def insert_effect(self) -> str:
        """The statement with which handlers write a row."""
        return self.sql("INSERT INTO effect (name) VALUES (?)")

    async def effects(self, app: App) -> list[str]:
        """Return the names of the committed effects, in alphabetical order."""
        return [row[0] for row in await app.store.fetch("SELECT name FROM effect ORDER BY name")]

    async def record(self, app: App, receipt: Receipt[Any] | str) -> Record:
        """Return the stored record of one message."""
        wanted = receipt if isinstance(receipt, str) else receipt.id
        return (await app.find(Query(ids=(wanted,))))[0]


@pytest.fixture(params=["sqlite", "sqlite3", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of each store in turn, SQLite with both of its libraries."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def world(store_url: str) -> World:
    """A world on each store in turn."""
    return World(store_url)
