"""Generated programs on real processes: workers and operators that are killed at random, on either store.

Every process is a fork of the test's own, killed by SIGKILL: by itself before or after a statement of its store or
inside a step or undo, or from outside at any moment.  Afterwards a new worker, which is not killed, brings every
program to its end, and the checker compares what is left.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from onefold.app import App
from onefold.clock import MICROSECONDS, Clock, SystemClock, to_datetime
from onefold.errors import StoreUnavailableError
from onefold.store import Store
from onefold.testing.checker import Violation
from onefold.testing.faults import HastyClock
from onefold.testing.programs.ending import bring_to_end, judge_all
from onefold.testing.programs.hazards import Hazards
from onefold.testing.programs.interpreter import Tasks, table
from onefold.testing.programs.outside import OutsideFile
from onefold.testing.programs.people import People
from onefold.testing.programs.worlds import draw_programs

#: The chance of death at each point inside a function, and before or after each statement.
_DEATH_IN_FUNCTION = 0.04
_DEATH_AT_STATEMENT = 0.004
#: The longest pause between two kills from outside.
_KILL_SECONDS = 0.5
_WORKERS = 2
_LEASE_SECONDS = 1.0
#: The clock of the last worker is so far ahead that every wait and every lease has run out.
_LATER = timedelta(days=1)

_fork = multiprocessing.get_context("fork")


@dataclass(slots=True)
class Outcome:
    """The result of one batch of programs."""

    violations: list[Violation] = field(default_factory=list)
    #: The number of processes that died, and of programs that were judged.
    deaths: int = 0
    judged: int = 0

    def __str__(self) -> str:
        told = f"{self.judged} programs, {self.deaths} processes killed, {len(self.violations)} violations"
        return "\n".join([told, *map(str, self.violations)])


class ProgramProcesses:
    """One batch of programs on one empty database; the provider keeps its memory in ``folder``."""

    def __init__(self, url: str, folder: Path, *, seed: int, number: int, sagas: bool) -> None:
        self._url = url
        self._outside = OutsideFile(folder / "outside.jsonl")
        self._seed = seed
        self._sagas = sagas
        self._bodies = draw_programs(seed, number, sagas=sagas)
        self._started = 0

    def run(self, *, deaths: int, seconds: float) -> Outcome:
        """Run the batch until ``deaths`` processes have died or ``seconds`` have passed, then bring it to its end."""
        level, logging.getLogger("onefold").level = logging.getLogger("onefold").level, logging.CRITICAL
        try:
            asyncio.run(self._prepare())
            outcome = Outcome(deaths=self._harm(deaths, seconds))
            asyncio.run(self._finish(outcome))
            return outcome
        finally:
            logging.getLogger("onefold").level = level

    # apps

    @property
    def _is_sqlite(self) -> bool:
        return self._url.startswith("sqlite")

    def _open(self, clock: Clock, trace: Callable[[Any, str], None] | None = None) -> Store:
        if self._is_sqlite:
            from onefold.store.sqlite import SQLiteStore

            return SQLiteStore(self._url.removeprefix("sqlite:///"), clock=clock, trace=trace)
        from onefold.store.postgres import PostgresStore

        return PostgresStore(self._url, clock=clock, trace=trace)

    def _app(self, hazards: Hazards, clock: Clock, trace: Callable[[Any, str], None] | None = None) -> App:
        app = App(store=self._open(clock, trace), clock=clock)
        Tasks(app, marker="?" if self._is_sqlite else "%s")
        app.lifespan(lambda: nullcontext(hazards))
        return app

    async def _prepare(self) -> None:
        clock = SystemClock()
        app = self._app(_ProcessHazards(self._outside, random.Random(0), clock, calm=True), clock)
        await app.migrate()
        async with app:
            async with app.transaction() as transaction:
                await transaction.execute(table("sqlite" if self._is_sqlite else "postgres"))
            await app.subscribe()
            task = app.tasks["deal" if self._sagas else "program"]
            await app.send_many([task.call(f"k{key}", body) for key, body in enumerate(self._bodies)])

    # harm

    def _harm(self, most: int, seconds: float) -> int:
        """Keep workers and an operator running, and kill them; return how many died."""
        clock, chance, deaths = SystemClock(), random.Random(self._seed), 0
        over = clock.steady() + round(seconds * MICROSECONDS)
        roles = [self._work] * _WORKERS + [self._interfere]
        living = [self._start(role) for role in roles]
        try:
            while deaths < most and (left := (over - clock.steady()) / MICROSECONDS) > 0:
                pause = min(left, chance.uniform(0.0, _KILL_SECONDS))
                if not wait([process.sentinel for process in living], timeout=pause):
                    chance.choice(living).kill()
                for place, process in enumerate(living):
                    if wait([process.sentinel], timeout=0):
                        process.join()
                        deaths += 1
                        living[place] = self._start(roles[place])
        finally:
            for process in living:
                process.kill()
                process.join()
        return deaths + len(living)

    def _start(self, role: Callable[[random.Random], Coroutine[Any, Any, None]]) -> Any:
        self._started += 1
        process = _fork.Process(target=_live, args=(role, f"{self._seed}/{self._started}"), daemon=True)
        process.start()
        return process

    async def _work(self, chance: random.Random) -> None:
        deadly, clock = _Deadly(chance), SystemClock()
        hazards = _ProcessHazards(self._outside, chance, clock)
        async with self._app(hazards, clock, deadly.trace) as app:
            deadly.armed = True
            await app.work(name=f"worker-{os.getpid()}", lease=_LEASE_SECONDS, concurrency=4)

    async def _interfere(self, chance: random.Random) -> None:
        deadly, clock = _Deadly(chance), SystemClock()
        people = People(self._outside, chance, lambda event: None)
        async with self._app(_ProcessHazards(self._outside, chance, clock), clock, deadly.trace) as app:
            deadly.armed = True
            while True:
                await clock.sleep(chance.uniform(0.0, 0.1))
                with suppress(StoreUnavailableError):
                    await (people.tell(app) if chance.random() < 0.7 else people.act(app))

    # the end

    async def _finish(self, outcome: Outcome) -> None:
        clock = _later()
        hazards = _ProcessHazards(self._outside, random.Random(self._seed), clock, calm=True)
        async with self._app(hazards, clock) as app:
            await bring_to_end(app, self._outside, clock)
            outcome.judged, outcome.violations = await judge_all(app, self._outside)


class _ProcessHazards(Hazards):
    """The faults of a real process."""

    def __init__(self, outside: OutsideFile, chance: random.Random, clock: Clock, *, calm: bool = False) -> None:
        super().__init__(outside, chance)
        self._clock = clock
        self.calm = calm

    def now(self) -> int:
        return self._clock.now()

    def risk_death(self, where: str) -> None:
        if not self.calm and self._chance.random() < _DEATH_IN_FUNCTION:
            os.kill(os.getpid(), signal.SIGKILL)

    async def dawdle(self, seconds: float) -> None:
        await self._clock.sleep(seconds / 4)


class _Deadly:
    """Kills its process before or after a random statement of its store."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        #: False while the store opens, which is the same for all processes and tested elsewhere.
        self.armed = False

    def trace(self, when: str, statement: str) -> None:
        if self.armed and self._chance.random() < _DEATH_AT_STATEMENT:
            os.kill(os.getpid(), signal.SIGKILL)


def _live(role: Callable[[random.Random], Coroutine[Any, Any, None]], seed: str) -> None:
    """Run a process until it is killed; it also ends if the store cannot be reached."""
    with suppress(StoreUnavailableError):
        asyncio.run(role(random.Random(seed)))


def _later() -> HastyClock:
    """Return a clock that is a day ahead, and on which short sleeps end at once."""
    real = SystemClock()
    clock = HastyClock(to_datetime(real.now() - real.steady()))
    clock.stall(real.steady() / MICROSECONDS + _LATER.total_seconds())
    return clock
