"""Redis ends, is away or forgets, while programs publish and workers receive and relay.

Every run has a foreign program that publishes by itself, a shop that relays its events, and a service that receives
both and writes a row for each.  A server that keeps its log costs only time; one that does not is refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from fault_scene import TABLES, run, until

from onefold import App, ConfigurationError, Context, Envelope, Query, State, TransportUnavailableError, limits
from onefold.brokers.redis import RedisTransport
from onefold.testing import FakeClock
from onefold.testing.brokers import DURABLE, RedisServer
from onefold.testing.checker import Effect, Final, Journal, check
from onefold.testing.proxy import Proxy

PUBLISHERS = 3
#: How often the server is killed, and how many more effects the test waits for in between.
KILLS, DONE_BETWEEN = 2, 15
#: A process has a reader and a few handlers; the pauses between attempts grow, and one attempt serves all.
CONNECTIONS_PER_SECOND_MAX = 40


@pytest.fixture(autouse=True)
def _quick_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses, so that processes are back soon after the server."""
    monkeypatch.setattr(limits, "RELAY_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(limits, "RELAY_PAUSE_SECONDS_MAX", 0.5)
    monkeypatch.setattr(limits, "INTAKE_LEASE", 1.0)


@pytest.fixture
def other_url(tmp_path: Path) -> str:
    """The store of the shop, which is not that of the service."""
    return f"sqlite:///{tmp_path}/shop.db"


def envelope(key: str) -> Envelope:
    return Envelope(
        id=f"foreign-{key}",
        message_type="order.placed",
        queue="orders",
        idempotency_key=key,
        correlation_id="c",
        causation_id="c",
        subject=key,
        payload_inline=b'"%s"' % key.encode(),
    )


class Scene:
    """A shop that relays its orders, foreign publishers beside it, and a service that writes a row per order."""

    def __init__(self, url: str, shop_url: str, broker: str, **options: Any) -> None:
        self.journal = Journal()
        self.broker = RedisTransport(broker, group="service", wait=0.05, **options)
        self.publisher = RedisTransport(broker, **options)
        self.shop = App(shop_url)
        self.placed = self.shop.topic("order.placed", str, key="{event}")
        self.shop.relay(self.placed, to=self.broker, stream="orders")
        self.service = App(url)
        self.service.receive(self.broker, "orders")
        self.unknown = 0
        self.may_publish = asyncio.Event()
        self.may_publish.set()
        self._publishing = 0
        self._stopping = False
        insert = f"INSERT INTO effect VALUES ({', '.join(['?' if url.startswith('sqlite') else '%s'] * 3)})"

        @self.service.on("order.placed")
        async def pay(ctx: Context, order: str) -> None:
            await ctx.execute(insert, order, ctx.message.id, ctx.fence)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        for app in (self.shop, self.service):
            await app.migrate()
        async with self.shop, self.service:
            async with self.service.transaction() as transaction:
                for statement in TABLES:
                    await transaction.execute(statement)
            for app in (self.shop, self.service):
                await app.subscribe()
            yield
        await self.publisher.close()

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Run all programs for the block, then let them finish, and check."""
        working = [asyncio.create_task(app.work()) for app in (self.shop, self.service)]
        publishing = [asyncio.create_task(self._publish(number)) for number in range(PUBLISHERS)]
        publishing.append(asyncio.create_task(self._place()))
        try:
            yield
            self._stopping = True
            await asyncio.gather(*publishing)
            await until(self.is_quiet)
        finally:
            for app in (self.shop, self.service):
                app.stop_working()
        # These are still the first workers.
        await asyncio.gather(*working)

    async def _publish(self, number: int) -> None:
        """Publish one entry after another, as a careful program does: one that was not accepted is published again."""
        count = 0
        while not self._stopping:
            await self.may_publish.wait()
            key = f"foreign.{number}.{count}"
            self.journal.invoke("foreign", key)
            self._publishing += 1
            while True:
                try:
                    await self.publisher.publish([envelope(key)])
                    break
                except TransportUnavailableError:
                    self.unknown += 1
                    self.journal.unknown("foreign", key)
                    await asyncio.sleep(0.02)
            self._publishing -= 1
            self.journal.ok("foreign", key)
            count += 1
            await asyncio.sleep(0.004)

    async def _place(self) -> None:
        count = 0
        while not self._stopping:
            await self.may_publish.wait()
            self.journal.invoke("shop", f"shop.{count}")
            await self.placed.publish(f"shop.{count}")
            self.journal.ok("shop", f"shop.{count}")
            count += 1
            await asyncio.sleep(0.01)

    async def until_written(self, url: str) -> None:
        """Stop publishing, and wait until the server has written everything it accepted to disk."""
        self.may_publish.clear()

        async def written() -> bool:
            counts = (await self.shop.count()).values()
            if self._publishing or any(one.scheduled or one.leased for one in counts):
                return False
            with redis.Redis.from_url(url) as client:
                told = client.info("persistence")
            return not (told["aof_pending_bio_fsync"] or told["aof_buffer_length"])

        await until(written)

    async def effects(self) -> list[Effect]:
        return [Effect(*row) for row in await self.service.store.fetch("SELECT key, message, fence FROM effect")]

    async def is_quiet(self) -> bool:
        """Whether every accepted order has its effect, and no message or entry is left."""
        accepted = {entry.key for entry in self.journal.entries if entry.event == "ok"}
        if not accepted <= {effect.key for effect in await self.effects()}:
            return False
        counts = [one for app in (self.shop, self.service) for one in (await app.count()).values()]
        return not any(one.scheduled or one.leased for one in counts)

    async def more_effects(self, number: int) -> None:
        wanted = len(await self.effects()) + number

        async def enough() -> bool:
            return len(await self.effects()) >= wanted

        await until(enough)

    async def verdict(self) -> None:
        """Check that nothing accepted is lost, each key has one message and one effect, and no attempt was used up."""
        effects = await self.effects()
        finals = []
        for app in (self.shop, self.service):
            after = ""
            while page := await app.find(Query(after=after, limit=1_000)):
                after = page[-1].envelope.id
                for one in page:
                    assert (one.state, one.attempt) == (State.DONE, 0), f"{one}: {one.failure}"
                    if app is self.service and one.envelope.message_type == "pay":
                        finals.append(Final(one.envelope.id, one.envelope.subject, one.state))
        report = check(self.journal, effects, finals)
        assert not report, report
        assert {effect.key.partition(".")[0] for effect in effects} == {"shop", "foreign"}


@pytest.mark.parametrize("appendfsync", ["always", "no"])
def test_a_server_with_its_log_that_is_killed_and_comes_back_loses_nothing(
    appendfsync: str, store_url: str, other_url: str, redis_program: Path
) -> None:
    """Faults 6, 16 and 34: kill -9 during publishing, receiving and relaying, several times."""
    with RedisServer(redis_program, settings={**DURABLE, "appendfsync": appendfsync}) as server:

        async def scenario() -> None:
            async with Proxy("127.0.0.1", server.port) as proxy:
                scene = Scene(store_url, other_url, proxy.through(server.url()))
                async with scene.open():
                    async with scene.traffic():
                        for _ in range(KILLS):
                            await scene.more_effects(DONE_BETWEEN)
                            await asyncio.to_thread(server.kill)
                            await asyncio.sleep(0.2)
                            await asyncio.to_thread(server.restart)
                        await scene.more_effects(DONE_BETWEEN)
                    assert scene.unknown > 0, "no entry was being published when the server died"
                    assert proxy.busiest_second() <= CONNECTIONS_PER_SECOND_MAX, proxy.busiest_second()
                    await scene.verdict()

        run(scenario)


def test_a_server_that_syncs_every_second_loses_nothing_that_it_has_written(
    store_url: str, other_url: str, redis_program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 6: kill -9 while workers receive; such a server may answer before it has written, so the test waits."""
    with RedisServer(redis_program, settings={**DURABLE, "appendfsync": "everysec"}) as server:

        async def scenario() -> None:
            scene = Scene(store_url, other_url, server.url())
            async with scene.open():
                async with scene.traffic():
                    for _ in range(KILLS):
                        await scene.more_effects(DONE_BETWEEN)
                        await scene.until_written(server.url())
                        await asyncio.to_thread(server.kill)
                        scene.may_publish.set()
                        await asyncio.sleep(0.2)
                        await asyncio.to_thread(server.restart)
                    await scene.more_effects(DONE_BETWEEN)
                assert scene.publisher.capabilities.durability == "all but the last seconds"
                await scene.verdict()

        run(scenario)
    assert "transport_may_lose_seconds" in caplog.text


def test_a_server_that_is_shut_down_and_started_again_loses_nothing(
    sqlite_url: str, other_url: str, redis_program: Path
) -> None:
    """Fault 6: the orderly way."""
    with RedisServer(redis_program) as server:

        async def scenario() -> None:
            scene = Scene(sqlite_url, other_url, server.url())
            async with scene.open():
                async with scene.traffic():
                    await scene.more_effects(DONE_BETWEEN)
                    await asyncio.to_thread(server.restart)
                    await scene.more_effects(DONE_BETWEEN)
                await scene.verdict()

        run(scenario)


def test_answers_of_the_server_that_are_lost_repeat_nothing(store_url: str, other_url: str, redis_url: str) -> None:
    """Faults 5 and 16: published, pulled or acknowledged, and the answer lost."""

    async def scenario() -> None:
        port = int(redis_url.rpartition(":")[2].partition("/")[0])
        async with Proxy("127.0.0.1", port) as proxy:
            scene = Scene(store_url, other_url, proxy.through(redis_url))
            async with scene.open():
                async with scene.traffic():
                    for _ in range(10):
                        await scene.more_effects(2)
                        proxy.lose_next_reply()
                    await scene.more_effects(DONE_BETWEEN)
                assert scene.unknown > 0, "no answer to a publisher was lost"
                await scene.verdict()

    run(scenario)


def test_however_many_are_talking_when_a_connection_breaks_only_errors_of_ours_leave(redis_url: str) -> None:
    """Fault 9: callers are cut off while they connect, ask and wait; errors of the driver never come out."""
    clock = FakeClock()

    async def scenario() -> None:
        port = int(redis_url.rpartition(":")[2].partition("/")[0])
        async with Proxy("127.0.0.1", port) as proxy:
            broker = RedisTransport(proxy.through(redis_url), group="service", wait=0.01, clock=clock)
            outcomes: list[object] = []
            for number in range(60):
                calls = [broker.publish([envelope(f"{number}.{place}")]) for place in range(6)]
                calls.append(broker.pull("orders", limit=10, lease=0.0))
                talking = [asyncio.create_task(call) for call in calls]
                await asyncio.sleep(number / 20_000)
                proxy.cut()
                outcomes += await asyncio.gather(*talking, return_exceptions=True)
                clock.advance(limits.TRANSPORT_PAUSE_SECONDS_MAX)
            failed = [one for one in outcomes if isinstance(one, BaseException)]
            assert len(failed) > 20, "too little was broken"
            assert {type(one) for one in failed} == {TransportUnavailableError}, failed
            await broker.publish([envelope("after")])
            await broker.close()

    run(scenario)


# a worker dies


WORKER = """
import asyncio, os, signal, sys
from onefold import App
from onefold.brokers.redis import RedisTransport

class Mortal(RedisTransport):
    async def ack(self, deliveries):
        print(len(deliveries), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

app = App(sys.argv[1])
app.receive(Mortal(sys.argv[2], group="service", wait=0.05), "orders")

@app.on("order.placed")
async def pay(order: str) -> None: ...

async def main():
    async with app:
        await app.work(lease=1)

asyncio.run(main())
"""


def test_a_worker_killed_between_put_and_acknowledgement_repeats_nothing(
    store_url: str, other_url: str, redis_url: str
) -> None:
    """Faults 1 and 16: the stored entry is delivered again, is a duplicate, and is acknowledged."""

    async def scenario() -> None:
        scene = Scene(store_url, other_url, redis_url)
        async with scene.open():
            await scene.publisher.publish([envelope(f"k{number}") for number in range(10)])
            killed = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", WORKER, store_url, redis_url], capture_output=True, timeout=30
            )
            assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
            put = [one for one in await scene.service.find(Query()) if one.envelope.message_type == "order.placed"]
            assert len(put) == int(killed.stdout) == 10
            with redis.Redis.from_url(redis_url) as client:
                assert client.xpending("orders", "service")["pending"] == 10
            working = asyncio.create_task(scene.service.work())

            async def all_acknowledged() -> bool:
                with redis.Redis.from_url(redis_url) as client:
                    return bool(client.xpending("orders", "service")["pending"] == 0)

            await until(all_acknowledged)

            async def all_done() -> bool:
                return len(await scene.effects()) >= 10

            await until(all_done)
            scene.service.stop_working()
            await working
            assert sorted(effect.key for effect in await scene.effects()) == [f"k{number}" for number in range(10)]
            put = [one for one in await scene.service.find(Query()) if one.envelope.message_type == "order.placed"]
            assert len(put) == 10

    run(scenario)


