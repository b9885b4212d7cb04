"""Events: one published event is handled once by each subscriber, wherever and whenever that runs.  I12, I13, J9."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from onefold import (
    App,
    Batch,
    ConfigurationError,
    Context,
    DecodeError,
    Envelope,
    KeyReuseError,
    Query,
    Record,
    Reject,
    Run,
    State,
    StoreUnavailableError,
    SyncApp,
    SyncBatch,
    SyncContext,
    TransactionOpenError,
    limits,
)
from onefold.clock import give_way
from onefold.events.subscriptions import copy_of
from onefold.store import Registered
from onefold.testing import HastyClock
from onefold.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


class Order(msgspec.Struct, frozen=True):
    id: int
    cents: int = 0


async def work_through(bench: Bench) -> None:
    while await bench.work():
        pass


async def of_type(bench: Bench, message_type: str) -> list[Record]:
    return await bench.app.find(Query(message_type=message_type))


def test_every_subscriber_is_sent_a_copy_that_goes_back_to_the_event(bench: Bench) -> None:
    """I12, A5, A6: its own message type, queue and key; the event's payload, subject, correlation and trace."""
    placed = bench.app.topic("order.placed", Order, subject="order:{event.id}")
    got: list[tuple[str, Order]] = []

    @bench.app.on(placed)
    async def reserve(ctx: Context, order: Order) -> None:
        got.append(("reserve", order))
        await bench.insert(ctx, f"reserved {order.id}")

    @bench.app.on("order.placed", queue="mail")
    def confirm(what: Order) -> None:
        got.append(("confirm", what))

    async def scenario() -> None:
        event = await placed.options(tags={"shop": "eu"}, trace="t-1").publish(Order(7, 500))
        await work_through(bench)
        assert sorted(got) == [("confirm", Order(7, 500)), ("reserve", Order(7, 500))]
        assert await bench.effects() == ["reserved 7"]
        assert await event.result() == 2
        for name, queue in (("reserve", "default"), ("confirm", "mail")):
            (copy,) = [one.envelope for one in await of_type(bench, name)]
            assert (copy.queue, copy.idempotency_key, copy.causation_id) == (
                queue,
                f"derived:event/{event.id}",
                event.id,
            )
            assert (copy.correlation_id, copy.subject, copy.trace) == (event.id, "order:7", "t-1")
            assert (copy.tags, copy.payload_inline) == ({"shop": "eu"}, b'{"id":7,"cents":500}')

    bench.run(scenario)


def test_one_key_is_one_event(bench: Bench) -> None:
    """B1: another payload under the same key is refused."""
    placed = bench.app.topic("order.placed", Order, key="{event.id}")
    seen: list[int] = []

    @bench.app.on(placed)
    async def reserve(order: Order) -> None:
        seen.append(order.id)

    async def scenario() -> None:
        first = await placed.publish(Order(7))
        assert (await placed.publish(Order(7))).id == first.id
        await work_through(bench)
        assert (await placed.publish(Order(7))).duplicate
        with pytest.raises(KeyReuseError):
            await placed.publish(Order(7, 1))
        await placed.options(key="another").publish(Order(7))
        await work_through(bench)
        assert seen == [7, 7]

    bench.run(scenario)


def test_an_event_leaves_with_the_transaction_or_not_at_all(bench: Bench) -> None:
    """J1, I13: ``tx.publish``, and a publish inside the block that is not awaited."""
    placed = bench.app.topic("order.placed", Order)

    async def scenario() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "order 1")
            receipt = tx.publish(placed, Order(1))
            placed.publish(Order(2))  # type: ignore[unused-coroutine]
        with pytest.raises(RuntimeError):  # noqa: PT012
            async with bench.app.transaction() as tx:
                tx.publish(placed.options(key="3"), Order(3))
                raise RuntimeError
        events = await of_type(bench, "order.placed")
        assert sorted(one.envelope.payload_inline or b"" for one in events) == [
            b'{"id":1,"cents":0}',
            b'{"id":2,"cents":0}',
        ]
        assert receipt.id in [one.envelope.id for one in events]

    bench.run(scenario)


