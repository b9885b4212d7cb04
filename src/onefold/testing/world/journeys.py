"""The programs of a simulated world of workflows: runs of every shape, senders of signals, an operator.

Every run returns the answers it got, under their names in its journal, so that both can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from onefold.app import App
from onefold.errors import CancelledMessageError, DeadError, SignalTimeoutError, StepError, StoreUnavailableError
from onefold.handlers.context import Context
from onefold.store import Query, Record, State
from onefold.store.journal_lines import LineKind
from onefold.store.sqlite.drivers import Connection
from onefold.store.sqlite.session import Session
from onefold.store.sqlite.verbs.journal import JournalTable
from onefold.tasks.retry import RetryPolicy
from onefold.testing.checker import Effect, Final, Violation
from onefold.testing.clock import FakeClock
from onefold.testing.world.loop import Process, SimulatedClock
from onefold.testing.world.story import StepEffect, Story, check_runs
from onefold.testing.world.workload import Tasks, Workload
from onefold.workflows.journal import standing
from onefold.workflows.workflow import Run

#: The answers that a run got, by their names in the journal.
Seen = dict[str, Any]

#: The workflows, the messages that only workflows send, and the steps that write a row.
_WORKFLOWS = ("ladder", "letters", "family", "nested")
_CHILDREN = ("leaf", "nested", "shared")
_TRANSACTIONAL = frozenset({"act", "slow", "finish"})

#: The timeout of a step named "slow"; the step takes up to twice as long.
_SLOW_SECONDS = 0.4
_RETRY = RetryPolicy(max_attempts=3, base=0.3, cap=2.0)
#: The kinds of lines from which an operator restarts a run.
_RESTARTABLE = (LineKind.RESULT, LineKind.TIMER, LineKind.SENT, LineKind.TAKEN)


class Journeys(Workload):
    """The work in a world of workflows."""

    tables = (
        *Workload.tables,
        "CREATE TABLE step_effect (number INTEGER PRIMARY KEY, run TEXT, step TEXT, restarts INTEGER, fence INTEGER, "
        "position INTEGER)",
    )
    options = " --runs"
    kinds = ("ladder", "letters", "letters", "family", "family", "write")

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        #: Runs that never get the signal they wait for.
        self._untold = {key for kind, key in self.todo if kind == "letters" and world.chance.random() < 0.1}

    # the bodies of steps and runs

    async def act(self, ctx: Context) -> None:
        """Take effect in a step; sometimes fail or wait before or after the effect."""
        await self.before_effect(ctx)
        # The first statement takes SQLite's only write lock: no claim can happen from here to the commit.
        await ctx.execute("UPDATE step_effect SET number = number WHERE number < 0")
        position = len(self._world.journal.entries)
        lines = "SELECT count(*) FROM onefold_step WHERE message_id = ? AND kind = ?"
        ((restarts,),) = await ctx.execute(lines, ctx.message.id, int(LineKind.RESTART))
        await ctx.execute(
            "INSERT INTO step_effect (run, step, restarts, fence, position) VALUES (?, ?, ?, ?, ?)",
            ctx.message.id, ctx.step, restarts, ctx.fence, position,
        )  # fmt: skip
        if self._roll(ctx.message) == "fail":
            raise ValueError("the step fails after its write")

    async def dawdle(self) -> None:
        """Take about as long as the timeout of a slow step."""
        seconds = 0.0 if self._world.calm else self._world.chance.uniform(0, 2 * _SLOW_SECONDS)
        await self._clock.sleep(seconds)

    def stumble(self, run: Run) -> None:
        """Fail, at random, in the code of the workflow itself."""
        if self._roll(run.message) == "fail":
            raise ValueError("the workflow fails")

    # senders of signals

    async def produce(self, tasks: Tasks, app: App, process: Process) -> None:
        """Send runs, and the signals that they wait for: too early, too late and twice."""
        await asyncio.gather(super().produce(tasks, app, process), self._tell(app, process))

    async def _tell(self, app: App, process: Process) -> None:
        clock, chance = SimulatedClock(self._world.loop, process), self._world.chance
        while not self._world.calm:
            await clock.sleep(chance.uniform(0.0, 0.8))
            with suppress(StoreUnavailableError):
                if waiting := await self._listening(app):
                    run_id, value = chance.choice(waiting), chance.choice([1, 2])
                    times = chance.choice([1, 1, 2])
                    told = [app.signal(run_id, "go", value, id=f"{value}") for _ in range(times)]
                    answers = await asyncio.gather(*told, return_exceptions=True)
                    self._world.log(process, f"told {run_id} {value}: {answers}")

    async def _listening(self, app: App) -> list[str]:
        """Return the runs that get signals."""
        records = await app.find(Query(message_type="letters"))
        return [one.envelope.id for one in records if not one.state.ended and one.envelope.subject not in self._untold]

    async def calm_down(self, app: App) -> None:
        """Send every signal to every run that waits for one."""
        for run_id in await self._listening(app):
            for value in (1, 2):
                await app.signal(run_id, "go", value, id=f"{value}")

    # operators

    async def _act(self, app: App, process: Process) -> None:
        chance = self._world.chance
        if chance.random() < 0.6:
            await super()._act(app, process)
            return
        runs = [one for one in await app.find(Query()) if one.envelope.message_type in _WORKFLOWS]
        runs = [one for one in runs if not one.state.ended or one.state is State.DEAD]
        if not runs:
            return
        run_id = chance.choice(runs).envelope.id
        names = [line.name for line in await app.journal(run_id) if line.kind in _RESTARTABLE]
        if names and chance.random() < 0.7:
            name = chance.choice(names)
            forgotten = await app.restart(run_id, from_step=name, actor="simulation", reason="chance")
            self._world.log(process, f"restart {run_id} from {name}: {forgotten}")
        else:
            done = await app.resume(run_id, actor="simulation", reason="chance")
            self._world.log(process, f"resume {run_id}: {done}")

    # the checks at the end

    def key_of(self, record: Record) -> str:
        """Identify children by their ids, because a child that is sent again after a restart is another message."""
        return record.envelope.id if record.envelope.message_type in _CHILDREN else super().key_of(record)

    def is_over(self, record: Record) -> bool:
        return super().is_over(record) or self._waits_for_ever(record)

    def _waits_for_ever(self, record: Record) -> bool:
        untold = record.envelope.message_type == "letters" and record.envelope.subject in self._untold
        return untold and record.state is State.PARKED

    def effects(self, connection: Connection) -> list[Effect]:
        return [
            replace(one, key=one.message_id) if one.key.partition(":")[0] in _CHILDREN else one
            for one in super().effects(connection)
        ]

    def final(self, record: Record) -> Final:
        has_effect = record.envelope.message_type not in _WORKFLOWS
        return Final(
            record.envelope.id, self.key_of(record), record.state, has_effect, waits=self._waits_for_ever(record)
        )

    def look(self, connection: Connection, records: Sequence[Record]) -> list[Violation]:
        steps = JournalTable(Session(connection, FakeClock()))
        rows = connection.execute("SELECT run, step, restarts, fence, position FROM step_effect ORDER BY number")
        effects = [StepEffect(*row) for row in rows]
        stories = [
            Story(
                one.envelope.id,
                self.key_of(one),
                one.state,
                standing(steps.read(one.envelope.id)),
                [effect for effect in effects if effect.run_id == one.envelope.id],
                one.result,
            )
            for one in records
            if one.envelope.message_type in _WORKFLOWS
        ]
        self._note_children(stories, records)
        return check_runs(self._world.journal.entries, stories, transactional=_TRANSACTIONAL)

    def _note_children(self, stories: Sequence[Story], records: Sequence[Record]) -> None:
        """Record journaled children as accepted, so they must exist, and others from before a restart as requested."""
        journal, restarted = self._world.journal, {one.run_id for one in stories if one.restarts}
        for run in stories:
            for line in run.lines:
                if line.kind is LineKind.SENT:
                    child = msgspec.json.decode(line.value)["id"]
                    journal.invoke(run.key, child)
                    journal.ok(run.key, child, child)
        for record in records:
            if any(run_id in (record.envelope.causation_id or "") for run_id in restarted):
                journal.invoke("before a restart", record.envelope.id)


async def act(ctx: Context, key: str) -> str:
    """A step with an effect."""
    await ctx.resources.act(ctx)
    return f"{ctx.step} for {key}"


async def slow(ctx: Context, key: str) -> str:
    """A step with a timeout that races with its success."""
    await ctx.resources.dawdle()
    return await act(ctx, key)


async def finish(ctx: Context, key: str) -> str:
    """The last step; its record carries all answers that are not in the journal yet."""
    return await act(ctx, key)


async def _fate(awaitable: Awaitable[Any]) -> Any:
    """Return the result, or how the step or child failed for good."""
    try:
        return await awaitable
    except StepError:
        return "failed"
    except DeadError:
        return "dead"
    except CancelledMessageError:
        return "gone"


def declare_journeys(app: App) -> Tasks:
    """Declare every workflow and task; the handlers find their world among the resources."""

    async def write(ctx: Context, key: str) -> str:
        work: Journeys = ctx.resources
        await work.before_effect(ctx)
        await work.effect(ctx, key)
        return key

    leaf = app.task(name="leaf", subject="{key}", retry=_RETRY)(write)
    shared = app.task(name="shared", key="{key}", subject="{key}", retry=_RETRY)(write)

    @app.workflow(name="nested", subject="{key}", retry=_RETRY)
    async def nested(run: Run, key: str) -> Seen:
        await run.sleep(0.2)
        return {"finish#1": await run.options(retry=_RETRY).step(finish, key)}

    async def ladder(run: Run, key: str) -> Seen:
        work: Journeys = run.resources
        seen: Seen = {"act#1": await _fate(run.options(retry=_RETRY).step(act, key))}
        await run.sleep(0.5)
        work.stumble(run)
        seen["slow#1"] = await _fate(run.options(timeout=_SLOW_SECONDS, retry=_RETRY).step(slow, key))
        run.send(leaf, key)
        await run.sleep(1.5)
        return seen | {"finish#1": await run.options(retry=_RETRY).step(finish, key)}

    async def letters(run: Run, key: str) -> Seen:
        work: Journeys = run.resources
        seen: Seen = {}
        for number, timeout in enumerate((0.6, None), 1):
            try:
                seen[f"go#{number}"] = await run.signal("go", timeout=timeout, type=int)
            except SignalTimeoutError:
                seen[f"go#{number}"] = None
            work.stumble(run)
            seen[f"act#{number}"] = await _fate(run.options(retry=_RETRY).step(act, key))
        return seen | {"finish#1": await run.options(retry=_RETRY).step(finish, key)}

    async def family(run: Run, key: str) -> Seen:
        async def branch(number: int) -> Seen:
            place = f"gather#2.{number}/"
            await run.sleep(0.1 * number)
            seen = {f"{place}act#1": await _fate(run.options(retry=_RETRY).step(act, key))}
            return seen | {f"{place}leaf#1": await _fate(run.child(leaf, key))}

        seen: Seen = {}
        with suppress(DeadError, CancelledMessageError):
            for number, child in enumerate(await run.gather(*(run.child(leaf, key) for _ in range(3))), 1):
                seen[f"leaf#{number}"] = child
        for one in await run.gather(branch(0), branch(1)):
            seen |= one
        seen["nested#1"] = await _fate(run.child(nested, key))
        seen["shared#1"] = await _fate(run.child(shared, "common"))
        return seen | {"finish#1": await run.options(retry=_RETRY).step(finish, key)}

    named: dict[str, Any] = {"ladder": ladder, "letters": letters, "family": family}
    declared: dict[str, Any] = {
        name: app.workflow(name=name, key="{key}", subject="{key}", retry=_RETRY)(function)
        for name, function in named.items()
    }
    declared["write"] = app.task(name="write", key="{key}", subject="{key}", retry=_RETRY)(write)
    return declared
