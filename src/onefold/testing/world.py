"""One seed's world: pretended processes on one database file, what happens to them, and the look at what is left.

``onefold.testing.simulation`` explains the idea and runs many of these.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import apsw

from onefold.app import App
from onefold.clock import MICROSECONDS
from onefold.errors import OnefoldError, StoreUnavailableError
from onefold.gate import NO_GATINGS, Gating
from onefold.store import Fenced, Lane, Lease, Query, Record, State
from onefold.stores.sqlite import SQLiteStore
from onefold.stores.sqlite.connection import Patience
from onefold.stores.sqlite.finding import find
from onefold.stores.sqlite.session import Session
from onefold.testing.checker import Effect, Final, Journal, Report, Violation, check
from onefold.testing.clock import FakeClock
from onefold.testing.faults import Fault, FaultyStore
from onefold.testing.loop import Process, SimulatedClock, SimulatedLoop
from onefold.testing.workload import CHILDREN, WITHOUT_EFFECT, Tasks, Workload, key_of

#: All pretended processes run on one machine, which is never started again.
BOOT = "simulated"

#: How long the faults last, in virtual seconds.
ACTIVE_SECONDS = 12.0
#: Rounds of draining, each with time for the longest lease and the longest delay.
_DRAIN_ROUNDS, _DRAIN_SECONDS = 60, 30.0
#: The clock that drains is ahead of the most wrong clock there was.
_DRAIN_SKEW = 86_400 * MICROSECONDS


class Crashed(BaseException):
    """The process is dead; whatever catches this is cleanup, and its store refuses every call."""


@dataclass(slots=True)
class Rates:
    """How hostile this world is: the chance per call of each fault."""

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
    """What became of one seed."""

    seed: int
    report: Report
    history: list[str] = field(repr=False)

    def __str__(self) -> str:
        return f"seed {self.seed}:\n{self.report}\nreplay with: python -m onefold.testing.simulation --seed {self.seed}"


class _MortalStore(SQLiteStore):
    """A store that knows its connections, so that they can be cut."""

    def _connect(self, patience: Patience) -> apsw.Connection:
        connection = super()._connect(patience)
        self.connections.append(connection)
        return connection

    @cached_property
    def connections(self) -> list[apsw.Connection]:
        return []


class SimulatedStore(FaultyStore):
    """The store of one pretended process; dies with it."""

    def __init__(self, inner: _MortalStore, world: World, process: Process, clock: SimulatedClock) -> None:
        super().__init__(inner, clock=clock)
        self._sqlite = inner
        self._world = world
        self._process = process
        self._answer: set[tuple[str, int]] = set()
        #: Leases that were given to this process and that it never heard of.
        self.unaware: set[tuple[str, int]] = set()

    async def before(self, verb: str) -> Fault | None:
        if self._process.dead:
            raise Crashed
        self._world.log(self._process, verb)
        return await self._world.trouble(self, self._process, verb)

    def after(self, verb: str, fault: Fault | None) -> None:
        if fault is None:
            return
        self._world.log(self._process, f"{verb}: {fault.kind}")
        if verb == "claim":
            self.unaware |= self._answer
        if fault.kind == "kill after":
            self.die()
        raise StoreUnavailableError(f"the answer to {verb} was lost")

    async def claim(
        self,
        queues: Sequence[str],
        *,
        types: Sequence[str],
        limit: int,
        lease: float,
        worker: str,
        lane: Lane = Lane.ANY,
        gatings: Mapping[str, Gating] = NO_GATINGS,
        at_once: int | None = None,
    ) -> list[Lease]:
        async def claim() -> list[Lease]:
            leases = await self._sqlite.claim(
                queues,
                types=types,
                limit=limit,
                lease=lease,
                worker=worker,
                lane=lane,
                gatings=gatings,
                at_once=at_once,
            )
            self._answer = {(one.id, one.fence) for one in leases}
            for one in leases:
                self._world.journal.claim(worker, one.id, one.fence)
                self._world.log(self._process, f"has {one.id} fence {one.fence}")
            return leases

        return await self.call("claim", claim)

    async def extend(self, leases: Sequence[Fenced], *, lease: float, starting: bool = False) -> list[bool]:
        return await self.call("extend", lambda: self._sqlite.extend(leases, lease=lease, starting=starting))

    def die(self) -> None:
        """Kill the process: its open transaction is rolled back and nothing in it runs any more."""
        self.break_off()
        self._world.bury(self._process)
        raise Crashed

    def break_off(self) -> None:
        """Close the file without a goodbye, as the kernel does for a killed process."""
        for connection in self._sqlite.connections:
            connection.close(True)


class World:
    """One seed's world, from its first send to its last check."""

    def __init__(self, seed: int, file: Path, declared: App, tasks: Tasks) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.loop = SimulatedLoop(random.Random(self.chance.getrandbits(64)))
        self.journal = Journal()
        self.history: list[str] = []
        self.calm = False
        self.rates = Rates.draw(self.chance)
        self.lease = self.chance.choice([1.0, 2.0, 5.0])
        self.work = Workload(self)
        self._file = file
        self._declared = declared
        self._tasks = tasks
        self._numbers = 0
        self._stores: list[SimulatedStore] = []
        self._apps: dict[str, App] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._problems: list[Violation] = []

    # what happens to calls

    def log(self, process: Process | None, event: str) -> None:
        """Write one line of history."""
        self.history.append(f"{self.loop.time():.6f} {process or '-'} {event}")

    async def trouble(self, store: SimulatedStore, process: Process, verb: str) -> Fault | None:
        """Decide what happens to one call."""
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
        # Whoever is stopped inside a transaction on SQLite stops every writer; seldom for long, to save steps.
        inside = verb in ("commit", "begin") or verb.startswith("transaction.")
        seconds = self.chance.uniform(0.1, 0.5 if inside and self.chance.random() < 0.9 else 2.5 * self.lease)
        self.log(process, f"{verb}: stopped for {seconds:.3f} s")
        if self.chance.random() < 0.3:
            process.skew += round(self.chance.uniform(-600, 600) * MICROSECONDS)
        self.loop.stop_process(process, seconds)
        await SimulatedClock(self.loop, process).sleep(0)

    def bury(self, process: Process) -> None:
        """Take note of a death, and start a successor after a while unless all is over."""
        self.loop.kill_process(process)
        self._apps.pop(process.name, None)
        role = process.name.partition("-")[0]
        self.loop.later(self.chance.uniform(0.01, 2.0), self._succeed, role)

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
            # A person or a supervisor starts it again; only the store's own failing may end a process.
            self.bury(process)
        except Exception as error:
            if not process.dead:
                self._problems.append(Violation("stuck", process.name, (), f"the process ended with {error!r}"))

    def app(self, process: Process) -> App:
        """Make the app of one process, with a connection and a clock of its own."""
        clock = SimulatedClock(self.loop, process)
        inner = _MortalStore(str(self._file), clock=clock, synchronous="OFF", inline=True, boot=BOOT)
        store = SimulatedStore(inner, self, process, clock)
        self._stores.append(store)
        app = App(store=store, clock=clock, chance=random.Random(self.chance.getrandbits(64)))
        # Declaring is half of the time a small world takes, and the same in all of them.
        app._registry = self._declared._registry
        app.lifespan(lambda: nullcontext(self.work))
        self._apps[process.name] = app
        return app

    async def _worker(self, app: App, process: Process) -> None:
        await app.work(name=process.name, lease=self.lease, concurrency=self.chance.randint(1, 3), stop_after=20.0)

    async def _producer(self, app: App, process: Process) -> None:
        await self.work.produce(self._tasks, app, process)

    async def _operator(self, app: App, process: Process) -> None:
        """A producer with an operator's hands: opening a process for each would make the worlds slow."""
        await asyncio.gather(self.work.produce(self._tasks, app, process), self.work.operate(app, process))

    # the whole

    def run(self) -> Result:
        """Run this world to its end and check it."""
        try:
            self.loop.run_until_complete(self._everything())
        except (RuntimeError, OnefoldError) as error:
            self._problems.append(Violation("stuck", "world", (), str(error)))
        report = self.check()
        self.calm = True
        for store in self._stores:
            store.break_off()
            store._process.dead = True
        self.loop.bury()
        return Result(self.seed, report, self.history)

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
        """Ask everybody to stop; a worker that was asked holds nothing afterwards."""
        clock = SimulatedClock(self.loop, Process("world"))
        for store in self._stores:
            self.loop.resume(store._process)
        left = {task for name, task in self._lives.items() if name in self._apps and not task.done()}
        while left and self.loop.time() < ACTIVE_SECONDS + 120:
            # Said again and again, because a worker that is only just starting does not hear it.
            for app in self._apps.values():
                app.stop_working()
            await clock.sleep(1.0)
            # Some die even now, of what was decided for them before.
            left = {task for task in left if not task.done() and task.get_name() in self._apps}
        if left:
            names = sorted(task.get_name() for task in left)
            self._problems.append(Violation("stuck", names[0], (), "the process does not stop"))
        unaware: set[tuple[str, int]] = set().union(*(store.unaware for store in self._stores))
        for record in self.records():
            known = (record.envelope.id, record.fence) not in unaware
            if record.state is State.LEASED and record.worker in self._apps and known and not left:
                problem = f"{record.worker} stopped and still holds it"
                self._problems.append(Violation("stuck", key_of(record), (record.envelope.id,), problem))

    async def _drain(self) -> None:
        process = Process("drain-0")
        process.skew = _DRAIN_SKEW

        async def life() -> None:
            async with self.app(process) as app:
                for _ in range(_DRAIN_ROUNDS):
                    await app.work(name=process.name, until_idle=True)
                    if all(record.state.ended for record in self.records()):
                        return
                    await SimulatedClock(self.loop, process).sleep(_DRAIN_SECONDS)

        await self.loop.start(process, life())

    # looking

    def records(self) -> list[Record]:
        """Read every message, past all stores that may have died."""
        connection = apsw.Connection(str(self._file))
        try:
            return find(Session(connection, FakeClock()), Query(limit=1_000))
        finally:
            connection.close()

    def check(self) -> Report:
        """Hand everything to the checker."""
        records = self.records()
        self._note_children(records)
        connection = apsw.Connection(str(self._file))
        effects = [Effect(*row) for row in connection.execute("SELECT key, message, fence, position FROM effect")]
        orders = {f"order:{row[0]}" for row in connection.execute("SELECT key FROM orders")}
        connection.close()
        for key in sorted(orders):
            self.journal.ok("the order's row", key)
        finals = [_final(record) for record in records]
        known = {final.message_id for final in finals}
        finals += [Final(id_, key, State.CANCELLED) for id_, key in self.work.given_up.items() if id_ not in known]
        report = check(self.journal, effects, finals)
        for final in finals:
            if final.key.startswith("order:") and final.key not in orders:
                problem = "it was sent in a transaction whose row is missing"
                self._problems.append(Violation("torn", final.key, (final.message_id,), problem))
        report.violations += self._problems
        return report

    def _note_children(self, records: Iterable[Record]) -> None:
        """What a handler sent is accepted when the handler's message is done, and not a moment earlier."""
        for record in records:
            key = key_of(record)
            if record.state is State.DONE and (child := CHILDREN.get(record.envelope.message_type)):
                self.journal.invoke(key, f"{child}:{record.envelope.subject}")
                self.journal.ok(key, f"{child}:{record.envelope.subject}")


def _final(record: Record) -> Final:
    has_effect = record.envelope.message_type not in WITHOUT_EFFECT
    return Final(record.envelope.id, key_of(record), record.state, has_effect)
