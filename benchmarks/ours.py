"""onefold itself, with everything it promises switched on and every setting at its default."""

from __future__ import annotations

from benchmarks.board import Tally
from benchmarks.contender import Job, Ready
from benchmarks.engines import insert_effect
from onefold import App, Context


class Onefold:
    """Sends keyed tasks; the sender and the worker make the same app."""

    name = "onefold"

    def __init__(self, *, transactional: bool = False) -> None:
        self.transactional = transactional

    async def setup(self, url: str) -> None:
        self._declare(url, None)
        await self._app.migrate()
        await self._app.open()

    def _declare(self, url: str, tally: Tally | None) -> None:
        """Declare the two handlers; only the one in use is registered, so that claims ask for one type."""
        self._app = App(url)
        insert = insert_effect(url)

        async def notify(seq: int, t0: int, to: str, template: str) -> None:
            assert tally is not None
            tally.count()

        async def record(ctx: Context, seq: int, t0: int, to: str, template: str) -> None:
            assert tally is not None
            tally.count()
            await ctx.execute(insert, seq, to)

        declare = self._app.task(key="{seq}")
        self._task = declare(record) if self.transactional else declare(notify)

    async def enqueue_one(self, job: Job) -> None:
        await self._task.send(*job)

    async def enqueue_many(self, jobs: list[Job]) -> None:
        await self._app.send_many(self._task.call(*job) for job in jobs)

    async def left(self) -> int:
        return sum(counts.scheduled + counts.leased for counts in (await self._app.count()).values())

    async def close(self) -> None:
        await self._app.close()

    async def drain(self, url: str, tally: Tally, ready: Ready) -> None:
        self._declare(url, tally)
        async with self._app:
            ready()
            await self._app.work()
