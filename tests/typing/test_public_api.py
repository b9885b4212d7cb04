"""The public interface as type checkers see it, checked by mypy and pyright, both strict.

Nothing here runs except the last test.  A line that must be wrong carries an ignore comment, which both heed;
both also report an ignore that is not needed, so a wrong call that became right fails the check as well.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import onefold
from onefold import App, Call, Context, DeadGroup, DeadLetter, Envelope, Rate, Receipt, RetryPolicy, Run, State, Task
from onefold.store import Counts, Query, Record
from onefold.tasks.task import BoundTask

app = App("sqlite:///never-opened.db")


@dataclass
class Order:
    number: int


@app.task
async def plain(order_id: int, cents: int = 0) -> str:
    return f"{order_id}: {cents}"


@app.task
async def with_context(ctx: Context, order: Order, *, note: str | None = None) -> int:
    return order.number


@app.task
async def nothing() -> None: ...


@app.task(key="{order_id}", retry=RetryPolicy(max_attempts=3), timeout=timedelta(seconds=5), effects=("T", "K"))
async def keyed(ctx: Context, order_id: int) -> list[Order]:
    return [Order(order_id)]


def key_of(order_id: int) -> str:
    return f"order-{order_id}"


@app.task(key=key_of, subject="order:{order_id}", settle="now", expires=None)
async def by_function(order_id: int) -> dict[str, int]:
    return {"order": order_id}


@app.task(gate="{tenant}", max_running=10, max_running_each=2, rate=Rate(100, per=60), rate_each=Rate(5, burst=1))
async def limited(tenant: str) -> int:
    return 1


def account_of(account: str) -> str:
    return account.lower()


@app.task(ordering_key=account_of, on_failure="skip", gap="retry", gap_after=timedelta(seconds=5))
async def lined(account: str) -> str:
    return account


@app.workflow(fair_key="{tenant}", priority=3, gate_name="runs")
async def fair(run: Run, tenant: str) -> str:
    return tenant


def gates() -> None:
    """F2 to F7: a gate leaves the signature as it is, and its settings are typed."""
    assert_type(limited.call("t"), Call[int])
    assert_type(lined.call("a"), Call[str])
    assert_type(fair.call("t"), Call[str])
    app.task(max_running="3")  # type: ignore[call-overload]
    app.task(ordering_key="{a}", on_failure="panic")  # type: ignore[call-overload]
    app.task(rate=5)  # type: ignore[call-overload]


def misspelt() -> None:
    """P5: a name that the package does not have is an error, although names are imported when they are used."""
    print(onefold.Aplication)  # type: ignore[attr-defined]


def test_a_task_keeps_the_signature_of_its_function_without_the_context() -> None:
    """P5: declared with and without settings."""
    assert_type(plain.call(1), Call[str])
    assert_type(with_context.call(Order(1)), Call[int])
    assert_type(nothing.call(), Call[None])
    assert_type(keyed.call(1), Call[list[Order]])
    assert_type(by_function.call(1), Call[dict[str, int]])
    as_declared: Task[[int], list[Order]] = keyed
    assert_type(as_declared.call(1), Call[list[Order]])


async def send_and_wait() -> None:
    """P5: the receipt's result has the handler's type."""
    assert_type(await plain.send(1, 500), Receipt[str])
    assert_type(await plain.send(order_id=1, cents=500), Receipt[str])
    assert_type(await (await plain.send(1)).result(), str)
    assert_type(await (await keyed.send(1)).result(timeout=5), list[Order])
    assert_type(await (await nothing.send()).result(timeout=timedelta(seconds=5)), None)
    assert_type(await with_context.send(Order(1), note="x"), Receipt[int])
    receipt = await plain.send(1)
    assert_type(receipt.id, str)
    assert_type(receipt.duplicate, bool)
    assert_type(receipt.state, State)


async def wrong_sends() -> None:
    """P5: a wrong argument is a type error."""
    await plain.send()  # type: ignore[call-arg]
    await plain.send("1")  # type: ignore[arg-type]
    await plain.send(1, 2, 3)  # type: ignore[call-arg]
    await plain.send(1, cent=2)  # type: ignore[call-arg]
    await plain.send(1, delay=5)  # type: ignore[call-arg]
    await with_context.send(1)  # type: ignore[arg-type]
    await with_context.send(Order(1), "x")  # type: ignore[call-arg]
    await keyed.send("1")  # type: ignore[arg-type]
    await nothing.send(1)  # type: ignore[call-arg]
    await by_function.send(order_id=None)  # type: ignore[arg-type]
    plain.call("1")  # type: ignore[arg-type]
    result: int = await (await plain.send(1)).result()  # type: ignore[assignment]
    print(result)


async def options() -> None:
    """P1, P5: options are typed by name and keep the task's signature."""
    bound = plain.options(delay=timedelta(minutes=5), key="k", tags={"tenant": "t"}, if_dead="redrive")
    as_declared: BoundTask[[int, int], str] = bound
    assert_type(await as_declared.send(1, 2), Receipt[str])
    assert_type(await bound.send(1, cents=2), Receipt[str])
    assert_type(bound.options(queue="fast").call(1), Call[str])
    await plain.options(delay=5, expires=None, sequence=3, deduplicate="d", deduplicate_for=60).send(1)
    await plain.options(at=datetime(2030, 1, 1, tzinfo=UTC), expires=timedelta(days=1)).send(1)
    await plain.options(ordering_key="a", sequence=1).send(1)
    await plain.options(priority=9).send(1)


