"""Benches for the tests of isolated handlers."""

from __future__ import annotations

import pytest
from isolated_scene import Bench


@pytest.fixture
def bench(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ONEFOLD_URL", store_url)
    return Bench(store_url)


@pytest.fixture
def sqlite_bench(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ONEFOLD_URL", sqlite_url)
    return Bench(sqlite_url)
