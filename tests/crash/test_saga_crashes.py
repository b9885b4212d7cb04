"""Sagas killed before and after every statement: each step and each undo takes effect once, on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest
from crash_scenarios import Place
from test_workflow_crashes import LATER, _migrated, judge

from onefold import App, Context, Receipt, Reject, Run, SagaStatus, State
from onefold.store import Query
from onefold.testing import HastyClock, drain
from onefold.testing.crash import Point, crash_points


@pytest.fixture
def place(database: Place) -> Place:
    asyncio.run(_migrated(database))
    return database


class Booking:
    """A saga of three steps: the second is a command, and the third fails after it wrote a row."""

    def __init__(self, place: Place, key: str, *, trace: object = None, later: timedelta = timedelta()) -> None:
        self.place = place
        self.key = key
        self.clock = HastyClock()
        self.clock.advance(later)
        self.app = App(store=place.store(self.clock, trace), clock=self.clock)
        insert = place.sql("INSERT INTO effect VALUES (?, ?, ?)")

        async def write(ctx: Context, name: str, key: str) -> None:
            await ctx.execute(insert, f"{name}:{key}", ctx.message.id, ctx.fence)

        async def release(ctx: Context, key: str) -> None:
            await write(ctx, "release", key)

        @self.app.step(undo=release)
        async def hold(ctx: Context, key: str) -> None:
            await write(ctx, "hold", key)

        @self.app.task
        async def refund(ctx: Context, key: str) -> None:
            await write(ctx, "refund", key)

        @self.app.step(undo=refund, timeout=None)
        @self.app.task
        async def pay(ctx: Context, key: str) -> None:
            await write(ctx, "pay", key)

        async def dismiss(ctx: Context, key: str) -> None:
            await write(ctx, "dismiss", key)

        @self.app.step(undo=dismiss)
        async def hire(ctx: Context, key: str) -> None:
            await write(ctx, "hire", key)
            raise Reject("it wrote, and that was rolled back")

        @self.app.saga(key="{key}", subject="{key}")
        async def book(run: Run, key: str) -> None:
            await run.step(hold, key)
            await run.step(pay, key)
            await run.step(hire, key)

        self.book = book

    async def start(self) -> Receipt[None]:
        return await self.book.send(self.key)

    async def wrong(self, run_id: str) -> str | None:
        """Return the difference from a run without a crash, or None."""
        found = await self.app.find(Query(correlation_id=run_id))
        states = {record.envelope.message_type: record.state for record in found}
        if states != {"book": State.DEAD, "pay": State.DONE, "refund": State.DONE} or len(found) != 3:
            return f"{found}"
        saga = await self.app.saga_status(run_id)
        if saga is None or saga.status is not SagaStatus.COMPENSATED:
            return f"{saga}"
        statement = self.place.sql("SELECT key FROM effect WHERE key LIKE ? ORDER BY key")
        rows = [row[0] for row in await self.app.store.fetch(statement, [f"%:{self.key}"])]
        if rows != [f"{name}:{self.key}" for name in ("dismiss", "hold", "pay", "refund", "release")]:
            return f"effects: {rows}"
        lines = [f"{step.name} {step.kind.name}" for step in await self.app.journal(run_id)]
        return None if lines == JOURNAL else f"journal: {lines}"


JOURNAL = [
    "hold#1 BEGUN",
    "hold#1 RESULT",
    "pay#1 BEGUN",
    "pay#1 SENT",
    "pay#1 CHILD",
    "hire#1 BEGUN",
    "hire#1 FAILED",
    "undo#0 UNDO",
    "undo:hire#1 UNDOING",
    "undo:hire#1 RESULT",
    "undo:pay#1 UNDOING",
    "undo:pay#1 SENT",
    "undo:pay#1 CHILD",
    "undo:hold#1 UNDOING",
    "undo:hold#1 RESULT",
]


def test_a_saga_killed_anywhere_is_undone_once(place: Place, record_property: Callable[[str, object], None]) -> None:
    """Fault 37, I6, I13: any worker continues the steps or the undos of the dead one."""

    def key(point: Point) -> str:
        return f"saga-{point.number}"

    async def act(point: Point) -> None:
        point.armed = False
        booking = Booking(place, key(point), trace=point.trace)
        async with booking.app as app:
            point.armed = True
            await booking.start()
            await app.work(until_idle=True)
            point.armed = False

    async def recover(point: Point) -> object:
        booking = Booking(place, key(point), later=LATER)
        async with booking.app as app:
            receipt = await booking.start()
            await drain(app)
            return await booking.wrong(receipt.id)

    judge(crash_points(act, recover), place, record_property, least=50)
