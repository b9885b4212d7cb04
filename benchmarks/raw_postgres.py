"""The floor on PostgreSQL: hand-written SQL over psycopg that leases a batch and deletes it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg

from benchmarks.board import Tally
from benchmarks.contender import STEPS, Job, Mode, Ready
from benchmarks.engines import insert_effect

CLAIM = 500
#: Connections for handlers that commit by themselves: as many as a worker of ours runs at once.
CONNECTIONS = 10
IDLE_SECONDS = 0.005

_SCHEMA = """
CREATE TABLE job (
    id bigserial PRIMARY KEY, state int NOT NULL DEFAULT 0, lease_until timestamptz, payload text
);
CREATE INDEX job_ready ON job (id) WHERE state = 0;
CREATE TABLE step (job bigint, number int, output text, PRIMARY KEY (job, number));
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
_STEP = "INSERT INTO step (job, number, output) VALUES (%s, %s, 'ok')"
_DELETE_MANY = "DELETE FROM job WHERE id = ANY(%s::bigint[])"
_EFFECT = insert_effect("postgresql:")

Connection = psycopg.AsyncConnection[Any]
Run = Callable[[Connection, int, dict[str, Any], Tally], Awaitable[None]]


class RawPostgres:
    """One connection in one thread; only handlers that commit by themselves need more."""

    def __init__(self, url: str, mode: Mode) -> None:
        self._url = url
        self._mode = mode

    async def setup(self) -> None:
        self._connection = psycopg.connect(self._url, autocommit=True)
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

    async def drain(self, tally: Tally, ready: Ready) -> None:
        if self._mode is Mode.PLAIN:
            await _drain_together(self._url, tally, ready)
        else:
            await _drain_apart(self._url, self._mode, tally, ready)


async def _drain_together(url: str, tally: Tally, ready: Ready) -> None:
    connection = psycopg.connect(url, autocommit=True)
    ready()
    while True:
        rows = connection.execute(_LEASE, (CLAIM,)).fetchall()
        for _, payload in rows:
            job = json.loads(payload)
            tally.count(job["seq"], job["t0"])
        if rows:
            connection.execute(_DELETE_MANY, ([id_ for id_, _ in rows],))
        else:
            await asyncio.sleep(IDLE_SECONDS)


async def _drain_apart(url: str, mode: Mode, tally: Tally, ready: Ready) -> None:
    """End each message in a commit of its own."""
    claimer = await psycopg.AsyncConnection.connect(url, autocommit=True)
    connections = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in range(CONNECTIONS)]
    run = _run_with_row if mode is Mode.TRANSACTIONAL else _run_with_steps
    ready()
    while True:
        rows = deque(await (await claimer.execute(_LEASE, (CLAIM,))).fetchall())
        if not rows:
            await asyncio.sleep(IDLE_SECONDS)
        await asyncio.gather(*(_run_all(run, connection, rows, tally) for connection in connections))


async def _run_all(run: Run, connection: Connection, rows: deque[tuple[Any, ...]], tally: Tally) -> None:
    while rows:
        id_, payload = rows.popleft()
        await run(connection, id_, json.loads(payload), tally)


async def _run_with_row(connection: Connection, id_: int, job: dict[str, Any], tally: Tally) -> None:
    tally.count(job["seq"], job["t0"])
    async with connection.transaction():
        await connection.execute(_EFFECT, (job["seq"], job["to"]))
        await connection.execute(_DELETE, (id_,))


async def _run_with_steps(connection: Connection, id_: int, job: dict[str, Any], tally: Tally) -> None:
    tally.count(job["seq"], job["t0"])
    for number in range(STEPS):
        await connection.execute(_STEP, (id_, number))
    await connection.execute(_DELETE, (id_,))
