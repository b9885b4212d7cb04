"""PostgreSQL ends in every possible way while senders send and a worker works: nothing is lost but time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from fault_scene import Loop, Scene, run, until

from onefold import Context, StoreUnavailableError, limits
from onefold.clock import MICROSECONDS, SystemClock
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire import connect as connection
from onefold.store.postgres.wire import reconnect as link
from onefold.testing import FakeClock
from onefold.testing.checker import Journal
from onefold.testing.proxy import Proxy
from onefold.testing.servers import PostgresServer
from onefold.worker import execution

SENDERS = 4
#: Messages claimed in a lost answer are free again after this long.
LEASE = 2.0
#: Messages done before the server ends, and again after it is back.
DONE_BEFORE, DONE_AFTER = 20, 20
#: One store has about five connections and a pool; each retries quickly first and then waits up to a second.
CONNECTIONS_PER_SECOND_MAX = 80


@pytest.fixture(autouse=True)
def _quick_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delay of five seconds before a handler with a lost transaction runs again."""
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.1)


class Traffic:
    """A worker behind a proxy, and impatient senders beside it."""

    def __init__(self, url: str, proxy: Proxy) -> None:
        journal = Journal()
        self.proxy = proxy
        self.worker = Scene(PostgresStore(proxy.through(url)), journal=journal)
        self.sender = Scene(PostgresStore(url, patience=0.1), journal=journal)
        self.refused = 0
        self._stopping = False

    async def send(self, number: int) -> None:
        """Send one message after another; repeat refused ones, and let any other error end the test."""
        count = 0
        while not self._stopping:
            try:
                await self.sender.send_next(number, count)
            except StoreUnavailableError:
                self.refused += 1
                continue
            count += 1
            await asyncio.sleep(0.005)

    async def done(self) -> int:
        """Return how many messages have an effect."""
        while True:
            try:
                return (await self.sender.app.store.fetch("SELECT count(*) FROM effect"))[0][0]
            except StoreUnavailableError:
                await asyncio.sleep(0.05)

    async def until_done(self, number: int) -> None:
        async def enough() -> bool:
            return await self.done() >= number

        await until(enough)

    async def drained(self) -> None:
        """Stop sending, and wait until everything accepted has ended."""
        self._stopping = True
        await until(self.sender.ended)


@asynccontextmanager
async def traffic(server: PostgresServer, url: str) -> AsyncIterator[Traffic]:
    async with Proxy("127.0.0.1", server.port) as proxy:
        both = Traffic(url, proxy)
        await both.sender.prepare()
        async with both.worker.app, both.sender.app, asyncio.TaskGroup() as group:
            working = group.create_task(both.worker.app.work(concurrency=5, lease=LEASE))
            sending = [group.create_task(both.send(number)) for number in range(SENDERS)]
            await both.until_done(DONE_BEFORE)
            yield both
            await both.until_done(await both.done() + DONE_AFTER)
            await both.drained()
            await asyncio.wait(sending)
            # It is still the first worker: it was never restarted.
            both.worker.app.stop_working()
            assert await working > 0
            await both.sender.verdict(crashes_max=limits.SUSPECT_AFTER - 1)


