"""DBOS: durable workflows whose steps are recorded, taken from a queue that is polled once a second."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from typing import Any

import psycopg
from dbos import DBOS, DBOSClient

from benchmarks.board import Tally
from benchmarks.contender import STEPS, Job, Mode, Ready

_SQLITE = "sqlite:///"
_QUEUE = "workflows"
_OPTIONS: Any = {"queue_name": _QUEUE, "workflow_name": "five", "app_version": "1"}
_LEFT = "SELECT count(*) FROM {}workflow_status WHERE queue_name = 'workflows' AND status IN ('ENQUEUED', 'PENDING')"


class Dbos:
    def __init__(self, url: str, mode: Mode) -> None:
        self._url = url
        self._sqlite = url.startswith(_SQLITE)
        self._system = f"{url}.dbos" if self._sqlite else url.replace("postgresql:", "postgresql+psycopg:")

    def _launch(self, tally: Tally | None) -> None:
        DBOS(
            config={
                "name": "bench",
                "system_database_url": self._system,
                "application_version": "1",
                "executor_id": str(os.getpid()),
                "log_level": "ERROR",
                "run_admin_server": False,
            }
        )

        @DBOS.step(name="step")
        def step(number: int) -> str:
            return "ok"

        @DBOS.workflow(name="five")
        def five(seq: int, t0: int, to: str, template: str) -> None:
            assert tally is not None
            tally.count(seq, t0)
            for number in range(STEPS):
                step(number)

        DBOS.launch()
        DBOS.register_queue(_QUEUE)

    async def setup(self) -> None:
        # It refuses to be called where an event loop runs.
        await asyncio.to_thread(self._launch, None)
        await asyncio.to_thread(DBOS.destroy)
        self._client = DBOSClient(system_database_url=self._system)

    async def enqueue_one(self, job: Job) -> None:
        await self.enqueue_many([job])

    async def enqueue_many(self, jobs: list[Job]) -> None:
        await asyncio.to_thread(self._enqueue, jobs)

    def _enqueue(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._client.enqueue(_OPTIONS, *job)

    async def left(self) -> int:
        if self._sqlite:
            with sqlite3.connect(self._system.removeprefix(_SQLITE), timeout=30) as file:
                return int(file.execute(_LEFT.format("")).fetchone()[0])
        with psycopg.connect(self._url) as connection:
            return int(connection.execute(_LEFT.format("dbos.")).fetchone()[0])  # type: ignore[index]

    async def drain(self, tally: Tally, ready: Ready) -> None:
        ready()
        await asyncio.to_thread(self._launch, tally)
        await asyncio.Event().wait()
