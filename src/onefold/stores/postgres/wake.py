"""Waking workers: at once in this process, through LISTEN and NOTIFY in others.

A NOTIFY inside the sender's transaction would make all commits of the server take turns, so it follows afterwards,
on another connection and at most once in a few milliseconds.
All of it is a hint: a lost one costs at most one polling interval.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

import psycopg

from onefold.clock import SystemClock
from onefold.errors import OnefoldError
from onefold.inside import outside
from onefold.stores.postgres.arrays import texts
from onefold.stores.postgres.connection import Connector
from onefold.stores.postgres.link import Backoff, Link
from onefold.stores.postgres.wire import Wire

#: A burst of puts wakes others once in this time, the first of them at once.
_NOTIFY_SECONDS = 0.01
#: Before the name of a queue in which something came back; no name begins with it.
_BACK = "<"
#: When the store closes, the last notification may take this long.
_CLOSE_SECONDS = 1.0
#: While nobody can be reached the listener keeps trying, for as long as the store is open.
_FOR_EVER = float(10**9)

_machine = SystemClock()


class Bell:
    """The doorbells of all queues."""

    def __init__(self, notifying: Link, listening: Connector | None, look_back: Callable[[], None]) -> None:
        self._notifying = notifying
        self._listening = listening
        #: Called when something came back that was due long ago, which a claim does not see at first glance.
        self._look_back = look_back
        self._rung: set[str] = set()
        self._waiting: dict[asyncio.Future[None], frozenset[str]] = {}
        self._to_notify: set[str] = set()
        self._notifier: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Return when one of the queues is rung, or was since the last time, or after ``timeout`` seconds."""
        if self._listening is not None and self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen(self._listening), context=outside())
        wanted = frozenset(queues)
        if not wanted & self._rung:
            rung: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[rung] = wanted
            try:
                await asyncio.wait([rung], timeout=timeout)
            finally:
                del self._waiting[rung]
        self._rung -= wanted

    def ring(self, queues: Iterable[str], *, back: bool = False) -> None:
        """Wake everybody who waits for these queues, here at once and elsewhere soon.

        ``back`` says that something came back which was due long ago.
        """
        names = set(queues)
        if not names:
            return
        if back:
            self._look_back()
        self._ring_here(names)
        self._to_notify |= {_BACK + name for name in names} if back else names
        if self._notifier is None:
            self._notifier = asyncio.get_running_loop().create_task(self._notify(), context=outside())

    def _ring_here(self, names: set[str]) -> None:
        self._rung |= names
        for future, wanted in self._waiting.items():
            if not future.done() and wanted & names:
                future.set_result(None)

    async def _notify(self) -> None:
        try:
            while self._to_notify:
                names, self._to_notify = sorted(self._to_notify), set()
                with contextlib.suppress(OnefoldError):
                    await self._notifying.run(lambda wire, _, names=names: _send(wire, names))  # type: ignore[misc]
                await _machine.sleep(_NOTIFY_SECONDS)
        finally:
            self._notifier = None

    async def _listen(self, connector: Connector) -> None:
        """Hear notifications for as long as the store is open, through however many connections."""
        backoff = Backoff(_FOR_EVER)
        while True:
            try:
                wire = await connector.connect("listen")
                async with wire.connection:
                    await wire.rows("listen")
                    backoff = Backoff(_FOR_EVER)
                    # What was rung before anybody listened is not known: let everybody look.
                    self._ring_here({name for wanted in self._waiting.values() for name in wanted})
                    async for heard in wire.connection.notifies():
                        # Our own rings were heard here before they were sent.
                        if heard.pid != self._notifying.backend_pid:
                            self._hear(heard.payload)
            except psycopg.Error:
                await backoff.pause()

    def _hear(self, payload: str) -> None:
        if payload.startswith(_BACK):
            self._look_back()
        self._ring_here({payload.removeprefix(_BACK)})

    async def close(self) -> None:
        """Stop listening, and send what is still to be sent."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
            self._listener = None
        if self._notifier is not None:
            notifier = self._notifier
            await asyncio.wait([notifier], timeout=_CLOSE_SECONDS)
            notifier.cancel()


async def _send(wire: Wire, names: list[str]) -> None:
    await wire.rows("notify", {"queues": texts(names)})
