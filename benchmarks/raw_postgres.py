"""The floor on PostgreSQL: hand-written SQL over psycopg that leases a batch and deletes it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import psycopg

from benchmarks.board import Tally
from benchmarks.contender import Job, Ready
from benchmarks.engines import insert_effect

CLAIM = 500
#: Handlers with a transaction of their own, as many at once as a worker of ours runs.
CONNECTIONS = 10
IDLE_SECONDS = 0.005

_SCHEMA = """
CREATE TABLE job (
    id bigserial PRIMARY KEY, state int NOT NULL DEFAULT 0, lease_until timestamptz, payload text
);
CREATE INDEX job_ready ON job (id) WHERE state = 0;
"""
_INSERT = "INSERT INTO job (payload) VALUES (%s)"
_COPY = "COPY job (payload) FROM STDIN"
_LEASE = """
UPDATE job SET state = 1, lease_until = now() + interval '60 s'
FROM (SELECT id FROM job WHERE state = 0 ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) due
WHERE job.id = due.id
RETURNING job.id, payload
"""
_DELETE = "DELETE FROM job WHERE id = %s"
_DELETE_MANY = "DELETE FROM job WHERE id = ANY(%s::bigint[])"


class RawPostgres:
    """One connection in one thread; only transactional handlers need more of them."""

    name = "raw"

    def __init__(self, *, transactional: bool = False) -> None:
        self.transactional = transactional

    async def setup(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(_SCHEMA)

    async def enqueue_one(self, job: Job) -> None:
        self._connection.execute(_INSERT, (json.dumps(job._asdict()),))

    async def enqueue_many(self, jobs: list[Job]) -> None:
        with self._connection.cursor() as cursor, cursor.copy(_COPY) as copy:
            for job in jobs:
                copy.write_row((json.dumps(job._asdict()),))

    async def left(self) -> int:
        row = self._connection.execute("SELECT count(*) FROM job").fetchone()
        assert row is not None
        return int(row[0])

    async def close(self) -> None:
        self._connection.close()

    async def drain(self, url: str, tally: Tally, ready: Ready) -> None:
        if self.transactional:
            await _drain_apart(url, tally, ready)
        else:
            await _drain_together(url, tally, ready)


async def _drain_together(url: str, tally: Tally, ready: Ready) -> None:
    connection = psycopg.connect(url, autocommit=True)
    ready()
    while True:
        rows = connection.execute(_LEASE, (CLAIM,)).fetchall()
        for _, payload in rows:
            json.loads(payload)
            tally.count()
        if rows:
            connection.execute(_DELETE_MANY, ([id_ for id_, _ in rows],))
        else:
            await asyncio.sleep(IDLE_SECONDS)


async def _drain_apart(url: str, tally: Tally, ready: Ready) -> None:
    """One commit per message, which holds the user's row and the end of the message."""
    claimer = await psycopg.AsyncConnection.connect(url, autocommit=True)
    connections = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in range(CONNECTIONS)]
    insert = insert_effect(url)
    ready()
    while True:
        rows = deque(await (await claimer.execute(_LEASE, (CLAIM,))).fetchall())
        if not rows:
            await asyncio.sleep(IDLE_SECONDS)
        await asyncio.gather(*(_run_apart(connection, rows, tally, insert) for connection in connections))


async def _run_apart(
    connection: psycopg.AsyncConnection[Any], rows: deque[tuple[Any, ...]], tally: Tally, insert: str
) -> None:
    while rows:
        id_, payload = rows.popleft()
        job = json.loads(payload)
        tally.count()
        async with connection.transaction():
            await connection.execute(insert, (job["seq"], job["to"]))
            await connection.execute(_DELETE, (id_,))
