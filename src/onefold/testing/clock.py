"""A clock that a test controls: time passes when the test says so."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from onefold.clock import MICROSECONDS, give_way, to_datetime, to_instant

_START = to_instant(datetime(2030, 1, 1, tzinfo=UTC))


class FakeClock:
    """A clock that stands still until ``advance`` is called, which wakes the sleepers that are due.

    ``jump`` sets the wall clock without time passing, as an administrator or a time server would.
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._now = _START if start is None else to_instant(start)
        self._steady = MICROSECONDS
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._hurried = 0.0
        self._may_advance = True
        self._count = 0

    def now(self) -> int:
        return self._now

    def steady(self) -> int:
        return self._steady

    @property
    def moment(self) -> datetime:
        """The wall clock's time as a ``datetime``."""
        return to_datetime(self._now)

    async def sleep(self, seconds: float) -> None:
        if seconds <= self._hurried:
            self.advance(seconds if self._may_advance else 0.0)
            await give_way()  # other tasks run, as in any sleep
            return
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self._steady + round(seconds * MICROSECONDS), self._count, future))
        await future

    @contextmanager
    def hurry(self, seconds: float, *, advance: bool = True) -> Iterator[None]:
        """Inside the block, end sleeps of at most ``seconds`` at once.

        Time advances by the length of the sleep, or stands still with ``advance=False``.
        """
        before = self._hurried, self._may_advance
        self._hurried, self._may_advance = seconds, advance
        try:
            yield
        finally:
            self._hurried, self._may_advance = before

    def advance(self, duration: timedelta | float) -> None:
        """Advance both clocks, and wake the sleepers that are due."""
        self.stall(duration)
        while self._sleepers and self._sleepers[0][0] <= self._steady:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)

    def stall(self, duration: timedelta | float) -> None:
        """Advance both clocks without waking sleepers, as when the whole process is stopped for a while."""
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        self._now += round(seconds * MICROSECONDS)
        self._steady += round(seconds * MICROSECONDS)

    def jump(self, duration: timedelta | float) -> None:
        """Set the wall clock forward, or back with a negative duration; no time passes."""
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        self._now += round(seconds * MICROSECONDS)
