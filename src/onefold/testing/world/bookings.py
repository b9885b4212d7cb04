"""The programs of a simulated world of sagas: steps and undos of every kind, and processes that interfere.

Timeouts race with success, answers arrive twice, operators cancel and resume; in the end every saga must have left
all of its effects, or none.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from onefold.app import App
from onefold.errors import StoreUnavailableError
from onefold.handlers.context import Context
from onefold.store import Query, Record, State
from onefold.store.journal_lines import UNDO_PREFIX, Line, LineKind
from onefold.store.sqlite.drivers import Connection
from onefold.store.sqlite.session import Session
from onefold.store.sqlite.verbs.journal import JournalTable
from onefold.tasks.retry import RetryPolicy
from onefold.testing.checker import Final, Violation
from onefold.testing.clock import FakeClock
from onefold.testing.world.loop import Process, SimulatedClock
from onefold.testing.world.workload import Tasks, Workload
from onefold.workflows.saga_status import SagaStatus, read_saga
from onefold.workflows.workflow import Run

_RETRY = RetryPolicy(max_attempts=2, base=0.3, cap=2.0)
_SAGAS = ("book", "fulfil")
#: The timeout of a step or an answer; the step takes up to twice as long.
_SECONDS = 0.6


class Bookings(Workload):
    """The work in a world of sagas."""

    tables = (
        *Workload.tables,
        "CREATE TABLE booking (number INTEGER PRIMARY KEY, saga TEXT, step TEXT)",
    )
    options = " --sagas"
    kinds = ("book", "book", "fulfil", "fulfil", "write")

    async def act(self, ctx: Context) -> None:
        """Take effect in a step, an undo or a command of either; sometimes be late, or fail before or after it."""
        await self.before_effect(ctx)
        if not self._world.calm and self._world.chance.random() < 0.3:
            await self._clock.sleep(self._world.chance.uniform(0, 2 * _SECONDS))
        step = f"workflow:{ctx.message.id}/{ctx.step}" if ctx.step else ctx.message.causation_id
        _, _, name = step.partition(":")
        saga, _, name = name.partition("/")
        await ctx.execute("INSERT INTO booking (saga, step) VALUES (?, ?)", saga, name)
        if self._roll(ctx.message) == "fail":
            raise ValueError("it fails after its write")

    # interference

    async def produce(self, tasks: Tasks, app: App, process: Process) -> None:
        """Send sagas, and repeat every answer that they got."""
        await asyncio.gather(super().produce(tasks, app, process), self._repeat(app, process))

    async def _repeat(self, app: App, process: Process) -> None:
        clock, chance = SimulatedClock(self._world.loop, process), self._world.chance
        while not self._world.calm:
            await clock.sleep(chance.uniform(0.0, 1.5))
            with suppress(StoreUnavailableError):
                for record in await self._sagas(app):
                    lines = await app.journal(record.envelope.id)
                    answers = [Line(one.name, one.kind, one.value) for one in lines if one.kind is LineKind.CHILD]
                    if answers and await app.store.record(record.envelope.id, answers):
                        self._world.log(process, f"answered again {record.envelope.id}")

    async def _sagas(self, app: App) -> list[Record]:
        found = await app.find(Query(limit=1_000))
        return [one for one in found if one.envelope.message_type in _SAGAS and not one.state.ended]

    async def _act(self, app: App, process: Process) -> None:
        """Cancel or resume a saga, or redrive a dead letter."""
        chance, by = self._world.chance, {"actor": "simulation", "reason": "chance"}
        letters = [letter async for letter in app.dead_letters()]
        if letters and chance.random() < 0.4:
            letter = chance.choice(letters)
            self._world.log(process, f"redrive {letter.id} {await letter.redrive(**by)}")
        elif sagas := await self._sagas(app):
            run_id = chance.choice(sagas).envelope.id
            if chance.random() < 0.5:
                self._world.log(process, f"cancel {run_id} {await app.cancel(run_id, **by)}")
            else:
                self._world.log(process, f"resume {run_id} {await app.resume(run_id, **by)}")

    async def calm_down(self, app: App) -> None:
        """Resume sagas that are stuck."""
        for record in await self._sagas(app):
            saga = await app.saga_status(record.envelope.id)
            if saga is not None and saga.status is SagaStatus.STUCK:
                await app.resume(record.envelope.id, actor="simulation", reason="all is calm")

    # the checks at the end

    def key_of(self, record: Record) -> str:
        sent_by_user = record.envelope.message_type in (*_SAGAS, "write")
        return super().key_of(record) if sent_by_user else record.envelope.id

    def final(self, record: Record) -> Final:
        has_effect = record.envelope.message_type == "write"
        return Final(record.envelope.id, self.key_of(record), record.state, has_effect)

    def look(self, connection: Connection, records: Sequence[Record]) -> list[Violation]:
        done: dict[str, list[str]] = defaultdict(list)
        for saga, step in connection.execute("SELECT saga, step FROM booking ORDER BY number"):
            done[saga].append(step)
        found: list[Violation] = []
        for record in records:
            if record.envelope.message_type in _SAGAS:
                lines = JournalTable(Session(connection, FakeClock())).read(record.envelope.id)
                self._note_commands(self.key_of(record), lines)
                problems = _problems(record, lines, done[record.envelope.id])
                found += [Violation("wrong", self.key_of(record), (record.envelope.id,), one) for one in problems]
        return found

    def _note_commands(self, key: str, lines: Sequence[Line]) -> None:
        for line in lines:
            if line.kind is LineKind.SENT:
                command = msgspec.json.decode(line.value)["id"]
                self._world.journal.invoke(key, command)
                self._world.journal.ok(key, command, command)


def _problems(record: Record, lines: Sequence[Line], done: Sequence[str]) -> Iterable[str]:
    """Yield the problems of a saga, given the steps and undos that took effect, in order."""
    saga = read_saga(record, lines)
    if saga.status not in (SagaStatus.COMPLETED, SagaStatus.COMPENSATED, SagaStatus.FAILED):
        yield f"it is {saga.status}"
    for name in {name for name in done if done.count(name) > 1}:
        yield f"{name} took effect {done.count(name)} times"
    forward = [name for name in done if not name.startswith(UNDO_PREFIX)]
    undone = [name.removeprefix(UNDO_PREFIX) for name in done if name.startswith(UNDO_PREFIX)]
    begun = [step.name for step in saga.steps]
    if saga.status is SagaStatus.COMPLETED and (undone or forward != begun):
        yield f"it is completed, and did {done} of {begun}"
    if saga.status is SagaStatus.COMPENSATED and undone != begun[::-1]:
        yield f"it is compensated, and undid {undone} of {begun}"
    if saga.status is SagaStatus.FAILED and (done or record.state is not State.DEAD):
        yield f"it failed at the start, and did {done}"
    if undone and done[: len(forward)] != forward:
        yield f"a step took effect after others were undone: {done}"


def declare_bookings(app: App) -> Tasks:
    """Declare every saga, step and command; they find their world among the resources."""

    async def act(ctx: Context, key: str) -> str:
        await ctx.resources.act(ctx)
        return key

    def step(name: str) -> Callable[..., Any]:
        async def undo(ctx: Context, key: str) -> None:
            await act(ctx, key)

        async def do(ctx: Context, key: str) -> str:
            return await act(ctx, key)

        return app.step(undo=app.step(retry=_RETRY)(undo), name=name, retry=_RETRY, timeout=_SECONDS)(do)

    def command(name: str) -> Any:
        undo = app.task(name=f"un-{name}", subject="{key}", retry=_RETRY)(act)
        return app.step(undo=undo, timeout=_SECONDS)(app.task(name=name, subject="{key}", retry=_RETRY)(act))

    async def write(ctx: Context, key: str) -> str:
        work: Bookings = ctx.resources
        await work.before_effect(ctx)
        await work.effect(ctx, key)
        return key

    seat, room, car = step("seat"), step("room"), step("car")
    stock, money = command("stock"), command("money")

    async def book(run: Run, key: str) -> str:
        await run.step(seat, key)
        await run.step(room, key)
        await run.sleep(0.5)
        return str(await run.step(car, key))

    async def fulfil(run: Run, key: str) -> str:
        await run.step(stock, key)
        await run.step(seat, key)
        return str(await run.child(money, key))

    sagas: dict[str, Any] = {"book": book, "fulfil": fulfil}
    declared: dict[str, Any] = {
        name: app.saga(name=name, key="{key}", subject="{key}", retry=_RETRY)(function)
        for name, function in sagas.items()
    }
    declared["write"] = app.task(name="write", key="{key}", subject="{key}", retry=_RETRY)(write)
    return declared
