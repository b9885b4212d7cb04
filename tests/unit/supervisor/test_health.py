"""Connections of the health server: how many it accepts, which it closes, and what it logs about that."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from onefold.errors import ConfigurationError
from onefold.supervisor import health
from onefold.testing import FakeClock


class House:
    """A server on a loopback port, and its clients."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.server = health._Server(lambda head: b"answer to " + head.split()[0], self.clock)
        self.address: tuple[str, int] = ("", 0)
        self.clients: list[socket.socket] = []

    async def connect(self) -> socket.socket:
        client = socket.socket()
        client.setblocking(False)
        self.clients.append(client)
        await asyncio.get_running_loop().sock_connect(client, self.address)
        return client

    async def ask(self, request: bytes = b"GET / HTTP/1.1\r\n\r\n") -> bytes:
        client = await self.connect()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, request)
        return await loop.sock_recv(client, 1_000)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def within() -> None:
            (listener,) = await health._listen("127.0.0.1:0")
            self.address = listener.getsockname()
            self.server.open(listener)
            try:
                async with asyncio.timeout(20):
                    await scenario()
            finally:
                await self.server.close()
                listener.close()
                for client in self.clients:
                    client.close()

        asyncio.run(within())


def test_more_connections_than_allowed_close_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    """The number of open connections is bounded; the newest is answered, and one line is logged in a minute."""
    caplog.set_level(logging.WARNING)
    house = House()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        silent = [await house.connect() for _ in range(5 * health._CONNECTIONS_MAX)]
        assert await house.ask() == b"answer to GET"
        assert len(house.server._open) <= health._CONNECTIONS_MAX
        # The first was closed; from the last, nothing has come yet.
        assert await loop.sock_recv(silent[0], 10) == b""
        with pytest.raises(BlockingIOError):
            silent[-1].recv(10)
        assert caplog.text.count("health_crowded") == 1
        house.clock.advance(health._LOG_SECONDS)
        for _ in range(2 * health._CONNECTIONS_MAX):
            await house.connect()
        assert await house.ask() == b"answer to GET"
        assert caplog.text.count("health_crowded") == 2

    house.run(scenario)


@pytest.mark.parametrize(
    "request_", [b"", b"G" * 20_000, b"GET / HTTP/1.1\r\n" + b"x" * 9_000], ids=["slow", "long", "many headers"]
)
def test_a_request_that_is_too_long_or_too_slow_is_closed(request_: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no answer, and no harm to the next request."""
    monkeypatch.setattr(health, "_REQUEST_SECONDS_MAX", 0.05)
    house = House()

    async def scenario() -> None:
        with suppress(ConnectionResetError):
            assert await house.ask(request_) == b""
        assert await house.ask() == b"answer to GET"

    house.run(scenario)


def test_a_machine_without_descriptors_is_waited_for_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line in a minute names the error; connections are accepted again when there are descriptors."""
    caplog.set_level(logging.WARNING)
    house = House()

    async def scenario() -> None:
        loop: Any = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "none left") for _ in range(5)]

        async def accept_or_fail(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(listener)

        loop.sock_accept = accept_or_fail
        asking = asyncio.ensure_future(house.ask())
        while failures or not asking.done():
            house.clock.advance(health._ACCEPT_PAUSE_SECONDS)
            await asyncio.wait([asking], timeout=0.01)
        assert await asking == b"answer to GET"
        assert caplog.text.count("health_not_accepting error=EMFILE") == 1

    house.run(scenario)


def test_an_address_that_is_taken_is_refused_with_its_name() -> None:
    """So is an address that this machine does not have."""

    async def scenario() -> None:
        (listener,) = await health._listen("127.0.0.1:0")
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        for address in (taken, "192.0.2.1:0"):
            with pytest.raises(ConfigurationError, match=f"cannot listen at {address}"):
                await health._listen(address)
        listener.close()

    asyncio.run(scenario())
