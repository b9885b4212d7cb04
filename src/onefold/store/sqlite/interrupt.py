"""Which of the caller's statements a connection runs, and stopping that one and no other.

SQLite interrupts whatever a connection runs at that moment, so the beginning and the end of each statement that may be
stopped are told here, under a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Lock

#: A statement that is to stop is interrupted again after this long: it may have been about to begin the first time.
_AGAIN_SECONDS = 0.05


class Running:
    """The statement of a caller that one connection runs, if any."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._names: tuple[object, ...] = ()
        self._lock = Lock()

    def start(self, is_given_up: Callable[[], bool], *names: object) -> bool:
        """Begin a statement that is known by these names; False if its caller has given up waiting for it."""
        with self._lock:
            if is_given_up():
                return False
            self._names = names
            return True

    def finish(self) -> None:
        """The statement is over."""
        with self._lock:
            self._names = ()

    def stop(self, name: object) -> None:
        """Interrupt the statement of this name until it is over; on the event loop, while another thread runs it.

        When this returns, a statement that was given up has begun, or never will.
        """
        with self._lock:
            if not any(one is name for one in self._names):
                return
            self._interrupt()
        asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self.stop, name)
