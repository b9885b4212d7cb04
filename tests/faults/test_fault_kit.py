"""The tools of the fault tests work: the proxy breaks the network, and files and servers fail as planned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import apsw
import psycopg
import pytest
from fault_scene import run

from onefold.testing.proxy import Mode, Proxy
from onefold.testing.servers import PostgresServer
from onefold.testing.vfs import FaultyFiles, FileFault, Operation

#: Without an answer for this long, a connection counts as silent.
SILENCE_SECONDS = 0.1


# the proxy


class Echo:
    """A server that answers every line with itself, and remembers the lines."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.heard.append(line)
                writer.write(line)
                await writer.drain()
        except ConnectionError:
            pass
        self.ended.set()
        writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, Echo]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with Proxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        yield proxy, echo
    server.close()


class Client:
    """One connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, proxy: Proxy) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", proxy.port))

    async def ask(self, line: bytes) -> bytes:
        self._writer.write(line + b"\n")
        return (await self._reader.readline()).rstrip(b"\n")

    async def is_left_without_answer(self, line: bytes) -> bool:
        try:
            await asyncio.wait_for(self.ask(line), SILENCE_SECONDS)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._writer.close()


def test_a_proxy_passes_everything_on_and_says_goodbye() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, echo):
            client = await Client.connect(proxy)
            large = b"x" * 60_000
            assert [await client.ask(b"one"), await client.ask(large)] == [b"one", large]
            client.close()
            await echo.ended.wait()
            assert len(proxy.connected_at) == 1

    run(scenario)


def test_a_connection_that_lost_bytes_stays_silent_and_others_do_not() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, echo):
            used, unused = await Client.connect(proxy), await Client.connect(proxy)
            assert await unused.ask(b"early") == b"early"
            await proxy.switch("blackhole")
            assert await used.is_left_without_answer(b"lost")
            late = await Client.connect(proxy)
            assert await late.is_left_without_answer(b"lost too")
            await proxy.switch("pass")
            assert await used.is_left_without_answer(b"still")
            assert await late.is_left_without_answer(b"still")
            assert await unused.ask(b"fine") == b"fine"
            assert echo.heard == [b"early\n", b"fine\n"]

    run(scenario)


def test_what_was_held_back_arrives_afterwards() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, echo):
            client = await Client.connect(proxy)
            await proxy.switch("hold")
            asked = asyncio.create_task(client.ask(b"late"))
            await asyncio.wait([asked], timeout=SILENCE_SECONDS)
            assert echo.heard == []
            await proxy.switch("pass")
            assert await asked == b"late"

    run(scenario)


def test_one_way_lets_requests_through_and_no_answers() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, echo):
            client = await Client.connect(proxy)
            await proxy.switch("one-way")
            assert await client.is_left_without_answer(b"heard")
            await proxy.switch("pass")
            assert await client.is_left_without_answer(b"heard again")
            assert echo.heard == [b"heard\n", b"heard again\n"]

    run(scenario)


@pytest.mark.parametrize("mode", ["latency", "trickle"])
def test_slow_answers_arrive_whole(mode: Mode) -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, _):
            client = await Client.connect(proxy)
            loop = asyncio.get_running_loop()
            await proxy.switch(mode, seconds=0.02)
            began = loop.time()
            assert await client.ask(b"y" * 100) == b"y" * 100
            assert loop.time() - began >= (0.02 if mode == "latency" else 6 * 0.02)

    run(scenario)


def test_reset_ends_what_is_and_what_comes_and_counts_it() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, echo):
            client = await Client.connect(proxy)
            assert await client.ask(b"one") == b"one"
            await proxy.switch("reset")
            with pytest.raises(ConnectionError):
                await client.ask(b"two")
            for _ in range(3):
                with pytest.raises(ConnectionError):
                    await (await Client.connect(proxy)).ask(b"three")
            assert len(proxy.connected_at) == 4
            assert proxy.busiest_second() == 4
            assert echo.heard == [b"one\n"]

    run(scenario)


def test_refuse_rejects_new_connections_and_leaves_open_ones() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, _):
            client, port = await Client.connect(proxy), proxy.port
            assert await client.ask(b"one") == b"one"
            await proxy.switch("refuse")
            with pytest.raises(ConnectionRefusedError):
                await Client.connect(proxy)
            assert await client.ask(b"two") == b"two"
            proxy.cut()
            with pytest.raises(ConnectionError):
                await client.ask(b"three")
            await proxy.switch("pass")
            assert proxy.port == port
            assert await (await Client.connect(proxy)).ask(b"four") == b"four"

    run(scenario)


def test_a_lost_reply_is_lost_after_the_server_gave_it() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, echo):
            client, other = await Client.connect(proxy), await Client.connect(proxy)
            assert await client.ask(b"one") == b"one"
            proxy.lose_next_reply()
            assert proxy.losing
            with pytest.raises(ConnectionError):
                await client.ask(b"two")
            assert not proxy.losing
            assert echo.heard == [b"one\n", b"two\n"]
            assert await other.ask(b"three") == b"three"

    run(scenario)


def test_a_lost_request_never_reaches_the_server() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, echo):
            client = await Client.connect(proxy)
            assert await client.ask(b"one") == b"one"
            proxy.lose_next_request()
            with pytest.raises(ConnectionError):
                await client.ask(b"two")
            assert not proxy.losing
            assert echo.heard == [b"one\n"]

    run(scenario)


def test_a_url_is_led_through_the_proxy() -> None:
    async def scenario() -> None:
        async with proxied() as (proxy, _):
            assert proxy.through("postgresql://ada:pw@db.example:5432/shop?sslmode=disable") == (
                f"postgresql://ada:pw@127.0.0.1:{proxy.port}/shop?sslmode=disable"
            )

    run(scenario)


# the files


@pytest.mark.parametrize(
    ("kind", "operation", "error"),
    [
        ("io error", "write", apsw.IOError),
        ("io error", "sync", apsw.IOError),
        ("io error", "read", apsw.IOError),
        ("torn", "write", apsw.IOError),
        ("full", "write", apsw.FullError),
        ("busy", "lock", apsw.BusyError),
    ],
)
def test_a_planned_call_fails_once_and_the_next_does_not(
    kind: Literal["io error", "full", "busy", "torn"], operation: Operation, error: type[apsw.Error], tmp_path: Path
) -> None:
    path = str(tmp_path / "x.db")
    with FaultyFiles() as files:
        connection = apsw.Connection(path)
        connection.execute("PRAGMA journal_mode = WAL; CREATE TABLE t (n INTEGER)").fetchall()
        fresh = apsw.Connection(path)
        files.plan(FileFault(kind, operation))
        with pytest.raises(error):
            (fresh if operation in ("read", "lock") else connection).execute("INSERT INTO t VALUES (1)")
        assert files.fired == 1
        fresh.execute("INSERT INTO t VALUES (2)")
        assert connection.execute("SELECT n FROM t").fetchall() == [(2,)]
        assert files.opened == 2
        connection.close()
        fresh.close()
    assert "onefold-faulty" not in apsw.vfs_names()


def test_a_lasting_fault_lasts_until_it_is_healed(tmp_path: Path) -> None:
    with FaultyFiles(durable=False) as files:
        connection = apsw.Connection(str(tmp_path / "x.db"))
        connection.execute("PRAGMA journal_mode = WAL; CREATE TABLE t (n INTEGER)").fetchall()
        files.plan(FileFault("full", "write", at=2, lasting=True))
        for _ in range(3):
            with pytest.raises(apsw.FullError):
                connection.execute("INSERT INTO t VALUES (1)")
        assert files.fired == 3
        files.heal()
        connection.execute("INSERT INTO t VALUES (1)")
        assert files.fired == 3
        connection.close()


# the server


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_was_shut_down_comes_back_with_what_was_committed(
    mode: Literal["fast", "immediate"], postgres_server: PostgresServer, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS id")
        connection.commit()
        connection.execute("INSERT INTO kept VALUES (8)")
        postgres_server.shut_down(mode)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    postgres_server.restart()
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT id FROM kept").fetchall() == [(7,)]


def test_a_server_has_the_settings_it_was_given(postgres_server: PostgresServer) -> None:
    settings = {"synchronous_standby_names": "ghost"}
    with PostgresServer(postgres_server.binaries, settings=settings) as server, psycopg.connect(server.url()) as asked:
        assert asked.execute("SHOW synchronous_standby_names").fetchone() == ("ghost",)
