"""Workflows as type checkers see them, checked by mypy and pyright, both strict; see ``test_public_api``."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from onefold import App, Call, Chronicle, Context, Happened, NotHappened, Receipt, RetryPolicy, Run, Workflow
from onefold.handlers.effects import LedgerEntry
from onefold.operations.preflight import Problem
from onefold.store.journal_lines import Line

app = App("sqlite:///never-opened.db")


@dataclass
class Order:
    number: int


async def create(user_id: int, *, name: str = "") -> Order:
    return Order(user_id)


async def write(ctx: Context, order: Order) -> str:
    return await ctx.once("mail", lambda: mail(order), reconcile=ask)


def blocking(number: int) -> bytes:
    return bytes(number)


async def mail(order: Order) -> str:
    return "sent"


async def ask() -> Happened[str] | NotHappened:
    return NotHappened()


@app.step(timeout=timedelta(seconds=30), retry=RetryPolicy(max_attempts=3), name="slow")
async def slow(number: int) -> float:
    return number / 2


@app.step
async def plain_step(number: int) -> float:
    return number / 2


@app.task
async def leaf(number: int) -> list[int]:
    return [number]


@app.workflow
async def onboard(run: Run, user_id: int, note: str = "") -> str:
    assert_type(await run.step(create, user_id), Order)
    assert_type(await run.step(create, user_id, name="ada"), Order)
    assert_type(await run.step(write, Order(1)), str)
    assert_type(await run.step(blocking, 7), bytes)
    assert_type(await run.step(slow, 7), float)
    assert_type(await run.step(plain_step, 7), float)
    assert_type(await run.options(name="again", timeout=5).step(create, user_id), Order)
    assert_type(await run.signal("confirmed", type=bool, timeout=timedelta(days=7)), bool)
    assert_type(await run.signal("anything"), Any)
    assert_type(await run.child(leaf, 7), list[int])
    assert_type(await run.child(leaf.options(delay=5), 7), list[int])
    assert_type(await run.child(versioned, 7), int)
    assert_type(await run.gather(run.step(create, 1), run.child(leaf, 2)), tuple[Order, list[int]])
    assert_type(await run.gather(*[run.child(leaf, n) for n in range(3)]), tuple[list[int], ...])
    assert_type(run.send(leaf, 7), Receipt[list[int]])
    assert_type(await run.sleep(days=1), None)
    assert_type(run.random(), float)
    await run.step(create, "seven")  # type: ignore[call-overload]
    await run.step(create)  # type: ignore[call-overload]
    await run.child(leaf, "seven")  # type: ignore[arg-type]
    run.send(leaf)  # type: ignore[call-arg]
    run.execute("SELECT 1")  # type: ignore[attr-defined]
    return "done"


@app.workflow(name="versioned", version=2, key="{number}", retry=RetryPolicy.fast(), queue="slow")
async def versioned(run: Run, number: int) -> int:
    return number


def test_a_workflow_keeps_the_signature_of_its_function_without_the_run() -> None:
    """P5: to a sender it is a task."""
    assert_type(onboard.call(7), Call[str])
    assert_type(onboard.call(7, note="x"), Call[str])
    as_declared: Workflow[[int], int] = versioned
    assert_type(as_declared.call(7), Call[int])


async def use() -> None:
    """P5."""
    receipt = await onboard.send(7)
    assert_type(receipt, Receipt[str])
    assert_type(await receipt.result(), str)
    assert_type(await app.signal(receipt.id, "confirmed", True, id="one"), bool)
    assert_type(await app.journal(receipt.id), list[Line])
    assert_type(await app.chronicle(receipt.id, depth=1), Chronicle | None)
    assert_type(await app.ledger(receipt.id), list[LedgerEntry])
    assert_type(await app.resume(receipt.id, actor="ada", reason="mended"), bool)
    assert_type(await app.restart(receipt.id, from_step="create#1", actor="ada", reason="mended"), list[Line])
    assert_type(await app.resolve(receipt.id, "mail", happened=False, actor="ada", reason="asked"), bool)
    assert_type(await app.preflight(), list[Problem])
    await onboard.send("seven")  # type: ignore[arg-type]


async def not_a_workflow(user_id: int) -> None: ...


def test_a_workflow_takes_a_run() -> None:
    """P5: the refusal at run time is tested elsewhere."""
    declare: Callable[[Callable[[int], Awaitable[None]]], object] = app.workflow  # type: ignore[assignment]
    assert declare is not None
