"""Sagas as type checkers see them, checked by mypy and pyright, both strict; see ``test_public_api``."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

from onefold import App, Call, Context, Receipt, RetryPolicy, Run, Saga, SagaRecord, SagaStatus, Task, never
from onefold.testing import try_undos

app = App("sqlite:///never-opened.db")


async def release(ctx: Context, trip: str, *, seats: int = 1) -> None: ...


async def refund(trip: str) -> None: ...


def blocking_refund(trip: str) -> None: ...


@app.step(undo=release, timeout=timedelta(seconds=30), retry=RetryPolicy(max_attempts=3), name="seat")
async def hold(ctx: Context, trip: str, *, seats: int = 1) -> int:
    return seats


@app.step(undo=refund)
async def pay(ctx: Context, trip: str) -> str:
    return trip


@app.step(undo=blocking_refund)
async def pay_again(trip: str) -> str:
    return trip


@app.step(undo=refund)
def blocking_pay(trip: str) -> bytes:
    return trip.encode()


@app.step(undo=never("it is only looked at"))
async def look(trip: str) -> float:
    return 1.0


@app.task
async def put_back(order: int) -> None: ...


@app.step(undo=put_back, timeout=None)
@app.task(queue="stock")
async def reserve(order: int) -> list[int]:
    return [order]


@app.saga
async def book(run: Run, trip: str) -> str:
    assert_type(await run.step(hold, trip, seats=2), int)
    assert_type(await run.step(pay, trip), str)
    assert_type(await run.step(pay_again, trip), str)
    assert_type(await run.step(blocking_pay, trip), bytes)
    assert_type(await run.step(look, trip), float)
    assert_type(await run.step(reserve, 7), list[int])
    assert_type(await run.child(reserve, 7), list[int])
    assert_type(await run.options(undo=put_back, timeout=5).step(reserve, 7), list[int])
    assert_type(await run.options(undo=never("none")).child(reserve.options(queue="other"), 7), list[int])
    assert_type(await run.gather(run.step(look, trip), run.step(reserve, 7)), tuple[float, list[int]])
    await run.step(reserve, "seven")  # type: ignore[call-overload]
    await run.step(hold, trip, seats="two")  # type: ignore[arg-type]
    return "booked"


@app.saga(key="{trip}", version=2, queue="trips")
async def keyed(run: Run, trip: str) -> int:
    return 7


def test_a_saga_and_its_steps_keep_their_signatures() -> None:
    """P5: including a task that is used as a step."""
    assert_type(book.call("rome"), Call[str])
    as_declared: Saga[[str], int] = keyed
    assert_type(as_declared.call("rome"), Call[int])
    still_a_task: Task[[int], list[int]] = reserve
    assert_type(still_a_task.call(7), Call[list[int]])


async def wrong(other: bytes) -> int:
    return 1


async def use() -> None:
    """P5: an undo takes what its step takes."""
    receipt = await book.send("rome")
    assert_type(receipt, Receipt[str])
    saga = await app.saga_status(receipt.id)
    assert_type(saga, SagaRecord | None)
    if saga is not None:
        assert_type(saga.status, SagaStatus)
    app.step(undo=refund)(wrong)  # type: ignore[arg-type]
    app.step(undo=put_back)(wrong)  # type: ignore[arg-type]
    app.step(undo=7)(refund)  # type: ignore[call-overload]

    async def check(trial: int) -> None: ...

    assert_type(await try_undos(app, lambda trial: book.call(str(trial)), check), int)
