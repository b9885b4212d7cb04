"""Caps, rates, order and ageing hold over six processes that are killed while their limits change.

Turns between keys are not judged here: the messages that a killed worker had claimed wait until its leases run out, and
meanwhile a key with many messages has all the turns.  See ``tests/unit/store/test_gate_pace.py`` and the contracts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import limit_journal
import pytest
from limit_journal import Limits, Lived, Ran
from limit_worker import CONCURRENCY, make_app

from onefold import App
from onefold.processes import parent_death

WORKER = Path(__file__).with_name("limit_worker.py")
PROCESSES = 6
#: Each process that is killed is replaced by one with the limits that follow; all six have been replaced by then.
LIMITS = (
    Limits(cap=3, cap_each=2, rate=20, rate_each=4, burst=5),
    Limits(cap=6, cap_each=3, rate=40, rate_each=8, burst=5),
    Limits(cap=2, cap_each=1, rate=10, rate_each=4, burst=5),
)
#: So many steps of priority are between the levels that are sent, and so long has the old message waited: a step counts
#: as a minute, so this is more than they are worth.
HIGH, OLD_SECONDS = 9, 600
#: So many messages are being run or prefetched when another one is due.
AT_ONCE = 2 * PROCESSES * CONCURRENCY
#: Parts of the handlers whose leases may run out because the machine is busy: each is left out of the count.
OVERTAKEN_MAX = 0.05
LOOK_SECONDS = 0.05


#: So many messages are done between two kills, and so few are left when more are sent because kills are still to come.
DONE_PER_KILL, LEFT_MIN = 40, 200
#: Keys and messages of each task with a limit, as they are sent in one go; and of the tasks whose turns are compared.
LIMITED = {
    "capped": ("a", 60),
    "each": ("abcdef", 120),
    "rated": ("a", 40),
    "rated_each": ("abcd", 80),
    "line": ("abcdef", 120),
}
RICH, POOR, POOR_KEYS, LEVEL = 300, 80, 8, 60


@dataclass(frozen=True, slots=True)
class Size:
    """How often a process is killed, and how long all of it may take."""

    kills: int
    seconds_max: float


SHORT = Size(kills=2 * PROCESSES, seconds_max=90)
LONG = Size(kills=8 * PROCESSES, seconds_max=400)


def limited(app: App, numbers: Iterator[int]) -> list[Any]:
    """Return calls of all tasks with a limit."""
    return [
        app.tasks[name].call(keys[n % len(keys)], next(numbers))
        for name, (keys, size) in LIMITED.items()
        for n in range(size)
    ]


def compared(app: App, numbers: Iterator[int]) -> list[Any]:
    """Return calls of the tasks whose turns are compared, those first that are not to be the first to run."""
    fair, level = app.tasks["fair"], app.tasks["level"]
    return [
        *(fair.call("rich", next(numbers)) for _ in range(RICH)),
        *(fair.call(f"poor{n % POOR_KEYS}", next(numbers)) for n in range(POOR)),
        *(level.call("low", next(numbers)) for _ in range(LEVEL)),
        *(level.options(priority=HIGH).call("high", next(numbers)) for _ in range(LEVEL)),
    ]


class Workers:
    """Worker processes: started, killed and replaced, and all killed at the end."""

    def __init__(self, url: str, folder: Path) -> None:
        self.lives: dict[int, Lived] = {}
        self._url, self._folder = url, folder
        self._running: list[tuple[subprocess.Popen[bytes], Limits, float]] = []

    def start(self, limits: Limits) -> None:
        words = [sys.executable, str(WORKER), self._url, str(self._folder), json.dumps(asdict(limits))]
        began = time.monotonic()
        process = subprocess.Popen(words, preexec_fn=partial(parent_death.die_with, os.getpid()))
        self._running.append((process, limits, began))

    @property
    def is_oldest_ready(self) -> bool:
        """Whether the process that has run for longest has begun a handler; before that its death proves nothing."""
        process, _, _ = self._running[0]
        assert process.poll() is None, "a worker ended by itself"
        file = self._folder / f"{process.pid}.jsonl"
        return file.exists() and file.stat().st_size > 0

    def kill_oldest(self) -> None:
        process, limits, began = self._running.pop(0)
        process.kill()
        process.wait()
        if (self._folder / f"{process.pid}.jsonl").exists():
            self.lives[process.pid] = Lived(began, time.monotonic(), limits)

    def end(self) -> None:
        while self._running:
            self.kill_oldest()


@contextmanager
def workers(url: str, folder: Path) -> Iterator[Workers]:
    started = Workers(url, folder)
    try:
        for _ in range(PROCESSES):
            started.start(LIMITS[0])
        yield started
    finally:
        started.end()


async def left_of(app: App) -> int:
    counts = (await app.count()).get("default")
    return counts.scheduled + counts.leased if counts else 0


async def make_old(app: App) -> None:
    """Send a message of the lowest priority that has waited for longer than priorities count."""
    receipt = await app.tasks["level"].send("old", -1)
    async with app.transaction() as transaction:
        old = OLD_SECONDS * 1_000_000
        if app.store.capabilities.shared:
            statement = "UPDATE onefold.delivery SET due_at = due_at - %s WHERE id = %s::uuid"
        else:
            statement = (
                "UPDATE onefold_delivery SET due_at = due_at - ? "
                "WHERE seq = (SELECT seq FROM onefold_message WHERE id = ?)"
            )
        await transaction.execute(statement, old, receipt.id)


async def attack(url: str, folder: Path, size: Size) -> dict[int, Lived]:
    """Send, work and kill until all is done; return when each process lived, and with which limits."""
    app, numbers = make_app(url, folder, **asdict(LIMITS[0])), itertools.count()
    await app.migrate()
    async with app:
        await app.send_many([*limited(app, numbers), *compared(app, numbers)])
        await make_old(app)
        sent, killed, done = await left_of(app), 0, 0
        give_up_at = time.monotonic() + size.seconds_max
        with workers(url, folder) as started:
            while (left := await left_of(app)) or killed < size.kills:
                assert time.monotonic() < give_up_at, f"after {size.seconds_max} s {left} are left, {killed} kills"
                if killed < size.kills and sent - left >= done + DONE_PER_KILL and started.is_oldest_ready:
                    started.kill_oldest()
                    killed, done = killed + 1, sent - left
                    started.start(LIMITS[killed * len(LIMITS) // (size.kills + 1)])
                elif killed < size.kills and left < LEFT_MIN:
                    more = limited(app, numbers)
                    await app.send_many(more)
                    sent += len(more)
                await asyncio.sleep(LOOK_SECONDS)
    return started.lives


def judge(runs: list[Ran], lives: dict[int, Lived]) -> list[str]:
    """Return everything that a limit forbids."""
    wrong = [
        *limit_journal.over_the_cap(runs, "capped", lives, each=False),
        *limit_journal.over_the_cap(runs, "each", lives, each=True),
        *limit_journal.over_the_rate(runs, "rated", lives, each=False),
        *limit_journal.over_the_rate(runs, "rated_each", lives, each=True),
        *limit_journal.out_of_order(runs, "line"),
    ]
    (old,) = limit_journal.places_of(runs, "level", "old")
    high, low = (limit_journal.places_of(runs, "level", key) for key in ("high", "low"))
    if old > AT_ONCE:
        wrong.append(f"the old message had its turn at place {old}")
    if sum(high) / len(high) > sum(low) / len(low):
        wrong.append("messages of the high priority did not overtake those of the low one")
    return wrong


def check(url: str, folder: Path, size: Size, record_property: Callable[[str, object], None]) -> None:
    lives = asyncio.run(attack(url, folder, size))
    runs = limit_journal.read(folder, lives)
    stale = limit_journal.overtaken(runs)
    lost = [run for run in stale if lives[run.process].ended > run.ended]
    seconds = max(run.ended for run in runs) - runs[0].began
    record_property("chaos", f"limits: {len(runs)} runs in {seconds:.0f} s, {size.kills} kills, {len(lost)} taken over")
    assert len(lost) <= OVERTAKEN_MAX * len(runs)
    assert not judge(runs, lives)
    if size is LONG:
        # The caps were reached: with one place less they would not have held.
        lower = {pid: replace(one, limits=_one_place_less(one.limits)) for pid, one in lives.items()}
        assert limit_journal.over_the_cap(runs, "capped", lower, each=False)
        assert limit_journal.over_the_cap(runs, "each", lower, each=True)


def _one_place_less(limits: Limits) -> Limits:
    return replace(limits, cap=limits.cap - 1, cap_each=limits.cap_each - 1)


def test_limits_hold_while_processes_are_killed_and_limits_change(
    store_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check(store_url, tmp_path, SHORT, record_property)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_limits_hold_for_minutes_while_processes_are_killed_and_limits_change(
    store_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check(store_url, tmp_path, LONG, record_property)
