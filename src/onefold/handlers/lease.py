"""Stage 7, handle: a lease while its handler runs, and whether the worker stopped the run.

A handler may swallow its cancellation, turn it into another error, or cancel itself.
So ``Held.lost``, which only the worker sets, decides whether a run was stopped, not the handler's result or error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from onefold.clock import Clock, give_way
from onefold.errors import LeaseLostError
from onefold.handlers.progress import Pulse
from onefold.store import Lease


@dataclass(slots=True, eq=False)
class Held:
    """A lease that the worker holds, from the claim until it is settled or lost."""

    lease: Lease
    #: When it runs out, on the steady clock; counted from before the claim was sent, so never later than in the store.
    until: int
    runner: asyncio.Task[None] | None = None
    #: The place in shared memory where the supervisor reads that the run has begun; None without a supervisor.
    slot: int | None = None
    #: The run must stop: the lease ran out, the store says that another worker has it, or the worker ends.
    lost: bool = False
    taken_over: bool = False
    #: Its outcome is known and is being written into the store.
    settling: bool = False
    #: The progress and signs of life of its handler; None until the first.
    pulse: Pulse | None = None

    def get_pulse(self) -> Pulse:
        """Return its pulse; made at the first use, because most runs report nothing."""
        if self.pulse is None:
            self.pulse = Pulse()
        return self.pulse

    def lose(self) -> None:
        """Mark it as lost, and cancel its handler if that runs."""
        self.lost = True
        if self.runner is not None:
            self.runner.cancel()


def deadline_of(held: Held, clock: Clock) -> int:
    """Return when a lease runs out unless it is renewed, as wall-clock time."""
    return clock.now() + held.until - clock.steady()


def is_cancelled(held: Held) -> bool:
    """Whether the run's task was cancelled, by the worker or by the handler itself."""
    return held.runner is not None and held.runner.cancelling() > 0


def stopped_from_outside(error: BaseException) -> bool:
    """Whether an error is a cancellation of the running task, and not a ``CancelledError`` that its code raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def raise_if_stopped(held_leases: Sequence[Held], error: BaseException) -> None:
    """Raise when this worker must not decide about a message: it stopped the run, or another worker has the message."""
    if is_cancelled(held_leases[0]) and await was_stopped(held_leases):
        # A stopped run has not failed, whatever error the handler made of its cancellation.
        raise asyncio.CancelledError from error
    if isinstance(error, LeaseLostError):
        raise error


async def was_stopped(held_leases: Sequence[Held]) -> bool:
    """Whether the worker cancelled this run; a handler that cancelled itself has only failed."""
    task = held_leases[0].runner
    if task is not None and not any(held.lost for held in held_leases):
        # A cancellation that is still pending would be raised in the worker's own code, or in the next message's run.
        with suppress(asyncio.CancelledError):
            await give_way()
        while task.cancelling():
            task.uncancel()
    return any(held.lost for held in held_leases)
