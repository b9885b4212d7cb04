"""onefold with the smallest possible messages, of which the bars of physical costs are told: one number, and a key."""

from __future__ import annotations

from typing import Any

from benchmarks.board import Tally
from benchmarks.contender import Ready
from benchmarks.engines import insert_effect
from benchmarks.ours import Count, Onefold, not_here
from onefold import App, Context, Run, Task, limits

#: Names of tasks: a plain one, one that writes a row, one at a gate of its own key, a workflow of so many steps.
PLAIN, ROW, GATED, STEPS = "plain", "row", "gated", "steps"
#: Handlers that a worker runs at once: with fewer, messages are settled in smaller commits.
CONCURRENCY = 50


class Small(Onefold):
    """Sends messages of one of the tasks."""

    def declare(self, count: Count | None) -> tuple[App, Task[Any, Any]]:
        return declare(self._url, count)

    async def drain(self, tally: Tally, ready: Ready) -> None:
        app, _ = self.declare(tally.count)
        async with app:
            ready()
            await app.work(concurrency=CONCURRENCY)

    async def put(self, *, task: str, numbers: list[int]) -> None:
        """Send one by one."""
        sender: Any = self._app.tasks[task]
        for number in numbers:
            await sender.send(number)

    async def put_at_once(self, *, task: str, first: int, messages: int) -> None:
        """Send in one call."""
        sender: Any = self._app.tasks[task]
        await self._app.send_many([sender.call(number) for number in range(first, first + messages)])


def declare(url: str, count: Count | None) -> tuple[App, Task[Any, Any]]:
    """Declare all of the tasks."""
    app, run, insert = App(url), count or not_here, insert_effect(url)

    async def plain(number: int) -> int:
        run(number, 0)
        return number

    async def row(ctx: Context, number: int) -> None:
        await ctx.execute(insert, number, "")
        run(number, 0)

    async def gated(number: int) -> int:
        run(number, 0)
        return number

    async def step(number: int) -> int:
        return number

    async def steps(run_: Run, number: int) -> int:
        for turn in range(number):
            await run_.step(step, turn)
        run(number, 0)
        return number

    task = app.task(name=PLAIN, key="{number}")(plain)
    app.task(name=ROW)(row)
    app.task(name=GATED, gate="{number}", max_running=limits.CONCURRENCY_MAX)(gated)
    app.workflow(name=STEPS)(steps)
    return app, task
