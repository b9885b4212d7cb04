"""Stage 6, lease: a thread renews leases while a handler blocks the event loop.

The event loop renews every third of a lease.  A handler that blocks the loop, with ``time.sleep`` or a long
computation, blocks that too, and another worker would take over and run the same messages.  So a thread renews the
leases that the loop is late with, through a store of its own on a loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, SystemClock
from onefold.errors import StoreError
from onefold.handlers.lease import Held
from onefold.store import HandBack, Store

logger = logging.getLogger("onefold")

#: A lease that was not renewed for this part of its length is late: the event loop renews every third.  The rest of it
#: is for opening the store and for the answer.
_LATE_AFTER = 0.4
#: After a failure the store is tried again after this part of a lease, so several times before it ends.
_AGAIN_AFTER = 0.1
#: A stop waits this long for the store to close; then the thread is left behind, and ends with the process.
_STOP_SECONDS = 5.0


class ThreadRenewer:
    """Renews leases in ``held`` that the event loop is late with.

    It opens its store when the first lease is late, so a worker without blocking handlers has no second connection.
    When the event loop has not renewed for a whole lease, messages that no handler has begun are handed back.
    No lease is marked as lost here: the event loop finds that out when it moves again.
    """

    def __init__(self, store: Store, clock: Clock, held: Mapping[str, Held], lease_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._held = held
        self._lease_micros = round(lease_seconds * MICROSECONDS)
        self._lease_seconds = lease_seconds
        self._renewed_at = clock.steady()
        self._begun = False
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        #: The thread's loop and the task that runs on it, while there is one.
        self._renewing: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def start(self) -> None:
        """Start the thread once; without a second store or a real clock there is none."""
        if self._begun:
            return
        self._begun = True
        if not isinstance(self._clock, SystemClock) or self._store.twin() is None:
            return
        thread = threading.Thread(target=self._run, name="onefold-guard", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The system refuses a new thread; the event loop still renews.
            logger.warning("guard_not_started error=%s", error)
        else:
            self._thread = thread

    def renewed(self, at: int) -> None:
        """Note that the event loop renewed at this time of the steady clock."""
        self._renewed_at = at

    async def stop(self) -> None:
        """End the thread; return when it has closed its store, or after ``_STOP_SECONDS``."""
        if self._thread is None:
            return
        self._stopping.set()
        if self._renewing is not None:
            loop, task = self._renewing
            with suppress(RuntimeError):  # the loop was closed just now
                loop.call_soon_threadsafe(task.cancel)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._ended.wait()
            self._thread.join()  # it only returns from here

    # in the thread

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._seconds_until_late()):
                if self._late():
                    with suppress(asyncio.CancelledError):
                        asyncio.run(self._renew_late())
                    self._renewing = None
                    self._stopping.wait(self._lease_seconds * _AGAIN_AFTER)
        except Exception:
            logger.exception("guard_failed")
        finally:
            with suppress(RuntimeError):  # the event loop was closed without waiting for this thread
                self._loop.call_soon_threadsafe(self._ended.set)

    async def _renew_late(self) -> None:
        """Open a store and renew late leases with it, until cancelled or until the store fails."""
        self._renewing = (asyncio.get_running_loop(), _this_task())
        store = self._store.twin()
        if self._stopping.is_set() or store is None:
            return
        try:
            await store.open()
            while True:
                fetched = self._only_fetched() if self._is_stuck() else []
                if fetched:
                    await self._hand_back(store, fetched)
                if late := self._late():
                    await self._extend(store, late)
                await self._clock.sleep(max(self._seconds_until_late(), self._lease_seconds * _AGAIN_AFTER))
        except (StoreError, TimeoutError) as error:
            logger.warning("store_failed doing=guard error=%s", str(error) or "no answer in time")
        finally:
            async with asyncio.timeout(_STOP_SECONDS):
                await store.close()

    async def _hand_back(self, store: Store, fetched: list[Held]) -> None:
        # Marked first, so that the event loop begins none of them; if it does so at this moment, the fence decides.
        for one in fetched:
            one.lost = one.taken_over = True
        async with self._in_time():
            await store.settle([(one.lease, HandBack()) for one in fetched])
        logger.warning("event_loop_blocked handed_back=%d", len(fetched))

    def _in_time(self) -> asyncio.Timeout:
        return asyncio.timeout(self._lease_seconds / limits.RENEWALS_PER_LEASE)

    async def _extend(self, store: Store, late: list[Held]) -> None:
        asked_at = self._clock.steady()
        async with self._in_time():
            kept = await store.extend([one.lease for one in late], lease=self._lease_seconds)
        for one, mine in zip(late, kept, strict=True):
            if mine:
                one.until = max(one.until, asked_at + self._lease_micros)

    def _is_stuck(self) -> bool:
        """Whether the event loop has not renewed for a whole lease."""
        return self._clock.steady() - self._renewed_at > self._lease_micros

    def _only_fetched(self) -> list[Held]:
        return [one for one in self._mine() if one.runner is None and not one.settling]

    def _late(self) -> list[Held]:
        """Return the leases that should have been renewed by now."""
        renewed_before = self._clock.steady() - round(self._lease_micros * _LATE_AFTER)
        return [one for one in self._mine() if one.until - self._lease_micros <= renewed_before]

    def _mine(self) -> list[Held]:
        # The event loop changes the dictionary meanwhile; list() copies its values without releasing the interpreter.
        return [one for one in list(self._held.values()) if not one.lost]

    def _seconds_until_late(self) -> float:
        """Return the seconds until the first lease is late; leases claimed from now on are late after that."""
        soonest = min((one.until for one in self._mine()), default=self._clock.steady() + self._lease_micros)
        late_at = soonest - self._lease_micros + round(self._lease_micros * _LATE_AFTER)
        return min(max(0.0, (late_at - self._clock.steady()) / MICROSECONDS), self._lease_seconds * _LATE_AFTER)


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