def test_what_a_handler_publishes_leaves_with_its_commit_once(bench: Bench) -> None:
    """I12, B23: coroutines, threads and batches; a failed run publishes nothing, its retry publishes once."""
    placed = bench.app.topic("order.placed", Order)
    runs: list[str] = []

    @bench.app.on(placed)
    async def note(ctx: Context, order: Order) -> None:
        await bench.insert(ctx, f"{order.id}")

    @bench.app.task
    async def asynchronous(ctx: Context) -> None:
        ctx.publish(placed, Order(1))
        runs.append("")
        if len(runs) == 1:
            raise ValueError("the first time")

    @bench.app.task
    def threaded(ctx: SyncContext) -> None:
        ctx.publish(placed, Order(2))

    @bench.app.task(batch=5)
    async def batched(batch: Batch[int]) -> None:
        batch.publish(placed, Order(3))
        for item in batch:
            item.done()

    async def scenario() -> None:
        await asynchronous.send()
        await threaded.send()
        await batched.send(1)
        await work_through(bench)
        bench.clock.advance(limits.RETRY_CAP)
        await work_through(bench)
        assert len(runs) == 2
        assert await bench.effects() == ["1", "2", "3"]

    bench.run(scenario)


def test_a_workflow_publishes_once_however_often_it_goes_on(bench: Bench) -> None:
    """I12: it is journaled like a send, and its cause is the step."""
    placed = bench.app.topic("order.placed", Order)

    @bench.app.workflow
    async def order(run: Run) -> None:
        run.publish(placed, Order(1))
        await run.sleep(60)
        await placed.publish(Order(2))
        await run.sleep(60)

    async def scenario() -> None:
        receipt = await order.send()
        for _ in range(3):
            await work_through(bench)
            bench.clock.advance(61)
        events = [one.envelope for one in await of_type(bench, "order.placed")]
        assert sorted(one.causation_id for one in events) == [
            f"workflow:{receipt.id}/order.placed#1",
            f"workflow:{receipt.id}/order.placed#2",
        ]
        assert {one.correlation_id for one in events} == {receipt.id}

    bench.run(scenario)


def test_a_subscriber_whose_workers_are_down_misses_nothing(bench: Bench) -> None:
    """I12: its copies wait for it; events from before it subscribed are not copied."""
    here = bench.app.topic("order.placed", Order)
    seen: list[int] = []

    def shipping() -> App:
        app = App(bench.url, clock=bench.clock)

        @app.on("order.placed", queue="shipping")
        async def ship(order: Order) -> None:
            seen.append(order.id)

        return app

    async def scenario() -> None:
        early = await here.publish(Order(1))
        await work_through(bench)
        assert await early.result() == 0
        async with shipping() as app:
            await app.subscribe()
        await here.publish(Order(2))
        await work_through(bench)
        assert [one.state for one in await of_type(bench, "ship")] == [State.SCHEDULED]
        async with shipping() as app:
            await app.work(until_idle=True)
        assert seen == [2]
        (kept,) = await bench.app.find(Query(ids=(early.id,)))
        assert kept.envelope.payload_inline == b'{"id":1,"cents":0}'

    bench.run(scenario)


def test_an_event_published_by_an_app_without_workers_is_copied_by_its_subscribers(bench: Bench) -> None:
    """I12: this holds also for an event of a version that their code does not know; each subscriber decides about it.

    It holds also for an event without an order, though their declaration has one.
    """
    seen: list[str] = []
    bench.app.topic("order.placed", Order, ordering_key="{event.id}")

    @bench.app.on("order.placed", version=2)
    async def newer(order: dict[str, Any]) -> None:
        seen.append("newer")

    @bench.app.on("order.placed")
    async def older(order: dict[str, Any]) -> None:
        seen.append("older")

    async def scenario() -> None:
        async with App(bench.url, clock=bench.clock) as web:
            await web.topic("order.placed", Order, version=2).publish(Order(1))
        await bench.work()
        assert seen == ["newer"]
        (waiting,) = await of_type(bench, "older")
        assert (waiting.state, waiting.attempt, waiting.envelope.schema_version) == (State.SCHEDULED, 0, 2)

    bench.run(scenario)


def test_a_dead_copy_is_its_subscribers_own_business(bench: Bench) -> None:
    """J9: the other copies and the event are done, and its redrive affects no other subscriber."""
    placed = bench.app.topic("order.placed", Order)
    seen: list[str] = []

    @bench.app.on(placed)
    async def bad(order: Order) -> None:
        seen.append("bad")
        if seen.count("bad") == 1:
            raise Reject("never")

    @bench.app.on(placed)
    async def good(order: Order) -> None:
        seen.append("good")

    async def scenario() -> None:
        event = await placed.publish(Order(1))
        await work_through(bench)
        letters = [one async for one in bench.app.dead_letters()]
        assert [one.message.message_type for one in letters] == ["bad"]
        assert (await bench.record(event)).state is State.DONE
        assert await letters[0].redrive(actor="ada", reason="fixed")
        await work_through(bench)
        assert sorted(seen) == ["bad", "bad", "good"]

    bench.run(scenario)


