"""The databases that crash tests harm: each store, and in the long run the other library of SQLite too."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_scenarios import Place


@pytest.fixture(params=["sqlite", "postgres", pytest.param("sqlite3", marks=pytest.mark.deep)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A database of each kind in turn, without the tables of a scenario."""
    if request.param == "postgres":
        return Place("postgres", request.getfixturevalue("postgres_url"))
    options = "?driver=sqlite3" if request.param == "sqlite3" else ""
    return Place("sqlite", f"sqlite:///{tmp_path}/crash.db{options}")
