"""The event API as type checkers see it, checked by mypy and pyright, both strict; see ``test_public_api.py``."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from onefold import (
    App,
    Batch,
    Call,
    Chain,
    Context,
    Receipt,
    RetryPolicy,
    Run,
    Subscription,
    SyncApp,
    SyncContext,
    SyncReceipt,
    SyncTopic,
    Task,
    Topic,
)


@dataclass(frozen=True)
class Order:
    id: int


app = App("sqlite:///never-opened.db")
placed = app.topic("order.placed", Order, key="{event.id}", subject="order:{event.id}")
anything = app.topic("anything")


@app.on(placed, queue="stock", retry=RetryPolicy(max_attempts=3))
async def reserve(ctx: Context, order: Order) -> str:
    assert_type(ctx.publish(anything, 7), Receipt[int])
    ctx.publish(placed, "text")  # type: ignore[misc]
    return "reserved"


@app.on(placed, isolate=False)
def in_a_thread(ctx: SyncContext, order: Order) -> None:
    assert_type(ctx.publish(placed, order), Receipt[int])


@app.on("order.placed")
async def by_name(order: Order) -> None: ...


@app.on(placed, batch=10)
async def together(batch: Batch[Order]) -> None:
    assert_type(batch[0].value, Order)


@app.workflow
async def flow(run: Run, order: Order) -> None:
    assert_type(run.publish(placed, order), Receipt[int])
    run.publish(placed, 7)  # type: ignore[misc]


def test_subscribers_are_tasks_and_topics_know_their_type() -> None:
    """P5."""
    as_declared: Task[[Order], str] = reserve
    topic: Topic[Order] = placed
    assert_type(topic.call(Order(1)), Call[int])
    assert_type(anything, Topic[Any])
    assert_type(as_declared.call(Order(1)), Call[str])
    assert sorted(app.tasks) == [
        "anything",
        "by_name",
        "flow",
        "in_a_thread",
        "order.placed",
        "reserve",
        "together",
    ]


async def publishing() -> None:
    """P5."""
    assert_type(await placed.publish(Order(1)), Receipt[int])
    assert_type(await placed.options(key="1").publish(Order(1)), Receipt[int])
    await placed.publish("text")  # type: ignore[arg-type]
    async with app.transaction() as tx:
        assert_type(tx.publish(placed, Order(1)), Receipt[int])
        tx.publish(placed.options(delay=5), Order(1))
        tx.publish(placed, "text")  # type: ignore[misc]
    assert_type(await app.subscriptions(), list[Subscription])
    assert_type(await app.unsubscribe("order.placed", "reserve"), bool)
    assert_type(await app.chain("…"), Chain | None)


def wrong() -> None:
    """P5: a subscriber that cannot take the topic's type."""

    @app.on(placed)  # type: ignore[arg-type]
    async def takes_text(order: str) -> None: ...


def synchronous(other: SyncApp) -> None:
    """P6."""
    topic = other.topic("order.placed", Order)
    assert_type(topic, SyncTopic[Order])
    assert_type(topic.publish(Order(1)), SyncReceipt[int])
    with other.transaction() as tx:
        assert_type(tx.publish(topic, Order(1)), SyncReceipt[int])
        assert_type(tx.publish(placed, Order(1)), SyncReceipt[int])