async def wrong_options() -> None:
    """P1, P5."""
    plain.options(dealy=5)  # type: ignore[call-arg]
    plain.options(delay="5")  # type: ignore[arg-type]
    plain.options(key=7)  # type: ignore[arg-type]
    plain.options(tags={"tenant": 7})  # type: ignore[dict-item]
    plain.options(if_dead="maybe")  # type: ignore[arg-type]
    await plain.options(delay=5).send("1")  # type: ignore[arg-type]
    await plain.options(delay=5).send()  # type: ignore[call-arg]


async def producers_transaction() -> None:
    """J1, P5: ``tx.send`` takes the task and its arguments."""
    async with app.transaction() as tx:
        assert_type(tx.send(plain, 1, cents=2), Receipt[str])
        assert_type(tx.send(with_context, Order(1), note="x"), Receipt[int])
        assert_type(tx.send(plain.options(delay=5), 1), Receipt[str])
        assert_type(tx.send_many([plain.call(1), keyed.call(2)]), list[Receipt[Any]])
        assert_type(await tx.execute("SELECT 1", 2, "three"), list[tuple[Any, ...]])
        tx.send(plain)  # type: ignore[call-arg]
        tx.send(plain, "1")  # type: ignore[arg-type]
        tx.send(plain, 1, cent=2)  # type: ignore[call-arg]
        tx.send(plain.options(delay=5), "1")  # type: ignore[arg-type]
        tx.send(len, [])  # type: ignore[arg-type]
        tx.send_many([plain])  # type: ignore[list-item]


@app.task
async def handler(ctx: Context) -> None:
    """P4, P5: the context inside a handler."""
    assert_type(ctx.send(plain, 1), Receipt[str])
    assert_type(ctx.send(keyed.options(delay=5), 1), Receipt[list[Order]])
    assert_type(ctx.send_many([plain.call(1)]), list[Receipt[Any]])
    assert_type(await ctx.execute("SELECT ?", 1), list[tuple[Any, ...]])
    assert_type(await ctx.fetch("SELECT 1"), list[tuple[Any, ...]])
    assert_type(ctx.idempotency_key, str)
    assert_type(ctx.fence, int)
    assert_type(ctx.attempt, int)
    assert_type(ctx.deadline, datetime)
    assert_type(ctx.upstream_key("stripe"), str)
    assert_type(ctx.message, Envelope)
    ctx.send(plain)  # type: ignore[call-arg]
    ctx.send(plain, "1")  # type: ignore[arg-type]
    ctx.send(plain, 1, cent=2)  # type: ignore[call-arg]


def wrong_declarations() -> None:
    """P3, P5: a declaration that is refused at run time is a type error too."""
    app.task(qeue="fast")  # type: ignore[call-overload]
    app.task(settle="later")  # type: ignore[call-overload]
    app.task(effects=("X",))  # type: ignore[arg-type]
    RetryPolicy(max_attempt=3)  # type: ignore[call-arg]
    RetryPolicy(3)  # type: ignore[call-arg]


async def people() -> None:
    """D5, P5."""
    async for letter in app.dead_letters(queue="default"):
        assert_type(letter, DeadLetter)
        assert_type(await letter.redrive(actor="ada", reason="fixed"), bool)
        assert_type(await letter.as_dict(), dict[str, Any])
        await letter.redrive("ada", "fixed")  # type: ignore[call-arg]
    assert_type(await app.send_many([plain.call(1)], batch_key="b"), list[Receipt[Any]])
    assert_type(await app.find(Query(states=(State.DEAD,))), list[Record])
    assert_type(await app.dead_groups(queue="default"), list[DeadGroup])
    assert_type(await app.count(), dict[str, Counts])
    assert_type(await app.work(until_idle=True), int)
    assert_type(app.tasks, dict[str, Task[Any, Any]])


@app.middleware
async def trace(ctx: Context, proceed: Callable[[], Awaitable[Any]]) -> Any:
    return await proceed()


@app.on_send
def tag(envelope: Envelope) -> Envelope:
    return envelope


@app.lifespan
@asynccontextmanager
async def resources() -> AsyncGenerator[dict[str, str], None]:
    yield {}


def test_this_module_is_checked_by_both_type_checkers() -> None:
    """P5: the declarations in it also hold at run time."""
    assert sorted(app.tasks) == [
        "by_function", "fair", "handler", "keyed", "limited", "lined", "nothing", "plain", "with_context"
    ]  # fmt: skip
    assert onefold.__version__
