"""Kill workers and servers at random for half an hour and count: nothing lost, nothing twice, memory flat.

    .venv/bin/python scripts/soak.py [--minutes 30] [--store sqlite|postgres] [--rate 60]

Four supervised workers of two processes each; every message is sent one to three times; every handler writes a row and
sends one more message; some fail at first.  Meanwhile worker processes and supervisors are killed, supervisors are
stopped gracefully and started again, and PostgreSQL is killed and restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onefold import App, Context, RetryPolicy
from onefold.errors import StoreUnavailableError
from onefold.testing.servers import PostgresServer

SUPERVISORS = 4
#: Seconds between two misfortunes.
MISFORTUNE_SECONDS = (1.0, 5.0)
SAMPLE_SECONDS = 15
#: Seconds in which everything that was accepted must be done after the last send.
DRAIN_SECONDS = 180

app = App()
#: The workers import this module with the store's URL set.
_mark = "?" if os.environ.get("ONEFOLD_URL", "").startswith("sqlite") else "%s"
_insert = f"INSERT INTO ledger (kind, number) VALUES ({_mark}, {_mark})"
_patient = RetryPolicy(max_attempts=20, base=0.2, cap=2.0)


@app.task(key="{number}", retry=_patient)
async def order(ctx: Context, number: int) -> None:
    """Write a row and send one message; every tenth fails at first, every seventh takes its time."""
    if number % 7 == 0:
        await asyncio.sleep(0.05)
    if number % 10 == 0 and ctx.attempt == 1:
        raise RuntimeError("planned")
    await ctx.execute(_insert, "order", number)
    ctx.send(receipt, number)


@app.task(key="{number}", retry=_patient)
async def receipt(ctx: Context, number: int) -> None:
    """Write the second row."""
    await ctx.execute(_insert, "receipt", number)


class Fleet:
    """Supervisors that are started again whenever they are gone; the first is spared, to watch its memory."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = [self._start() for _ in range(SUPERVISORS)]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "onefold", "worker", "soak:app", "--processes", "2", "--lease", "5"]
        return subprocess.Popen(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)

    def signal_supervisor(self, number: int) -> None:
        """Signal one supervisor; whether it is gone is seen by ``tend``."""
        random.choice(self._running[1:]).send_signal(number)

    def kill_process(self) -> None:
        """Kill one worker process."""
        if children := _children(random.choice(self._running[1:]).pid):
            os.kill(random.choice(children), signal.SIGKILL)

    def tend(self) -> None:
        """Start what is gone."""
        self._running = [one if one.poll() is None else self._start() for one in self._running]

    def memory(self) -> list[float]:
        """Return how many MiB the processes take that nobody kills."""
        spared = self._running[0].pid
        return [_mebibytes(pid) for pid in (spared, *_children(spared))]

    def stop(self) -> None:
        """Stop gracefully."""
        for one in self._running:
            one.send_signal(signal.SIGTERM)
        for one in self._running:
            one.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _mebibytes(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


class Soak:
    """One run: what was accepted, what was done to it, and what memory was taken."""

    def __init__(self, fleet: Fleet, server: PostgresServer | None, rate: float) -> None:
        self.accepted: set[int] = set()
        self.sends = 0
        self.refused = 0
        self.misfortunes: Counter[str] = Counter()
        self.samples: list[list[float]] = []
        self.stopping = asyncio.Event()
        self._fleet = fleet
        self._server = server
        self._rate = rate

    async def send(self) -> None:
        """Send numbers at the given rate, each one to three times, some of the copies at once."""
        number, sending = 0, set[asyncio.Task[None]]()
        while not self.stopping.is_set():
            number += 1
            for _ in range(random.choice((1, 1, 2, 3))):
                task = asyncio.create_task(self._send(number))
                sending.add(task)
                task.add_done_callback(sending.discard)
            await self._pause(1 / self._rate)
        await asyncio.gather(*sending)

    async def _send(self, number: int) -> None:
        while True:
            try:
                await order.send(number)
            except StoreUnavailableError:
                self.refused += 1
                await asyncio.sleep(0.2)
            else:
                self.sends += 1
                self.accepted.add(number)
                return

    async def misfortune(self) -> None:
        """Do something bad every few seconds."""
        while not self.stopping.is_set():
            await self._pause(random.uniform(*MISFORTUNE_SECONDS))
            await asyncio.to_thread(self._one_misfortune)

    def _one_misfortune(self) -> None:
        self._fleet.tend()
        kinds = ["process killed"] * 6 + ["supervisor killed"] * 2 + ["supervisor stopped"] * 2
        if self._server is not None:
            kinds += ["server killed", "server restarted"]
        kind = random.choice(kinds)
        self.misfortunes[kind] += 1
        if kind == "process killed":
            self._fleet.kill_process()
        elif kind == "supervisor killed":
            self._fleet.signal_supervisor(signal.SIGKILL)
        elif kind == "supervisor stopped":
            self._fleet.signal_supervisor(signal.SIGTERM)
        elif self._server is not None:
            if kind == "server killed":
                self._server.kill()
            self._server.restart()

    async def sample(self) -> None:
        """Write down how much memory the fleet takes."""
        while not self.stopping.is_set():
            await self._pause(SAMPLE_SECONDS)
            self.samples.append(self._fleet.memory())

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            pass


async def booked(kind: str) -> Counter[int]:
    """Return how often each number was booked."""
    while True:
        try:
            rows = await app.store.fetch(f"SELECT number FROM ledger WHERE kind = '{kind}'")
        except StoreUnavailableError:
            # The first question after a restart may meet a connection that the server has closed.
            await asyncio.sleep(0.2)
        else:
            return Counter(number for (number,) in rows)


async def run(soak: Soak, fleet: Fleet, minutes: float, progress: Progress) -> Table:
    task = progress.add_task("soaking", total=minutes * 60)
    async with app:
        async with app.transaction() as tx:
            await tx.execute("CREATE TABLE ledger (kind text NOT NULL, number bigint NOT NULL)")
        work = [asyncio.create_task(one) for one in (soak.send(), soak.misfortune(), soak.sample())]
        for _ in range(round(minutes * 60)):
            await asyncio.sleep(1)
            progress.advance(task)
        soak.stopping.set()
        await asyncio.gather(*work)
        progress.update(task, description="draining")
        for _ in range(DRAIN_SECONDS):
            fleet.tend()
            if len(await booked("receipt")) >= len(soak.accepted):
                break
            await asyncio.sleep(1)
        orders, receipts = await booked("order"), await booked("receipt")
        dead = [letter async for letter in app.dead_letters()]
    return report(soak, orders, receipts, len(dead))


def report(soak: Soak, orders: Counter[int], receipts: Counter[int], dead: int) -> Table:
    """Say what was seen, and fail if the promise was broken."""
    third = max(len(soak.samples) // 3, 1)
    early, late = ([max(sample) for sample in part] for part in (soak.samples[:third], soak.samples[-third:]))
    lost = len(soak.accepted - orders.keys()) + len(soak.accepted - receipts.keys())
    twice = sum(n > 1 for n in (*orders.values(), *receipts.values()))
    table = Table(title="Soak")
    table.add_column("")
    table.add_column("figure", justify="right")
    for name, figure in (
        ("messages accepted", len(soak.accepted)),
        ("sends, duplicates among them", soak.sends),
        ("sends answered with StoreUnavailableError and repeated", soak.refused),
        *soak.misfortunes.most_common(),
        ("largest process in the first third, in MiB", f"{max(early):.0f}"),
        ("largest process in the last third, in MiB", f"{max(late):.0f}"),
        ("effects", orders.total() + receipts.total()),
        ("lost", lost),
        ("twice", twice),
        ("dead letters", dead),
    ):
        table.add_row(str(name), str(figure))
    if lost or twice or dead:
        Console().print(table)
        raise SystemExit("the promise was broken")
    return table


@contextmanager
def place(store: str) -> Iterator[tuple[str, PostgresServer | None]]:
    """Make a store of its own and return its URL."""
    if store == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            yield f"sqlite:///{directory}/soak.db", None
    else:
        with PostgresServer() as server:
            yield server.create_database("soak"), server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="postgres")
    parser.add_argument("--rate", type=float, default=60.0, help="messages sent per second")
    given = parser.parse_args()
    console = Console()
    with place(given.store) as (url, server):
        os.environ["ONEFOLD_URL"] = url
        asyncio.run(app.migrate())
        fleet = Fleet()
        try:
            with Progress(console=console) as progress:
                soak = Soak(fleet, server, given.rate)
                table = asyncio.run(run(soak, fleet, given.minutes, progress))
        finally:
            fleet.stop()
    console.print(table)


if __name__ == "__main__":
    main()
