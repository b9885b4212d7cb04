"""The testing kit itself: its clock, drain, context and assert_idle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onefold import App, Context, RetryPolicy, Run, Snooze, State, never
from onefold.clock import MICROSECONDS
from onefold.errors import ConfigurationError
from onefold.store import Query
from onefold.store.open import open_store
from onefold.store.sqlite import SQLiteStore
from onefold.tasks.options import TaskSettings
from onefold.tasks.task import Task
from onefold.testing import FakeClock, Fault, FaultyStore, HastyClock, assert_idle, context, drain


async def _turn() -> None:
    """Let every task that is ready run one step."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()


class Shop:
    """An app on a database in memory, with a table of its own."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        store = SQLiteStore(":memory:", clock=self.clock)
        self.app = App(store=store, clock=self.clock, chance=random.Random(7))

    def run(self, scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def opened() -> None:
            async with self.app:
                async with self.app.transaction() as transaction:
                    await transaction.execute("CREATE TABLE paid (id INTEGER)")
                await scene()

        asyncio.run(opened())

    async def paid(self) -> list[int]:
        return [row[0] for row in await self.app.store.fetch("SELECT id FROM paid ORDER BY id")]


@pytest.fixture
def shop() -> Shop:
    return Shop()


# The clock.


def test_a_fake_clock_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(datetime(2030, 5, 1, tzinfo=UTC))
    now, steady = clock.now(), clock.steady()
    assert (clock.now(), clock.steady()) == (now, steady)
    clock.advance(timedelta(seconds=2))
    assert (clock.now() - now, clock.steady() - steady) == (2 * MICROSECONDS, 2 * MICROSECONDS)
    assert clock.moment == datetime(2030, 5, 1, 0, 0, 2, tzinfo=UTC)


def test_a_jump_sets_the_wall_clock_and_lets_no_time_pass() -> None:
    clock = FakeClock()
    now, steady = clock.now(), clock.steady()
    clock.jump(timedelta(hours=-1))
    assert (clock.now() - now, clock.steady() - steady) == (-3_600 * MICROSECONDS, 0)


def test_sleepers_wake_in_order_and_not_too_early() -> None:
    async def scene() -> None:
        clock, woken = FakeClock(), []

        async def sleep(seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append(seconds)

        tasks = [asyncio.create_task(sleep(seconds)) for seconds in (3.0, 1.0, 2.0)]
        await _turn()
        clock.jump(100.0)
        clock.advance(0.999999)
        await _turn()
        assert woken == []
        clock.advance(1.000001)
        await _turn()
        assert woken == [1.0, 2.0]
        clock.advance(1.0)
        await asyncio.gather(*tasks)
        assert woken == [1.0, 2.0, 3.0]

    asyncio.run(scene())


def test_a_sleeper_that_was_cancelled_does_not_trouble_the_clock() -> None:
    async def scene() -> None:
        clock = FakeClock()
        sleeper = asyncio.create_task(clock.sleep(1.0))
        await _turn()
        sleeper.cancel()
        await asyncio.wait([sleeper])
        clock.advance(1.0)

    asyncio.run(scene())


def test_a_hasty_clock_is_through_with_short_sleeps_at_once_and_waits_for_long_ones() -> None:
    async def scene() -> None:
        clock = HastyClock()
        steady = clock.steady()
        await clock.sleep(0.5)
        assert clock.steady() - steady == MICROSECONDS // 2
        long = asyncio.create_task(clock.sleep(30.0))
        await _turn()
        assert not long.done()
        clock.advance(30.0)
        await long

    asyncio.run(scene())


# drain and assert_idle.


def test_drain_goes_through_retries_and_delays_in_no_time(shop: Shop) -> None:
    runs: list[datetime] = []

    @shop.app.task(retry=RetryPolicy(jitter=False))
    async def flaky() -> str:
        runs.append(shop.clock.moment)
        if len(runs) < 3:
            raise ValueError("not yet")
        return "done"

    async def scene() -> None:
        start = shop.clock.moment
        receipt = await flaky.options(delay=timedelta(days=1)).send()
        assert await drain(shop.app) == 3
        assert [moment - start for moment in runs] == [
            timedelta(days=1),
            timedelta(days=1, seconds=5),
            timedelta(days=1, seconds=15),
        ]
        assert await receipt.result() == "done"
        await assert_idle(shop.app)

    shop.run(scene)


@pytest.mark.parametrize("base", [0.2, 2.0, 20.0])
@pytest.mark.parametrize("advance", [True, False])
def test_drain_does_not_wait_for_a_step_that_waits_in_place(shop: Shop, base: float, advance: bool) -> None:
    """A short wait of a step ends at once, a long one when time advances; neither hangs on a stopped clock."""
    tried: list[int] = []

    @shop.app.step(undo=never("nothing to do"), retry=RetryPolicy(max_attempts=3, base=base, jitter=False))
    async def pay(ctx: Context) -> str:
        tried.append(shop.clock.now())
        if len(tried) < 3:
            raise ConnectionError("no answer")
        return "paid"

    @shop.app.saga
    async def book(run: Run) -> str:
        return await run.step(pay)

    async def scene() -> None:
        receipt = await book.send()
        begun_at = shop.clock.now()
        async with asyncio.timeout(20):
            await drain(shop.app, advance=advance)
        waited = (shop.clock.now() - begun_at) / MICROSECONDS
        if advance:
            assert await receipt.result(timeout=1) == "paid"
            assert waited == pytest.approx(3 * base)
        else:
            assert waited == 0
            assert len(tried) == (3 if base < 1 else 1)

    shop.run(scene)


def test_drain_does_not_wait_for_a_store_that_is_away_for_a_moment() -> None:
    """A worker that backs off sleeps on the same clock."""
    clock = FakeClock()
    store = FaultyStore(SQLiteStore(":memory:", clock=clock), [Fault("refuse", at=n, verb="settle") for n in (1, 2)])
    app = App(store=store)

    @app.task
    async def note() -> str:
        return "noted"

    async def scene() -> None:
        async with app:
            receipt = await note.send()
            async with asyncio.timeout(20):
                await drain(app)
            assert await receipt.result(timeout=1) == "noted"

    asyncio.run(scene())


# override.


@pytest.mark.parametrize("kind", ["its store's", "given"])
def test_an_app_goes_by_the_clock_of_the_store_it_is_given(kind: str, tmp_path: Path) -> None:
    """As documented: the program's app on a store in memory with the test's clock; afterwards all is as before."""
    clock = FakeClock()
    app = App(f"sqlite:///{tmp_path}/real.db")

    @app.task
    async def flaky(ctx: Context) -> str:
        if ctx.attempt < 3:
            raise ConnectionError("no answer")
        return "done"

    async def scene() -> None:
        store = open_store("sqlite:///:memory:", clock=clock)
        with app.override(store=store, clock=clock if kind == "given" else None):
            async with app:
                receipt = await flaky.options(delay=timedelta(days=1)).send()
                assert await drain(app) == 3
                await assert_idle(app)
                assert await receipt.result(timeout=1) == "done"
        async with app:
            assert await app.count() == {}
            assert not isinstance(app.clock, FakeClock)
            before = app.clock.now()
            assert (await flaky.send()).id
            (record,) = await app.find(Query())
            assert record.envelope.created_at >= before

    asyncio.run(scene())


def test_an_app_made_on_a_store_goes_by_its_clock() -> None:
    """The app needs no clock argument of its own."""
    clock = FakeClock()
    assert App(store=SQLiteStore(":memory:", clock=clock)).clock is clock
    assert App(store=FaultyStore(SQLiteStore(":memory:", clock=clock))).clock is clock


def test_an_override_has_resources_of_its_own(shop: Shop) -> None:
    """For workers and for handlers that are called directly; the app's own lifespan is opened only afterwards."""
    opened: list[str] = []
    seen: list[Any] = []

    @shop.app.lifespan
    @asynccontextmanager
    async def connect() -> AsyncIterator[str]:
        opened.append("connection")
        yield "connection"

    @shop.app.task
    async def use(ctx: Context) -> None:
        seen.append(ctx.resources)

    async def scene() -> None:
        with shop.app.override(resources=None):
            async with context(use) as ctx:
                await use.function(ctx)
        with shop.app.override(resources="double"):
            await use.send()
            await drain(shop.app)
        assert opened == []
        await use.send()
        await drain(shop.app)
        assert seen == [None, "double", "connection"]

    shop.run(scene)


