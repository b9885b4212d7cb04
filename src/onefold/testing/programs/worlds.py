"""Generated programs in simulated worlds: crashes at every call of the store, and inside steps and undos."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from onefold.app import App
from onefold.errors import StoreUnavailableError
from onefold.store import Record, State
from onefold.store.sqlite.drivers import Connection
from onefold.store.sqlite.session import Session
from onefold.store.sqlite.verbs.journal import JournalTable
from onefold.tasks.task import Call, Task
from onefold.testing.checker import Effect, Final, Violation
from onefold.testing.clock import FakeClock
from onefold.testing.programs.description import written
from onefold.testing.programs.drawing import Drawing
from onefold.testing.programs.hazards import Hazards
from onefold.testing.programs.interpreter import ROWS, Tasks, table
from onefold.testing.programs.judging import Evidence, judge_program, judge_saga
from onefold.testing.programs.outside import Deed, Outside
from onefold.testing.programs.people import RUNS, People
from onefold.testing.world.loop import Process, SimulatedClock, current_process
from onefold.testing.world.workload import Workload

#: How much likelier death is inside a function than at a call of the store, because there are fewer functions.
_DANGER = 4.0


class _SimulatedHazards(Hazards):
    """The faults of a simulated world, for the process that is running."""

    def __init__(self, world: Any) -> None:
        super().__init__(Outside(), world.chance)
        self._world = world

    @property
    def _clock(self) -> SimulatedClock:
        return SimulatedClock(self._world.loop, current_process() or Process("none"))

    def now(self) -> int:
        return self._clock.now()

    def risk_death(self, where: str) -> None:
        self.calm = self._world.calm
        if not self.calm and self._chance.random() < _DANGER * self._world.rates.crash:
            self._world.kill_current(where)

    async def dawdle(self, seconds: float) -> None:
        # Sometimes longer than a lease, so that the process is replaced while it runs.
        long = self._chance.random() < 0.2
        await self._clock.sleep(seconds * self._world.lease if long else seconds)


class Programs(Workload):
    """Generated workflows in one world."""

    tables = (*Workload.tables, table("sqlite"))
    options = " --programs"
    kinds = ("program",)
    declares = staticmethod(Tasks)
    _judge: Callable[[Evidence], list[Violation]] = staticmethod(judge_program)

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.bodies = {key: self._draw(Drawing(world.chance)) for _, key in self.todo}
        self.hazards = _SimulatedHazards(world)
        self._people = People(self.hazards.outside, world.chance, lambda event: world.log(None, event))

    def _draw(self, drawing: Drawing) -> str:
        return written(drawing.workflow())

    @property
    def resources(self) -> Any:
        return self.hazards

    def call(self, app: App, task: Task[Any, Any], key: str) -> Call[Any]:
        return app.tasks[task.name].call(key, self.bodies[key])

    # people

    async def produce(self, tasks: Any, app: App, process: Process) -> None:
        await asyncio.gather(super().produce(tasks, app, process), self._often(app, process, self._people.tell, 0.5))

    async def operate(self, app: App, process: Process) -> None:
        await self._often(app, process, self._people.act, 0.8)

    async def _often(self, app: App, process: Process, act: Callable[[App], Awaitable[None]], pause: float) -> None:
        clock = SimulatedClock(self._world.loop, process)
        while not self._world.calm:
            await clock.sleep(self._world.chance.uniform(0.0, pause))
            with suppress(StoreUnavailableError):
                await act(app)

    async def calm_down(self, app: App) -> None:
        self.hazards.calm = True
        await self._people.calm_down(app)

    # the checks at the end

    def key_of(self, record: Record) -> str:
        return super().key_of(record) if record.envelope.message_type in self.kinds else record.envelope.id

    def is_over(self, record: Record) -> bool:
        # Dead letters are redriven, so that in the end everything has happened.
        return record.state.ended and record.state is not State.DEAD

    def effects(self, connection: Connection) -> list[Effect]:
        return []

    def final(self, record: Record) -> Final:
        return Final(record.envelope.id, self.key_of(record), record.state, has_effect=False)

    def look(self, connection: Connection, records: Sequence[Record]) -> list[Violation]:
        rows = [Deed(*row) for row in connection.execute(ROWS)]
        deeds = self.hazards.outside.deeds()
        found: list[Violation] = []
        for record in records:
            id_ = record.envelope.id
            self._world.journal.invoke("program", self.key_of(record))
            if record.envelope.message_type in RUNS:
                lines = JournalTable(Session(connection, FakeClock())).read(id_)
                evidence = Evidence(record, lines, *([one for one in of if one.run == id_] for of in (deeds, rows)))
                found += self._judge(evidence)
        return found


class Deals(Programs):
    """Generated sagas in one world."""

    options = " --deals"
    kinds = ("deal",)
    _judge = staticmethod(judge_saga)

    def _draw(self, drawing: Drawing) -> str:
        return written(drawing.saga())

    def is_over(self, record: Record) -> bool:
        return record.state.ended


def declare_programs(app: App) -> Any:
    """Declare the tasks of generated programs."""
    tasks = Tasks(app)
    return {"program": tasks.program, "deal": tasks.deal}


def draw_programs(seed: int, number: int, *, sagas: bool) -> list[str]:
    """Draw ``number`` programs, encoded for sending."""
    drawings = [Drawing(random.Random(f"{seed}/{one}")) for one in range(number)]
    return [written(one.saga() if sagas else one.workflow()) for one in drawings]
