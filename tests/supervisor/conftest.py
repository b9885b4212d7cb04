"""Scenes for the tests of the supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_scene import Scene


@pytest.fixture
def scene(store_url: str, tmp_path: Path) -> Iterator[Scene]:
    """A scene on each store in turn."""
    made = Scene(store_url, tmp_path)
    yield made
    made.close()


@pytest.fixture
def local(sqlite_url: str, tmp_path: Path) -> Iterator[Scene]:
    """A scene on SQLite only, for tests that do not depend on the store."""
    made = Scene(sqlite_url, tmp_path)
    yield made
    made.close()
