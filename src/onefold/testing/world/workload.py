"""The programs of a simulated world: handlers that fail, producers that repeat themselves, operators.

Everything here uses onefold as any program would, and records its requests and the answers in the journal.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from onefold.app import App
from onefold.errors import Reject, Retry, Snooze, StoreUnavailableError
from onefold.handlers.context import Context
from onefold.message.envelope import Envelope
from onefold.operations.dead_letters import DeadLetter
from onefold.store import Query, Record, State
from onefold.store.sqlite.drivers import Connection
from onefold.tasks.retry import RetryPolicy
from onefold.tasks.task import Call, Task
from onefold.testing.checker import Effect, Final, Journal, Violation
from onefold.testing.world.loop import Process, SimulatedClock, SimulatedLoop

#: The tasks that send a message of another task when they succeed.
CHILDREN = {"relay": "child", "relay-now": "child", "parent": "derived"}
#: Tasks that have no effect but their sends.
WITHOUT_EFFECT = ("relay", "relay-now")

#: How often the handler of one message may fail, so that every world comes to an end.
_MISDEEDS_MAX = 3


class Surroundings(Protocol):
    """The part of the world that a workload uses."""

    loop: SimulatedLoop
    chance: random.Random
    journal: Journal
    calm: bool
    lease: float

    def log(self, process: Process | None, event: str) -> None: ...


class _AbandonedError(Exception):
    """Rolls back a producer's transaction on purpose."""


#: The tasks by name; each takes the key of its work as its argument.
Tasks = dict[str, Task[[str], str]]


