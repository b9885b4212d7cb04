"""Handlers of every kind and ``SyncApp`` as type checkers see them, checked by mypy and pyright, both strict.

Nothing here runs except the last test.  A line that must be wrong carries an ignore comment, which both heed;
both also report an ignore that is not needed, so a wrong call that became right fails the check as well.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_type

from onefold import (
    App,
    Batch,
    Call,
    Context,
    DeadGroup,
    Envelope,
    Item,
    Receipt,
    Record,
    RetryPolicy,
    Run,
    State,
    SyncApp,
    SyncBatch,
    SyncContext,
    SyncDeadLetter,
    SyncReceipt,
    SyncSchedule,
    SyncTask,
    Task,
)
from onefold.store import Counts, Query

app = App("sqlite:///never-opened.db")


@dataclass
class Doc:
    number: int


@app.task
def plain(order_id: int, cents: int = 0) -> str:
    return f"{order_id}: {cents}"


@app.task
def with_context(ctx: SyncContext, doc: Doc, *, note: str | None = None) -> int:
    return doc.number


@app.task
def nothing() -> None: ...


@app.task(key="{order_id}", timeout=timedelta(seconds=5))
def keyed(ctx: SyncContext, order_id: int) -> list[Doc]:
    return [Doc(order_id)]


@app.task(retry=RetryPolicy.fast(), queue="fast")
async def awaited(ctx: Context, order_id: int) -> str:
    return str(order_id)


@app.task(batch=10)
async def index(batch: Batch[Doc]) -> None:
    """C4, P5: the items of a batch have the type that is sent."""
    for item in batch:
        assert_type(item, Item[Doc])
        assert_type(item.value, Doc)
        assert_type(item.attempt, int)
        assert_type(item.message, Envelope)
        item.done()
        item.done({"number": item.value.number})
        item.retry("later", after=timedelta(minutes=1))
        item.retry(ValueError("no"))
        item.reject("never")
        item.progress(50, "half of it")
        item.progress("half")  # type: ignore[arg-type]
        item.retry(after="soon")  # type: ignore[arg-type]
        item.reject()  # type: ignore[call-arg]
    batch.beat()
    assert_type(batch[0], Item[Doc])
    assert_type(len(batch), int)
    assert_type(await batch.execute("SELECT ?", 1), list[tuple[Any, ...]])
    assert_type(batch.send(plain, 1), Receipt[str])


@app.task(batch=True, key="{value}")
def index_in_a_thread(batch: SyncBatch[int]) -> None:
    """C4, P6."""
    assert_type(batch[0].value, int)
    assert_type(batch.execute("SELECT 1"), list[tuple[Any, ...]])
    assert_type(batch.send(plain, 1), Receipt[str])


def test_a_task_keeps_the_signature_of_its_function_without_the_context() -> None:
    """P5, P6: for every kind of handler."""
    assert_type(plain.call(1), Call[str])
    assert_type(with_context.call(Doc(1)), Call[int])
    assert_type(nothing.call(), Call[None])
    assert_type(keyed.call(1), Call[list[Doc]])
    assert_type(awaited.call(1), Call[str])
    assert_type(index.call(Doc(1)), Call[Any])
    assert_type(index_in_a_thread.call(1), Call[Any])
    as_declared: Task[[int], list[Doc]] = keyed
    assert_type(as_declared.call(1), Call[list[Doc]])


async def send() -> None:
    """P5."""
    assert_type(await plain.send(1, cents=5), Receipt[str])
    assert_type(await (await keyed.send(1)).result(), list[Doc])
    assert_type(await index.send(Doc(1)), Receipt[Any])
    await plain.send("1")  # type: ignore[arg-type]
    await with_context.send()  # type: ignore[call-arg]
    await index.send(1)  # type: ignore[arg-type]
    await index.send()  # type: ignore[call-arg]
    await index_in_a_thread.send(Doc(1))  # type: ignore[arg-type]


@app.task
def in_a_thread(ctx: SyncContext) -> None:
    """P4, P5, P6: the context inside a handler that blocks."""
    assert_type(ctx.execute("SELECT ?", 1), list[tuple[Any, ...]])
    assert_type(ctx.fetch("SELECT 1"), list[tuple[Any, ...]])
    assert_type(ctx.send(plain, 1), Receipt[str])
    assert_type(ctx.send(keyed.options(delay=5), 1), Receipt[list[Doc]])
    assert_type(ctx.send_many([plain.call(1)]), list[Receipt[Any]])
    assert_type(ctx.idempotency_key, str)
    assert_type(ctx.fence, int)
    assert_type(ctx.attempt, int)
    assert_type(ctx.deadline, datetime)
    assert_type(ctx.upstream_key("stripe"), str)
    assert_type(ctx.message, Envelope)
    assert_type(ctx.once("charge", lambda: 7), int)
    ctx.check()
    ctx.after(print, "x", end="")
    ctx.send(plain)  # type: ignore[call-arg]
    ctx.send(plain, "1")  # type: ignore[arg-type]
    ctx.after(with_doc, 1)  # type: ignore[arg-type]


@app.task
async def on_the_loop(ctx: Context) -> None:
    """C25, P5: late work is typed as its call would be."""

    async def refresh(page: int, *, deep: bool = False) -> None: ...

    ctx.after(refresh, 1)
    ctx.after(refresh, 1, deep=True)
    ctx.after(refresh)  # type: ignore[call-arg]
    ctx.after(refresh, "1")  # type: ignore[arg-type]
    ctx.after(with_doc, Doc(1))  # type: ignore[arg-type]


def with_doc(doc: Doc) -> None: ...


def wrong_declarations() -> None:
    """P3, P5: a declaration that is refused at run time is a type error too, where types can express that."""

    async def two(batch: Batch[int], more: int) -> None: ...

    app.task(qeue="fast")  # type: ignore[call-overload]
    app.task(batch="many")  # type: ignore[call-overload]
    app.task(batch=3, isolate=True)  # type: ignore[call-overload]
    app.task(batch=3)(two)  # type: ignore[arg-type]
    app.task(isolate="yes")  # type: ignore[call-overload]


shop = SyncApp("sqlite:///never-opened.db")


@shop.task
def charge(ctx: SyncContext, order_id: int, cents: int = 0) -> str:
    return f"{order_id}: {cents}"


@shop.task(key="{order_id}", isolate=False)
def refund(order_id: int) -> int:
    return order_id


@shop.task
async def on_its_loop(ctx: Context, order_id: int) -> int:
    return order_id


@shop.task(batch=5)
def bulk(batch: SyncBatch[Doc]) -> None: ...


@shop.task(batch=5)
async def bulk_awaited(batch: Batch[Doc]) -> None: ...


@shop.workflow
async def journey(run: Run, order_id: int) -> str:
    return str(order_id)


@shop.workflow(version=2, name="journey2")
async def second_journey(run: Run, order_id: int) -> str:
    return str(order_id)


@shop.recurring(every=60, mode="rate")
def tick(name: str = "") -> None: ...


def sends() -> None:
    """P5, P6: typed as for an ``App``, without await."""
    as_declared: SyncTask[[int, int], str] = charge
    assert_type(as_declared.send(1, 2), SyncReceipt[str])
    assert_type(charge.send(1, cents=5), SyncReceipt[str])
    assert_type(charge.send(1).result(timeout=5), str)
    assert_type(refund.send(order_id=1).result(), int)
    assert_type(on_its_loop.send(1), SyncReceipt[int])
    assert_type(bulk.send(Doc(1)), SyncReceipt[Any])
    assert_type(bulk_awaited.send(Doc(1)), SyncReceipt[Any])
    assert_type(journey.send(1), SyncReceipt[str])
    assert_type(second_journey.send(1).result(), str)
    assert_type(tick.send(), SyncReceipt[None])
    assert_type(charge.call(1), Call[str])
    assert_type(charge.options(delay=5).send(1), SyncReceipt[str])
    assert_type(shop.send(plain, 1, cents=2), SyncReceipt[str])
    assert_type(shop.send(charge.options(delay=5), 1), SyncReceipt[str])
    assert_type(shop.send_many([charge.call(1), plain.call(1)]), list[SyncReceipt[Any]])
    receipt = charge.send(1)
    assert_type(receipt.id, str)
    assert_type(receipt.state, State)
    charge.send("1")  # type: ignore[arg-type]
    charge.send()  # type: ignore[call-arg]
    charge.send(1, delay=5)  # type: ignore[call-arg]
    charge.options(dealy=5)  # type: ignore[call-arg]
    bulk.send(1)  # type: ignore[arg-type]
    journey.send()  # type: ignore[call-arg]
    shop.send(charge, "1")  # type: ignore[arg-type]
    shop.send(len, [])  # type: ignore[arg-type]


def transactions() -> None:
    """J1, P6."""
    with shop.transaction() as tx:
        assert_type(tx.execute("SELECT 1", 2), list[tuple[Any, ...]])
        assert_type(tx.send(charge, 1), SyncReceipt[str])
        assert_type(tx.send(plain, 1), SyncReceipt[str])
        assert_type(tx.send_many([charge.call(1)]), list[SyncReceipt[Any]])
        tx.send(charge)  # type: ignore[call-arg]


def people() -> None:
    """D5, P6."""
    assert_type(shop.dead_letters(queue="default"), Iterator[SyncDeadLetter])
    assert_type(shop.dead_groups(), list[DeadGroup])
    for letter in shop.dead_letters():
        assert_type(letter.redrive(actor="ada", reason="fixed"), bool)
        assert_type(letter.as_dict(), dict[str, Any])
        letter.redrive("ada", "fixed")  # type: ignore[call-arg]
    assert_type(shop.find(Query()), list[Record])
    assert_type(shop.count(), dict[str, Counts])
    assert_type(shop.work(until_idle=True), int)
    assert_type(shop.schedules(), dict[str, SyncSchedule])
    assert_type(shop.debounce(charge, key="{order_id}", wait=5, at_most=60).trigger(1), datetime)
    with SyncApp(app) as door:
        assert_type(door, SyncApp)


def test_this_module_is_checked_by_both_type_checkers() -> None:
    """P5: the declarations in it also hold at run time."""
    assert {"plain", "index", "index_in_a_thread", "in_a_thread", "on_the_loop"} <= set(app.tasks)
    assert {"charge", "bulk", "journey", "tick"} <= set(shop.tasks)
