"""The floor on SQLite: a hand-written loop that leases a batch and deletes it, with no further promise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import apsw

from benchmarks.board import Tally
from benchmarks.contender import STEPS, Job, Mode, Ready
from benchmarks.engines import connect_sqlite, insert_effect

CLAIM = 100
IDLE_SECONDS = 0.005
LEASE_SECONDS = 60

_SCHEMA = """
CREATE TABLE job (id INTEGER PRIMARY KEY, state INT NOT NULL DEFAULT 0, lease_until REAL, payload TEXT);
CREATE INDEX job_ready ON job (id) WHERE state = 0;
CREATE TABLE step (job INT, number INT, output TEXT, PRIMARY KEY (job, number)) WITHOUT ROWID;
"""
_INSERT = "INSERT INTO job (payload) VALUES (?)"
_LEASE = """
UPDATE job SET state = 1, lease_until = unixepoch('subsec') + ?
WHERE id IN (SELECT id FROM job WHERE state = 0 ORDER BY id LIMIT ?)
RETURNING id, payload
"""
_DELETE = "DELETE FROM job WHERE id = ?"
_STEP = "INSERT INTO step (job, number, output) VALUES (?, ?, 'ok')"
_EFFECT = insert_effect("sqlite:///")

Row = tuple[Any, ...]


class RawSQLite:
    """Uses the same SQLite library as onefold, so that only the statements differ."""

    def __init__(self, url: str, mode: Mode) -> None:
        self._url = url
        self._mode = mode

    async def setup(self) -> None:
        self._connection = connect_sqlite(self._url)
        self._connection.execute(_SCHEMA)

    async def enqueue_one(self, job: Job) -> None:
        self._connection.execute(_INSERT, (json.dumps(job._asdict()),))

    async def enqueue_many(self, jobs: list[Job]) -> None:
        _execute_together(self._connection, _INSERT, [(json.dumps(job._asdict()),) for job in jobs])

    async def left(self) -> int:
        count: int = self._connection.execute("SELECT count(*) FROM job").get
        return count

    async def drain(self, tally: Tally, ready: Ready) -> None:
        connection = connect_sqlite(self._url)
        run = {Mode.PLAIN: _run_together, Mode.TRANSACTIONAL: _run_with_row, Mode.WORKFLOW: _run_with_steps}[self._mode]
        ready()
        while True:
            rows: list[Row] = connection.execute(_LEASE, (LEASE_SECONDS, CLAIM)).fetchall()
            run(connection, rows, tally)
            if not rows:
                await asyncio.sleep(IDLE_SECONDS)


def _execute_together(connection: apsw.Connection, statement: str, parameters: list[tuple[Any, ...]]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(statement, parameters)
    connection.execute("COMMIT")


def _run_together(connection: apsw.Connection, rows: list[Row], tally: Tally) -> None:
    for _, payload in rows:
        job = json.loads(payload)
        tally.count(job["seq"], job["t0"])
    if rows:
        _execute_together(connection, _DELETE, [(id_,) for id_, _ in rows])


def _run_with_row(connection: apsw.Connection, rows: list[Row], tally: Tally) -> None:
    """End each message in its own commit, together with the user's row."""
    for id_, payload in rows:
        job = json.loads(payload)
        tally.count(job["seq"], job["t0"])
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_EFFECT, (job["seq"], job["to"]))
        connection.execute(_DELETE, (id_,))
        connection.execute("COMMIT")


def _run_with_steps(connection: apsw.Connection, rows: list[Row], tally: Tally) -> None:
    """Commit once per step; the ends of the messages share one commit."""
    for id_, payload in rows:
        job = json.loads(payload)
        tally.count(job["seq"], job["t0"])
        for number in range(STEPS):
            connection.execute(_STEP, (id_, number))
    if rows:
        _execute_together(connection, _DELETE, [(id_,) for id_, _ in rows])
