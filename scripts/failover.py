"""Lose a PostgreSQL server under load and promote its synchronous standby: nothing is lost, nothing happens twice.

    .venv/bin/python scripts/failover.py [--seconds 20]

Starts its own primary and synchronous standby, and two supervised workers and eight senders that use both servers;
kills the primary like a power cut, promotes the standby, and counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psycopg
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onefold import App, Context
from onefold.errors import StoreUnavailableError
from onefold.testing.servers import PostgresServer, PostgresStandby

SENDERS = 8
WORKERS = 2
#: Seconds in which everything accepted must be done after the senders have stopped.
DRAIN_SECONDS = 60

app = App()


@app.task(key="{number}")
async def book(ctx: Context, number: int) -> None:
    """Write one row; a second run that commits would write a second one."""
    await ctx.execute("INSERT INTO ledger (number) VALUES (%s)", number)


class Senders:
    """Send numbers one after another, and record the accepted ones and their times."""

    def __init__(self) -> None:
        self.accepted: dict[int, float] = {}
        self.refused = 0
        self.stopping = False

    async def run(self, sender: int) -> None:
        number = sender
        while not self.stopping:
            try:
                await book.send(number)
            except StoreUnavailableError:
                self.refused += 1  # it is sent again with the same key, so it cannot be stored twice
                await asyncio.sleep(0.05)
                continue
            self.accepted[number] = time.monotonic()
            number += SENDERS
            await asyncio.sleep(0.002)


@contextmanager
def workers(url: str) -> Iterator[None]:
    """Run workers as users do, in their own processes."""
    command = [sys.executable, "-m", "onefold", "worker", "failover:app", "--lease", "5"]
    environment = {**os.environ, "ONEFOLD_URL": url}
    started = [
        subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, stderr=subprocess.DEVNULL)
        for _ in range(WORKERS)
    ]
    try:
        yield
    finally:
        for one in started:
            one.send_signal(signal.SIGTERM)
        for one in started:
            one.wait()


def counts(standby: PostgresServer) -> tuple[int, int]:
    """Return how many numbers were booked, and how many of them more than once."""
    with psycopg.connect(standby.url("shop")) as connection:
        row = connection.execute(
            "SELECT count(*), count(*) FILTER (WHERE n > 1) FROM (SELECT count(*) AS n FROM ledger GROUP BY number)"
        ).fetchone()
    assert row is not None
    return row[0], row[1]


async def run(seconds: float, primary: PostgresServer, standby: PostgresStandby, progress: Progress) -> Table:
    senders, task = Senders(), progress.add_task("load before the cut", total=3)
    async with app:
        sending = [asyncio.create_task(senders.run(number)) for number in range(SENDERS)]
        await asyncio.sleep(seconds / 2)
        progress.update(task, advance=1, description="the primary is cut off")
        cut_at, accepted_before = time.monotonic(), len(senders.accepted)
        await asyncio.to_thread(primary.kill)
        await asyncio.to_thread(standby.promote)
        promoted = time.monotonic() - cut_at
        await asyncio.sleep(seconds / 2)
        senders.stopping = True
        await asyncio.gather(*sending)
        progress.update(task, advance=1, description="draining")
        for _ in range(DRAIN_SECONDS * 5):
            if counts(standby)[0] == len(senders.accepted):
                break
            await asyncio.sleep(0.2)
        progress.update(task, advance=1)
    done, twice = counts(standby)
    silence = max(after - before for before, after in pairwise(sorted(senders.accepted.values())))
    with psycopg.connect(standby.url("shop")) as connection:
        booked = {row[0] for row in connection.execute("SELECT DISTINCT number FROM ledger")}
    table = Table(title="Primary lost under load, synchronous standby promoted")
    for name in ("", "figure"):
        table.add_column(name, justify="right" if name else "left")
    for name, figure in (
        ("accepted before the cut", accepted_before),
        ("accepted after it", len(senders.accepted) - accepted_before),
        ("sends answered with StoreUnavailableError and repeated", senders.refused),
        ("seconds until the standby was promoted", f"{promoted:.2f}"),
        ("longest silence between two accepted sends, in seconds", f"{silence:.2f}"),
        ("booked", done),
        ("accepted and lost", len(senders.accepted.keys() - booked)),
        ("booked twice", twice),
    ):
        table.add_row(name, str(figure))
    if senders.accepted.keys() - booked or twice:
        raise SystemExit("the promise was broken")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long messages are sent")
    seconds = parser.parse_args().seconds
    console = Console()
    settings = {"synchronous_standby_names": "standby"}
    with PostgresServer(settings=settings) as primary, PostgresStandby(primary) as standby:
        primary.create_database("shop")
        with psycopg.connect(primary.url("shop"), autocommit=True) as connection:
            connection.execute("CREATE TABLE ledger (number bigint NOT NULL)")
        url = primary.url("shop").replace(f":{primary.port}/", f":{primary.port},127.0.0.1:{standby.port}/")
        os.environ["ONEFOLD_URL"] = url = f"{url}?target_session_attrs=read-write"
        asyncio.run(app.migrate())
        with Progress(console=console, transient=True) as progress, workers(url):
            table = asyncio.run(run(seconds, primary, standby, progress))
    console.print(table)


if __name__ == "__main__":
    main()
