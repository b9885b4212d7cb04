"""The floor on SQLite: a hand-written loop that leases a batch and deletes it, with no promise beyond that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import apsw

from benchmarks.board import Tally
from benchmarks.contender import Job, Ready
from benchmarks.engines import connect_sqlite, insert_effect

CLAIM = 100
IDLE_SECONDS = 0.005
LEASE_SECONDS = 60

_SCHEMA = """
CREATE TABLE job (id INTEGER PRIMARY KEY, state INT NOT NULL DEFAULT 0, lease_until REAL, payload TEXT);
CREATE INDEX job_ready ON job (id) WHERE state = 0;
"""
_INSERT = "INSERT INTO job (payload) VALUES (?)"
_LEASE = """
UPDATE job SET state = 1, lease_until = unixepoch('subsec') + ?
WHERE id IN (SELECT id FROM job WHERE state = 0 ORDER BY id LIMIT ?)
RETURNING id, payload
"""
_DELETE = "DELETE FROM job WHERE id = ?"


class RawSQLite:
    """Through the same SQLite library as onefold, so that only what is done with it differs."""

    name = "raw"

    def __init__(self, *, transactional: bool = False) -> None:
        self.transactional = transactional

    async def setup(self, url: str) -> None:
        self._connection = connect_sqlite(url)
        self._connection.execute(_SCHEMA)

    async def enqueue_one(self, job: Job) -> None:
        self._connection.execute(_INSERT, (json.dumps(job._asdict()),))

    async def enqueue_many(self, jobs: list[Job]) -> None:
        _commit_each(self._connection, _INSERT, [(json.dumps(job._asdict()),) for job in jobs])

    async def left(self) -> int:
        count: int = self._connection.execute("SELECT count(*) FROM job").get
        return count

    async def close(self) -> None:
        self._connection.close()

    async def drain(self, url: str, tally: Tally, ready: Ready) -> None:
        connection = connect_sqlite(url)
        insert = insert_effect(url)
        ready()
        while True:
            rows: list[tuple[Any, ...]] = connection.execute(_LEASE, (LEASE_SECONDS, CLAIM)).fetchall()
            if not rows:
                await asyncio.sleep(IDLE_SECONDS)
            elif self.transactional:
                _run_apart(connection, rows, tally, insert)
            else:
                for _, payload in rows:
                    json.loads(payload)
                    tally.count()
                _commit_each(connection, _DELETE, [(id_,) for id_, _ in rows])


def _commit_each(connection: apsw.Connection, statement: str, parameters: list[tuple[Any, ...]]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(statement, parameters)
    connection.execute("COMMIT")


def _run_apart(connection: apsw.Connection, rows: list[tuple[Any, ...]], tally: Tally, insert: str) -> None:
    """One commit per message, which holds the user's row and the end of the message."""
    for id_, payload in rows:
        job = json.loads(payload)
        tally.count()
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(insert, (job["seq"], job["to"]))
        connection.execute(_DELETE, (id_,))
        connection.execute("COMMIT")
