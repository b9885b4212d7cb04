"""The scenarios of the crash tests: each prepares a database, acts in a child that is killed, recovers and checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from onefold import App, Context, Receipt, Reject, RetryPolicy, State
from onefold.store import Query, Record, Store
from onefold.testing import HastyClock, drain
from onefold.testing.checker import Effect, Final, Journal, Report, check
from onefold.testing.crash import Point

TABLES = (
    "CREATE TABLE effect (key TEXT NOT NULL, message TEXT NOT NULL, fence BIGINT NOT NULL)",
    "CREATE TABLE orders (key TEXT PRIMARY KEY)",
)
#: The tasks that send a message of another task when they succeed.
CHILDREN = {"pay": "child", "relay": "child"}
LATER = timedelta(hours=1)


@dataclass
class Place:
    """One database, and the app on it as each process makes it."""

    kind: str
    url: str

    @property
    def name(self) -> str:
        """What its figures are printed under."""
        return "sqlite3" if self.url.endswith("?driver=sqlite3") else self.kind

    def store(self, clock: HastyClock, trace: Any = None) -> Store:
        if self.kind == "sqlite":
            from onefold.store.sqlite import SQLiteStore

            path = self.url.removeprefix("sqlite:///").partition("?")[0]
            return SQLiteStore(path, clock=clock, trace=trace, driver="sqlite3" if self.name == "sqlite3" else "apsw")
        from onefold.store.postgres import PostgresStore

        return PostgresStore(self.url, clock=clock, trace=trace)

    def sql(self, statement: str) -> str:
        return statement if self.kind == "sqlite" else statement.replace("?", "%s")

    def app(self, *, trace: Any = None, later: timedelta = timedelta(), rejects: bool = False) -> App:
        """Make the app of a process; with ``later`` its clock is ahead, so that all leases have run out."""
        clock = HastyClock()
        clock.advance(later)
        app = App(store=self.store(clock, trace), clock=clock)
        insert = self.sql("INSERT INTO effect VALUES (?, ?, ?)")
        retry = RetryPolicy(max_attempts=3)

        @app.task(subject="{key}")
        async def child(ctx: Context, key: str) -> None:
            await ctx.execute(insert, f"child:{key}", ctx.message.id, ctx.fence)

        @app.task(key="{key}", subject="{key}")
        async def pay(ctx: Context, key: str) -> str:
            await ctx.execute(insert, f"pay:{key}", ctx.message.id, ctx.fence)
            ctx.send(child, key)
            return key

        @app.task(key="{key}", subject="{key}")
        async def relay(ctx: Context, key: str) -> None:
            await ctx.check()
            ctx.send(child, key)

        @app.task(key="{key}", subject="{key}", retry=retry)
        async def flaky(ctx: Context, key: str) -> None:
            await ctx.execute(insert, f"flaky:{key}", ctx.message.id, ctx.fence)
            if ctx.attempt == 1:
                raise ValueError("the first attempt fails after its write")

        @app.task(key="{key}", subject="{key}")
        async def doomed(ctx: Context, key: str) -> None:
            await ctx.execute(insert, f"doomed:{key}", ctx.message.id, ctx.fence)
            if rejects:
                raise Reject("it cannot be done")

        return app


# recovery and its checks


async def finish(app: App) -> None:
    """Recover as a new worker does, with all the time it needs."""
    await drain(app)


async def records(app: App, key: str) -> list[Record]:
    found, after = [], ""
    while page := await app.find(Query(after=after, limit=1_000)):
        found += [record for record in page if record.envelope.subject == key]
        after = page[-1].envelope.id
    return found


async def record(app: App, name: str, key: str) -> Record:
    (found,) = [one for one in await records(app, key) if one.envelope.message_type == name]
    return found


async def verdict(place: Place, app: App, journal: Journal, key: str) -> Report:
    """Run the checker on everything that concerns one key."""
    rows = await app.store.fetch(place.sql("SELECT key, message, fence FROM effect WHERE key LIKE ?"), [f"%:{key}"])
    finals = []
    for one in await records(app, key):
        name = one.envelope.message_type
        finals.append(Final(one.envelope.id, f"{name}:{key}", one.state, name != "relay"))
        if one.state is State.DONE and name in CHILDREN:
            journal.invoke(name, f"{CHILDREN[name]}:{key}")
            journal.ok(name, f"{CHILDREN[name]}:{key}")
    return check(journal, [Effect(*row) for row in rows], finals)


async def send(app: App, journal: Journal, name: str, key: str, client: str = "producer") -> Receipt[Any]:
    """Send, and record the request and the answer."""
    journal.invoke(client, f"{name}:{key}")
    receipt = await app.tasks[name].send(key)
    journal.ok(client, f"{name}:{key}", receipt.id)
    return receipt


# the scenarios: prepare, act in a child that is killed, recover and check


class Scenario:
    """One operation that may be interrupted anywhere; each crash point uses a key of its own."""

    #: The task of the message, for scenarios that need only one.
    task = "pay"

    def __init__(self, place: Place) -> None:
        self.place = place

    def key(self, number: int) -> str:
        return f"{type(self).__name__.lower()}-{number}"

    async def prepare(self, number: int) -> None:
        """Prepare the database; by default a message is waiting."""
        async with self.place.app(rejects=True) as app:
            await app.tasks[self.task].send(self.key(number))

    async def act(self, point: Point) -> None:
        point.armed = type(self) is Opening  # opening is the same in every scenario
        async with self.place.app(trace=point.trace, rejects=True) as app:
            point.armed = True
            await self.interrupted(app, point)
            point.armed = False

    async def interrupted(self, app: App, point: Point) -> None:
        """Act in the child; by default a worker handles the message."""
        await app.work(until_idle=True)

    async def recover(self, point: Point) -> object:
        key = self.key(point.number)
        async with self.place.app(later=LATER) as app:
            # The message was accepted before; sending it again must not add another one.
            await send(app, point.journal, self.task, key, "sent again")
            await finish(app)
            return await verdict(self.place, app, point.journal, key) or await self.look(app, point, key)

    async def look(self, app: App, point: Point, key: str) -> object:
        """Return a problem that the checker cannot see, or None."""
        one = await record(app, self.task, key)
        return None if one.state is State.DONE else f"{one}"


class Opening(Scenario):
    """A worker dies while it opens the store, or anywhere between its claim and the commit of the outcome."""


class Sending(Scenario):
    """A producer dies in a send and sends again with the same key."""

    async def prepare(self, number: int) -> None:
        pass

    async def interrupted(self, app: App, point: Point) -> None:
        await send(app, point.journal, self.task, self.key(point.number))


class SendingWithRows(Scenario):
    """A producer dies in a transaction with rows of its own: both are there, or neither."""

    async def prepare(self, number: int) -> None:
        pass

    async def interrupted(self, app: App, point: Point) -> None:
        key = self.key(point.number)
        point.journal.invoke("producer", f"pay:{key}")
        async with app.transaction() as transaction:
            await transaction.execute(self.place.sql("INSERT INTO orders VALUES (?)"), key)
            receipt = transaction.send(app.tasks["pay"], key)
        point.journal.ok("producer", f"pay:{key}", receipt.id)

    async def recover(self, point: Point) -> object:
        key = self.key(point.number)
        async with self.place.app(later=LATER) as app:
            rows = await app.store.fetch(self.place.sql("SELECT key FROM orders WHERE key = ?"), [key])
            if bool(rows) != bool(await records(app, key)):
                return f"the row is {rows}, the message {await records(app, key)}"
            await finish(app)
            return await verdict(self.place, app, point.journal, key)


class SendingTwiceAtOnce(Scenario):
    """Two producers send the same key at the same time and die together."""

    async def prepare(self, number: int) -> None:
        pass

    async def act(self, point: Point) -> None:
        key = self.key(point.number)
        point.armed = False
        async with self.place.app(trace=point.trace) as one, self.place.app(trace=point.trace) as other:
            point.armed = True
            both = [send(one, point.journal, "pay", key, "one"), send(other, point.journal, "pay", key, "other")]
            receipts = await asyncio.gather(*both)
            point.armed = False
            assert receipts[0].id == receipts[1].id


class HandlingWithoutSql(Scenario):
    """A worker dies around a batched settle, or while it extends its lease."""

    task = "relay"

    async def prepare(self, number: int) -> None:
        async with self.place.app() as app:
            for part in ("", "-b"):
                await app.tasks["relay"].send(self.key(number) + part)

    async def look(self, app: App, point: Point, key: str) -> object:
        journal = Journal()
        journal.invoke("prepared", f"relay:{key}-b")
        if report := await verdict(self.place, app, journal, f"{key}-b"):
            return report
        return await super().look(app, point, key)


class Extending(Scenario):
    """A worker dies while it extends its lease; another worker takes over the message."""

    async def interrupted(self, app: App, point: Point) -> None:
        leases = await app.store.claim(["default"], types=["pay"], limit=1, lease=30.0, worker="extender")
        assert await app.store.extend(leases, lease=60.0) == [True]


class Retrying(Scenario):
    """A worker dies while it records that a handler failed and will be retried."""

    task = "flaky"

    async def look(self, app: App, point: Point, key: str) -> object:
        one = await record(app, "flaky", key)
        return None if one.state is State.DONE and one.attempt == 1 else f"{one}"


class Burying(Scenario):
    """A worker dies while it makes a dead letter."""

    task = "doomed"

    async def recover(self, point: Point) -> object:
        key = self.key(point.number)
        async with self.place.app(later=LATER, rejects=True) as app:
            await send(app, point.journal, "doomed", key, "sent again")
            await finish(app)
            one = await record(app, "doomed", key)
            if one.state is not State.DEAD or len(await app.store.attempts(one.envelope.id)) != 1:
                return f"{one}: {await app.store.attempts(one.envelope.id)}"
            return await verdict(self.place, app, point.journal, key)


class DeadLetter(Scenario):
    """The base of the scenarios below: one dead letter, on which an operator acts twice."""

    task = "doomed"
    ends_as = State.DONE
    verb: Callable[[App, str], Awaitable[object]]

    async def prepare(self, number: int) -> None:
        async with self.place.app(rejects=True) as app:
            await app.tasks["doomed"].send(self.key(number))
            await app.work(until_idle=True)
            assert (await record(app, "doomed", self.key(number))).state is State.DEAD

    async def interrupted(self, app: App, point: Point) -> None:
        one = await record(app, "doomed", self.key(point.number))
        await type(self).verb(app, one.envelope.id)
        point.journal.ok("operator", f"doomed:{self.key(point.number)}", one.envelope.id)

    async def recover(self, point: Point) -> object:
        key = self.key(point.number)
        done = bool(point.journal.entries)
        point.journal.invoke("prepared", f"doomed:{key}")
        async with self.place.app(later=LATER) as app:
            one = await record(app, "doomed", key)
            if done and one.state is State.DEAD:
                return f"the operator was told that it is done, and it is not: {one}"
            await type(self).verb(app, one.envelope.id)
            await finish(app)
            one = await record(app, "doomed", key)
            if one.state is not self.ends_as or one.replay_count != (self.ends_as is State.DONE):
                return f"{one}"
            return await verdict(self.place, app, point.journal, key)


class Redriving(DeadLetter):
    """A redrive is interrupted and repeated: the message runs once more, and only once."""

    @staticmethod
    async def verb(app: App, message_id: str) -> object:
        return await app.redrive([message_id], actor="test", reason="fixed")


class Discarding(DeadLetter):
    """A discard is interrupted and repeated."""

    ends_as = State.DISCARDED

    @staticmethod
    async def verb(app: App, message_id: str) -> object:
        letters = [letter async for letter in app.dead_letters() if letter.id == message_id]
        return [await letter.discard(actor="test", reason="useless") for letter in letters]


class Cancelling(Scenario):
    """A cancellation is interrupted and repeated; a cancelled message never takes effect."""

    async def interrupted(self, app: App, point: Point) -> None:
        one = await record(app, "pay", self.key(point.number))
        assert await app.cancel(one.envelope.id, actor="test", reason="a mistake")
        point.journal.ok("operator", f"pay:{self.key(point.number)}", one.envelope.id)

    async def recover(self, point: Point) -> object:
        key = self.key(point.number)
        told = bool(point.journal.entries)
        point.journal.invoke("prepared", f"pay:{key}")
        async with self.place.app(later=LATER) as app:
            one = await record(app, "pay", key)
            if told and one.state is not State.CANCELLED:
                return f"the operator was told that it is cancelled, and it is not: {one}"
            await app.cancel(one.envelope.id, actor="test", reason="a mistake")
            await finish(app)
            if (await record(app, "pay", key)).state is not State.CANCELLED:
                return f"{await record(app, 'pay', key)}"
            return await verdict(self.place, app, point.journal, key)


class Purging(Scenario):
    """A purge is interrupted and repeated: the message is gone, its effect stays, and its key is free."""

    async def prepare(self, number: int) -> None:
        async with self.place.app() as app:
            await app.tasks["pay"].send(self.key(number))
            await finish(app)

    async def act(self, point: Point) -> None:
        for later in (timedelta(days=8), timedelta(days=60)):  # first the body, then the rest
            point.armed = False
            async with self.place.app(trace=point.trace, later=later) as app:
                point.armed = True
                async with app.store.transaction() as transaction:
                    await transaction.purge()
                point.armed = False

    async def recover(self, point: Point) -> object:
        key = self.key(point.number)
        async with self.place.app(later=timedelta(days=61)) as app:
            for _ in range(2):
                async with app.store.transaction() as transaction:
                    await transaction.purge()
            if left := await records(app, key):
                return f"left: {left}"
            effects = self.place.sql("SELECT count(*) FROM effect WHERE key = ?")
            if await app.store.fetch(effects, [f"pay:{key}"]) != [(1,)]:
                return "the effect went with the message"
            again = await app.tasks["pay"].send(key)
            await finish(app)
            return "the key is still taken" if again.duplicate else None


SCENARIOS = [
    Opening,
    Sending,
    SendingWithRows,
    SendingTwiceAtOnce,
    HandlingWithoutSql,
    Extending,
    Retrying,
    Burying,
    Redriving,
    Discarding,
    Cancelling,
    Purging,
]
