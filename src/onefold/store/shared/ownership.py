"""The process and event loop of a store: calls from elsewhere must not touch its connections."""

from __future__ import annotations

import asyncio
import os

from onefold.errors import StoreError


class Ownership:
    """The process and the event loop that a store was opened in: no other may use it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.loop = asyncio.get_running_loop()

    @property
    def abroad(self) -> bool:
        """Whether this is a child of the process that it was opened in."""
        return os.getpid() != self._process

    def refuse_strangers(self) -> None:
        """Raise for a caller that would use the connections from a second place."""
        # A child has no running loop before it starts one of its own.
        if asyncio._get_running_loop() is self.loop:
            return
        if self.abroad:
            raise StoreError("this store was opened before a fork; open one in the child process")
        raise StoreError("this store was opened in another event loop; use it there, or open one here")
