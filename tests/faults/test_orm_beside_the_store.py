"""The usual first set-up: an ORM and onefold on one SQLite file in one process, with worker processes beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiosqlite
import httpx
import pytest
from web_shop import app, make_web

from onefold import App, SecondLibraryError, State
from onefold.store import Query

ORDERS = 60
ORDERS_IN_DEPTH = 4_000
CLIENTS = 8
#: Long enough for a busy machine; a passing test does not wait this long.
PATIENCE_SECONDS = 60.0


@contextmanager
def workers(url: str, log: Path) -> Iterator[None]:
    """Run two real worker processes below a supervisor."""
    command = [sys.executable, "-m", "onefold", "worker", "web_shop:app", "--processes", "2"]
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parent, env={**os.environ, "ONEFOLD_URL": url}, stdout=written, stderr=written
        )
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@contextmanager
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> Iterator[tuple[Path, str]]:
    """A file with the shop's own tables, and its URL in the environment."""
    path = tmp_path / "shop.db"
    url = f"sqlite:///{path}{options}"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    connection.execute("CREATE TABLE payment (id INTEGER PRIMARY KEY)")
    connection.close()
    monkeypatch.setenv("ONEFOLD_URL", url)
    yield path, url


def serve(path: Path, use: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run the web application in this process, with clients that use it."""

    async def main() -> None:
        web = make_web(path)
        transport = httpx.ASGITransport(app=web)
        async with (
            web.router.lifespan_context(web),
            httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=PATIENCE_SECONDS) as client,
        ):
            await use(client)

    asyncio.run(main())


async def place_orders(client: httpx.AsyncClient, number: int) -> list[str]:
    """Send orders from several clients at once, with reads in between; return the ids of their messages."""
    numbers = iter(range(number))
    ids: list[str] = []

    async def one_client() -> None:
        for order in numbers:
            answer = await client.post(f"/orders/{order}")
            assert answer.status_code == 200, answer.text
            ids.append(answer.json())
            if order % 10 == 0:
                assert (await client.get("/orders")).json() >= 1

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return ids


async def until_done(ids: list[str]) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    wanted = set(ids)
    while wanted:
        assert time.monotonic() < give_up_at, f"{len(wanted)} of {len(ids)} messages are not done"
        asked = tuple(sorted(wanted)[:500])
        found = await app.find(Query(ids=asked, limit=500))
        assert len(found) == len(asked), "messages that were accepted are not there"
        wanted -= {one.envelope.id for one in found if one.state is State.DONE}
        await asyncio.sleep(0.05)


def everything_is_there(path: Path, number: int) -> None:
    """Check in another process that each order and each payment is there once, and that the file is sound."""
    connection = sqlite3.connect(path)
    for table in ("orders", "payment"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (number,)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def orders_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, number: int) -> None:
    with shop(tmp_path, monkeypatch, options) as (path, url):

        async def use(client: httpx.AsyncClient) -> None:
            await until_done(await place_orders(client, number))

        with workers(url, tmp_path / "worker.log"):
            serve(path, use)
        everything_is_there(path, number)


OPTIONS = ["?driver=sqlite3", "?driver=sqlite3&journal=delete"]


@pytest.mark.parametrize("options", OPTIONS)
def test_with_one_library_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    """Web requests write through the ORM and send, several at once, beside worker processes."""
    orders_are_kept(tmp_path, monkeypatch, options, ORDERS)


@pytest.mark.deep
@pytest.mark.parametrize("options", OPTIONS)
def test_with_one_library_nothing_is_lost_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """The same with thousands of orders, past many resets of the log."""
    orders_are_kept(tmp_path, monkeypatch, options, ORDERS_IN_DEPTH)


def test_with_two_libraries_the_second_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request that uses the ORM reports the problem; messages are still handled, and the file is sound."""
    with shop(tmp_path, monkeypatch, "") as (path, _):

        async def use(client: httpx.AsyncClient) -> None:
            for request in (client.post("/orders/1"), client.get("/orders")):
                with pytest.raises(SecondLibraryError, match=r'shop\.db.*driver="sqlite3"'):
                    await request
            await app.tasks["charge"].send(7)
            await app.work(until_idle=True)

        serve(path, use)
        connection: Any = sqlite3.connect(path)
        assert connection.execute("SELECT id FROM payment").fetchall() == [(7,)]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()


def test_a_web_process_that_connected_first_keeps_the_store_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a connection pool opens the file before the app does."""
    with shop(tmp_path, monkeypatch, "") as (path, url):

        async def main() -> None:
            async with aiosqlite.connect(path) as connection:
                await connection.execute_fetchall("SELECT count(*) FROM orders")
                with pytest.raises(SecondLibraryError, match='driver="sqlite3"'):
                    await App(url).open()
                async with App(f"{url}?driver=sqlite3"):
                    pass

        asyncio.run(main())
