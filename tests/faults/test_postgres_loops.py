"""A server that ends in the middle of an answer is noticed at once, on each event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from urllib.parse import urlsplit

import psycopg
import pytest
from fault_scene import Loop, run

from onefold.store.postgres.wire.pipeline import Pipeline
from onefold.store.postgres.wire.statements import WireQuery

#: Far more than noticing takes, and far less than waiting for the answer would.
NOTICED_SECONDS_MAX = 3.0
ANSWER_SECONDS = 30.0
_NO_LINGER = struct.pack("ii", 1, 0)


class Relay:
    """One connection to the server that can be ended in the middle of a message, as by a crash."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.url = parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}").geturl()
        self._pumps: list[asyncio.Task[None]] = []

    async def carry(self) -> None:
        """Accept one client and forward bytes in both directions."""
        loop = asyncio.get_running_loop()
        self._client, _ = await loop.sock_accept(self._listener)
        self._server = socket.create_connection(self._target)
        for one in (self._client, self._server):
            one.setblocking(False)
        self._pumps = [
            loop.create_task(self._pump(self._client, self._server)),
            loop.create_task(self._pump(self._server, self._client)),
        ]

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 65_536):
            await loop.sock_sendall(sink, data)

    async def hold(self) -> None:
        """Forward nothing from here on."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def crash(self, last_words: bytes) -> None:
        """Send these bytes and reset the connection, before the client's loop can read in between."""
        sent = self._client.send(last_words)
        assert sent == len(last_words)
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        for one in (self._client, self._server, self._listener):
            one.close()


def notice(text: str) -> bytes:
    """Return the notice that a server sends to every session before it ends them all after a crash."""
    fields = b"".join(
        kind + value.encode() + b"\0" for kind, value in ((b"S", "WARNING"), (b"C", "57P02"), (b"M", text))
    )
    return b"N" + struct.pack("!i", len(fields) + 5) + fields + b"\0"


@pytest.mark.parametrize("owned", [True, False], ids=["control", "pooled"])
@pytest.mark.parametrize("size", [40, 60_000])
def test_last_words_and_a_reset_in_one_are_not_waited_for_any_longer(
    size: int, owned: bool, loop: Loop, postgres_url: str
) -> None:
    """Faults 4 and 5: uvloop calls a reader only once when its socket has an error."""

    async def scenario() -> None:
        relay = Relay(postgres_url)
        carrying = asyncio.create_task(relay.carry())
        connection = await psycopg.AsyncConnection.connect(relay.url, autocommit=True)
        await carrying
        exchange = Pipeline(connection, owned=owned, answer_seconds=ANSWER_SECONDS)
        await exchange.send([WireQuery(b"SELECT 1")])
        await relay.hold()
        answer = exchange.send([WireQuery(b"SELECT 2")])
        await asyncio.sleep(0.05)
        relay.crash(notice("x" * size))
        with pytest.raises(psycopg.OperationalError):
            async with asyncio.timeout(NOTICED_SECONDS_MAX):
                await answer

    run(scenario, loop=loop)
