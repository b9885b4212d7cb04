"""The broker API as type checkers see it, checked by mypy and pyright, both strict; see ``test_public_api.py``."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from onefold import App, Delivery, Envelope, SyncApp, Task, Transport, TransportCapabilities
from onefold.brokers.redis import RedisTransport
from onefold.testing import MemoryTransport

app = App("sqlite:///never-opened.db")
placed = app.topic("order.placed", int)
redis = RedisTransport("redis://localhost", group="billing", durability="process crash", wait=timedelta(seconds=1))


def read(body: bytes) -> Envelope:
    raise NotImplementedError


def declarations() -> None:
    assert_type(app.relay(placed, to=redis, stream="orders", queue="edge"), Task[[Any], Any])
    app.relay("order.paid", to=MemoryTransport(), stream="orders")
    app.receive(redis, "orders", types=["order.placed"], read=read)
    app.relay(placed, to="redis://localhost", stream="orders")  # type: ignore[arg-type]
    app.relay(placed, to=redis)  # type: ignore[call-arg]
    app.receive(redis)  # type: ignore[call-arg]
    RedisTransport("redis://h", durability="nothing at all")  # type: ignore[arg-type]
    without_loop = SyncApp("sqlite:///never-opened.db")
    without_loop.receive(redis, "orders")
    without_loop.relay("order.placed", to=redis, stream="orders")


async def use(transport: Transport) -> None:
    assert_type(transport.capabilities, TransportCapabilities)
    deliveries = await transport.pull("orders", limit=10, lease=30.0)
    assert_type(deliveries, list[Delivery])
    assert_type(deliveries[0].content, Envelope | bytes)
    await transport.ack(deliveries)
    await transport.nack(deliveries, delay=1.0)


def test_transports_of_ours_are_transports() -> None:
    """P7: the checkers compare them with the protocol; at run time only the declarations are executed."""
    transports: list[Transport] = [redis, MemoryTransport()]
    assert all(one.capabilities.body_bytes_max > 0 for one in transports)
