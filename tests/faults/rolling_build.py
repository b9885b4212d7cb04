"""Two builds of one application: with ``BUILD=new`` each task and workflow has one more argument, with a default.

Run as a program it sends: ``python rolling_build.py FIRST LAST``.
"""

from __future__ import annotations

import asyncio
import os
import sys

from onefold import App, Context, Run
from onefold.worker import refusals as refusing

NEW = os.environ.get("BUILD") == "new"
#: The first and the longest wait of a message for a newer worker, shortened to fit a deployment of a few seconds.
refusing.UNSUPPORTED_SECONDS, refusing.UNSUPPORTED_SECONDS_MAX = 0.2, 0.4

app = App()
_INSERT = "INSERT INTO ledger (kind, number) VALUES (?, ?)"
if not os.environ.get("ONEFOLD_URL", "").startswith("sqlite"):
    _INSERT = "INSERT INTO ledger (kind, number) VALUES (%s, %s)"


async def _step(ctx: Context, number: int) -> int:
    await ctx.execute(_INSERT, "step", number)
    return number


if NEW:

    @app.task(key="{number}")
    async def plain(ctx: Context, number: int, extra: str = "x") -> None:
        await ctx.execute(_INSERT, "plain", number)

    @app.task(key="{number}")
    async def said(ctx: Context, number: int, extra: str = "x") -> None:
        await ctx.execute(_INSERT, "said", number)

    @app.workflow(key="{number}")
    async def flow(run: Run, number: int, extra: str = "x") -> None:
        await run.step(_step, number)
        await run.sleep(0.3)
        # Equal to the default, so it is the same call to a worker of the older build, which may continue this run.
        # Another value would be changed code, and needs another version= of the workflow.
        await run.child(plain, 100_000 + number, extra="x")

else:

    @app.task(key="{number}", name="plain")
    async def old_plain(ctx: Context, number: int) -> None:
        await ctx.execute(_INSERT, "plain", number)

    @app.task(key="{number}", name="said")
    async def old_said(ctx: Context, number: int) -> None:
        await ctx.execute(_INSERT, "said", number)

    @app.workflow(key="{number}", name="flow")
    async def old_flow(run: Run, number: int) -> None:
        await run.step(_step, number)
        await run.sleep(0.3)
        await run.child(app.tasks["plain"], 100_000 + number)


async def send(first: int, last: int) -> None:
    """Send one message of each kind for each number; only the newer build knows the argument ``said``."""
    async with app:
        for number in range(first, last):
            await app.tasks["plain"].send(number)
            await app.tasks["flow"].send(number)
            if NEW:
                await app.tasks["said"].send(number, "y")


if __name__ == "__main__":
    asyncio.run(send(*map(int, sys.argv[1:])))
