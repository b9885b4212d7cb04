"""The messages and handlers of ``scripts/soak.py``; every effect is a row of a ledger, so that it can be counted."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from datetime import timedelta

from onefold import App, Context, RetryPolicy, Run, SyncContext

app = App()

#: The workers import this module with the store's URL set.
_mark = "?" if os.environ.get("ONEFOLD_URL", "").startswith("sqlite") else "%s"
_insert = f"INSERT INTO ledger (kind, number) VALUES ({_mark}, {_mark})"
_patient = RetryPolicy(max_attempts=20, base=0.2, cap=2.0)

#: The chance that an isolated handler kills its own process before it has written anything.
_DEATH_CHANCE = 0.1

#: The effects of one order, one parcel and one trip, each exactly once.
ORDER_EFFECTS = ("order", "receipt")
PARCEL_EFFECTS = ("parcel",)
TRIP_EFFECTS = ("begun", "stamp", "over")


@app.task(key="{number}", retry=_patient)
async def order(ctx: Context, number: int) -> None:
    """Write a row and send one message; every tenth fails at first, every seventh is slow."""
    if number % 7 == 0:
        await asyncio.sleep(0.05)
    if number % 10 == 0 and ctx.attempt == 1:
        raise RuntimeError("planned")
    await ctx.execute(_insert, "order", number)
    ctx.send(receipt, number)


@app.task(key="{number}", retry=_patient)
async def receipt(ctx: Context, number: int) -> None:
    """Write the second row."""
    await ctx.execute(_insert, "receipt", number)


@app.task(key="{number}", retry=_patient, isolate=True)
def parcel(ctx: SyncContext, number: int) -> None:
    """Write a row in a process of its own, which kills itself now and then."""
    if random.random() < _DEATH_CHANCE:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.execute(_insert, "parcel", number)


@app.task(retry=_patient)
async def stamp(ctx: Context, number: int) -> int:
    """Write the row of a trip's child."""
    await ctx.execute(_insert, "stamp", number)
    return number


async def book(ctx: Context, kind: str, number: int) -> None:
    """Write a row of a trip, in one commit with the record of the step."""
    await ctx.execute(_insert, kind, number)


@app.workflow(key="{number}", retry=_patient)
async def trip(run: Run, number: int) -> None:
    """Write, sleep, wait for a signal and for a child, write again."""
    await run.options(retry=_patient).step(book, "begun", number)
    await run.sleep(timedelta(seconds=number % 3))
    if await run.signal("go", type=int) + await run.child(stamp, number) != 2 * number:
        raise RuntimeError("the signal or the child of another trip")
    await run.options(retry=_patient).step(book, "over", number)
