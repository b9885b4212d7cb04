"""The network between a worker and PostgreSQL fails: the handler is told, and another worker takes over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fault_scene import TABLES, Loop, run, until

from onefold import App, Context, State, StoreUnavailableError, limits
from onefold.store import Query, Record
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire import connect as connection
from onefold.testing.proxy import Mode, Proxy
from onefold.testing.servers import PostgresServer
from onefold.worker import execution

#: The real values are thirty times as long, in the same proportion.
LEASE, ANSWER_SECONDS = 1.0, 0.4
#: A message with an expired lease is found within a poll; a busy machine may need a moment more.
TAKEOVER_SECONDS_MAX = LEASE + 2 * limits.POLL_SECONDS + 2.0
#: A handler is told when the lease is over by the worker's own reckoning, a moment more or less.
TOLD_SECONDS_MAX = LEASE + 1.0
#: After the network is back, the worker that was cut off works again within this time.
BACK_SECONDS_MAX = 10.0


@pytest.fixture(autouse=True)
def _quick_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time to wait for an answer, which is seconds."""
    monkeypatch.setattr(connection, "ANSWER_SECONDS", ANSWER_SECONDS)
    monkeypatch.setitem(connection._ANSWERS, "handlers", ANSWER_SECONDS)  # type: ignore[call-overload]
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.1)


class Machine:
    """A worker with its own connection to the server, and the events its handler saw."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.app = App(store=PostgresStore(url))
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.told_at: float | None = None
        self.writes_first = False
        self.task: asyncio.Task[int] | None = None
        insert = "INSERT INTO effect VALUES (%s, %s, %s)"

        @self.app.task(key="{key}", subject="{key}")
        async def pay(ctx: Context, key: str) -> str:
            if self.writes_first:
                await ctx.execute(insert, key, name, ctx.fence)
            self.entered.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.told_at = asyncio.get_running_loop().time()
                raise
            if not self.writes_first:
                await ctx.execute(insert, key, name, ctx.fence)
            return name

    async def start(self) -> None:
        await self.app.open()
        self.task = asyncio.create_task(self.app.work(lease=LEASE, concurrency=1, name=self.name))

    async def rest(self) -> None:
        """Stop working, but stay open."""
        self.app.stop_working()
        if self.task is not None:
            await self.task
            self.task = None

    async def stop(self) -> None:
        await self.rest()
        await self.app.close()

    async def effects(self) -> list[tuple[Any, ...]]:
        return await self.app.store.fetch("SELECT key, message FROM effect ORDER BY key")

    async def record(self, key: str) -> Record:
        return next(one for one in await self.app.find(Query()) if one.envelope.subject == key)


@asynccontextmanager
async def two_machines(server: PostgresServer, url: str) -> AsyncIterator[tuple[Proxy, Machine, Machine]]:
    """Yield one worker behind a proxy and one beside it; the first holds the message ``k``."""
    async with Proxy("127.0.0.1", server.port) as proxy:
        cut_off, other = Machine(proxy.through(f"{url}?connect_timeout=2"), "cut-off"), Machine(url, "other")
        await other.app.migrate()
        await other.app.open()
        async with other.app.transaction() as transaction:
            for statement in TABLES:
                await transaction.execute(statement)
        other.go_on.set()
        try:
            await cut_off.start()
            await other.app.tasks["pay"].send("k")
            yield proxy, cut_off, other
        finally:
            await proxy.switch("pass")
            await cut_off.stop()
            await other.stop()


def _time() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("mode", "seconds"), [("blackhole", 0.0), ("latency", 10.0)])
def test_a_worker_that_is_cut_off_tells_its_handler_and_another_takes_over(
    mode: Mode, seconds: float, loop: Loop, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Fault 9: told by its deadline, taken over within lease and poll, one effect, and working again afterwards."""

    async def scenario() -> None:
        async with two_machines(postgres_server, postgres_url) as (proxy, cut_off, other):
            await cut_off.entered.wait()
            await proxy.switch(mode, seconds=seconds)
            cut_at = _time()
            await other.start()

            async def taken_over() -> bool:
                return await other.effects() != []

            await until(taken_over, within=TAKEOVER_SECONDS_MAX)
            assert cut_off.told_at is not None, "its handler was not told"
            assert cut_off.told_at - cut_at <= TOLD_SECONDS_MAX
            assert await other.effects() == [("k", "other")]
            record = await other.record("k")
            assert (record.state, record.attempt) == (State.DONE, 0)
            cut_off.go_on.set()
            await back_at_work(proxy, other)
            assert await other.effects() == [("after", "cut-off"), ("k", "other")]

    run(scenario, loop=loop)


