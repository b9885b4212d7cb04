#!/usr/bin/env python
"""The cost of removing a message beside storing and running it, in processor time of the client and of the server.

    scripts/purge.py --store postgres --messages 20000 --standing 100000

Messages are put, claimed and settled; later their bodies are purged, and later still their remaining rows.
The exit status says whether, for messages that are sent one by one, purging costs at most a quarter of the rest, and
whether one worker keeps up with 2,000 messages a second in its share of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from onefold import App, limits
from onefold.clock import MICROSECONDS, SystemClock
from onefold.store import Done, Store
from onefold.testing.servers import PostgresServer

#: Purging may cost at most this share of the messages' earlier cost ...
SHARE_MAX = 0.25
#: ... and must keep up with this many messages a second.
RATE_MIN = 2_000
#: Concurrent senders, each with one message at a time, as in a busy service.
SENDERS = 100
#: Messages of one ``send_many``.
_BULK = 1_000
_CLAIM = 500
_RESULT = b"null"
_TICKS = os.sysconf("SC_CLK_TCK")


class LaterClock(SystemClock):
    """The machine's clock, which can be put forward."""

    def __init__(self) -> None:
        self._ahead = 0

    def now(self) -> int:
        return super().now() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += round(seconds * MICROSECONDS)


@dataclass
class Place:
    """A database, and the processor time spent on it so far."""

    url: str
    processor: Callable[[], float]
    #: Does what a server does by itself in the days between two purges, which is not counted.
    tidy: Callable[[], None]


@dataclass
class Costs:
    """Processor seconds by purpose, for a number of messages."""

    messages: int
    seconds: dict[str, float] = field(default_factory=dict)
    #: The duration of the purges in real time.
    purging: float = 0.0

    @property
    def share(self) -> float:
        """The cost of purging, as a share of the rest."""
        purging = sum(seconds for name, seconds in self.seconds.items() if name.startswith("purge"))
        return purging / (sum(self.seconds.values()) - purging)

    @property
    def rate(self) -> float:
        """How many messages a second one worker can purge."""
        return self.messages / self.purging * limits.PURGE_SHARE_MAX

    @property
    def good(self) -> bool:
        return self.share <= SHARE_MAX and self.rate >= RATE_MIN

    def __str__(self) -> str:
        each = {name: seconds / self.messages * 1e6 for name, seconds in self.seconds.items()}
        parts = [f"{name} {micros:.1f} µs" for name, micros in each.items()]
        return "  ".join([*parts, f"share {self.share:.2f}", f"keeps up with {self.rate:,.0f}/s"])


async def measure(app: App, clock: LaterClock, place: Place, messages: int, *, bulk: bool) -> Costs:
    """Let messages live and be purged; return the cost of each part."""
    store, processor, tidy = app.store, place.processor, place.tidy
    costs = Costs(messages)

    @asynccontextmanager
    async def counted(name: str) -> AsyncIterator[None]:
        before, began = processor(), time.perf_counter()
        yield
        costs.seconds[name] = processor() - before
        costs.purging += time.perf_counter() - began if name.startswith("purge") else 0.0

    async with counted("put"):
        await _put(app, range(messages), bulk=bulk)
    async with counted("claim and settle"):
        await _run(store, messages)
    tidy()
    clock.advance(limits.MESSAGE_RETENTION + 1)
    async with counted("purge bodies"):
        await purge_all(store)
    tidy()
    clock.advance(limits.KEY_WINDOW)
    async with counted("purge messages"):
        await purge_all(store)
    return costs


async def _put(app: App, numbers: range, *, bulk: bool) -> None:
    task = app.tasks["work"]
    if bulk:
        for start in range(0, len(numbers), _BULK):
            await app.send_many(task.call(n) for n in numbers[start : start + _BULK])
        return
    left = iter(numbers)

    async def send() -> None:
        for n in left:
            await task.send(n)

    await asyncio.gather(*(send() for _ in range(SENDERS)))


async def _run(store: Store, messages: int, kept: float = limits.KEY_WINDOW) -> None:
    left, done = messages, Done(_RESULT, key_window=kept, body_retention=min(kept, limits.MESSAGE_RETENTION))
    while left:
        leases = await store.claim(["default"], types=["work"], limit=_CLAIM, lease=60.0, worker="w")
        await store.settle([(lease, done) for lease in leases])
        left -= len(leases)


async def purge_all(store: Store) -> int:
    """Purge until nothing is left to purge; return the number of batches."""
    batches = 0
    while True:
        async with store.transaction() as transaction:
            if not (await transaction.purge()).total:
                return batches
        batches += 1


def make_app(url: str, clock: LaterClock) -> App:
    app = App(url, clock=clock)

    @app.task(key=lambda n: f"order-{n}")
    async def work(n: int) -> None: ...

    return app


# processor time


def client_seconds() -> float:
    """Return the processor time of this process."""
    return time.process_time()


def tree_seconds(pid: int) -> float:
    """Return the processor time of a process, of its running children and of those it has waited for."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(int(word) for word in words[11:15]) / _TICKS + sum(_own_seconds(int(child)) for child in children)


def _own_seconds(pid: int) -> float:
    try:
        return tree_seconds(pid)
    except OSError:
        return 0.0  # it has just ended, and its parent will count it


@contextmanager
def make_place(name: str) -> Iterator[Place]:
    """Make a database."""
    if name == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            yield Place(f"sqlite:///{directory}/purge.db", client_seconds, lambda: None)
        return
    with PostgresServer() as server:
        url = server.create_database("purge")

        def vacuum() -> None:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("VACUUM ANALYZE")

        yield Place(url, lambda: client_seconds() + tree_seconds(server.pid), vacuum)


async def measure_anew(name: str, options: argparse.Namespace, *, bulk: bool) -> Costs:
    """Measure on a new database, after filling it with the standing messages."""
    with make_place(name) as place:
        clock = LaterClock()
        app = make_app(place.url, clock)
        await app.migrate()
        async with app:
            if options.standing:
                await _put(app, range(-options.standing, 0), bulk=True)
                await _run(app.store, options.standing, kept=100 * limits.DAY)
                clock.advance(limits.MESSAGE_RETENTION + 1)
                await purge_all(app.store)
            return await measure(app, clock, place, options.messages, bulk=bulk)


async def main(options: argparse.Namespace) -> int:
    bad = 0
    for name in options.store.split(","):
        # On a busy machine the best of several rounds is the most reliable.
        rounds = [await measure_anew(name, options, bulk=False) for _ in range(options.rounds)]
        for costs in rounds:
            print(f"{name:9} {SENDERS} senders  {costs}", flush=True)
        bad += not any(costs.good for costs in rounds)
        print(f"{name:9} send_many    {await measure_anew(name, options, bulk=True)}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="sqlite,postgres")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--standing", type=int, default=0, help="messages that are there already and stay")
    parser.add_argument("--rounds", type=int, default=1)
    raise SystemExit(asyncio.run(main(parser.parse_args())))
