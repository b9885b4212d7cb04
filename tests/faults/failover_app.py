"""An app with every kind of work, for workers in their own processes; each effect is a row of ``ledger``."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from onefold import App, Context, Run

app = App()

TABLE = "CREATE TABLE ledger (id bigserial, kind text NOT NULL, number bigint NOT NULL, line bigint NOT NULL)"
INSERT = "INSERT INTO ledger (kind, number, line) VALUES (%s, %s, %s)"


@app.task(key="{number}")
async def book(ctx: Context, number: int) -> None:
    """Write a row and send another message in the same commit."""
    await ctx.execute(INSERT, "book", number, 0)
    ctx.send(follow, number)


@app.task(key="{number}")
async def follow(ctx: Context, number: int) -> None:
    await ctx.execute(INSERT, "follow", number, 0)


@app.task(key="{number}")
async def order(ctx: Context, number: int) -> None:
    """Handle a message that was sent together with a row of the sender's own."""
    await ctx.execute(INSERT, "order", number, 0)


@app.task(key="{number}", max_running=3)
async def gated(ctx: Context, number: int) -> None:
    await asyncio.sleep(0.005)
    await ctx.execute(INSERT, "gated", number, 0)


@app.task(key="{number}", ordering_key="{line}")
async def lined(ctx: Context, number: int, line: int) -> None:
    await ctx.execute(INSERT, "lined", number, line)


async def first(ctx: Context, number: int) -> int:
    await ctx.execute(INSERT, "first", number, 0)
    return number


async def second(ctx: Context, number: int) -> int:
    await ctx.execute(INSERT, "second", number, 0)
    return number


@app.workflow(key="{number}")
async def flow(run: Run, number: int) -> int:
    done = await run.step(first, number)
    await run.sleep(0.2)
    return await run.step(second, done)


@app.recurring(every=timedelta(seconds=1), mode="rate", catchup="all")
async def tick(ctx: Context) -> None:
    assert ctx.scheduled_for is not None
    await ctx.execute(INSERT, "tick", int(ctx.scheduled_for.timestamp()), 0)