@pytest.mark.parametrize("end", ["kill -9", "immediate", "fast"])
def test_a_server_that_ends_and_comes_back_costs_time_and_nothing_else(
    end: str, loop: Loop, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Faults 4 and 34: typed errors or success, nothing lost, one effect each, no attempt used up, no restart."""

    def end_it() -> None:
        if end == "kill -9":
            postgres_server.kill()
        else:
            postgres_server.shut_down(end)  # type: ignore[arg-type]

    async def scenario() -> None:
        async with traffic(postgres_server, postgres_url) as both:
            before = len(both.proxy.connected_at)
            await asyncio.to_thread(end_it)
            await asyncio.sleep(0.4)
            assert len(both.proxy.connected_at) > before, "no client tried to reconnect"
            await asyncio.to_thread(postgres_server.restart)
        assert both.refused > 0
        assert both.proxy.busiest_second() <= CONNECTIONS_PER_SECOND_MAX

    try:
        run(scenario, loop=loop)
    finally:
        postgres_server.restart()


def test_a_backend_that_is_killed_takes_all_others_with_it_and_costs_nothing_else(
    loop: Loop, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Fault 4: the server ends all sessions, recovers by itself and continues."""

    async def scenario() -> None:
        async with traffic(postgres_server, postgres_url) as both:
            (victim, *_), *_ = await both.worker.app.store.fetch("SELECT pg_backend_pid()")
            os.kill(victim, signal.SIGKILL)
        assert both.proxy.busiest_second() <= CONNECTIONS_PER_SECOND_MAX

    run(scenario, loop=loop)


#: A session's last statement shows its purpose: waiting for wake-ups, claiming, putting, settling, running handlers.
PURPOSES = ("LISTEN", "lease_until", "INSERT INTO onefold.message", "INSERT INTO onefold.outcome", "INSERT INTO effect")
#: Sessions ended in all, unless every purpose was hit earlier.
ENDED_MAX = 100


def test_each_session_is_ended_in_its_turn(postgres_server: PostgresServer, postgres_url: str) -> None:
    """Fault 4: claiming, settling, putting, listening and handlers' sessions, while all are in use."""
    missing = set(PURPOSES)

    async def end_one_after_the_other(direct: psycopg.AsyncConnection[Any]) -> None:
        for number in range(ENDED_MAX):
            rows = await (await direct.execute(SESSIONS)).fetchall()
            # Prefer a session with a purpose that was not hit yet, otherwise the oldest one.
            wanted = [row for row in rows if any(purpose in row[1] for purpose in missing)] or rows[:1]
            for pid, query in wanted[:1]:
                missing.difference_update([purpose for purpose in missing if purpose in query])
                await direct.execute("SELECT pg_terminate_backend(%s)", [pid])
            if not missing and number > 2 * len(PURPOSES):
                return
            await asyncio.sleep(0.03)

    async def scenario() -> None:
        async with traffic(postgres_server, postgres_url) as both:
            async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as direct:
                await end_one_after_the_other(direct)
            assert both.proxy.busiest_second() <= CONNECTIONS_PER_SECOND_MAX

    run(scenario)
    assert not missing, "no session for that was ended"


def test_a_handler_is_not_blamed_for_a_server_that_was_away_at_its_first_statement(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults 4 and 34: the statement is lost and waits longer than a transaction may last; no attempt is used up."""
    monkeypatch.setattr(limits, "TRANSACTION_SECONDS_MAX", 0.3)

    async def scenario() -> None:
        async with Proxy("127.0.0.1", postgres_server.port) as proxy:
            scene = Scene(PostgresStore(proxy.through(postgres_url)))
            other = Scene(PostgresStore(postgres_url), journal=scene.journal)
            took: dict[str, float] = {}
            back = asyncio.Event()

            @scene.app.middleware
            async def cut_off(ctx: Context, proceed: Any) -> Any:
                if ctx.message.message_type != "pay" or ctx.message.subject in took:
                    return await proceed()
                took[ctx.message.subject] = 0.0
                await asyncio.sleep(0.2)  # until no other request is under way
                await proxy.switch("refuse")
                proxy.lose_next_request()
                began = asyncio.get_running_loop().time()
                asyncio.get_running_loop().call_later(AWAY_SECONDS, back.set)
                try:
                    return await proceed()
                finally:
                    took[ctx.message.subject] = asyncio.get_running_loop().time() - began

            await other.prepare()
            async with scene.app, other.app:
                await scene.app.store.fetch("SELECT 1")  # so that there is a connection to lose
                working = asyncio.create_task(scene.app.work())
                for number in range(TRIES_MAX):
                    back.clear()
                    await other.send("pay", f"k{number}")
                    await back.wait()
                    await proxy.switch("pass")
                    await until(other.ended)
                    if took[f"k{number}"] >= AWAY_SECONDS / 2:
                        break  # otherwise another request was lost
                scene.app.stop_working()
                await working
                assert max(took.values()) >= AWAY_SECONDS / 2, "no handler lost its first statement"
                await other.verdict()

    run(scenario)


#: Tries of a test that depends on which request comes first.
TRIES_MAX = 5
#: Longer than a transaction may last in that test.
AWAY_SECONDS = 0.8

SESSIONS = """
    SELECT pid, query FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'onefold'
    ORDER BY backend_start
"""


def test_an_outage_is_waited_out_with_ever_longer_pauses_and_the_return_is_no_stampede(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Fault 34: the workers of a small fleet lose their server for a while."""
    fleet = 4

    async def scenario() -> None:
        async with Proxy("127.0.0.1", postgres_server.port) as proxy:
            scenes = [Scene(PostgresStore(proxy.through(postgres_url))) for _ in range(fleet)]
            await scenes[0].prepare()
            for scene in scenes:
                await scene.app.open()
            working = [asyncio.create_task(scene.app.work()) for scene in scenes]
            await asyncio.sleep(0.2)
            await proxy.switch("reset")
            cpu, began = _cpu(), len(proxy.connected_at)
            start = _now()
            await asyncio.sleep(3.0)
            tries = [at - start for at in proxy.connected_at[began:]]
            late = [at for at in tries if at >= 1.5 * MICROSECONDS]
            # By then a worker tries one connection at a time, about once a second.
            assert 1 <= len(late) <= 4 * fleet, len(late)
            assert _cpu() - cpu < 1.5, "it spins"
            await proxy.switch("pass")
            back, begun = _now(), len(proxy.connected_at)
            receipts = [await scene.send("plain", f"k{number}") for number, scene in enumerate(scenes)]
            assert [await receipt.result(timeout=10) for receipt in receipts] == ["k0", "k1", "k2", "k3"]
            first = [at - back for at in proxy.connected_at[begun:]]
            in_a_moment = max(sum(at <= other < at + 50_000 for other in first) for at in first)
            assert in_a_moment <= len(first) * 0.75, first
            for scene in scenes:
                scene.app.stop_working()
            await asyncio.gather(*working)
            for scene in scenes:
                await scene.app.close()

    run(scenario)


def _cpu() -> float:
    used = os.times()
    return used.user + used.system


def _now() -> int:
    return SystemClock().steady()


class FastClock(FakeClock):
    """Jumps to the next moment for which a task sleeps as soon as no task can run."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self._sleepers:
                self.advance(max(0, self._sleepers[0][0] - self.steady()) / MICROSECONDS)


def test_a_server_that_cannot_be_reached_for_long_is_asked_at_a_bounded_rate(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 34, on a clock that runs fast: a quarter of an hour of resets, and then the work is done."""
    clock = FastClock()
    for module in (connection, link):
        monkeypatch.setattr(module, "_machine", clock)

    async def scenario() -> None:
        async with Proxy("127.0.0.1", postgres_server.port, clock=clock) as proxy:
            scene = Scene(PostgresStore(proxy.through(postgres_url)), clock)
            sender = Scene(PostgresStore(postgres_url), journal=scene.journal)
            running = asyncio.create_task(clock.run())
            await sender.prepare()
            async with scene.app, sender.app:
                working = asyncio.create_task(scene.app.work())
                await proxy.switch("reset")
                began, start = len(proxy.connected_at), clock.steady()

                async def a_quarter_of_an_hour_later() -> bool:
                    return clock.steady() - start > 900 * MICROSECONDS

                await until(a_quarter_of_an_hour_later)
                tries = len(proxy.connected_at) - began
                # About one connection per second, all callers together.
                assert 50 < tries < 3 * 900, tries
                await proxy.switch("pass")
                receipt = await sender.send("plain", "k")
                assert await receipt.result(timeout=20) == "k"
                scene.app.stop_working()
                await working
            running.cancel()

    run(scenario)