def test_a_redriven_event_copies_nothing_twice(bench: Bench) -> None:
    """I12: as if the worker had died right after the commit of the copies."""
    app = bench.app
    placed = app.topic("order.placed", Order)
    seen: list[int] = []
    broken = [False]

    @app.on(placed)
    async def reserve(order: Order) -> None:
        seen.append(order.id)

    @app.on_send
    def breaks(envelope: Envelope) -> Envelope:
        if broken[0] and envelope.message_type == "reserve":
            raise Reject("no")
        return envelope

    async def scenario() -> None:
        event = await placed.publish(Order(1))
        (subscription,) = await app.subscribe()
        await app.store.put([copy_of((await bench.record(event)).envelope, subscription, app.fresh_id())])
        broken[0] = True
        await work_through(bench)
        assert (await bench.record(event)).state is State.DEAD
        broken[0] = False
        await app.redrive([event.id], actor="ada", reason="fixed")
        await work_through(bench)
        assert (await bench.record(event)).state is State.DONE
        assert seen == [1]

    bench.run(scenario)


def test_while_two_versions_of_a_service_run_the_newer_has_its_way(bench: Bench) -> None:
    """I12: in whatever order they start, and whether or not the older one still runs."""

    def service(version: int, queue: str) -> App:
        app = App(bench.url, clock=bench.clock)

        @app.on("order.placed", version=version, queue=queue)
        async def ship(order: Order) -> None: ...

        return app

    async def scenario() -> None:
        async with service(1, "old") as old, service(2, "new") as new:
            for app in (old, new, old):
                await app.work(until_idle=True)
            (one,) = await bench.app.subscriptions()
            assert (one.subscriber, one.queue, one.version) == ("ship", "new", 2)
            since = one.since
            bench.clock.advance(60)
            async with service(2, "newest") as newest:
                await newest.subscribe()
            (one,) = await bench.app.subscriptions()
            assert (one.queue, one.since) == ("newest", since)

    bench.run(scenario)


def test_what_a_newer_version_wrote_about_a_subscription_is_not_lost(sqlite_bench: Bench) -> None:
    """I12: fields that this version does not know are kept in the subscriptions of other programs."""
    app = sqlite_bench.app

    @app.on("order.placed")
    async def mine(order: Order) -> None: ...

    async def scenario() -> None:
        theirs = (
            b'{"event":"order.placed","subscriber":"theirs","queue":"q","version":1,"retention":0,"made_at":1,"x":9}'
        )
        async with app.store.transaction() as transaction:
            await transaction.register("subscription", "order.placed", b'{"theirs":' + theirs + b"}", version=0)
        await app.subscribe()
        entry = await app.store.registered("subscription", "order.placed")
        assert entry is not None
        assert theirs in entry.value
        assert [one.subscriber for one in await app.subscriptions()] == ["mine", "theirs"]

    sqlite_bench.run(scenario)


def test_subscriptions_go_only_by_command_and_come_back_with_their_code(bench: Bench) -> None:
    app = bench.app
    placed = app.topic("order.placed", Order)

    @app.on(placed)
    async def reserve(order: Order) -> None: ...

    async def scenario() -> None:
        await bench.work()
        assert [one.as_dict()["subscriber"] for one in await app.subscriptions()] == ["reserve"]
        assert await app.unsubscribe("order.placed", "reserve")
        assert not await app.unsubscribe("order.placed", "reserve")
        assert not await app.unsubscribe("no.such", "reserve")
        assert await app.subscriptions() == []
        assert await app.store.entries("subscription") == {}
        event = await placed.publish(Order(1))
        await bench.work()
        assert [one.subscriber for one in await app.subscriptions()] == ["reserve"]
        assert await event.result() == 1

    bench.run(scenario)


