"""The app of ``isolated_tasks`` on one store, for the tests of isolated handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from isolated_tasks import app

from onefold import Receipt
from onefold.store import Query, Record
from onefold.testing.clock import FakeClock

#: Processes are started and killed, on machines that may be busy.
SECONDS_MAX = 120


class Bench:
    """The app of ``isolated_tasks``, on one store."""

    def __init__(self, url: str) -> None:
        self.insert = f"INSERT INTO effect (name) VALUES ({'?' if url.startswith('sqlite') else '%s'})"
        clock = app.clock
        assert isinstance(clock, FakeClock)
        self.clock = clock

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        asyncio.run(self._within(scenario))

    async def _within(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await app.migrate()
            async with app:
                async with app.transaction() as tx:
                    await tx.execute("CREATE TABLE effect (name TEXT NOT NULL)")
                await scenario()

    async def work(self) -> int:
        return await app.work(until_idle=True, concurrency=2)

    async def record(self, receipt: Receipt[Any]) -> Record:
        return (await app.find(Query(ids=(receipt.id,))))[0]

    async def effects(self) -> list[str]:
        return [row[0] for row in await app.store.fetch("SELECT name FROM effect ORDER BY name")]

    async def children(self) -> list[Record]:
        return [one for one in await app.find(Query()) if one.envelope.message_type == "child"]


async def result_of(receipt: Receipt[Any]) -> Any:
    """Wait for a result in real time, because the clock of the app stands still."""
    while not (await app.find(Query(ids=(receipt.id,))))[0].state.ended:
        turn = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, turn.set)
        await turn.wait()
    return await receipt.result()
