"""pgqueuer over asyncpg: batches of 1,000, completions written in batches too, woken by LISTEN/NOTIFY."""

from __future__ import annotations

import json

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job as Claimed
from pgqueuer.queries import Queries

from benchmarks.board import Tally
from benchmarks.contender import Job, Mode, Ready

_BATCH = 1_000
_POOL = 10
_NAME = "notify"


class Pgqueuer:
    def __init__(self, url: str, mode: Mode) -> None:
        self._url = url

    async def setup(self) -> None:
        self._connection = await asyncpg.connect(self._url)
        self._queries = Queries(AsyncpgDriver(self._connection))
        await self._queries.install()

    async def enqueue_one(self, job: Job) -> None:
        await self._queries.enqueue(_NAME, _encode(job))

    async def enqueue_many(self, jobs: list[Job]) -> None:
        await self._queries.enqueue([_NAME] * len(jobs), [_encode(job) for job in jobs], [0] * len(jobs))

    async def left(self) -> int:
        return int(await self._connection.fetchval("SELECT count(*) FROM pgqueuer"))

    async def drain(self, tally: Tally, ready: Ready) -> None:
        pool = await asyncpg.create_pool(self._url, min_size=2, max_size=_POOL)
        worker = PgQueuer(AsyncpgPoolDriver(pool))

        @worker.entrypoint(_NAME)
        async def notify(claimed: Claimed) -> None:
            assert claimed.payload is not None
            job = json.loads(claimed.payload)
            tally.count(job["seq"], job["t0"])

        ready()
        await worker.run(batch_size=_BATCH)


def _encode(job: Job) -> bytes:
    return json.dumps(job._asdict()).encode()
