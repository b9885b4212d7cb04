"""An entry of a broker is stored before it is acknowledged, once per key; an event is relayed only if it committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import redis

from onefold import App, Context, Envelope, TransportUnavailableError
from onefold.brokers.redis import RedisTransport
from onefold.testing import Fault, FaultyStore, drain

if TYPE_CHECKING:
    from conftest import World

KEYS = [f"order-{number}" for number in range(5)]


def envelope(key: str, copy: int = 0) -> Envelope:
    return Envelope(
        id=f"{key}/{copy}",
        message_type="order.placed",
        queue="orders",
        idempotency_key=key,
        correlation_id="c",
        causation_id="c",
        subject=key,
        payload_inline=b'"%s"' % key.encode(),
    )


def receiver(world: World, broker: RedisTransport) -> App:
    app = world.app()
    app.receive(broker, "orders")

    @app.on("order.placed")
    async def pay(ctx: Context, order: str) -> None:
        await ctx.execute(world.insert_effect, order)

    return app


def reader(url: str) -> RedisTransport:
    return RedisTransport(url, group="service", wait=0.005)


def unacknowledged(url: str) -> int:
    """Return how many entries are not acknowledged, whether or not a consumer has them."""
    with redis.Redis.from_url(url) as client:
        (group,) = client.xinfo_groups("orders")
        unread = client.xrange("orders", min=b"(" + group["last-delivered-id"])
        return int(group["pending"]) + len(unread)


def test_however_often_an_entry_comes_it_has_one_effect(world: World, redis_url: str) -> None:
    """J6, B24: published several times, at once and later, received by several workers, also after it was done."""
    broker = reader(redis_url)
    apps = [receiver(world, broker), receiver(world, reader(redis_url))]

    async def scenario() -> None:
        async with world.running(*apps):
            for app in apps:
                await app.subscribe()
            for copy in range(3):
                await broker.publish([envelope(key, copy) for key in KEYS * 2])
                await asyncio.gather(*(app.work(until_idle=True) for app in apps))
                await asyncio.gather(*(app.work(until_idle=True) for app in apps))
            assert await world.effects(apps[0]) == KEYS
            assert unacknowledged(redis_url) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["refuse", "lose"])
def test_nothing_is_acknowledged_before_the_store_has_it(kind: Any, world: World, redis_url: str) -> None:
    """J6: the store refuses, or stores and loses its answer; in both cases the entry is delivered again."""
    broker = reader(redis_url)
    app = receiver(world, broker)

    async def scenario() -> None:
        async with world.running(app):
            await app.subscribe()
            await broker.publish([envelope(key) for key in KEYS])
            store, app._store = app.store, FaultyStore(app.store, [Fault(kind, 1, "put")])
            await app.work(until_idle=True)
            assert unacknowledged(redis_url) == len(KEYS)
            app._store = store
            await drain(app)
            assert await world.effects(app) == KEYS
            assert unacknowledged(redis_url) == 0

    asyncio.run(scenario())


def test_a_worker_that_dies_between_the_two_leaves_a_duplicate_and_no_second_effect(
    world: World, redis_url: str
) -> None:
    """J6, B24: another worker handles the stored message; the entry is then delivered again and acknowledged."""

    class Died(BaseException):
        """Ends a worker; not an ``Exception``, which a worker would take for a failure of its transport."""

    class Mortal(RedisTransport):
        async def ack(self, deliveries: Sequence[Any]) -> None:
            raise Died

    dead = receiver(world, Mortal(redis_url, group="service", wait=0.005))
    other = receiver(world, reader(redis_url))

    async def scenario() -> None:
        async with world.running(dead, other):
            await other.subscribe()
            await reader(redis_url).publish([envelope(key) for key in KEYS])
            with pytest.raises(Died):
                await dead.work(until_idle=True)
            await drain(other)
            assert await world.effects(other) == KEYS
            with redis.Redis.from_url(redis_url) as client:
                pending = client.xpending_range("orders", "service", "-", "+", 10)
                # The lease of the dead worker runs out.
                for one in pending:
                    client.xclaim("orders", "service", "unknown", 0, [one["message_id"]], idle=3_600_000)
            assert len(pending) == len(KEYS)
            await drain(other)
            assert await world.effects(other) == KEYS
            assert unacknowledged(redis_url) == 0

    asyncio.run(scenario())


def test_an_event_is_relayed_if_its_commit_stands_and_its_repeats_are_absorbed(world: World, redis_url: str) -> None:
    """J1, J6: a rolled back event never leaves; an event with a lost answer is published twice and handled once."""

    class Deaf(RedisTransport):
        told = 0

        async def publish(self, envelopes: Sequence[Envelope]) -> None:
            await super().publish(envelopes)
            self.told += 1
            if self.told == 1:
                raise TransportUnavailableError("the answer was lost")

    shop = world.app()
    placed = shop.topic("order.placed", str)
    shop.relay(placed, to=Deaf(redis_url), stream="orders")

    async def scenario() -> None:
        async with world.running(shop):
            await shop.subscribe()
            with suppress(ZeroDivisionError):
                async with shop.transaction() as tx:
                    tx.publish(placed, "rolled back")
                    raise ZeroDivisionError
            async with shop.transaction() as tx:
                tx.publish(placed, "committed")
            await drain(shop)
        with redis.Redis.from_url(redis_url) as client:
            bodies = [fields[b"envelope"] for _, fields in client.xrange("orders")]
        assert len(bodies) == 2
        assert bodies[0] == bodies[1]
        service = App("sqlite:///:memory:", clock=world.clock)
        service.receive(reader(redis_url), "orders")
        paid: list[str] = []

        @service.on("order.placed")
        async def pay(order: str) -> None:
            paid.append(order)

        async with service:
            await drain(service)
        assert paid == ["committed"]

    asyncio.run(scenario())
