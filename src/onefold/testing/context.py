"""Call a handler directly in a unit test, with a context that commits nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from onefold import limits
from onefold.app import App
from onefold.clock import MICROSECONDS
from onefold.current import current
from onefold.errors import ConfigurationError
from onefold.handlers.context import Context
from onefold.store import Lease
from onefold.tasks.task import Task

P = ParamSpec("P")
R = TypeVar("R")


class _RolledBackError(Exception):
    """Ends the handler's transaction; the test never sees it."""


@asynccontextmanager
async def context(task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Context]:
    """Give a handler the context that a worker would, as if this call of it had been sent and claimed::

        async with context(charge, order_id=7, cents=5) as ctx:
            assert await charge.function(ctx, 7, 5) == "paid"
            assert [sent.message_type for sent in ctx.buffer.envelopes] == ["receipt"]

    The app must be open.  Rows that the handler wrote can be read inside the block and are rolled back at its end;
    messages that it sent stay in ``ctx.buffer`` and are never stored.  ``ctx.resources`` is what the app's lifespan
    yields, opened for the length of the block; ``app.override(resources=…)`` replaces it.
    Set ``ctx.attempt`` as needed.
    """
    app = task.sender
    if not isinstance(app, App):
        raise ConfigurationError(f"{task.name} belongs to no app, so there is no store to run it on")
    envelope, _ = app.prepare(task.call(*args, **kwargs), None, 0)
    now = app.clock.now()
    lease = Lease(envelope, fence=1, attempt=1, crashes=0, replay_count=0, claimed_at=now, worker="test")
    held_until = now + round(limits.LEASE * MICROSECONDS)
    async with app.open_resources() as resources:
        inside = Context(lease, app.store, app.prepare, resources, lambda: held_until, origin=str(app.origin))
        token = current.set(inside)
        try:
            yield inside
        finally:
            current.reset(token)
            await inside.roll_back(_RolledBackError())
