"""The world of one seed: simulated processes on one database file, their faults, and the checks at the end.

``onefold.testing.world.simulation`` explains the idea and runs many of these.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from onefold.app import App
from onefold.clock import MICROSECONDS
from onefold.errors import OnefoldError, StoreUnavailableError
from onefold.handlers.threads import Threads
from onefold.store import Query, Record, State
from onefold.store.sqlite.drivers import Library, load_driver
from onefold.store.sqlite.session import Session
from onefold.store.sqlite.verbs.find import find
from onefold.testing.checker import Final, Journal, Report, Violation, check
from onefold.testing.clock import FakeClock
from onefold.testing.faults import Fault
from onefold.testing.world.loop import Process, SimulatedClock, SimulatedLoop, current_process
from onefold.testing.world.mortal import Crashed, MortalStore, SimulatedStore
from onefold.testing.world.workload import Tasks, Workload
from onefold.worker.settings import WorkerSettings

#: The boot id of the one machine on which all simulated processes run.
BOOT = "simulated"

#: How long the faults last, in virtual seconds.
ACTIVE_SECONDS = 12.0
#: Rounds of draining, and the seconds of each, enough for the longest lease and the longest delay.
_DRAIN_ROUNDS, _DRAIN_SECONDS = 60, 30.0
#: The clock of the draining worker is ahead of every wrong clock of the run.
_DRAIN_SKEW = 86_400 * MICROSECONDS


@dataclass(slots=True)
class Rates:
    """The chance of each fault, per call."""

    crash: float
    lose: float
    stop: float
    refuse: float
    delay: float

    @classmethod
    def draw(cls, chance: random.Random) -> Rates:
        pick = chance.choice
        return cls(
            pick([0, 0.004, 0.015, 0.04]),
            pick([0, 0.01, 0.05]),
            pick([0, 0.005, 0.02]),
            pick([0, 0.01]),
            pick([0, 0.2]),
        )


@dataclass(slots=True)
class Result:
    """The result of one seed."""

    seed: int
    report: Report
    history: list[str] = field(repr=False)
    #: The command line options that, with the seed, make the same world.
    options: str = ""
    #: The generated programs of the world, by key.
    programs: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        command = f"python -m onefold.testing.world.simulation{self.options} --seed {self.seed}"
        return f"seed {self.seed}:\n{self.report}\nreplay with: {command}"


class World:
    """The world of one seed, from the first send to the last check."""

    def __init__(
        self,
        seed: int,
        file: Path,
        declared: App,
        tasks: Tasks,
        workload: type[Workload],
        driver: Library = "apsw",
    ) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.loop = SimulatedLoop(random.Random(self.chance.getrandbits(64)))
        self.journal = Journal()
        self.history: list[str] = []
        self.calm = False
        self.rates = Rates.draw(self.chance)
        self.lease = self.chance.choice([1.0, 2.0, 5.0])
        self.work = workload(self)
        self._file = file
        self._driver = driver
        self._declared = declared
        self._tasks = tasks
        self._numbers = 0
        self._stores: list[SimulatedStore] = []
        self._apps: dict[str, App] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._problems: list[Violation] = []

    # the faults of calls

    def log(self, process: Process | None, event: str) -> None:
        """Append one line to the history."""
        self.history.append(f"{self.loop.time():.6f} {process or '-'} {event}")

    async def trouble(self, store: SimulatedStore, process: Process, verb: str) -> Fault | None:
        """Decide the fault of one call."""
        if self.calm:
            return None
        roll, rates = self.chance.random(), self.rates
        if (roll := roll - rates.crash) < 0:
            if self.chance.random() < 0.5:
                return Fault("kill after")
            self.log(process, f"{verb}: kill")
            store.die()
        elif (roll := roll - rates.lose) < 0:
            return Fault("lose")
        elif (roll := roll - rates.refuse) < 0:
            raise StoreUnavailableError(f"{verb} was refused")
        elif (roll := roll - rates.stop) < 0:
            await self._stop(process, verb)
        elif (roll := roll - rates.delay) < 0:
            await SimulatedClock(self.loop, process).sleep(self.chance.choice([0.0, 0.001, 0.05]))
        return None

    async def _stop(self, process: Process, verb: str) -> None:
        # A process stopped inside a transaction on SQLite blocks every writer; seldom for long, to save steps.
        inside = verb in ("commit", "begin") or verb.startswith("transaction.")
        seconds = self.chance.uniform(0.1, 0.5 if inside and self.chance.random() < 0.9 else 2.5 * self.lease)
        self.log(process, f"{verb}: stopped for {seconds:.3f} s")
        if self.chance.random() < 0.3:
            process.skew += round(self.chance.uniform(-600, 600) * MICROSECONDS)
        self.loop.stop_process(process, seconds)
        await SimulatedClock(self.loop, process).sleep(0)

    def note_death(self, process: Process) -> None:
        """Mark the process as dead, and start its successor after a while unless the faults have stopped."""
        self.loop.kill_process(process)
        self._apps.pop(process.name, None)
        role = process.name.partition("-")[0]
        self.loop.later(self.chance.uniform(0.01, 2.0), self._succeed, role)

    def kill_current(self, where: str) -> None:
        """Kill the process that is running."""
        process = current_process()
        for store in self._stores:
            if process is not None and store._process is process and not process.dead:
                self.log(process, f"{where}: kill")
                store.die()

    def _succeed(self, role: str) -> None:
        if not self.calm:
            self._begin(role)

    # processes

    def _begin(self, role: str) -> None:
        lives: dict[str, Callable[[App, Process], Coroutine[Any, Any, None]]] = {
            "worker": self._worker,
            "producer": self._producer,
            "operator": self._operator,
        }
        self._numbers += 1
        process = Process(f"{role}-{self._numbers}")
        process.skew = round(self.chance.choice([0, 0, 1, 60]) * self.chance.uniform(-1, 1) * MICROSECONDS)
        self._lives[process.name] = self.loop.start(process, self._live(process, lives[role]))

    async def _live(self, process: Process, life: Callable[[App, Process], Awaitable[None]]) -> None:
        try:
            async with self.app(process) as app:
                await life(app, process)
        except Crashed:
            pass
        except StoreUnavailableError:
            # As if a supervisor restarted it; only an error of the store may end a process.
            self.note_death(process)
        except Exception as error:
            if not process.dead:
                self._problems.append(Violation("stuck", process.name, (), f"the process ended with {error!r}"))

    def app(self, process: Process) -> App:
        """Make the app of one process, with its own connection and clock."""
        clock = SimulatedClock(self.loop, process)
        inner = MortalStore(
            str(self._file), clock=clock, synchronous="OFF", inline=True, boot=BOOT, driver=self._driver
        )
        store = SimulatedStore(inner, self, process, clock)
        self._stores.append(store)
        app = App(store=store, clock=clock, chance=random.Random(self.chance.getrandbits(64)))
        if self.work.declares is None:
            # Declaring takes half the time of a small world, and gives the same in all of them.
            app.registry = self._declared.registry
        else:
            self.work.declares(app)
        app.lifespan(lambda: nullcontext(self.work.resources))
        self._apps[process.name] = app
        return app

    async def _worker(self, app: App, process: Process) -> None:
        await app.work(name=process.name, lease=self.lease, concurrency=self.chance.randint(1, 3), stop_after=20.0)

    async def _producer(self, app: App, process: Process) -> None:
        await self.work.produce(self._tasks, app, process)

    async def _operator(self, app: App, process: Process) -> None:
        """A producer and an operator in one process: opening a process for each would make the worlds slow."""
        await asyncio.gather(self.work.produce(self._tasks, app, process), self.work.operate(app, process))

    # the whole run

    def run(self) -> Result:
        """Run this world to its end and check it."""
        try:
            with patch.object(Threads, "run", _run_at_once):
                self.loop.run_until_complete(self._everything())
        except (RuntimeError, OnefoldError) as error:
            self._problems.append(Violation("stuck", "world", (), str(error)))
        report = self.check()
        self.calm = True
        for store in self._stores:
            store.break_off()
            store._process.dead = True
        self.loop.unwind()
        return Result(self.seed, report, self.history, self.work.options, self.work.bodies)

    async def _everything(self) -> None:
        producers = self.chance.choice(["producer", "operator"]), self.chance.choice(["producer", "operator"])
        for role in ("worker",) * self.chance.randint(2, 3) + producers:
            self._begin(role)
        outside = Process("world")
        await SimulatedClock(self.loop, outside).sleep(ACTIVE_SECONDS)
        self.calm = True
        if self.chance.random() < 0.5:
            await self._stop_gracefully()
        else:
            for store in self._stores:
                store.break_off()
                self.loop.kill_process(store._process)
        await self._drain()

    async def _stop_gracefully(self) -> None:
        """Ask all processes to stop; a worker that was asked must hold no lease afterwards."""
        clock = SimulatedClock(self.loop, Process("world"))
        for store in self._stores:
            self.loop.resume(store._process)
        left = {task for name, task in self._lives.items() if name in self._apps and not task.done()}
        while left and self.loop.time() < ACTIVE_SECONDS + 120:
            # Repeated, because a worker that is only just starting misses the request.
            for app in self._apps.values():
                app.stop_working()
            await clock.sleep(1.0)
            # Some processes still die of faults that were decided before.
            left = {task for task in left if not task.done() and task.get_name() in self._apps}
        if left:
            names = sorted(task.get_name() for task in left)
            self._problems.append(Violation("stuck", names[0], (), "the process does not stop"))
        unaware: set[tuple[str, int]] = set().union(*(store.unaware for store in self._stores))
        for record in self.records():
            known = (record.envelope.id, record.fence) not in unaware
            if record.state is State.LEASED and record.worker in self._apps and known and not left:
                problem = f"{record.worker} stopped and still holds it"
                self._problems.append(Violation("stuck", self.work.key_of(record), (record.envelope.id,), problem))

    async def _drain(self) -> None:
        process = Process("drain-0")
        process.skew = _DRAIN_SKEW

        async def life() -> None:
            async with self.app(process) as app:
                # Not alone, which would purge: the checker must find every message.
                queues = sorted({task.queue for task in app.tasks.values()})
                settings = WorkerSettings(process.name, queues, until_idle=True, alone=False)
                for _ in range(_DRAIN_ROUNDS):
                    await self.work.calm_down(app)
                    await app.work_as(settings)
                    if all(self.work.is_over(record) for record in self.records()):
                        return
                    await SimulatedClock(self.loop, process).sleep(_DRAIN_SECONDS)

        await self.loop.start(process, life())

    # checking

    def records(self) -> list[Record]:
        """Read every message through a connection of its own, because the stores may be dead."""
        connection = load_driver(self._driver).connect(str(self._file))
        try:
            return find(Session(connection, FakeClock()), Query(limit=1_000))
        finally:
            connection.close()

    def check(self) -> Report:
        """Run the checkers."""
        records = self.records()
        connection = load_driver(self._driver).connect(str(self._file))
        effects = self.work.effects(connection)
        problems = self.work.look(connection, records)
        connection.close()
        finals = [self.work.final(record) for record in records]
        known = {final.message_id for final in finals}
        finals += [Final(id_, key, State.CANCELLED) for id_, key in self.work.given_up.items() if id_ not in known]
        report = check(self.journal, effects, finals)
        report.violations += [*problems, *self._problems]
        return report


async def _run_at_once(threads: Threads, call: Callable[[], Any], **_: object) -> Any:
    """Run a thread's function on the simulated loop, so that the seed decides when it runs."""
    return await asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, call)
