"""For probes: the health of a supervisor and its worker processes, over HTTP.

``/live`` says whether the supervisor itself works: if not, restart it.
``/ready`` says whether messages are being handled: every process is ready, its event loop moves, the store answers.
Both answer 200 or 503, and the same JSON says why.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec

from onefold.clock import MICROSECONDS, Clock, give_way
from onefold.errors import ConfigurationError
from onefold.store import Lane
from onefold.supervisor.process import WorkerProcess
from onefold.supervisor.supervisor import Supervisor

#: A check or a beat that is older than this counts as a failure.
FRESH_SECONDS = 30.0
#: A request is a line and a few headers; a client that sends more, or more slowly, is no health probe.
_REQUEST_BYTES_MAX = 8_192
_REQUEST_SECONDS_MAX = 5.0
#: Connections that are open at once, far fewer than a process has descriptors: it needs a handful of those for each
#: worker process that it starts.  A probe is answered within milliseconds, so more are idle or hostile.
_CONNECTIONS_MAX = 16
#: The pause after an accept that failed, such as when the whole machine is out of descriptors.
_ACCEPT_PAUSE_SECONDS = 0.5
#: Failures to accept and early closes are logged at most once in this time.
_LOG_SECONDS = 60.0

logger = logging.getLogger("onefold")


class Health:
    """The health of a supervisor, as a report and over HTTP."""

    def __init__(self, supervisor: Supervisor, clock: Clock) -> None:
        self._supervisor = supervisor
        self._clock = clock

    def report(self) -> dict[str, Any]:
        """Return the present state, in types that JSON has."""
        supervisor = self._supervisor
        workers = [self._worker(process) for process in supervisor.processes.by_name.values()]
        places = [one for one in workers if one["lane"] == Lane.MAIN.name.lower() and not one["leaving"]]
        store_age = self._age(supervisor.store_checked_at)
        live = self._age(supervisor.watched_at) <= FRESH_SECONDS
        ready = (
            live
            and not supervisor.stopping
            and store_age <= FRESH_SECONDS
            and sum(one["ready"] for one in places) >= supervisor.places
            and all(one["beat_seconds_ago"] <= FRESH_SECONDS for one in places if one["ready"])
        )
        return {
            "live": live,
            "ready": ready,
            "stopping": supervisor.stopping,
            "store_checked_seconds_ago": round(store_age, 1),
            "settled": supervisor.processes.settled,
            "workers": workers,
        }

    def _worker(self, process: WorkerProcess) -> dict[str, Any]:
        ready = process.ready.is_set()
        return {
            "name": process.name,
            "pid": process.pid,
            "lane": process.lane.name.lower(),
            "ready": ready,
            "leaving": process.leaving,
            "running": len(process.running()),
            "settled": process.settled,
            "memory_bytes": process.board.memory,
            "beat_seconds_ago": round(self._age(process.board.beat_at), 1) if ready else None,
        }

    def _age(self, at: int) -> float:
        return (self._clock.steady() - at) / MICROSECONDS

    # over HTTP

    @asynccontextmanager
    async def serve(self, address: str) -> AsyncIterator[str]:
        """Answer at ``HOST:PORT`` for the length of the block; yields the address, as port 0 means any free one."""
        async with AsyncExitStack() as stack:
            listeners = await _listen(address)
            for listener in listeners:
                stack.callback(listener.close)
            server = _Server(self._response, self._clock)
            stack.push_async_callback(server.close)
            for listener in listeners:
                server.open(listener)
            bound = listeners[0].getsockname()
            yield f"{bound[0]}:{bound[1]}"

    def _response(self, head: bytes) -> bytes:
        method, path, *_ = [*head.split(b"\r\n", 1)[0].split(b" "), b"", b""]
        path = path.split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _http(405, {"error": "use GET"}, body=True)
        if path not in (b"/live", b"/ready"):
            return _http(404, {"error": "ask for /live or /ready"}, body=method == b"GET")
        report = self.report()
        healthy = report["live" if path == b"/live" else "ready"]
        return _http(200 if healthy else 503, report, body=method == b"GET")


class _Server:
    """Accepts a limited number of connections; for one more, the one that has been open longest is closed.

    Not ``asyncio.start_server``: that accepts without a bound, and when descriptors run out it logs a traceback for
    every connection, thousands in a second.
    """

    def __init__(self, respond: Callable[[bytes], bytes], clock: Clock) -> None:
        self._respond = respond
        self._clock = clock
        self._accepting: list[asyncio.Task[None]] = []
        self._open: dict[asyncio.Task[None], None] = {}
        self._closed_early = 0
        self._log_again_at = 0

    def open(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket from now on."""
        self._accepting.append(asyncio.create_task(self._accept(listener), name="onefold-health"))

    async def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        tasks = [*self._accepting, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                self._log("health_not_accepting error=%s", errno.errorcode.get(error.errno or 0, "OSError"))
                await self._clock.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._open) >= _CONNECTIONS_MAX:
                self._closed_early += 1
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
                self._log("health_crowded most=%d closed=%d", _CONNECTIONS_MAX, self._closed_early)
            task = asyncio.create_task(self._answer(connection))
            self._open[task] = None
            task.add_done_callback(lambda done: self._open.pop(done, None))
            # Lets a cancelled task close its descriptor before the next connection is accepted.
            await give_way()

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        head = b""
        with connection, suppress(OSError, TimeoutError):
            async with asyncio.timeout(_REQUEST_SECONDS_MAX):
                while b"\r\n\r\n" not in head:
                    part = await loop.sock_recv(connection, _REQUEST_BYTES_MAX)
                    head += part
                    if not part or len(head) > _REQUEST_BYTES_MAX:
                        return
                await loop.sock_sendall(connection, self._respond(head))

    def _log(self, text: str, *values: object) -> None:
        now = self._clock.steady()
        if now >= self._log_again_at:
            self._log_again_at = now + round(_LOG_SECONDS * MICROSECONDS)
            logger.warning(text, *values)


async def _listen(address: str) -> list[socket.socket]:
    """Return a listening socket for every address that a host has, as ``localhost`` may have two."""
    host, port = parse_address(address)
    listeners: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, where in dict.fromkeys((one[0], one[4]) for one in found):
            try:
                listener = socket.create_server(where[:2], family=family, backlog=_CONNECTIONS_MAX)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                continue
            listener.setblocking(False)
            listeners.append(listener)
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, "no address of this machine")
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigurationError(f"health: cannot listen at {address}: {error}") from error
    return listeners


_PHRASES = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def _http(status: int, content: Any, *, body: bool) -> bytes:
    text = msgspec.json.encode(content) + b"\n"
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (text if body else b"")


def parse_address(address: str) -> tuple[str, int]:
    """Read ``HOST:PORT``; an IPv6 host is written in brackets."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535 or not host:
        raise ConfigurationError(f"health: {address!r} is no address; write HOST:PORT, such as 127.0.0.1:8080")
    return host.strip("[]"), int(port)
