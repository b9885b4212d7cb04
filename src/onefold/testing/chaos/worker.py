"""A worker process of a chaos run, around ``app.work()``: ``python -m onefold.testing.chaos.worker ORDERS``."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from onefold.testing.chaos.app import make_tasks
from onefold.testing.chaos.process import Orders, on_stop, opened, read_orders, run

#: Seconds that a stopping worker gives its handlers to finish.
STOP_SECONDS = 5.0


async def work(orders: Orders) -> None:
    """Work until told to stop, even if that happens before the work has begun."""
    app, stopping = make_tasks(orders.url).app, asyncio.Event()
    on_stop(stopping.set)
    async with opened(app, orders):
        working = asyncio.create_task(
            app.work(name=orders.name, lease=orders.lease_seconds, stop_after=STOP_SECONDS), name="work"
        )
        told = asyncio.create_task(stopping.wait())
        await asyncio.wait((working, told), return_when=asyncio.FIRST_COMPLETED)
        app.stop_working()
        told.cancel()
        with suppress(asyncio.CancelledError):
            await told
        await working


if __name__ == "__main__":
    given = read_orders()
    run(work(given), given.loop)
