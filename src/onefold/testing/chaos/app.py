"""The app of a chaos run: handlers of every kind, each of which runs several statements in a varying order.

Most statements take two integers, so that a statement which runs in another's place does not fail by the types of
its parameters but writes wrong rows.  The answer of each statement is known beforehand; any other answer is written
to the table ``misread`` in the same commit, because a handler that raised would only be retried.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import permutations
from math import factorial
from typing import Any, NamedTuple

from onefold.app import URL_VARIABLE, App
from onefold.clock import SystemClock
from onefold.handlers.batch import Batch
from onefold.handlers.context import Context
from onefold.handlers.sync_context import SyncContext
from onefold.tasks.retry import RetryPolicy
from onefold.tasks.task import Task
from onefold.testing.chaos import demand
from onefold.testing.chaos.demand import Demand, amount_of
from onefold.testing.chaos.process import FOLDER_VARIABLE, say_ready
from onefold.workflows.workflow import Run, Workflow

Rows = list[tuple[Any, ...]]

#: Enough attempts that no message becomes a dead letter because of cancelled statements or deadlocks.
PATIENT = RetryPolicy(max_attempts=100, base=0.1, cap=0.5)
#: The cap on gifts that run at the same time.
GIFTS_MAX = 3
PARCELS_PER_BATCH = 5
#: How long some handlers wait between two statements, so that faults hit open transactions.
PAUSE_SECONDS = 0.005


class Action(NamedTuple):
    """A statement, its parameters and the expected answer, or None if the answer depends on other messages."""

    statement: str
    parameters: tuple[object, ...]
    answer: Rows | None = []  # noqa: RUF012 - never changed


class Statements:
    """Every statement of the workload, in the SQL of one engine."""

    def __init__(self, url: str) -> None:
        self.is_shared = url.startswith("postgres")

    def _say(self, text: str) -> str:
        return text.replace("?", "%s") if self.is_shared else text.replace(" FOR UPDATE", "")

    def audit(self, number: int) -> Action:
        text = "INSERT INTO audit (number, amount) VALUES (?, ?)"
        return Action(self._say(text), (number, amount_of(number)))

    def trail(self, number: int) -> Action:
        text = "INSERT INTO trail (number, amount) VALUES (?, ?)"
        return Action(self._say(text), (number, amount_of(number)))

    def account(self, number: int) -> Action:
        text = "UPDATE account SET balance = balance + ? WHERE id = ?"
        return Action(self._say(text), (amount_of(number), demand.account_of(number)))

    def tally(self, number: int) -> Action:
        text = (
            "INSERT INTO tally (id, total, times) VALUES (?, ?, 1) ON CONFLICT (id) DO UPDATE "
            "SET total = tally.total + excluded.total, times = tally.times + 1 RETURNING id"
        )
        id_ = demand.tally_of(number)
        return Action(self._say(text), (id_, amount_of(number)), [(id_,)])

    def parts(self, number: int) -> Action:
        text = "INSERT INTO part (number, place, amount) VALUES (?, 1, ?), (?, 2, ?), (?, 3, ?)"
        amounts = (amount_of(number) + place for place in range(1, demand.PARTS + 1))
        return Action(self._say(text), tuple(value for amount in amounts for value in (number, amount)))

    def note(self, number: int) -> Action:
        text = "INSERT INTO note (number, body) VALUES (?, ?)"
        return Action(self._say(text), (number, demand.body_of(number)))

    def price(self, number: int) -> Action:
        text = "SELECT id, amount FROM price WHERE id = ?"
        id_ = demand.price_id_of(number)
        return Action(self._say(text), (id_,), [(id_, demand.price_of(id_))])

    def lock(self, number: int) -> Action:
        """Lock the head of a line; the answer holds the last place that was taken in it."""
        text = "SELECT id, last FROM head WHERE id = ? FOR UPDATE"
        return Action(self._say(text), (demand.line_of(number),), None)

    def line(self, number: int, place: int) -> Action:
        text = "INSERT INTO line (number, line, place) VALUES (?, ?, ?)"
        return Action(self._say(text), (number, demand.line_of(number), place))

    def head(self, number: int, place: int) -> Action:
        text = "UPDATE head SET last = ? WHERE id = ?"
        return Action(self._say(text), (place, demand.line_of(number)))

    def order(self, number: int) -> Action:
        text = "INSERT INTO orders (number, amount) VALUES (?, ?) ON CONFLICT (number) DO NOTHING RETURNING number"
        return Action(self._say(text), (number, amount_of(number)), None)

    def till(self, number: int) -> Action:
        text = "UPDATE till SET total = total + ? WHERE id = ?"
        return Action(self._say(text), (amount_of(number), demand.till_of(number)))

    def misread(self, number: int, action: Action, answer: object) -> Action:
        text = "INSERT INTO misread (number, answer) VALUES (?, ?)"
        return Action(self._say(text), (number, f"{action.statement} answered {answer!r:.200}"))

    def first_rows(self) -> Iterator[Action]:
        """Fill the tables of sums and the table that is only read."""
        texts = {
            "account": "INSERT INTO account (id, balance) VALUES (?, ?)",
            "till": "INSERT INTO till (id, total) VALUES (?, ?)",
            "head": "INSERT INTO head (id, last) VALUES (?, ?)",
            "price": "INSERT INTO price (id, amount) VALUES (?, ?)",
        }
        for table, rows in demand.first_sums().items():
            yield from (Action(self._say(texts[table]), (id_, *values)) for id_, values in rows.items())


def in_some_order(actions: Iterable[Action], number: int) -> Iterator[Action]:
    """Return the actions in an order that depends on the number; over many numbers every order occurs."""
    given = tuple(actions)
    wanted = number // 7 % factorial(len(given))
    return iter(next(order for place, order in enumerate(permutations(given)) if place == wanted))


class Tasks(NamedTuple):
    """The declared tasks, by the kind of demand."""

    app: App
    statements: Statements
    by_kind: dict[str, Task[Any, Any] | Workflow[Any, Any]]


def make_tasks(url: str | None = None) -> Tasks:
    """Declare every task on a new app, for the store named by the URL or by the environment."""
    app = App(url)
    do = Statements(url or os.environ.get(URL_VARIABLE, ""))
    pause = SystemClock().sleep

    async def perform(ctx: Any, number: int, *actions: Action) -> None:
        for place, action in enumerate(in_some_order(actions, number)):
            if place and number % 5 == 0:
                await pause(PAUSE_SECONDS)
            await expect(ctx, number, action, await ctx.execute(action.statement, *action.parameters))

    async def expect(ctx: Any, number: int, action: Action, answer: Rows) -> None:
        if action.answer is not None and answer != action.answer:
            wrong = do.misread(number, action, answer)
            await ctx.execute(wrong.statement, *wrong.parameters)

    async def read_price(ctx: Context, number: int) -> None:
        action = do.price(number)
        await expect(ctx, number, action, await ctx.fetch(action.statement, *action.parameters))

    async def deposit(ctx: Context, number: int) -> int:
        if number % 4 == 0:
            await read_price(ctx, number)
        actions = [do.account(number), do.trail(number), do.tally(number)]
        if do.is_shared and number % 8 == 3:
            # The driver's own connection is part of the same transaction as ``ctx.execute``.
            connection, audit = await ctx.connection(), do.audit(number)
            await connection.execute(audit.statement, audit.parameters)
        else:
            actions.append(do.audit(number))
        await perform(ctx, number, *actions)
        send_follow_up(ctx, Demand("deposit", number))
        return amount_of(number)

    async def receipt(ctx: Context, number: int) -> int:
        await perform(ctx, number, do.note(number), do.parts(number))
        return amount_of(number)

    def purchase(ctx: SyncContext, number: int) -> int:
        for action in in_some_order((do.price(number), do.tally(number), do.parts(number), do.note(number)), number):
            answer = ctx.execute(action.statement, *action.parameters)
            if answer != action.answer:
                wrong = do.misread(number, action, answer)
                ctx.execute(wrong.statement, *wrong.parameters)
        return amount_of(number)

    async def gift(ctx: Context, number: int) -> int:
        await perform(ctx, number, do.audit(number), do.account(number), do.trail(number))
        return amount_of(number)

    async def place(ctx: Context, number: int) -> int:
        lock = do.lock(number)
        answer = await ctx.execute(lock.statement, *lock.parameters)
        if len(answer) != 1 or len(answer[0]) != 2 or answer[0][0] != demand.line_of(number):
            wrong = do.misread(number, lock, answer)
            await ctx.execute(wrong.statement, *wrong.parameters)
            return amount_of(number)
        last = answer[0][1] + 1
        await perform(ctx, number, do.line(number, last), do.head(number, last))
        return amount_of(number)

    async def order(ctx: Context, number: int) -> int:
        send_follow_up(ctx, Demand("order", number))
        await perform(ctx, number, do.trail(number), do.audit(number), do.account(number), do.price(number))
        return amount_of(number)

    def shipment(ctx: SyncContext, number: int) -> int:
        for action in in_some_order((do.note(number), do.parts(number)), number):
            ctx.execute(action.statement, *action.parameters)
        return amount_of(number)

    async def parcel(batch: Batch[int]) -> None:
        for item in batch:
            number = item.value
            await perform(batch, number, do.audit(number), do.trail(number), do.account(number))
            item.done(amount_of(number))

    async def stamp(ctx: Context, number: int) -> int:
        if number % 2:
            await read_price(ctx, number)
        await perform(ctx, number, do.parts(number))
        return amount_of(number)

    async def go_out(ctx: Context, number: int) -> int:
        await perform(ctx, number, do.audit(number), do.account(number))
        return amount_of(number)

    async def come_back(ctx: Context, number: int) -> None:
        await perform(ctx, number, do.tally(number), do.note(number))

    async def trip(run: Run, number: int) -> int:
        steps = run.options(retry=PATIENT)
        out = await steps.step(go_out, number)
        await run.child(by_kind["stamp"], number + demand.FOLLOW_UP)
        await steps.step(come_back, number)
        return int(out)

    def send_follow_up(ctx: Context, asked: Demand) -> None:
        if (following := asked.follow_up) is not None:
            ctx.send(by_kind[following.kind], following.number)

    task: Callable[..., Any] = app.task
    named: dict[str, Any] = {"key": "{number}", "subject": "{number}", "retry": PATIENT}
    by_kind: dict[str, Task[Any, Any] | Workflow[Any, Any]] = {
        "deposit": task(**named)(deposit),
        "receipt": task(**named)(receipt),
        "purchase": task(**named)(purchase),
        "gift": task(subject="{number}", retry=PATIENT, max_running=GIFTS_MAX)(gift),
        "place": task(**named, ordering_key=lambda number: str(demand.line_of(number)))(place),
        "order": task(**named)(order),
        "shipment": task(**named)(shipment),
        "parcel": task(key="{value}", subject="{value}", retry=PATIENT, batch=PARCELS_PER_BATCH)(parcel),
        "trip": app.workflow(**named)(trip),
        "stamp": task(subject="{number}", retry=PATIENT)(stamp),
    }
    return Tasks(app, do, by_kind)


async def make_tables(tasks: Tasks) -> None:
    """Migrate an empty database and make the tables of the workload."""
    await tasks.app.migrate()
    async with tasks.app as app, app.transaction() as transaction:
        for statement in (*demand.ROW_TABLES.values(), *demand.SUM_TABLES.values()):
            await transaction.execute(statement)
        for action in tasks.statements.first_rows():
            await transaction.execute(action.statement, *action.parameters)


def __getattr__(name: str) -> App:
    """Make ``app`` when ``onefold worker onefold.testing.chaos.app:app`` asks for it."""
    if name != "app":
        raise AttributeError(name)
    made = make_tasks().app

    @made.lifespan
    @asynccontextmanager
    async def begin() -> AsyncIterator[None]:
        say_ready(os.environ[FOLDER_VARIABLE])
        yield

    return made