def test_many_workers_that_start_together_lose_no_subscription(bench: Bench) -> None:
    """I12: each writes its own subscription beside those of the others."""

    def service(number: int) -> App:
        app = App(bench.url, clock=bench.clock)
        for one in (number // 2, number // 2 + 100):

            @app.on("order.placed", name=f"s{one}")
            async def handle(order: Order) -> None: ...

        return app

    async def scenario() -> None:
        apps = [service(number) for number in range(12)]
        for app in apps:
            await app.open()
        await asyncio.gather(*(app.subscribe() for app in apps))
        for app in apps:
            await app.close()
        assert len(await bench.app.subscriptions()) == 12

    bench.run(scenario)


def test_as_many_subscribers_as_allowed_and_no_more(bench: Bench) -> None:
    """The limit has a name; all copies are put in one commit."""
    app = bench.app
    placed = app.topic("order.placed", Order)
    seen: list[int] = []

    def add(number: int) -> None:
        @app.on(placed, name=f"s{number}")
        async def handle(order: Order) -> None:
            seen.append(number)

    for number in range(limits.SUBSCRIBERS_MAX):
        add(number)

    async def scenario() -> None:
        event = await placed.publish(Order(1))
        await work_through(bench)
        assert await event.result() == limits.SUBSCRIBERS_MAX
        assert sorted(seen) == list(range(limits.SUBSCRIBERS_MAX))
        add(limits.SUBSCRIBERS_MAX)
        with pytest.raises(ConfigurationError, match=r"order.placed.*at most 200"):
            await bench.work()

    bench.run(scenario)


def test_a_slow_subscriber_delays_no_other(sqlite_bench: Bench) -> None:
    """I12: while one of them hangs, the others handle this event and the next."""
    app = sqlite_bench.app
    placed = app.topic("order.placed", Order)
    may_end, seen = asyncio.Event(), list[int]()

    @app.on(placed)
    async def slow(order: Order) -> None:
        await may_end.wait()

    @app.on(placed)
    async def quick(order: Order) -> None:
        seen.append(order.id)
        if len(seen) == 5:
            may_end.set()

    async def scenario() -> None:
        for number in range(5):
            await placed.publish(Order(number))
        await sqlite_bench.work()
        assert len(seen) == 5

    sqlite_bench.run(scenario)


def test_a_worker_waits_for_its_store_to_subscribe(sqlite_bench: Bench) -> None:
    app = sqlite_bench.app

    @app.on("order.placed")
    async def reserve(order: Order) -> None: ...

    class Away(FaultyStore):
        asked = 0

        async def registered(self, kind: str, name: str) -> Registered | None:
            self.asked += 1
            if self.asked < 3:
                raise StoreUnavailableError("away")
            return await super().registered(kind, name)

    async def scenario() -> None:
        app._store = Away(app.store)
        await sqlite_bench.work()
        assert [one.subscriber for one in await app.subscriptions()] == ["reserve"]

    sqlite_bench.run(scenario)


@pytest.mark.parametrize("kind", ["refuse", "lose"])
def test_copies_and_the_end_of_the_event_are_one_commit(sqlite_bench: Bench, kind: str) -> None:
    """J1: even if the answer is lost, each subscriber has one copy."""
    app = sqlite_bench.app
    placed = app.topic("order.placed", Order)

    for name in ("one", "two"):

        @app.on(placed, name=name)
        async def handle(order: Order) -> None: ...

    async def scenario() -> None:
        app._store = FaultyStore(app.store, [Fault(kind, verb="settle")])  # type: ignore[arg-type]
        await placed.publish(Order(1))
        await work_through(sqlite_bench)
        states = sorted((one.envelope.message_type, one.state.name) for one in await sqlite_bench.messages())
        assert states == [("one", "DONE"), ("order.placed", "DONE"), ("two", "DONE")]

    sqlite_bench.run(scenario)


# declaring


def test_what_cannot_be_declared_says_why(sqlite_bench: Bench) -> None:
    app = sqlite_bench.app
    placed = app.topic("order.placed", Order)
    with pytest.raises(ConfigurationError, match="two tasks are named"):
        app.topic("order.placed", Order)
    with pytest.raises(ConfigurationError, match="event name"):
        app.on("Order placed")

    @app.task
    async def charge() -> None: ...

    with pytest.raises(ConfigurationError, match="'charge' is a task, not an event"):
        app.on("charge")
    with pytest.raises(ConfigurationError, match="takes 2 arguments; let it take one, the event"):

        @app.on("order.placed")  # type: ignore[arg-type]
        async def two(order: Order, more: int) -> None: ...

    with pytest.raises(ConfigurationError, match="key= belongs to the event"):

        @app.on(placed, key="{order.id}")
        async def keyed(order: Order) -> None: ...

    with pytest.raises(ConfigurationError, match="cannot be part of a message"):
        app.topic("x", object)


def test_a_topic_may_be_declared_after_a_subscription_to_it(sqlite_bench: Bench) -> None:
    app = sqlite_bench.app

    @app.on("order.placed")
    async def reserve(order: Order) -> None: ...

    placed = app.topic("order.placed", Order)
    assert app.tasks["order.placed"] is placed
    assert (repr(placed), repr(reserve)) == ("<topic order.placed>", "<task reserve on order.placed>")


def test_a_wrong_event_raises_in_the_publishers_hands(sqlite_bench: Bench) -> None:
    """An event that only a subscriber cannot read becomes that subscriber's dead letter."""
    app = sqlite_bench.app
    placed = app.topic("order.placed", Order)
    anything = app.topic("anything")

    @app.on(anything)
    async def strict(order: Order) -> None: ...

    with pytest.raises(DecodeError):
        placed.call({"id": "x"})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        placed.call()  # type: ignore[call-arg]

    async def scenario() -> None:
        for value in (5, None, "text", [1], {"id": "x"}):
            await anything.publish(value)
        await work_through(sqlite_bench)
        assert {one.state for one in await of_type(sqlite_bench, "strict")} == {State.DEAD}
        assert {one.state for one in await of_type(sqlite_bench, "anything")} == {State.DONE}

    sqlite_bench.run(scenario)


def test_batches_and_plain_values_are_subscribed_to_as_well(sqlite_bench: Bench) -> None:
    app = sqlite_bench.app
    counted = app.topic("counted", int)
    seen: list[int] = []

    @app.on(counted, batch=10)
    async def together(batch: Batch[int]) -> None:
        for item in batch:
            seen.append(item.value)
            item.done()

    async def scenario() -> None:
        await app.send_many(counted.call(number) for number in range(5))
        await work_through(sqlite_bench)
        assert sorted(seen) == [0, 1, 2, 3, 4]

    sqlite_bench.run(scenario)


def test_verbs_that_commit_by_themselves_are_refused_inside(sqlite_bench: Bench) -> None:
    app = sqlite_bench.app

    async def scenario() -> None:
        async with app.transaction():
            with pytest.raises(TransactionOpenError):
                await app.subscribe()
            with pytest.raises(TransactionOpenError):
                await app.unsubscribe("a", "b")

    sqlite_bench.run(scenario)


def test_the_synchronous_app_has_events_too(tmp_path: Path) -> None:
    """P6."""
    seen: list[Order] = []
    with SyncApp(f"sqlite:///{tmp_path}/onefold.db", clock=HastyClock()) as app:
        placed = app.topic("order.placed", Order, key="{event.id}")

        @app.on(placed)
        def reserve(order: Order) -> None:
            seen.append(order)

        @app.on("order.placed", batch=5)
        def together(batch: SyncBatch[Order]) -> None:
            for item in batch:
                item.done()

        app.unsubscribe("order.placed", "unknown")
        assert [one.subscriber for one in app.subscribe()] == ["reserve", "together"]
        receipt = placed.publish(Order(1))
        assert placed.options(key="1").publish(Order(1)).duplicate
        with app.transaction() as tx:
            tx.publish(placed, Order(2))
            placed.publish(Order(3))
        while app.work(until_idle=True):
            pass
        assert receipt.result() == 2
        assert sorted(one.id for one in seen) == [1, 2, 3]
        assert [one.event for one in app.subscriptions()] == ["order.placed"] * 2


def test_events_of_one_ordering_key_reach_each_subscriber_in_their_order(bench: Bench) -> None:
    """F5: they are copied one after the other, and a copy that waits for its retry is not overtaken."""
    app = bench.app
    moved = app.topic("stock.moved", int, ordering_key=lambda event: f"{event % 2}")
    seen: list[int] = []
    failed: list[int] = []

    @app.on(moved)
    async def follow(number: int) -> None:
        if number == 2 and not failed:
            failed.append(number)
            raise ConnectionError
        seen.append(number)

    async def scenario() -> None:
        for number in range(8):
            await moved.publish(number)
        for _ in range(2):
            await work_through(bench)
            bench.clock.advance(limits.RETRY_CAP)
        assert [number for number in seen if number % 2] == [1, 3, 5, 7]
        assert [number for number in seen if not number % 2] == [0, 2, 4, 6]

    bench.run(scenario)


def test_a_subscriber_has_limits_and_a_priority_of_its_own(sqlite_bench: Bench) -> None:
    """F1, F6: even if the worker that copies the event does not know the subscriber's code."""
    app = sqlite_bench.app
    placed = app.topic("order.placed", Order)
    running: list[int] = []
    most: list[int] = []

    @app.on(placed, max_running=1, gate="{order.id}")
    async def limited(order: Order) -> None:
        running.append(order.id)
        await give_way()
        most.append(len(running))
        running.remove(order.id)

    @app.on(placed, priority=5)
    async def urgent(order: Order) -> None: ...

    async def scenario() -> None:
        for number in range(5):
            await placed.publish(Order(number))
        await work_through(sqlite_bench)
        assert most == [1] * 5
        assert {one.envelope.priority for one in await of_type(sqlite_bench, "urgent")} == {5}

    sqlite_bench.run(scenario)
