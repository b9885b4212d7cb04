"""The work that goes on during a fault: sends, handlers with and without SQL, a retry; and the checks afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import uvloop

from onefold import App, CommitUnknownError, Context, Receipt, RetryPolicy, StoreUnavailableError
from onefold.clock import Clock
from onefold.store import Query, Record, State, Store
from onefold.testing.checker import Effect, Final, Journal, check

Answer = TypeVar("Answer")
#: Workers run on uvloop where it is installed, and everything else on asyncio's own loop.
Loop = Literal["asyncio", "uvloop"]
_LOOPS: Mapping[Loop, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

TABLES = (
    # Without a unique constraint, so that a second effect shows as a second row and not as an error.
    "CREATE TABLE effect (key TEXT NOT NULL, message TEXT NOT NULL, fence BIGINT NOT NULL)",
    "CREATE TABLE orders (key TEXT NOT NULL)",
)
#: The task that fails once on purpose, so that its failed attempt can be told from attempts that a fault adds.
FAILS_ONCE = "flaky"
#: A scenario that takes longer hangs.
SECONDS_MAX = 60


def run(scenario: Callable[[], Awaitable[Answer]], *, loop: Loop = "asyncio") -> Answer:
    """Run a scenario on an event loop of this kind; fail if it hangs."""

    async def within() -> Answer:
        async with asyncio.timeout(SECONDS_MAX):
            return await scenario()

    with asyncio.Runner(loop_factory=_LOOPS[loop]) as runner:
        return runner.run(within())


class Scene:
    """One store with an app whose handlers write rows, and a journal of the answers that senders got."""

    def __init__(self, store: Store, clock: Clock | None = None, *, journal: Journal | None = None) -> None:
        self.journal = journal or Journal()
        self.app = App(store=store, clock=clock)
        self._placeholder = "%s" if store.capabilities.shared else "?"
        insert = self.sql("INSERT INTO effect VALUES (?, ?, ?)")

        @self.app.task(subject="{key}")
        async def child(ctx: Context, key: str) -> None:
            await ctx.execute(insert, f"child:{key}", ctx.message.id, ctx.fence)

        @self.app.task(key="{key}", subject="{key}")
        async def pay(ctx: Context, key: str) -> str:
            await ctx.execute(insert, f"pay:{key}", ctx.message.id, ctx.fence)
            ctx.send(child, key)
            return key

        @self.app.task(key="{key}", subject="{key}")
        async def plain(key: str) -> str:
            """Write nothing, so that the message is settled together with others."""
            return key

        @self.app.task(key="{key}", subject="{key}", retry=RetryPolicy(max_attempts=2, base=1.0))
        async def flaky(ctx: Context, key: str) -> None:
            await ctx.execute(insert, f"flaky:{key}", ctx.message.id, ctx.fence)
            if ctx.attempt == 1:
                raise ValueError("the first attempt fails after its write")

    def sql(self, statement: str) -> str:
        """Write a statement with the placeholders of this store's driver."""
        return statement.replace("?", self._placeholder)

    async def prepare(self) -> None:
        """Make the tables."""
        await self.app.migrate()
        async with self.app, self.app.transaction() as transaction:
            for statement in TABLES:
                await transaction.execute(statement)

    async def send(self, name: str, key: str, client: str = "sender") -> Receipt[Any]:
        """Send, and record the request and the answer; any error but ``StoreUnavailableError`` fails the test."""
        self.journal.invoke(client, f"{name}:{key}")
        try:
            receipt = await self.app.tasks[name].send(key)
        except StoreUnavailableError:
            self.journal.unknown(client, f"{name}:{key}")
            raise
        self.journal.ok(client, f"{name}:{key}", receipt.id)
        return receipt

    async def order(self, key: str, client: str = "shop") -> Receipt[Any]:
        """Send together with a row of the sender's own."""
        self.journal.invoke(client, f"pay:{key}")
        try:
            async with self.app.transaction() as transaction:
                await transaction.execute(self.sql("INSERT INTO orders VALUES (?)"), key)
                receipt = transaction.send(self.app.tasks["pay"], key)
        except CommitUnknownError:
            self.journal.unknown(client, f"pay:{key}")
            if await self._ordered(key):
                return await self.send("pay", key, client)
            raise
        except StoreUnavailableError:
            self.journal.unknown(client, f"pay:{key}")
            raise
        self.journal.ok(client, f"pay:{key}", receipt.id)
        return receipt

    async def _ordered(self, key: str) -> bool:
        """Look up the row once the store can be reached, as the error's text advises."""

        async def found() -> list[Any]:
            return await self.app.store.fetch(self.sql("SELECT key FROM orders WHERE key = ?"), [key])

        return bool(await until_accepted(found))

    async def send_next(self, sender: int, count: int) -> Receipt[Any]:
        """Send the sender's ``count``-th message; the kinds of messages take turns."""
        name, key = ("pay", "plain", "flaky", "rows")[count % 4], f"{sender}.{count}"
        return await (self.order(key) if name == "rows" else self.send(name, key))

    async def ended(self) -> bool:
        """Whether no message is alive any more."""
        return not any(counts.scheduled or counts.leased for counts in (await self.app.count()).values())

    async def records(self) -> list[Record]:
        """Return every message."""
        found: list[Record] = []
        while page := await self.app.find(Query(after=found[-1].envelope.id if found else "", limit=1_000)):
            found += page
        return found

    async def effects(self) -> list[Effect]:
        """Return every effect."""
        return [Effect(*row) for row in await self.app.store.fetch("SELECT key, message, fence FROM effect")]

    async def verdict(self, *, crashes_max: int = 0) -> Sequence[Record]:
        """Fail unless every message is done, with one effect, none lost, and no attempt used up by the fault.

        A claim with a lost answer looks like a crash; the first crashes of a message have no consequence.
        """
        records, orders = await self.records(), await self.app.store.fetch("SELECT key FROM orders ORDER BY key")
        finals = []
        for one in records:
            name, key = one.envelope.message_type, one.envelope.subject
            finals.append(Final(one.envelope.id, f"{name}:{key}", one.state, name != "plain"))
            if name == "pay" and one.state is State.DONE:
                self.journal.invoke("pay", f"child:{key}")
                self.journal.ok("pay", f"child:{key}")
            failed = int(name == FAILS_ONCE)
            assert one.state is State.DONE, f"{one}: {one.failure}"
            if failed or one.attempt:
                attempts = await self.app.store.attempts(one.envelope.id)
                assert [attempt.failure.error_type for attempt in attempts] == ["ValueError"] * failed, attempts
            assert (one.attempt, one.replay_count) == (failed, 0), one
            assert one.crashes <= crashes_max, f"{one}: {one.crashes} crashes"
        report = check(self.journal, await self.effects(), finals)
        assert not report, report
        self._check_orders([key for (key,) in orders])
        return records

    def _check_orders(self, orders: list[str]) -> None:
        """A row of the sender exists once if its message was accepted, and at most once otherwise."""
        assert len(orders) == len(set(orders)), orders
        accepted = {e.key.removeprefix("pay:") for e in self.journal.entries if (e.client, e.event) == ("shop", "ok")}
        assert accepted <= set(orders)


async def until(true: Callable[[], Awaitable[bool]], *, within: float = SECONDS_MAX, every: float = 0.02) -> None:
    """Wait until the condition is true; fail if that takes too long."""
    give_up_at = asyncio.get_running_loop().time() + within
    while True:
        if await true():
            return
        assert asyncio.get_running_loop().time() < give_up_at, f"not within {within:g} s"
        await asyncio.sleep(every)


async def until_accepted(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Retry as a careful sender does, which is safe because the message has a key."""
    while True:
        try:
            return await call()
        except StoreUnavailableError:
            await asyncio.sleep(0.01)
