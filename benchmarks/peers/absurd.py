"""absurd: durable workflows in stored procedures of PostgreSQL, with a synchronous worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
from absurd_sdk import Absurd

from benchmarks.board import Tally
from benchmarks.contender import STEPS, Job, Mode, Ready

_QUEUE = "bench"
_TASK = "five"
_BATCH = 50
_LEFT = "SELECT count(*) FROM absurd.t_bench WHERE state <> 'completed'"


class AbsurdWorkflow:
    def __init__(self, url: str, mode: Mode) -> None:
        self._url = url

    def _declare(self, tally: Tally | None) -> Any:
        app = Absurd(self._url, queue_name=_QUEUE)

        @app.register_task(_TASK)
        def five(job: dict[str, Any], context: Any) -> None:
            assert tally is not None
            tally.count(job["seq"], job["t0"])
            for number in range(STEPS):
                context.step(f"step-{number}", lambda: "ok")

        return app

    async def setup(self) -> None:
        self._control("init")
        self._control("create-queue", _QUEUE)
        self._app = self._declare(None)

    def _control(self, *command: str) -> None:
        program = Path(sys.executable).parent / "absurdctl"
        subprocess.run([program, *command, "-d", self._url], check=True)

    async def enqueue_one(self, job: Job) -> None:
        self._app.spawn(_TASK, job._asdict())

    async def enqueue_many(self, jobs: list[Job]) -> None:
        for job in jobs:
            await self.enqueue_one(job)

    async def left(self) -> int:
        with psycopg.connect(self._url) as connection:
            return int(connection.execute(_LEFT).fetchone()[0])  # type: ignore[index]

    async def drain(self, tally: Tally, ready: Ready) -> None:
        app = self._declare(tally)
        ready()
        app.start_worker(concurrency=1, batch_size=_BATCH)