async def back_at_work(proxy: Proxy, other: Machine) -> None:
    """Restore the network, and let the worker that was cut off do all the work."""
    await other.rest()
    await proxy.switch("pass")
    receipt = await other.app.tasks["pay"].send("after")
    assert await receipt.result(timeout=BACK_SECONDS_MAX) == "cut-off"


@pytest.mark.parametrize("mode", ["blackhole", "hold", "latency"])
def test_what_was_written_before_the_cut_is_never_committed_after_the_takeover(
    mode: Mode, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Fault 9: the server still has the session with its uncommitted rows, and its COMMIT may even arrive later."""

    async def scenario() -> None:
        async with two_machines(postgres_server, postgres_url) as (proxy, cut_off, other):
            cut_off.writes_first = True
            await cut_off.entered.wait()
            await proxy.switch(mode, seconds=3.0)
            # The handler returns at once: its settlement and commit are lost on the way.
            cut_off.go_on.set()
            await other.start()

            async def ended() -> bool:
                return (await other.record("k")).state.ended

            await until(ended, within=TAKEOVER_SECONDS_MAX)
            (winner,) = await other.effects()
            cut_off.writes_first = False
            await back_at_work(proxy, other)
            assert await other.effects() == [("after", "cut-off"), winner]
            # With latency requests arrive at once, so its commit was in time.  In a black hole the commit was lost,
            # and a held one arrived when the message had another owner.
            assert winner == ("k", "cut-off" if mode == "latency" else "other")

    run(scenario)


def test_a_commit_whose_answer_cannot_come_back_is_resolved_when_the_network_is_back(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Faults 5 and 9: requests arrive, answers do not; one effect, and no caller gets a wrong answer."""

    async def scenario() -> None:
        async with two_machines(postgres_server, postgres_url) as (proxy, cut_off, other):
            cut_off.writes_first = True
            await cut_off.entered.wait()
            await proxy.switch("one-way")
            cut_off.go_on.set()
            await other.start()

            async def ended() -> bool:
                return (await other.record("k")).state.ended

            await until(ended, within=TAKEOVER_SECONDS_MAX)
            record = await other.record("k")
            assert record.state is State.DONE
            assert len(await other.effects()) == 1
            cut_off.writes_first = False
            await back_at_work(proxy, other)
            assert await other.effects() == [("after", "cut-off"), ("k", (record.result or b"").decode().strip('"'))]

    run(scenario)


@pytest.mark.parametrize("mode", ["blackhole", "reset", "refuse"])
def test_a_sender_that_is_cut_off_gets_a_typed_error_within_its_patience(
    mode: Mode, loop: Loop, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Fault 9: it does not hang, and sending again with the same key is safe."""

    async def scenario() -> None:
        async with Proxy("127.0.0.1", postgres_server.port) as proxy:
            app = App(store=PostgresStore(proxy.through(f"{postgres_url}?connect_timeout=2"), patience=0.5))

            @app.task(key="{key}", subject="{key}")
            async def pay(key: str) -> None: ...

            await app.migrate()
            async with app:
                await pay.send("before")
                await proxy.switch(mode)
                if mode == "refuse":
                    proxy.cut()
                began = _time()
                with pytest.raises(StoreUnavailableError):
                    await pay.send("k")
                assert _time() - began < 8.0
                await proxy.switch("pass")
                first = await pay.send("k")
                assert (await pay.send("k")).id == first.id
                assert len(await app.find(Query())) == 2

    run(scenario, loop=loop)


def test_a_trickle_of_answers_is_slow_and_nothing_else(postgres_server: PostgresServer, postgres_url: str) -> None:
    """Fault 9: answers that arrive in pieces are put together."""

    async def scenario() -> None:
        async with Proxy("127.0.0.1", postgres_server.port) as proxy:
            machine = Machine(proxy.through(postgres_url), "slow")
            await machine.app.migrate()
            async with machine.app:
                async with machine.app.transaction() as transaction:
                    for statement in TABLES:
                        await transaction.execute(statement)
                machine.go_on.set()
                await proxy.switch("trickle", seconds=0.0005)
                for number in range(3):
                    await machine.app.tasks["pay"].send(f"k{number}")
                await machine.app.work(until_idle=True)
                await proxy.switch("pass")
                assert await machine.effects() == [(f"k{number}", "slow") for number in range(3)]

    run(scenario)