# servers that forget


@pytest.mark.parametrize(
    ("setting", "value"),
    [("appendonly", "no"), ("maxmemory-policy", "allkeys-lru"), ("maxmemory-policy", "volatile-ttl")],
)
def test_a_server_that_would_forget_is_refused_with_the_setting_and_the_remedy(
    setting: str, value: str, sqlite_url: str, other_url: str, redis_program: Path
) -> None:
    """Fault 6: before anything is claimed, received or published."""
    with RedisServer(redis_program, settings={**DURABLE, setting: value}) as server:

        async def scenario() -> None:
            scene = Scene(sqlite_url, other_url, server.url())
            async with scene.open():
                await scene.placed.publish("order")
                for refused in (scene.shop.work(), scene.service.work(), scene.publisher.publish([envelope("k")])):
                    with pytest.raises(ConfigurationError, match=f"{setting} is {value}, so .* set `{setting} "):
                        await refused
                with redis.Redis.from_url(server.url()) as client:
                    assert client.dbsize() == 0
                assert (await scene.shop.count())["default"].scheduled == 1

        run(scenario)


def test_onefold_worker_does_not_start_on_a_server_that_would_forget(tmp_path: Path, redis_program: Path) -> None:
    """Fault 6: the command prints the reason and the remedy."""
    with RedisServer(redis_program, settings={**DURABLE, "appendonly": "no"}) as server:
        (tmp_path / "shop.py").write_text(
            "from onefold import App\n"
            "from onefold.brokers.redis import RedisTransport\n"
            "app = App('sqlite:///shop.db')\n"
            f"app.receive(RedisTransport('{server.url()}', group='shop'), 'orders')\n"
        )
        command = [sys.executable, "-m", "onefold", "worker", "shop:app"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert "appendonly is no" in said
    assert "set `appendonly yes`" in said


def test_a_server_that_comes_back_with_other_settings_is_waited_for_until_it_is_durable(
    sqlite_url: str, other_url: str, redis_program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 6: it was durable when the worker started; its settings are checked again at each reconnect.

    Until then nothing is read from it or written to it, the reason is logged once for each direction, and both workers
    continue with work that needs no broker.
    """
    with RedisServer(redis_program) as server:

        async def scenario() -> None:
            scene = Scene(sqlite_url, other_url, server.url())
            done: list[int] = []

            @scene.service.task
            async def plain(number: int) -> None:
                done.append(number)

            async with scene.open():
                await scene.publisher.publish([envelope("k")])
                working = [asyncio.create_task(app.work()) for app in (scene.shop, scene.service)]
                await scene.more_effects(1)
                await asyncio.to_thread(server.kill)
                server.settings["appendonly"] = "no"
                await asyncio.to_thread(server.restart)
                await scene.placed.publish("later")
                await until(lambda: _holds(_refusals() >= 2))
                for number in range(5):
                    await plain.send(number)
                await until(lambda: _holds(len(done) == 5))
                with redis.Redis.from_url(server.url()) as client:
                    assert client.dbsize() == 0
                assert not any(one.done() for one in working)
                await asyncio.to_thread(server.kill)
                server.settings["appendonly"] = "yes"
                await asyncio.to_thread(server.restart)
                await scene.more_effects(1)
                for app in (scene.shop, scene.service):
                    app.stop_working()
                await asyncio.gather(*working)

        def _refusals() -> int:
            return sum("appendonly is no" in record.getMessage() for record in caplog.records)

        run(scenario)
        assert _refusals() == 2


async def _holds(true: bool) -> bool:
    return true


def test_a_worker_process_is_replaced_while_the_server_must_not_be_used(tmp_path: Path, redis_program: Path) -> None:
    """Fault 6: only the first process of a supervisor is refused; later ones do the work that needs no broker."""
    with RedisServer(redis_program) as server:
        (tmp_path / "shop.py").write_text(
            "import os\n"
            "from onefold import App\n"
            "from onefold.brokers.redis import RedisTransport\n"
            "app = App('sqlite:///shop.db')\n"
            f"app.receive(RedisTransport('{server.url()}', group='shop'), 'orders')\n"
            "@app.task\n"
            "async def tells_its_pid() -> int:\n"
            "    return os.getpid()\n"
        )
        sender = App(f"sqlite:///{tmp_path}/shop.db")

        @sender.task
        async def tells_its_pid() -> int:
            raise AssertionError

        with subprocess.Popen(
            [sys.executable, "-m", "onefold", "worker", "shop:app"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stderr=(tmp_path / "log").open("wb"),
        ) as supervisor:
            try:

                async def scenario() -> None:
                    await sender.migrate()
                    async with sender:
                        first = await (await tells_its_pid.send()).result(timeout=30)
                        await asyncio.to_thread(server.kill)
                        server.settings["appendonly"] = "no"
                        await asyncio.to_thread(server.restart)
                        os.kill(first, signal.SIGKILL)
                        assert await (await tells_its_pid.send()).result(timeout=30) != first

                run(scenario)
                assert supervisor.poll() is None
            finally:
                supervisor.terminate()
        assert "appendonly is no" in (tmp_path / "log").read_text()


def test_a_server_may_be_allowed_to_forget_and_then_does(sqlite_url: str, other_url: str, redis_program: Path) -> None:
    """Fault 6: with the explicit permission; messages that the stores had accepted are not lost even so."""
    with RedisServer(redis_program, settings={"appendonly": "no"}) as server:

        async def scenario() -> None:
            scene = Scene(sqlite_url, other_url, server.url(), allow_volatile=True)
            async with scene.open():
                await scene.publisher.publish([envelope("taken in")])
                assert scene.publisher.capabilities.durability == "nothing"
                receiving = asyncio.create_task(scene.service.work())
                await scene.more_effects(1)
                scene.service.stop_working()
                await receiving
                await scene.publisher.publish([envelope("accepted by the server alone")])
                await asyncio.to_thread(server.kill)
                await scene.placed.publish("in the store")
                await asyncio.to_thread(server.restart)
                working = [asyncio.create_task(app.work()) for app in (scene.shop, scene.service)]
                await scene.more_effects(1)
                for app in (scene.shop, scene.service):
                    app.stop_working()
                await asyncio.gather(*working)
                assert sorted(effect.key for effect in await scene.effects()) == ["in the store", "taken in"]

        run(scenario)


# servers that are away


#: Seconds on the test's clock for which the server is away, and between two attempts of the worker.
AWAY_SECONDS, LOOK_SECONDS = 600, 5


def test_a_server_that_is_away_for_long_is_asked_at_a_bounded_rate_and_burns_no_attempt(
    store_url: str, redis_server: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 34: ten minutes of resets, on a fake clock, while other work is done; then everything is received."""
    monkeypatch.undo()
    clock = FakeClock()
    done: list[str] = []

    async def scenario() -> None:
        async with Proxy("127.0.0.1", redis_server.port, clock=clock) as proxy:
            broker = RedisTransport(proxy.through(redis_url), group="service", wait=0.01, clock=clock)
            app = App(store_url, clock=clock)
            placed = app.topic("order.placed", str)
            app.relay(placed, to=broker, stream="orders")
            app.receive(broker, "orders", types=["nothing"])

            @app.task
            async def other(name: str) -> None:
                done.append(name)

            await app.migrate()
            async with app:
                await app.subscribe()
                await proxy.switch("reset")
                for number in range(20):
                    await placed.publish(str(number))
                for _ in range(0, AWAY_SECONDS, LOOK_SECONDS):
                    await app.work(until_idle=True)
                    clock.advance(LOOK_SECONDS)
                await other.send("meanwhile")
                await app.work(until_idle=True)
                assert done == ["meanwhile"]
                tries = len(proxy.connected_at)
                assert AWAY_SECONDS / 60 < tries <= 2 * AWAY_SECONDS / LOOK_SECONDS, tries
                copies = await app.find(Query(message_type="order.placed.to.orders"))
                assert [(one.state, one.attempt) for one in copies] == [(State.SCHEDULED, 0)] * 20
                await proxy.switch("pass")
                clock.advance(limits.RELAY_PAUSE_SECONDS_MAX)
                await app.work(until_idle=True)
                with redis.Redis.from_url(redis_url) as client:
                    assert client.xlen("orders") == 20

    run(scenario)


def test_a_worker_starts_while_the_server_is_away_and_receives_when_it_comes(
    sqlite_url: str, other_url: str, redis_program: Path
) -> None:
    """Fault 34: work that needs no broker is done meanwhile, and no process has to be restarted."""
    with RedisServer(redis_program) as server:
        server.kill()

        async def scenario() -> None:
            scene = Scene(sqlite_url, other_url, server.url())
            async with scene.open():
                working = [asyncio.create_task(app.work()) for app in (scene.shop, scene.service)]
                await scene.placed.publish("order")

                async def copied() -> bool:
                    return bool(await scene.shop.find(Query(message_type="order.placed.to.orders")))

                await until(copied)
                await asyncio.to_thread(server.restart)
                await scene.more_effects(1)
                for app in (scene.shop, scene.service):
                    app.stop_working()
                await asyncio.gather(*working)

        run(scenario)
