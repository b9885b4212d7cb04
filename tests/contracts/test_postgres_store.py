"""The store contract on PostgreSQL."""

from __future__ import annotations

import pytest

from onefold.clock import Clock
from onefold.store import Store
from onefold.store.open import open_store
from onefold.testing.contracts import Bench, StoreContract, scenario


class TestPostgresStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str) -> None:
        self.url = postgres_url

    def make_store(self, clock: Clock) -> Store:
        return open_store(self.url, clock=clock)

    @scenario
    async def test_what_it_says_about_itself(self, bench: Bench) -> None:
        said = bench.store.capabilities
        assert (said.transactional, said.shared, said.notifies) == (True, True, True)