def test_drain_without_advancing_leaves_what_is_not_due(shop: Shop) -> None:
    ran: list[int] = []

    @shop.app.task
    async def note(number: int) -> None:
        ran.append(number)

    async def scene() -> None:
        await note.send(1)
        await note.options(delay=60.0).send(2)
        now = shop.clock.now()
        assert await drain(shop.app, advance=False) == 1
        assert (ran, shop.clock.now()) == ([1], now)
        with pytest.raises(AssertionError, match=r"1 alive:\n  note .*: scheduled, attempt 0"):
            await assert_idle(shop.app)

    shop.run(scene)


def test_drain_takes_over_from_a_worker_that_died(shop: Shop) -> None:
    ran: list[int] = []

    @shop.app.task
    async def note(number: int) -> None:
        ran.append(number)

    async def scene() -> None:
        await note.send(1)
        await shop.app.store.claim(["default"], types=["note"], limit=1, lease=30.0, worker="dead")
        with pytest.raises(AssertionError, match="leased"):
            await assert_idle(shop.app)
        assert await drain(shop.app) == 1
        assert ran == [1]

    shop.run(scene)


def test_drain_works_through_queues_that_only_a_send_named(shop: Shop) -> None:
    ran: list[int] = []

    @shop.app.task
    async def note(number: int) -> None:
        ran.append(number)

    async def scene() -> None:
        await note.options(queue="seldom").send(1)
        await drain(shop.app)
        assert ran == [1]

    shop.run(scene)


