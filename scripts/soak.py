"""Kill workers and servers at random for half an hour and check: nothing lost, nothing twice, no growth of memory.

    .venv/bin/python scripts/soak.py [--minutes 30] [--store sqlite|postgres] [--rate 60]

Four supervised workers of two processes each; every message is sent one to three times; every handler writes a row and
sends one more message; some fail at first.  Beside them, workflows sleep and wait for children and for signals, which
are also sent more than once, and isolated handlers kill their own processes.  Meanwhile worker processes and
supervisors are killed, supervisors are stopped gracefully, alone or with a signal to their whole group, and restarted,
every second one with standard error on a full disk; whole workers are frozen past their leases, and PostgreSQL is
killed and restarted.  Afterwards no process, file, socket or directory of theirs may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from soak_app import ORDER_EFFECTS, PARCEL_EFFECTS, TRIP_EFFECTS, app, order, parcel, trip

from onefold import limits
from onefold.errors import StoreUnavailableError
from onefold.store.sqlite.connection import LOG_BYTES_MAX
from onefold.tasks.receipt import Receipt
from onefold.testing.chaos.fleet import processes_with
from onefold.testing.servers import PostgresServer, children_of

Answer = TypeVar("Answer")

SUPERVISORS = 4
LEASE_SECONDS = 5
#: A worker that is frozen for this long has lost all of its leases.
FROZEN_SECONDS = 8.0
#: Seconds between two faults.
FAULT_PAUSE_SECONDS = (1.0, 5.0)
SAMPLE_SECONDS = 15
#: The first samples do not count, because caches are still filling.
WARM_UP_SAMPLES = 8
#: Memory is flat if the median of the last third exceeds that of the first by at most this share.
GROWTH_MAX = 0.10
#: Seconds in which everything accepted must be done after the last send.
DRAIN_SECONDS = 180
#: One trip and one parcel are sent for this many orders.
ORDERS_PER_TRIP = 10
ORDERS_PER_PARCEL = 20
#: SQLite's write-ahead log is no longer than this when nothing has been written for a while.
LOG_MEBIBYTES_MAX = LOG_BYTES_MAX / 1_048_576
LOG_SECONDS = 30
#: Writes to this file fail as on a full disk.
FULL_DISK = Path("/dev/full")


class Fleet:
    """Supervisors that are restarted whenever they end; the first one is spared, to watch its memory."""

    def __init__(self, url: str, temporary: str) -> None:
        self._url = url
        self._temporary = temporary
        self._started = 0
        self._running: list[subprocess.Popen[bytes]] = [self._start() for _ in range(SUPERVISORS)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        lease = ("--lease", str(LEASE_SECONDS))
        command = [sys.executable, "-m", "onefold", "worker", "soak_app:app", "--processes", "2", *lease]
        environment = {**os.environ, "ONEFOLD_URL": self._url, "TMPDIR": self._temporary}
        # Every second one writes to a full disk; each leads a process group, so that a signal can go to all of it.
        with (FULL_DISK if self._started % 2 else Path(os.devnull)).open("wb") as stderr:
            return subprocess.Popen(
                command, cwd=Path(__file__).parent, stderr=stderr, env=environment, start_new_session=True
            )

    def signal_group(self) -> None:
        """Tell a supervisor and all of its processes to stop, as systemd or a closed terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(random.choice(self._running[1:]).pid, random.choice((signal.SIGTERM, signal.SIGHUP)))

    def signal_supervisor(self, number: int) -> None:
        """Signal one supervisor; ``tend`` notices if that ended it."""
        random.choice(self._running[1:]).send_signal(number)

    def kill_process(self) -> None:
        """Kill one worker process."""
        if children := children_of(random.choice(self._running[1:]).pid):
            os.kill(random.choice(children), signal.SIGKILL)

    def freeze(self) -> list[int]:
        """Stop one supervisor and its processes, like a suspended machine; return the process ids for ``thaw``."""
        supervisor = random.choice(self._running[1:])
        supervisor.send_signal(signal.SIGSTOP)
        frozen = [supervisor.pid, *children_of(supervisor.pid)]
        for pid in frozen[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return frozen

    def thaw(self, frozen: list[int]) -> None:
        """Let the processes continue that still exist."""
        for pid in set(frozen) & self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def tend(self) -> None:
        """Restart supervisors that have ended."""
        self._running = [one if one.poll() is None else self._start() for one in self._running]

    def sizes(self) -> dict[str, float]:
        """Return the memory in MiB and the descriptors of the processes that are spared."""
        spared = self._running[0].pid
        named = {"supervisor": spared} | {f"process {n}": pid for n, pid in enumerate(children_of(spared), 1)}
        sizes = {f"MiB of {name}": _mebibytes(pid) for name, pid in named.items()}
        return sizes | {"descriptors of supervisor": _descriptors(spared)}

    def alive(self) -> set[int]:
        """Return every process that works on this store, including those without their supervisor."""
        return processes_with(f"ONEFOLD_URL={self._url}")

    def stop(self) -> None:
        """Stop gracefully."""
        for one in self._running:
            one.send_signal(signal.SIGTERM)
        for one in self._running:
            one.wait()
        # Processes without their supervisor have their time to stop, too.
        give_up_at = time.monotonic() + limits.STOP_SECONDS + limits.STOP_MARGIN_SECONDS
        while self.alive() and time.monotonic() < give_up_at:
            time.sleep(0.5)


def _mebibytes(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


def _descriptors(pid: int) -> float:
    try:
        return float(len(os.listdir(f"/proc/{pid}/fd")))
    except OSError:
        return 0.0


def _log_mebibytes(url: str) -> float:
    log = Path(f"{url.removeprefix('sqlite:///')}-wal")
    return log.stat().st_size / 2**20 if log.exists() else 0.0


class Soak:
    """One run: the accepted messages, the faults, and the memory samples."""

    def __init__(self, fleet: Fleet, server: PostgresServer | None, rate: float) -> None:
        #: The effects that must have happened in the end, by kind and number.
        self.expected: set[tuple[str, int]] = set()
        self.figures: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.stopping = asyncio.Event()
        self._fleet = fleet
        self._server = server
        self._rate = rate
        self._frozen: list[list[int]] = []
        self.log_mebibytes = 0.0

    # sending

    async def send(self) -> None:
        """Send numbers at the given rate, each one to three times, some of the copies at once."""
        number, sending = 0, set[asyncio.Task[None]]()
        while not self.stopping.is_set():
            number += 1
            for _ in range(random.choice((1, 1, 2, 3))):
                jobs = [self._send_order(number)]
                if number % ORDERS_PER_TRIP == 0:
                    jobs.append(self._send_trip(number))
                if number % ORDERS_PER_PARCEL == 0:
                    jobs.append(self._send_parcel(number))
                for job in jobs:
                    task = asyncio.create_task(job)
                    sending.add(task)
                    task.add_done_callback(sending.discard)
            await self._pause(1 / self._rate)
        await asyncio.gather(*sending)

    async def _send_order(self, number: int) -> None:
        self._note(await self._insist(lambda: order.send(number)), ORDER_EFFECTS, number)

    async def _send_parcel(self, number: int) -> None:
        self._note(await self._insist(lambda: parcel.send(number)), PARCEL_EFFECTS, number)

    async def _send_trip(self, number: int) -> None:
        receipt = await self._insist(lambda: trip.send(number))
        self._note(receipt, TRIP_EFFECTS, number)
        await self._pause(random.uniform(0, 2))
        # Every sender of this trip sends the same signal, which must count once.
        await self._insist(lambda: app.signal(receipt.id, "go", number, id="the one"))
        self.figures["signals, repetitions among them"] += 1

    async def _insist(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                self.figures["sends answered with StoreUnavailableError and repeated"] += 1
                await asyncio.sleep(0.2)

    def _note(self, receipt: Receipt[None], kinds: tuple[str, ...], number: int) -> None:
        self.figures["sends"] += 1
        self.figures["of which duplicates"] += bool(receipt.duplicate)
        self.expected.update((kind, number) for kind in kinds)

    # faults

    async def cause_faults(self) -> None:
        """Cause a fault every few seconds."""
        while not self.stopping.is_set():
            await self._pause(random.uniform(*FAULT_PAUSE_SECONDS))
            self._cause_one()
            if self._server is not None and random.random() < 2 / 14:
                kind = random.choice(("server killed", "server restarted"))
                self.faults[kind] += 1
                await asyncio.to_thread(self._restart, self._server, kind == "server killed")
        for frozen in self._frozen:
            self._fleet.thaw(frozen)

    def _cause_one(self) -> None:
        fleet = self._fleet
        fleet.tend()
        kinds = {
            "process killed": 6,
            "supervisor killed": 2,
            "supervisor stopped": 2,
            "group told to stop": 2,
            "worker frozen past its lease": 1,
        }
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        self.faults[kind] += 1
        if kind == "process killed":
            fleet.kill_process()
        elif kind == "supervisor killed":
            fleet.signal_supervisor(signal.SIGKILL)
        elif kind == "supervisor stopped":
            fleet.signal_supervisor(signal.SIGTERM)
        elif kind == "group told to stop":
            fleet.signal_group()
        else:
            self._frozen.append(frozen := fleet.freeze())
            asyncio.get_running_loop().call_later(FROZEN_SECONDS, fleet.thaw, frozen)

    def _restart(self, server: PostgresServer, at_once: bool) -> None:
        if at_once:
            server.kill()
        server.restart()

    async def sample(self) -> None:
        """Record the memory and descriptors of the fleet."""
        while not self.stopping.is_set():
            await self._pause(SAMPLE_SECONDS)
            self.samples.append(self._fleet.sizes())

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    # counting

    async def booked(self) -> Counter[tuple[str, int]]:
        """Return how often each effect happened."""
        rows = await self._insist(lambda: app.store.fetch("SELECT kind, number FROM ledger"))
        return Counter((kind, number) for kind, number in rows)

    async def drain(self) -> Counter[tuple[str, int]]:
        """Wait until everything accepted has happened; redrive messages that were quarantined by chance."""
        booked = await self.booked()
        for _ in range(DRAIN_SECONDS):
            self._fleet.tend()
            for letter in [one async for one in app.dead_letters() if one.failure.reason == "quarantined"]:
                self.figures["quarantined after three kills, and redriven"] += 1
                await letter.redrive(actor="soak", reason="it was killed from outside")
            booked = await self.booked()
            if booked.keys() >= self.expected:
                break
            await asyncio.sleep(1)
        self.figures["dead letters"] += len([one async for one in app.dead_letters()])
        return booked

    async def look_at_log(self) -> None:
        """Record the length of SQLite's write-ahead log when nothing is written any more, while its workers run."""
        if self._server is None:
            for _ in range(LOG_SECONDS):
                self.log_mebibytes = _log_mebibytes(app.url)
                if self.log_mebibytes <= LOG_MEBIBYTES_MAX:
                    break
                await asyncio.sleep(1)


async def run(soak: Soak, minutes: float, progress: Progress) -> Counter[tuple[str, int]]:
    """Soak for this many minutes and return the effects."""
    task = progress.add_task("soaking", total=minutes * 60)
    async with app:
        async with app.transaction() as tx:
            await tx.execute("CREATE TABLE ledger (kind text NOT NULL, number bigint NOT NULL)")
        work = [asyncio.create_task(one) for one in (soak.send(), soak.cause_faults(), soak.sample())]
        for _ in range(round(minutes * 60)):
            await asyncio.sleep(1)
            progress.advance(task)
        soak.stopping.set()
        await asyncio.gather(*work)
        progress.update(task, description="draining")
        booked = await soak.drain()
        await soak.look_at_log()
        return booked


def report(
    soak: Soak, booked: Counter[tuple[str, int]], left: dict[str, int], minutes: float
) -> tuple[Table, list[str]]:
    """Return a table of the run, and the problems that break the promise."""
    lost, unasked = soak.expected - booked.keys(), booked.keys() - soak.expected
    twice = sum(number > 1 for number in booked.values())
    broken = {"lost": len(lost), "twice": twice, "not asked for": len(unasked), **left}
    broken["dead letters"] = soak.figures.pop("dead letters")
    table = Table(title="Soak")
    table.add_column("")
    table.add_column("figure", justify="right")
    figures: dict[str, object] = {"minutes": f"{minutes:g}", **soak.figures, **soak.faults}
    figures["effects"] = booked.total()
    growing = []
    for name, (first, last) in thirds(soak.samples).items():
        figures[f"{name}, first and last third"] = f"{first:.1f} → {last:.1f}"
        if last > first * (1 + GROWTH_MAX):
            growing.append(f"{name}: they grow")
    figures["MiB of the write-ahead log at rest"] = f"{soak.log_mebibytes:.2f}"
    if soak.log_mebibytes > LOG_MEBIBYTES_MAX:
        growing.append("the write-ahead log does not shrink")
    for name, figure in {**figures, **broken}.items():
        table.add_row(name, f"{figure:,}" if isinstance(figure, int) else str(figure))
    return table, [f"{name}: {number}" for name, number in broken.items() if number] + growing


def thirds(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the median of each size in the first and in the last third of the time."""
    warm = samples[WARM_UP_SAMPLES:] or samples
    third = max(len(warm) // 3, 1)
    names = warm[0] if warm else ()

    def median(name: str, part: list[dict[str, float]]) -> float:
        return statistics.median(sample.get(name, 0.0) for sample in part)

    return {name: (median(name, warm[:third]), median(name, warm[-third:])) for name in names}


@contextmanager
def place(store: str, directory: str) -> Iterator[tuple[str, PostgresServer | None]]:
    """Make a store of its own and return its URL."""
    if store == "sqlite":
        yield f"sqlite:///{directory}/soak.db", None
    else:
        with PostgresServer() as server:
            yield server.create_database("soak"), server


def left_behind(fleet: Fleet, directory: str, temporary: str) -> dict[str, int]:
    """Count leftovers after every worker has stopped: only the database file may be there."""
    files = {path.name for path in Path(directory).iterdir()} - {"soak.db", Path(temporary).name}
    return {
        "processes left behind": len(fleet.alive()),
        "files, sockets and directories left behind": len(files) + len(os.listdir(temporary)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="postgres")
    parser.add_argument("--rate", type=float, default=60.0, help="numbers sent per second")
    given = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as directory, place(given.store, directory) as (url, server):
        os.environ["ONEFOLD_URL"] = url
        asyncio.run(app.migrate())
        temporary = tempfile.mkdtemp(dir=directory)
        fleet = Fleet(url, temporary)
        soak = Soak(fleet, server, given.rate)
        try:
            with Progress(console=console) as progress:
                booked = asyncio.run(run(soak, given.minutes, progress))
        finally:
            fleet.stop()
        table, broken = report(soak, booked, left_behind(fleet, directory, temporary), given.minutes)
    console.print(table)
    if broken:
        raise SystemExit(f"the promise was broken: {', '.join(broken)}")


if __name__ == "__main__":
    main()
