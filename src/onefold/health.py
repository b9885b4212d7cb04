"""For machines: whether a supervisor and its worker processes are well, over HTTP.

``/live`` says whether the supervisor itself works: if not, start it again.
``/ready`` says whether messages are being handled: every process is ready, its event loop moves, the store answers.
Both answer 200 or 503, and the same JSON says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from onefold.clock import MICROSECONDS, Clock
from onefold.errors import ConfigurationError
from onefold.process import WorkerProcess
from onefold.store import Lane
from onefold.supervisor import Supervisor

#: Everything must have been seen to be well within this time.
FRESH_SECONDS = 30.0
#: A request is a line and a few headers; whoever sends more, or more slowly, is not asking about health.
_REQUEST_BYTES_MAX = 8_192
_REQUEST_SECONDS_MAX = 5.0


class Health:
    """What is known about a supervisor, now."""

    def __init__(self, supervisor: Supervisor, clock: Clock) -> None:
        self._supervisor = supervisor
        self._clock = clock

    def report(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        supervisor = self._supervisor
        workers = [self._worker(process) for process in supervisor.crew.processes.values()]
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
            "settled": supervisor.crew.settled,
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
        """Answer at ``HOST:PORT`` for the length of the block; yields where, since port 0 means any."""
        host, port = parse_address(address)
        try:
            server = await asyncio.start_server(self._answer, host, port, limit=_REQUEST_BYTES_MAX)
        except OSError as error:
            raise ConfigurationError(f"health: cannot listen at {address}: {error}") from error
        async with server:
            bound = server.sockets[0].getsockname()
            yield f"{bound[0]}:{bound[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_SECONDS_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        writer.close()

    def _response(self, head: bytes) -> bytes:
        method, path, *_ = [*head.split(b"\r\n", 1)[0].split(b" "), b"", b""]
        path = path.split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _http(405, {"error": "use GET"}, body=True)
        if path not in (b"/live", b"/ready"):
            return _http(404, {"error": "ask for /live or /ready"}, body=method == b"GET")
        report = self.report()
        well = report["live" if path == b"/live" else "ready"]
        return _http(200 if well else 503, report, body=method == b"GET")


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
