"""Stage 7, handle: a lease while its handler runs, and whether the run was told to end.

A handler may swallow its cancellation, turn it into another error, or cancel itself.
So what counts is what the worker says on the lease it holds, not what comes out of the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from onefold.clock import Clock, give_way
from onefold.errors import LeaseLostError
from onefold.handling import refuse_strays
from onefold.progress import Pulse
from onefold.store import Lease
from onefold.work import Work


class Hold(Protocol):
    """A lease in a worker's hands."""

    @property
    def lease(self) -> Lease: ...

    @property
    def until(self) -> int:
        """When it runs out, on the steady clock."""
        ...

    @property
    def lost(self) -> bool:
        """Whether its run is to end: the worker says so, and then cancels it."""
        ...

    @property
    def runner(self) -> asyncio.Task[None] | None:
        """The task that runs it."""
        ...

    pulse: Pulse | None


def deadline_of(hold: Hold, clock: Clock) -> int:
    """Return when a lease runs out unless it is renewed, on the clock that people read."""
    return clock.now() + hold.until - clock.steady()


def is_cancelled(hold: Hold) -> bool:
    """Whether somebody has cancelled the run, be it the handler itself."""
    return hold.runner is not None and hold.runner.cancelling() > 0


def stopped_from_outside(error: BaseException) -> bool:
    """Tell a cancellation that came from outside from code that raised ``CancelledError`` by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def end(work: Work, holds: Sequence[Hold]) -> None:
    """Let nothing outlive a handler that has returned: neither its tasks nor a stop it may have swallowed."""
    await refuse_strays(work)
    if is_cancelled(holds[0]) and await _was_stopped(holds):
        raise asyncio.CancelledError


async def raise_if_stopped(holds: Sequence[Hold], error: BaseException) -> None:
    """Raise when there is nothing to be decided about a message: its run was stopped, or somebody else has it."""
    if is_cancelled(holds[0]) and await _was_stopped(holds):
        # Whatever the handler made of it: it was told to stop, and has not failed.
        raise asyncio.CancelledError from error
    if isinstance(error, LeaseLostError):
        raise error


async def _was_stopped(holds: Sequence[Hold]) -> bool:
    """Whether it was the worker who has cancelled this run; a handler that has cancelled itself has only failed."""
    task = holds[0].runner
    if task is not None and not any(hold.lost for hold in holds):
        # What is left of it would strike the worker's own code, or the next message.
        with suppress(asyncio.CancelledError):
            await give_way()
        while task.cancelling():
            task.uncancel()
    return any(hold.lost for hold in holds)
