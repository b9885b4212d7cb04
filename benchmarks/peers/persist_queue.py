"""persist-queue's SQLiteAckQueue.  It is made for one process, so only its sending is measured."""

from __future__ import annotations

from pathlib import Path

from persistqueue import SQLiteAckQueue

from benchmarks.board import Tally
from benchmarks.contender import Job, Mode, Ready


class PersistQueue:
    def __init__(self, url: str, mode: Mode) -> None:
        self._directory = Path(url.removeprefix("sqlite:///")).parent / "persist-queue"

    async def setup(self) -> None:
        self._queue = SQLiteAckQueue(str(self._directory), auto_commit=True, multithreading=False)

    async def enqueue_one(self, job: Job) -> None:
        self._queue.put(job._asdict())

    async def enqueue_many(self, jobs: list[Job]) -> None:
        for job in jobs:
            await self.enqueue_one(job)

    async def left(self) -> int:
        return int(self._queue.active_size())

    async def drain(self, tally: Tally, ready: Ready) -> None:
        raise NotImplementedError("the queue keeps its state in memory, so a second process runs messages twice")
