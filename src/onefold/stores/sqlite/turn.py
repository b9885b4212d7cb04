"""One transaction on the writer's connection, from its first call to its end, as its owner uses it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from onefold.clock import MICROSECONDS, SystemClock
from onefold.errors import StoreError, TransactionTooLongError
from onefold.stores.sqlite.round import Call, Ending, Part
from onefold.stores.sqlite.session import Session

if TYPE_CHECKING:
    from onefold.stores.sqlite.writer import Writer

Answer = TypeVar("Answer")

#: How long a turn is open is a matter of real time: a test that moves its clock does not make it longer.
_machine = SystemClock()


class Turn:
    """One transaction, from its first call to its end."""

    __slots__ = ("_over", "_writer", "calls", "ended_by", "part", "queued", "seconds", "since")

    def __init__(self, writer: Writer, seconds: float | None) -> None:
        self._writer = writer
        self._over = False
        #: How long it may be open, and why the writer has ended it.
        self.seconds = seconds
        self.ended_by: Exception | None = None
        self.calls: deque[Call] = deque()
        self.part = Part()
        self.queued = False
        self.since = 0

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Run a blocking call, whose first argument is the session, inside the transaction."""
        answer: Answer = await self._writer.ask(self, function, args, None)
        return answer

    async def execute(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Run the caller's own SQL, which is interrupted when its time or the wait for it is over."""
        answer: Answer = await self._writer.ask(self, function, args, None, is_callers=True)
        return answer

    async def conclude(self, function: Callable[..., None], *args: Any) -> None:
        """Run a last call and commit; rolled back if it raises, and over in any case."""
        self._over = True
        await self._writer.ask(self, function, args, Ending.COMMIT)

    async def end(self, ending: Ending) -> None:
        """Commit or roll back unless it is over; afterwards nothing of the transaction is open, even if this raises."""
        if self._over or (not self.queued and self.ended_by is None):
            return
        self._over = True
        if ending is Ending.ROLLBACK:
            if self._writer.closed or self.ended_by is not None or self._writer.forget(self):
                return
            self._writer.stop(self)
        await self._writer.ask(self, nothing, (), ending)

    def refuse(self, error: Exception) -> None:
        """End it before it has begun: every call gets this error."""
        self.ended_by = error
        for call in self.calls:
            if not call.future.done():
                call.future.set_exception(error)
        self.calls.clear()

    def owned_seconds(self) -> float:
        """Return for how long the owner has kept the lock; waiting does not count, nor do operations of ours."""
        since = self.part.owned_since
        return (_machine.steady() - since) / MICROSECONDS if since else 0.0


class Watchdog:
    """One timer for all turns: most of them are over long before they would be looked at."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> None:
        self._loop = loop
        self._look = look
        self._timer: asyncio.TimerHandle | None = None

    def look_in(self, seconds: float) -> None:
        """Look in so many seconds, or sooner."""
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._now)

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> None:
        self._timer = None
        self._look()


def too_long(seconds: float) -> TransactionTooLongError:
    """Return the error of a transaction that was open for more than its time."""
    return TransactionTooLongError(
        f"the transaction kept the only write lock of the file for more than {seconds:g} s and was rolled back; "
        "do slow work before its first statement"
    )


def given_up() -> StoreError:
    """Return the error of a transaction of which a statement was given up while it ran."""
    return StoreError(
        "the wait for a statement was given up while it ran, so it is not known what it did: its transaction cannot be "
        "committed any more"
    )


def closed() -> StoreError:
    """Return the error of all that is asked after the store was closed."""
    return StoreError("the store is closed; use it inside `async with app`")


def nothing(session: Session) -> None:
    """Commit what is there."""
