"""litequeue on SQLite, synchronous=NORMAL.  It has no worker: the loop here takes, runs and marks as done."""

from __future__ import annotations

import asyncio
import json

from litequeue import LiteQueue

from benchmarks.board import Tally
from benchmarks.contender import Job, Mode, Ready

_IDLE_SECONDS = 0.01


class Litequeue:
    def __init__(self, url: str, mode: Mode) -> None:
        self._path = url.removeprefix("sqlite:///") + ".litequeue"

    async def setup(self) -> None:
        self._queue = LiteQueue(self._path)

    async def enqueue_one(self, job: Job) -> None:
        self._queue.put(json.dumps(job._asdict()))

    async def enqueue_many(self, jobs: list[Job]) -> None:
        for job in jobs:
            await self.enqueue_one(job)

    async def left(self) -> int:
        return int(self._queue.qsize())

    async def drain(self, tally: Tally, ready: Ready) -> None:
        queue = LiteQueue(self._path)
        ready()
        while True:
            message = queue.pop()
            if message is None:
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            job = json.loads(message.data)
            tally.count(job["seq"], job["t0"])
            queue.done(message.message_id)
