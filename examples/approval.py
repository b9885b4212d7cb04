"""An approval that takes a week, in a second: ``python examples/approval.py``.

Three employees hand in expenses, and each request waits for a decision.  After three days the approver is reminded, and
after seven another approver is asked.  Waiting requests hold no worker, and on the second day all processes are gone.
The clock is the example's own, so that a week passes while you watch.  ``ONEFOLD_URL`` names another store.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from onefold import App, Context, Run, SignalTimeoutError, Task
from onefold.cli.tree import draw, waits_of
from onefold.testing import FakeClock

REMIND_AFTER = timedelta(days=3)
GIVE_UP_AFTER = timedelta(days=4)
REQUESTS = (("ada", 120), ("ben", 45), ("cem", 900))
EXPECTED = ["ada gets 120 €", "ben gets nothing", "cem gets 900 €"]


def declare(url: str, clock: FakeClock) -> tuple[App, Task[[str, int], str]]:
    """Declare the workflow on a store; every process does the same, at import."""
    app = App(url, clock=clock)

    @app.task
    async def mail(to: str, text: str) -> None:
        """Stands for a mail server."""

    async def ask(ctx: Context, approver: str, who: str, euros: int) -> None:
        ctx.send(mail, approver, f"{who} asks for {euros} €")  # stored once, with the record of this step

    async def remind(ctx: Context, approver: str, who: str) -> None:
        ctx.send(mail, approver, f"{who} is still waiting")

    @app.workflow(key="{who}:{euros}", subject="expense:{who}")
    async def approve(run: Run, who: str, euros: int) -> str:
        await run.step(ask, "grace", who, euros)
        try:
            granted = await run.signal("decision", timeout=REMIND_AFTER, type=bool)
        except SignalTimeoutError:
            await run.step(remind, "grace", who)
            try:
                granted = await run.signal("decision", timeout=GIVE_UP_AFTER, type=bool)
            except SignalTimeoutError:
                await run.step(ask, "the board", who, euros)
                granted = await run.signal("decision", type=bool)
        return f"{who} gets {euros} €" if granted else f"{who} gets nothing"

    return app, approve


async def play(url: str, console: Console) -> list[Any]:
    """Let a week pass and return the decisions about the requests."""
    clock = FakeClock()
    app, approve = declare(url, clock)
    await app.migrate()
    async with app:
        ada, ben, cem = [(await approve.send(who, euros)).id for who, euros in REQUESTS]
        await app.work(until_idle=True)
        clock.advance(timedelta(days=1))
        console.print("day 1: ada's request is granted, by two clicks that are one")
        for _ in range(2):
            await app.signal(ada, "decision", True, id="click-1")
        await app.work(until_idle=True)
    console.print("day 2: every process is gone, and nothing is lost with them")
    app, approve = declare(url, clock)
    async with app:
        clock.advance(timedelta(days=2))
        await app.work(until_idle=True)
        console.print("day 3: grace is reminded, and refuses ben's")
        await app.signal(ben, "decision", False)
        await app.work(until_idle=True)
        clock.advance(timedelta(days=4))
        await app.work(until_idle=True)
        console.print("day 7: nobody has answered cem; this is his request:\n")
        await show(app, cem, clock, console)
        await app.signal(cem, "decision", True)
        await app.work(until_idle=True)
        # Sending a request again only returns its receipt, with the result of the first send.
        return [await (await approve.send(who, euros)).result() for who, euros in REQUESTS]


async def show(app: App, run_id: str, clock: FakeClock, console: Console) -> None:
    """Draw one request as ``onefold runs show`` does."""
    request = await app.chronicle(run_id)
    assert request is not None
    console.print(draw(request, clock.moment))
    for wait in waits_of(request, clock.moment):
        console.print(f"waits for {wait}\n", style="yellow")


def main() -> int:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="onefold-approval-") as directory:
        url = os.environ.get("ONEFOLD_URL") or f"sqlite:///{Path(directory) / 'expenses.db'}"
        ended = asyncio.run(play(url, console))
    for one in ended:
        console.print(f"[green]{one}[/]")
    return 0 if ended == EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
