"""A TCP proxy that breaks the network where a test says so: silence, resets, delays, lost replies.

It stands between a client and a real server, in the event loop of the test::

    async with Proxy("127.0.0.1", 5432) as proxy:
        store = open_store(proxy.through("postgresql://shop@127.0.0.1:5432/shop"))
        …
        await proxy.switch("blackhole")

It forwards bytes without interpreting them, so it serves every protocol over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from onefold.clock import MICROSECONDS, Clock, SystemClock

Mode = Literal["pass", "hold", "blackhole", "one-way", "latency", "trickle", "reset", "refuse"]

_CHUNK = 65_536
#: The bytes of a reply that arrive at a time in the mode "trickle".
_DROP = 16
#: Closing a socket with this setting sends a reset instead of a FIN.
_NO_LINGER = struct.pack("ii", 1, 0)


class Proxy:
    """Carries connections to one server for the length of its block.

    ``pass``: everything is forwarded.
    ``hold``: every byte is held back, in both directions, and arrives when the mode changes, as after a partition.
    ``blackhole``: connections are accepted and every byte is dropped, in both directions.
    ``one-way``: requests arrive, replies do not.
    ``latency``: replies come ``seconds`` later.  ``trickle``: replies come a few bytes at a time, ``seconds`` apart.
    ``reset``: open and new connections are reset.  ``refuse``: new connections are refused; open ones stay.

    A connection that lost bytes carries none from then on: neither side notices, as when a firewall forgot about it.
    """

    def __init__(self, host: str, port: int, *, clock: Clock | None = None) -> None:
        self.mode: Mode = "pass"
        self.port = 0
        #: When each connection was made, on the steady clock; refused connections do not count.
        self.connected_at: list[int] = []
        self._target = (host, port)
        self._clock = clock or SystemClock()
        self._seconds = 0.0
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        #: The tasks of all connections, including closed ones: without a reference a task could be collected before
        #: it has finished.
        self.tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._losing_next: Literal["request", "reply"] | None = None

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_listening()
        for pair in list(self._pairs):
            await pair.close()

    def through(self, url: str) -> str:
        """Return the URL of the server with the proxy's address."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}127.0.0.1:{self.port}").geturl()

    async def switch(self, mode: Mode, *, seconds: float = 0.0) -> None:
        """Change the mode, from the next byte on, for open and new connections."""
        self.mode, self._seconds = mode, seconds
        self._changed.set()
        self._changed = asyncio.Event()
        if mode == "refuse":
            self._stop_listening()
        elif self._server is None:
            await self._listen()
        if mode == "reset":
            self.cut()

    def cut(self) -> None:
        """Reset every open connection; new ones are not affected."""
        for pair in list(self._pairs):
            pair.reset()

    def lose_next_request(self) -> None:
        """Swallow the next request on any connection, and reset that connection."""
        self._losing_next = "request"

    def lose_next_reply(self) -> None:
        """Carry the next request to the server, wait for the reply, swallow it and reset the connection."""
        self._losing_next = "reply"

    @property
    def losing(self) -> bool:
        """Whether a request or reply that is to be lost has not been lost yet."""
        return self._losing_next is not None or any(pair.losing for pair in self._pairs)

    def busiest_second(self) -> int:
        """Return the largest number of connections made within one second."""
        at = self.connected_at
        return max((sum(start <= other < start + MICROSECONDS for other in at) for start in at), default=0)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected_at.append(self._clock.steady())
        pair = _Pair(self, reader, writer)
        if self.mode == "reset":
            pair.reset()
            return
        self._pairs.add(pair)
        pair.start(pair.swallow(reader) if self.mode == "blackhole" else pair.carry(*self._target))

    def forget(self, pair: _Pair) -> None:
        """Remove a closed connection."""
        self._pairs.discard(pair)

    async def before_request(self) -> None:
        """Wait as long as a request takes to arrive."""
        while self.mode == "hold":
            await self._changed.wait()

    async def before_reply(self) -> None:
        """Wait as long as a reply takes to arrive."""
        await self.before_request()
        if self.mode == "latency":
            await self._clock.sleep(self._seconds)

    async def deliver(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Forward a reply, in small parts if the mode says so."""
        if self.mode != "trickle":
            writer.write(data)
            await writer.drain()
            return
        for start in range(0, len(data), _DROP):
            writer.write(data[start : start + _DROP])
            await writer.drain()
            await self._clock.sleep(self._seconds)

    def take_losing(self) -> Literal["request", "reply"] | None:
        """Return whether the current request or its reply is to be lost, and reset that."""
        losing, self._losing_next = self._losing_next, None
        return losing


class _Pair:
    """A client's connection and the matching one to the server."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writers = [writer]
        self._tasks: list[asyncio.Task[None]] = []
        #: Bytes to the server, or to the client, were lost; the rest of the stream would be garbage.
        self._requests_lost = self._replies_lost = False
        #: The next reply is swallowed, and then both ends are reset.
        self.losing = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        self._proxy.tasks.add(task)
        task.add_done_callback(self._proxy.tasks.discard)

    async def carry(self, host: str, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            self.reset()
            return
        self._writers.append(writer)
        self.start(self._requests(writer))
        self.start(self._replies(reader))

    async def swallow(self, reader: asyncio.StreamReader) -> None:
        """Read and drop bytes until this side closes; the other side does not notice."""
        with contextlib.suppress(OSError):
            while await reader.read(_CHUNK):
                pass

    async def _requests(self, server: asyncio.StreamWriter) -> None:
        try:
            while data := await self._reader.read(_CHUNK):
                await self._proxy.before_request()
                self._requests_lost |= self._proxy.mode == "blackhole"
                if self._requests_lost:
                    await self.swallow(self._reader)
                    return
                losing = self._proxy.take_losing()
                if losing == "request":
                    self.reset()
                    return
                self.losing |= losing == "reply"
                server.write(data)
                await server.drain()
        except OSError:
            pass
        if self._proxy.mode != "blackhole" and not self._replies_lost:
            self._part()

    async def _replies(self, server: asyncio.StreamReader) -> None:
        try:
            while data := await server.read(_CHUNK):
                if self.losing:
                    self.reset()
                    return
                await self._proxy.before_reply()
                self._replies_lost |= self._proxy.mode in ("blackhole", "one-way") or self._requests_lost
                if self._replies_lost:
                    await self.swallow(server)
                    return
                await self._proxy.deliver(data, self._writers[0])
        except OSError:
            pass
        if self._proxy.mode not in ("blackhole", "one-way") and not self._requests_lost:
            self._part()

    def _part(self) -> None:
        """Close both connections after one side has closed, once the bytes sent before have been forwarded."""
        for writer in self._writers:
            writer.close()
        self._proxy.forget(self)

    def reset(self) -> None:
        """Abort both connections with a reset."""
        self.losing = False
        for writer in self._writers:
            # uvloop returns no socket for a transport that is already closed.
            if (connected := writer.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()
        self._proxy.forget(self)

    async def close(self) -> None:
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