def test_drain_says_what_never_ends(shop: Shop) -> None:
    @shop.app.task(expires=None, key_window=timedelta(days=400))
    async def restless() -> None:
        raise Snooze(after=60.0)

    async def scene() -> None:
        await restless.send()
        with pytest.raises(AssertionError, match="after 7 rounds of work there is 1 alive:\n  restless"):
            await drain(shop.app, rounds=7)

    shop.run(scene)


def test_drain_names_a_message_without_a_handler(shop: Shop) -> None:
    other = App(store=None, clock=shop.clock)

    @other.task(name="elsewhere")
    async def elsewhere() -> None: ...

    async def scene() -> None:
        envelope = elsewhere.call().envelope("01900000-0000-7000-8000-000000000000")
        await shop.app.store.put([envelope])
        with pytest.raises(AssertionError, match=r"elsewhere .*: scheduled, attempt 0, and this app has no such task"):
            await drain(shop.app, rounds=3)

    shop.run(scene)


def test_drain_leaves_dead_letters_to_people(shop: Shop) -> None:
    @shop.app.task(retry=RetryPolicy(max_attempts=2))
    async def broken() -> None:
        raise ValueError("no")

    async def scene() -> None:
        receipt = await broken.send()
        assert await drain(shop.app) == 2
        assert (await shop.app.find(Query(ids=(receipt.id,))))[0].state is State.DEAD
        await assert_idle(shop.app)

    shop.run(scene)


# context.


def test_a_handler_can_be_called_directly_and_leaves_nothing_behind(shop: Shop) -> None:
    @shop.app.task
    async def receipt(order_id: int) -> None: ...

    @shop.app.task(key="{order_id}:charge")
    async def charge(ctx: Context, order_id: int, cents: int) -> str:
        await ctx.execute("INSERT INTO paid VALUES (?)", order_id)
        ctx.send(receipt, order_id)
        await receipt.send(order_id + 1)
        return f"{cents} cents"

    async def scene() -> None:
        async with context(charge, order_id=7, cents=5) as ctx:
            assert await charge.function(ctx, 7, 5) == "5 cents"
            assert await ctx.fetch("SELECT id FROM paid") == [(7,)]
            assert [sent.payload_inline for sent in ctx.buffer.envelopes] == [b'{"order_id":7}', b'{"order_id":8}']
            assert {sent.causation_id for sent in ctx.buffer.envelopes} == {ctx.message.id}
            assert (ctx.idempotency_key, ctx.attempt) == ("7:charge", 1)
            assert ctx.deadline > shop.clock.moment
        assert await shop.paid() == []
        assert await shop.app.find(Query()) == []
        await receipt.send(9)
        assert len(await shop.app.find(Query())) == 1

    shop.run(scene)


def test_a_context_has_the_resources_a_worker_would_open(shop: Shop) -> None:
    """For the length of the block; the test sees the error of a lifespan that fails."""
    events: list[str] = []

    @shop.app.lifespan
    @asynccontextmanager
    async def connect() -> AsyncIterator[str]:
        events.append("opened")
        yield "connection"
        events.append("closed")

    @shop.app.task
    async def use(ctx: Context) -> str:
        resources: str = ctx.resources
        return resources

    async def scene() -> None:
        async with context(use) as ctx:
            assert await use.function(ctx) == "connection"
            assert events == ["opened"]
        assert events == ["opened", "closed"]

    shop.run(scene)


def test_an_error_in_the_block_is_the_test_s_own_and_rolls_back_too(shop: Shop) -> None:
    @shop.app.task
    async def charge(ctx: Context, order_id: int) -> None:
        await ctx.execute("INSERT INTO paid VALUES (?)", order_id)
        raise ValueError("no money")

    async def call() -> None:
        async with context(charge, 7) as ctx:
            await charge.function(ctx, 7)

    async def scene() -> None:
        with pytest.raises(ValueError, match="no money"):
            await call()
        assert await shop.paid() == []

    shop.run(scene)


def test_a_context_needs_right_arguments_and_an_open_app(shop: Shop) -> None:
    @shop.app.task
    async def charge(ctx: Context, order_id: int) -> None: ...

    async def enter(*args: Any) -> None:
        async with context(charge, *args):
            raise AssertionError("the block must not be reached")

    async def wrong() -> None:
        with pytest.raises(Exception, match="order_id"):
            await enter("seven")

    shop.run(wrong)
    with pytest.raises(ConfigurationError, match="not open"):
        asyncio.run(enter(7))


def test_a_task_of_no_app_has_no_context() -> None:
    async def charge(ctx: Context) -> None: ...

    task: Task[[], None] = Task(object(), charge, TaskSettings())  # type: ignore[arg-type]

    async def enter() -> None:
        async with context(task):
            raise AssertionError("the block must not be reached")

    with pytest.raises(ConfigurationError, match="no app"):
        asyncio.run(enter())
