#!/usr/bin/env python
"""A cap over many processes, some of which are killed: it is never exceeded, and its places are nearly always used.

    scripts/caps.py --store sqlite --tasks 10000 --processes 8 --cap 3

Every handler records its beginning and its end on a clock that all processes share; a killed one ends when its process
does.  The intervals are compared afterwards, and the exit status says whether the cap held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onefold import App
from onefold.store import State
from onefold.testing.servers import PostgresServer, find_postgres

#: Short, because the places of a killed worker are free only when its leases have run out.
LEASE_SECONDS = 1.0


def make_app(url: str, cap: int, hold: float, notes: Path) -> App:
    app = App(url)
    file = os.open(notes / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, n: int) -> None:
        os.write(file, f'["{what}", {n}, {time.monotonic()}]\n'.encode())

    @app.task(max_running=cap, expires=None)
    async def job(n: int) -> None:
        note("began", n)
        await asyncio.sleep(hold)
        note("ended", n)

    return app


async def work(app: App) -> None:
    async with app:
        await app.work(lease=LEASE_SECONDS)


def hire(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


async def run(app: App, url: str, options: argparse.Namespace, notes: Path) -> dict[int, float]:
    """Send, work and kill until everything is done; return the time at which each killed process ended."""
    ends: dict[int, float] = {}
    command = [sys.executable, __file__, "--work", url, str(notes), *_same(options)]
    chance = random.Random(options.seed)
    await app.migrate()
    async with app:
        await app.send_many(app.tasks["job"].call(n) for n in range(options.tasks))
        crew = [hire(command) for _ in range(options.processes)]
        try:
            spared = options.tasks - options.kill_after
            while (counts := (await app.count()).get("default")) and (left := counts.scheduled + counts.leased):
                await asyncio.sleep(0.1)
                if left > spared:
                    continue
                spared = left - options.kill_after
                victim = crew.pop(chance.randrange(len(crew)))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                ends[victim.pid] = time.monotonic()
                crew.append(hire(command))
            assert not counts or not counts.dead, "nothing was to fail"
            found = await app.store.fetch(_COUNT[app.store.capabilities.shared], (int(State.DONE),))
            assert found == [(options.tasks,)], found
        finally:
            for process in crew:
                process.kill()
                process.wait()
                ends.setdefault(process.pid, time.monotonic())
    return ends


_COUNT = {
    False: "SELECT count(*) FROM onefold_outcome WHERE state = ?",
    True: "SELECT count(*) FROM onefold.outcome WHERE state = %s",
}


def intervals(notes: Path, ends: dict[int, float]) -> Iterator[tuple[float, float]]:
    for file in notes.glob("*.jsonl"):
        began: dict[int, float] = {}
        for line in file.read_text().splitlines():
            what, n, at = json.loads(line)
            if what == "began":
                began[n] = at
            else:
                yield began.pop(n), at
        for at in began.values():
            yield at, ends[int(file.stem)]


def judge(spans: list[tuple[float, float]]) -> tuple[int, float]:
    """Return the largest number that ran at once, and the average from the first beginning to the last end."""
    changes = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    whole = max(ended for _, ended in spans) - min(began for began, _ in spans)
    return most, sum(ended - began for began, ended in spans) / whole


def _same(options: argparse.Namespace) -> list[str]:
    return ["--cap", str(options.cap), "--hold", str(options.hold)]


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/caps.db"
        return
    binaries = find_postgres()
    assert binaries is not None, "there is no PostgreSQL here"
    with PostgresServer(binaries) as server:
        yield server.create_database("caps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--cap", type=int, default=3)
    parser.add_argument("--hold", type=float, default=0.05, help="seconds that each task takes")
    parser.add_argument("--kill-after", type=int, default=200, help="tasks that are done between two kills")
    parser.add_argument("--busy", type=float, default=2.7, help="how many must run on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", nargs=2, metavar=("URL", "NOTES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        url, notes = options.work
        asyncio.run(work(make_app(url, options.cap, options.hold, Path(notes))))
        return 0
    with tempfile.TemporaryDirectory() as folder, database(options.store, Path(folder)) as url:
        notes = Path(folder) / "notes"
        notes.mkdir()
        began = time.monotonic()
        ends = asyncio.run(run(make_app(url, options.cap, options.hold, notes), url, options, notes))
        spans = list(intervals(notes, ends))
        most, busy = judge(spans)
        killed, took = len(ends) - options.processes, time.monotonic() - began
        print(f"{options.store}: {options.tasks} tasks, {options.processes} processes, {killed} killed, {took:.0f} s;")
        print(f"at most {most} at once and {busy:.2f} on average, with a cap of {options.cap}")
    return 0 if most <= options.cap and busy >= options.busy else 1


if __name__ == "__main__":
    sys.exit(main())