class Workload:
    """The work in one world, and the checks of its effects."""

    #: The world's own tables, for the effects of handlers and for rows that producers write with their sends.
    tables: tuple[str, ...] = (
        "CREATE TABLE effect (number INTEGER PRIMARY KEY, key TEXT, message TEXT, fence INTEGER, position INTEGER)",
        "CREATE TABLE orders (key TEXT PRIMARY KEY)",
    )
    #: The command line options that make such a world.
    options = ""
    #: Declares what cannot be shared by the processes, because it refers to their app, as topics do.
    declares: Callable[[App], object] | None = None
    #: The tasks that producers send.
    kinds: tuple[str, ...] = ("write", "order", "relay", "relay-now", "parent")

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        chance = world.chance
        self.todo = [
            (kind, f"k{number}")
            for number, kind in enumerate(chance.choices(self.kinds, k=chance.randint(2, 4)))
            for _ in range(chance.randint(1, 3))
        ]
        #: The generated programs that are sent, by key.
        self.bodies: dict[str, str] = {}
        #: Messages that an operator tried to cancel or discard, so that they may be missing.
        self.given_up: dict[str, str] = {}
        self._misdeeds: Counter[str] = Counter()

    # handlers

    async def before_effect(self, ctx: Context) -> None:
        """Do what handlers do before they write: take time, snooze or fail, at random."""
        roll = self._roll(ctx.message)
        chance, clock = self._world.chance, self._clock
        if roll == "fail":
            raise ValueError("the handler fails")
        if roll == "retry":
            raise Retry(after=chance.uniform(0.1, 1.0))
        if roll == "snooze":
            raise Snooze(after=chance.uniform(0.1, 1.0))
        if roll == "reject":
            raise Reject("the handler rejects")
        if roll == "long":
            await clock.sleep(chance.uniform(0.5, 2.5) * self._world.lease)
        elif roll == "short":
            await clock.sleep(chance.uniform(0.0, 0.2))
        elif roll == "check":
            await ctx.check()

    async def effect(self, ctx: Context, key: str) -> None:
        """Write the effect, and sometimes fail or wait afterwards with the transaction open."""
        name = f"{ctx.message.message_type}:{key}"
        # The first statement takes SQLite's only write lock: no claim can happen from here to the commit.
        await ctx.execute("UPDATE effect SET number = number WHERE number < 0")
        position = len(self._world.journal.entries)
        await ctx.execute(
            "INSERT INTO effect (key, message, fence, position) VALUES (?, ?, ?, ?)",
            name, ctx.message.id, ctx.fence, position,
        )  # fmt: skip
        roll = self._roll(ctx.message)
        if roll == "fail":
            raise ValueError("the handler fails after its write")
        if roll == "short":
            await self._clock.sleep(self._world.chance.uniform(0.0, 0.2))
        elif roll == "long" and self._world.chance.random() < 0.1:
            await self._clock.sleep(2.5)  # longer than a handler's transaction may stay open

    def _roll(self, message: Envelope) -> str:
        roll = self._world.chance.choice(["fail", "retry", "snooze", "reject", "long", "short", "check", *[""] * 5])
        if self._world.calm or self._misdeeds[message.id] >= _MISDEEDS_MAX:
            return ""
        self._misdeeds[message.id] += bool(roll)
        if roll:
            self._world.log(None, f"handler of {message.message_type}:{message.subject}: {roll}")
        return roll

    @property
    def _clock(self) -> SimulatedClock:
        return SimulatedClock(self._world.loop, Process("handler"))

    @property
    def resources(self) -> Any:
        """The resources of handlers."""
        return self

    # producers

    def call(self, app: App, task: Task[Any, Any], key: str) -> Call[Any]:
        """Return the call that a producer sends for one key."""
        return task.call(key)

    async def produce(self, tasks: Tasks, app: App, process: Process) -> None:
        """Send the messages in random order, some of them twice at once; repeat a send that got no answer."""
        clock = SimulatedClock(self._world.loop, process)
        while self.todo and not self._world.calm:
            await clock.sleep(self._world.chance.uniform(0.0, 1.0))
            if not self.todo:
                return
            item = self._world.chance.choice(self.todo)
            times = self._world.chance.choice([1, 1, 2])
            answers = await asyncio.gather(*(self._send(tasks, app, process, *item) for _ in range(times)))
            if any(answers):
                with suppress(ValueError):
                    self.todo.remove(item)

    async def _send(self, tasks: Tasks, app: App, process: Process, kind: str, key: str) -> bool:
        journal, name = self._world.journal, f"{kind}:{key}"
        task = tasks[kind]
        journal.invoke(process.name, name)
        try:
            if kind != "order":
                receipt = await app.dispatch(self.call(app, task, key))
            else:
                async with app.transaction() as transaction:
                    await transaction.execute("INSERT INTO orders VALUES (?) ON CONFLICT DO NOTHING", key)
                    receipt = transaction.send(task, key)
                    if self._world.chance.random() < 0.2:
                        raise _AbandonedError
        except StoreUnavailableError:
            journal.unknown(process.name, name)
            return False
        except _AbandonedError:
            journal.fail(process.name, name)
            return False
        journal.ok(process.name, name, receipt.id)
        self._world.log(process, f"sent {name} as {receipt.id} duplicate={receipt.duplicate}")
        return True

    # operators

    async def operate(self, app: App, process: Process) -> None:
        """Redrive, discard and cancel messages at random."""
        clock = SimulatedClock(self._world.loop, process)
        while not self._world.calm:
            await clock.sleep(self._world.chance.uniform(0.2, 3.0))
            with suppress(StoreUnavailableError):
                await self._act(app, process)

    async def _act(self, app: App, process: Process) -> None:
        chance = self._world.chance
        letters: list[DeadLetter] = [letter async for letter in app.dead_letters()]
        roll = chance.random()
        if letters and roll < 0.7:
            letter = chance.choice(letters)
            if roll < 0.1:
                (record,) = await app.find(Query(ids=(letter.id,)))
                self.given_up[letter.id] = self.key_of(record)
                done = await letter.discard(actor="simulation", reason="chance")
            else:
                done = await letter.redrive(actor="simulation", reason="chance")
            self._world.log(process, f"{'discard' if roll < 0.1 else 'redrive'} {letter.id} {done}")
        elif roll > 0.8 and (records := await app.find(Query())):
            record = chance.choice(records)
            if not record.state.ended:
                self.given_up[record.envelope.id] = self.key_of(record)
                done = await app.cancel(record.envelope.id, actor="simulation", reason="chance")
                self._world.log(process, f"cancel {record.envelope.id} {done}")

    # the checks at the end

    def key_of(self, record: Record) -> str:
        """Return the name of a message's work in the journal and the effects."""
        return f"{record.envelope.message_type}:{record.envelope.subject}"

    async def calm_down(self, app: App) -> None:
        """Prepare the end, now that the faults have stopped."""

    def is_over(self, record: Record) -> bool:
        """Whether a message has nothing left to do."""
        return record.state.ended

    def effects(self, connection: Connection) -> list[Effect]:
        """Read the effects of handlers."""
        return [Effect(*row) for row in connection.execute("SELECT key, message, fence, position FROM effect")]

    def final(self, record: Record) -> Final:
        """Return the final state of a message."""
        has_effect = record.envelope.message_type not in WITHOUT_EFFECT
        return Final(record.envelope.id, self.key_of(record), record.state, has_effect)

    def look(self, connection: Connection, records: Sequence[Record]) -> list[Violation]:
        """Record requests made by handlers, and return the violations that only this workload can find."""
        journal = self._world.journal
        orders = {f"order:{key}" for (key,) in connection.execute("SELECT key FROM orders")}
        for record in records:
            # A handler's send is accepted once the handler's message is done, and not before.
            if record.state is State.DONE and (child := CHILDREN.get(record.envelope.message_type)):
                journal.invoke(self.key_of(record), f"{child}:{record.envelope.subject}")
                journal.ok(self.key_of(record), f"{child}:{record.envelope.subject}")
        for key in sorted(orders):
            journal.ok("the order's row", key)
        alone = [(self.key_of(record), record.envelope.id) for record in records]
        problem = "it was sent in a transaction, and the row of that transaction is missing"
        return [
            Violation("torn", key, (id_,), problem) for key, id_ in alone if key[:6] == "order:" and key not in orders
        ]


def declare(app: App) -> Tasks:
    """Declare every task; the handlers find their world among the resources."""
    retry = RetryPolicy(max_attempts=3, base=0.3, cap=2.0)

    async def write(ctx: Context, key: str) -> str:
        work: Workload = ctx.resources
        await work.before_effect(ctx)
        await work.effect(ctx, key)
        return key

    async def relay(ctx: Context, key: str) -> str:
        work: Workload = ctx.resources
        await work.before_effect(ctx)
        ctx.send(child, key)
        return key

    async def parent(ctx: Context, key: str) -> str:
        ctx.send(derived, key)
        return await write(ctx, key)

    child = app.task(name="child", key="{key}", subject="{key}", retry=retry)(write)
    derived = app.task(name="derived", subject="{key}", retry=retry)(write)
    named = {"write": write, "order": write, "relay": relay, "relay-now": relay, "parent": parent}
    return {
        name: app.task(
            name=name, key="{key}", subject="{key}", retry=retry, settle="now" if name == "relay-now" else "batch"
        )(function)
        for name, function in named.items()
    }
