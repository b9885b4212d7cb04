"""The store contract on SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AsyncExitStack

import pytest

from onefold.clock import Clock
from onefold.store import Store
from onefold.store.open import open_store
from onefold.store.sqlite import SQLiteStore
from onefold.store.sqlite.drivers import has_safe_log
from onefold.testing.contracts import Bench, StoreContract, scenario


class TestSQLiteStore(StoreContract):
    options = ""
    durability = "power loss"

    @pytest.fixture(autouse=True)
    def _database(self, sqlite_url: str) -> None:
        self.url = sqlite_url + self.options

    def make_store(self, clock: Clock) -> Store:
        return open_store(self.url, clock=clock)

    @scenario
    async def test_what_it_says_about_itself(self, bench: Bench) -> None:
        said = bench.store.capabilities
        assert (said.transactional, said.shared, said.durability) == (True, False, self.durability)


class TestSQLiteStoreOnSqlite3(TestSQLiteStore):
    """The same with the interpreter's own ``sqlite3`` module."""

    options = "?driver=sqlite3"
    durability = "power loss" if has_safe_log(sqlite3.sqlite_version_info) else "process crash"


class TestSQLiteStoreOnSqlite3WithoutLog(TestSQLiteStore):
    """The same with a rollback journal, which no SQLite version damages."""

    options = "?driver=sqlite3&journal=delete"


@pytest.mark.parametrize(("boot", "free"), [("the same", False), ("another", True)])
def test_a_restart_of_the_machine_ends_every_lease(sqlite_url: str, boot: str, free: bool) -> None:
    """Leases are dated by the time since the machine started, which restarts at zero, and no owner survives that."""
    path = sqlite_url.removeprefix("sqlite:///")

    async def hold(boot: str) -> None:
        async with AsyncExitStack() as stack:
            bench = Bench(lambda clock: SQLiteStore(path, clock=clock, boot=boot), stack)
            bench.store = await bench.another()
            await bench.leased("k")

    async def claimable(boot: str) -> int:
        async with AsyncExitStack() as stack:
            bench = Bench(lambda clock: SQLiteStore(path, clock=clock, boot=boot), stack)
            bench.store = await bench.another()
            return len(await bench.claim())

    asyncio.run(hold("the same"))
    assert asyncio.run(claimable(boot)) == free
