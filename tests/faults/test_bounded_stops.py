"""A worker that is told to stop ends in time, because every call of its store is bounded from then on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest
from standby_scene import release_standby, require_standby

from onefold import App, Query, State, limits
from onefold.store.postgres import store as postgres_store
from onefold.store.sqlite import connection as sqlite_connection
from onefold.testing.servers import PostgresServer

#: Far less than waiting for every answer would take, far more than a busy machine needs.
STOPPED_SECONDS_MAX = 20.0

pytestmark = pytest.mark.alone


class Blockade:
    """Blocks every commit of a store: no standby confirms, or another program holds the write lock."""

    def __init__(self, url: str, server: PostgresServer | None) -> None:
        self._url = url
        self._server = server

    @contextmanager
    def closed(self) -> Iterator[None]:
        if self._server is not None:
            require_standby(self._server)
            try:
                yield
            finally:
                release_standby(self._server)
        else:
            holder = apsw.Connection(self._url.removeprefix("sqlite:///"))
            holder.set_busy_timeout(10_000)
            holder.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                holder.close()


@pytest.fixture
def blockade(store_url: str, request: pytest.FixtureRequest) -> Blockade:
    return Blockade(store_url, None if store_url.startswith("sqlite") else request.getfixturevalue("postgres_server"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the bounds of the worker, and SQLite's wait for a lock; the other bounds of the stores stay."""
    monkeypatch.setattr(limits, "STOP_STORE_SECONDS", 0.5)
    monkeypatch.setattr(postgres_store, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(sqlite_connection, "BUSY_SECONDS_MAX", 1.0)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("when", ["settling", "claiming", "sending"])
def test_an_embedded_worker_stops_in_time(when: str, store_url: str, blockade: Blockade) -> None:
    """While it settles finished handlers, while it claims, and while other tasks of its process send."""
    app = App(store_url)
    begun = asyncio.Event()
    go_on = asyncio.Event()

    @app.task
    async def handle(number: int) -> None:
        begun.set()
        await go_on.wait()

    async def scenario() -> float:
        await app.migrate()
        async with app:
            for number in range(30):
                await handle.send(number)
            working = asyncio.create_task(app.work(concurrency=5, stop_after=0.3, lease=60))
            await begun.wait()
            with blockade.closed():
                if when == "settling":
                    go_on.set()
                sends = [asyncio.create_task(handle.send(99)) for _ in range(5 if when == "sending" else 0)]
                await asyncio.sleep(0.1)
                began = time.monotonic()
                app.stop_working()
                await working
                await app.close()
                took = time.monotonic() - began
                await asyncio.gather(*sends, return_exceptions=True)
            return took

    began = time.monotonic()
    assert asyncio.run(scenario()) < STOPPED_SECONDS_MAX
    assert time.monotonic() - began < 2 * STOPPED_SECONDS_MAX
    _nothing_is_lost(store_url, at_least=30)


WORKER = """
    import sys
    from onefold import limits
    from onefold.store.postgres import store
    limits.STOP_STORE_SECONDS = store._CLOSE_SECONDS = 0.5
    from onefold.cli.main import main
    sys.argv[1:] = ["worker", "stop_app:app", "--stop-after", "0.5", "--lease", "60", "--processes", "2"]
    main()
"""
APP = """
    import asyncio, os
    from datetime import timedelta
    from onefold import App
    app = App()

    @app.task
    async def handle(number: int) -> None:
        os.write(1, b"begun\\n")
        await asyncio.sleep(0.5)

    @app.recurring(every=timedelta(seconds=1), mode="rate")
    async def tick() -> None: ...
"""


def test_a_supervisor_stops_in_time(store_url: str, blockade: Blockade, tmp_path: Path) -> None:
    """Its processes settle, claim and tick and the supervisor does its own upkeep, while no commit is answered."""
    (tmp_path / "stop_app.py").write_text(textwrap.dedent(APP))

    async def prepare() -> None:
        async with App(store_url) as app:
            handle = app.task(name="handle")(_handle)
            await app.send_many(handle.call(number) for number in range(200))

    asyncio.run(_migrated(store_url))
    asyncio.run(prepare())
    log = (tmp_path / "log").open("wb")
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER)],
        cwd=tmp_path,
        env={**os.environ, "ONEFOLD_URL": store_url, "PYTHONPATH": str(tmp_path)},
        stdout=log,
        stderr=log,
    )
    try:
        give_up_at = time.monotonic() + 60
        while b"begun" not in (tmp_path / "log").read_bytes():
            assert worker.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < give_up_at, (tmp_path / "log").read_text()
            time.sleep(0.05)
        with blockade.closed():
            time.sleep(0.6)  # some handlers end, and their messages are to be settled
            began = time.monotonic()
            worker.send_signal(signal.SIGTERM)
            worker.wait(STOPPED_SECONDS_MAX)
            took = time.monotonic() - began
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
        log.close()
    assert took < STOPPED_SECONDS_MAX, (tmp_path / "log").read_text()
    assert worker.returncode == 0, (tmp_path / "log").read_text()
    _nothing_is_lost(store_url, at_least=200)


async def _handle(number: int) -> None: ...


async def _migrated(url: str) -> None:
    await App(url).migrate()


def _nothing_is_lost(url: str, *, at_least: int) -> None:
    """Check that every message is done, or will be when its lease is over."""

    async def look() -> None:
        async with App(url) as app:
            states = [record.state for record in await app.find(Query(limit=1_000, message_type="handle"))]
            assert len(states) >= at_least
            assert set(states) <= {State.DONE, State.SCHEDULED, State.LEASED}

    asyncio.run(look())
