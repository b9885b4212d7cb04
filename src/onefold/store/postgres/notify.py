"""Waking workers: at once in this process, through LISTEN and NOTIFY in others.

A NOTIFY inside the sender's transaction would make all commits of the server take turns, so it is one of its own: sent
right behind a put, on the same connection and without waiting, or else on another one; and not more often than once in
a few milliseconds.
All of it is a hint: a lost one costs at most one polling interval.

Any role that may connect to the database may also notify, with any text and as often as it likes.  So only the names of
queues that were waited for here are kept, they wake no more often than once in a few milliseconds, and the event loop
has its turn between many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence

import psycopg

from onefold.clock import MICROSECONDS, SystemClock, give_way
from onefold.current import outside
from onefold.errors import OnefoldError
from onefold.store.postgres.wire.arrays import texts
from onefold.store.postgres.wire.connect import Connector
from onefold.store.postgres.wire.reconnect import Backoff, PersistentWire
from onefold.store.postgres.wire.wire import Named, Row, Wire

#: Others are woken no more often than this, the first time at once.
_NOTIFY_SECONDS = 0.005
#: A notification that could not go at once waits this much longer for a put that takes it along.
_TAKE_ALONG_SECONDS = 0.005
#: Before the name of a queue in which something came back; no name begins with it.
_BACK = "<"
#: Notifications that are read before the event loop has its turn: a flood of them must not keep it from the rest.
_READ_TOGETHER = 100
#: Queues that rang here and were not waited for since; beyond so many, only those that ever were are kept.
_RUNG_MAX = 1_000
#: When the store closes, the last notification may take this long.
_CLOSE_SECONDS = 1.0
#: While the server cannot be reached the listener keeps trying, for as long as the store is open.
_FOR_EVER = float(10**9)

_machine = SystemClock()


class Notifier:
    """The doorbells of all queues."""

    def __init__(
        self,
        notifying: PersistentWire,
        putting: PersistentWire,
        listening: Connector | None,
        look_back: Callable[[], None],
    ) -> None:
        self._notifying = notifying
        self._putting = putting
        self._listening = listening
        #: Called when a message came back that was due long ago, where claims do not begin to look.
        self._look_back = look_back
        self._rung: set[str] = set()
        #: The queues that were ever waited for here, which are those of this process's workers.
        self._known: set[str] = set()
        #: The queues heard of since workers were last woken, and whether a message came back in one of them.
        self._heard: set[str] = set()
        self._heard_back = False
        self._pause: asyncio.TimerHandle | None = None
        self._waiting: dict[asyncio.Future[None], frozenset[str]] = {}
        self._to_notify: set[str] = set()
        self._not_before = 0
        self._notifier: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Return when one of the queues is rung, or was since the last time, or after ``timeout`` seconds."""
        if self._listening is not None and self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen(self._listening), context=outside())
        wanted = frozenset(queues)
        self._known |= wanted
        if not wanted & self._rung:
            rung: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[rung] = wanted
            try:
                await asyncio.wait([rung], timeout=timeout)
            finally:
                del self._waiting[rung]
        self._rung -= wanted

    def ring(self, queues: Iterable[str], *, back: bool = False) -> None:
        """Wake all that wait for these queues, in this process at once and in others soon.

        ``back`` says that something came back which was due long ago.
        """
        names = set(queues)
        if not names:
            return
        if back:
            self._look_back()
        self.ring_here(names)
        self.ring_elsewhere({_BACK + name for name in names} if back else names)

    def ring_elsewhere(self, names: Iterable[str]) -> None:
        """Wake workers that wait in other processes."""
        self._to_notify |= set(names)
        if self._to_notify and self._notifier is None:
            self._notifier = asyncio.get_running_loop().create_task(self._notify(), context=outside())

    def take_along(self, names: Iterable[str]) -> Named | None:
        """Return a statement that wakes others, to be sent behind a put; None when that was done just now."""
        now = _machine.steady()
        together = self._to_notify.union(names)
        if not together or now < self._not_before:
            return None
        self._to_notify.clear()
        self._not_before = now + round(_NOTIFY_SECONDS * MICROSECONDS)
        return "notify", {"queues": texts(sorted(together))}

    def ring_here(self, names: set[str]) -> None:
        """Wake workers that wait in this process."""
        self._rung |= names if len(self._rung) < _RUNG_MAX else names & self._known
        for future, wanted in self._waiting.items():
            if not future.done() and wanted & names:
                future.set_result(None)

    async def _notify(self) -> None:
        try:
            while self._to_notify:
                if notification := self.take_along(()):
                    with contextlib.suppress(OnefoldError):
                        await self._notifying.run(_sending(notification))
                if self._to_notify:
                    await _machine.sleep(_NOTIFY_SECONDS + _TAKE_ALONG_SECONDS)
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
                    # Notifications from before this moment were missed: let all that wait look.
                    self.ring_here({name for wanted in self._waiting.values() for name in wanted})
                    number = 0
                    async for heard in wire.connection.notifies():
                        # Our own rings were heard here before they were sent.
                        if heard.pid not in (self._notifying.backend_pid, self._putting.backend_pid):
                            self._hear(heard.payload)
                        number += 1
                        if number % _READ_TOGETHER == 0:
                            await give_way()
            except psycopg.Error:
                await backoff.pause()

    def _hear(self, payload: str) -> None:
        """Ring what others say came to one of our queues, the first time at once."""
        name = payload.removeprefix(_BACK)
        if name not in self._known:
            return
        self._heard.add(name)
        self._heard_back |= payload.startswith(_BACK)
        if self._pause is None:
            self._ring_heard()

    def _ring_heard(self) -> None:
        self._pause = None
        if not self._heard:
            return
        if self._heard_back:
            self._look_back()
        self.ring_here(self._heard)
        self._heard, self._heard_back = set(), False
        self._pause = asyncio.get_running_loop().call_later(_NOTIFY_SECONDS, self._ring_heard)

    async def close(self) -> None:
        """Stop listening, and send what is still to be sent."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
            self._listener = None
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._notifier is not None:
            notifier = self._notifier
            await asyncio.wait([notifier], timeout=_CLOSE_SECONDS)
            notifier.cancel()


def _sending(notification: Named) -> Callable[[Wire, bool], Awaitable[list[Row]]]:
    return lambda wire, _: wire.rows(*notification)
