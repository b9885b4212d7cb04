"""huey on SQLite or PostgreSQL.  It deletes a message before it runs it, so a crash loses what was running."""

from __future__ import annotations

from typing import Any

from huey import PostgresHuey, SqliteHuey

from benchmarks.board import Tally
from benchmarks.contender import Job, Mode, Ready

_SQLITE = "sqlite:///"
#: Worker threads: on SQLite more of them would only wait for each other.
_WORKERS = {True: 1, False: 4}


class Huey:
    def __init__(self, url: str, mode: Mode) -> None:
        self._sqlite = url.startswith(_SQLITE)
        self._huey = (
            SqliteHuey(filename=url.removeprefix(_SQLITE) + ".huey", results=False)
            if self._sqlite
            else PostgresHuey(dsn=url, results=False)
        )
        self._tally: Tally | None = None
        self._task: Any = self._huey.task(name="notify")(self._notify)

    def _notify(self, seq: int, t0: int, to: str, template: str) -> None:
        assert self._tally is not None
        self._tally.count(seq, t0)

    async def setup(self) -> None:
        len(self._huey)

    async def enqueue_one(self, job: Job) -> None:
        self._task(*job)

    async def enqueue_many(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._task(*job)

    async def left(self) -> int:
        return len(self._huey)

    async def drain(self, tally: Tally, ready: Ready) -> None:
        self._tally = tally
        consumer = self._huey.create_consumer(workers=_WORKERS[self._sqlite], periodic=False)
        ready()
        consumer.run()
