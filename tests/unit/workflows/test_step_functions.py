"""Functions as steps: they are told apart, and plain ones run in the threads of plain tasks."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from onefold import Context, RetryPolicy, Run, limits, never

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

ONE = RetryPolicy(max_attempts=1)


@dataclass
class Parcel:
    number: int


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as a library for tracing or metrics does."""

    @functools.wraps(function)
    async def inner(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return inner


def test_functions_under_one_decorator_are_told_apart(bench: Bench) -> None:
    """They share the decorator's code, but neither their arguments nor their results."""

    @traced
    async def price(number: int) -> int:
        return number

    @traced
    async def ship(number: int) -> Parcel:
        return Parcel(number)

    @traced
    async def save(ctx: Context, number: int) -> str:
        await bench.insert(ctx, f"row {number}")
        return ctx.step or ""

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> list[str]:
        runs = run.options(retry=ONE)
        return [repr(await runs.step(price, 3)), repr(await runs.step(ship, 3)), repr(await runs.step(save, 3))]

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == ["3", "Parcel(number=3)", "'save#1'"]
        assert await bench.effects() == ["row 3"]

    bench.run(scenario)


def test_functions_from_one_factory_are_told_apart(sqlite_bench: Bench) -> None:
    """They share their code but not their signatures; a hint that is an object comes from the factory's arguments."""
    bench = sqlite_bench

    def make(kind: Any) -> Callable[..., Any]:
        async def fetch(number: int) -> Any:
            return kind(number)

        fetch.__annotations__["return"] = kind
        return fetch

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> list[str]:
        found = [await run.options(retry=ONE, name=kind.__name__).step(make(kind), 3) for kind in (str, int, Parcel)]
        return [repr(one) for one in found]

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == ["'3'", "3", "Parcel(number=3)"]

    bench.run(scenario)


def test_methods_and_partial_functions_are_steps_too(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    class Shop:
        __hash__ = None  # type: ignore[assignment]

        async def pack(self, number: int) -> Parcel:
            return Parcel(number)

    def add(one: int, two: int) -> int:
        return one + two

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> str:
        total = await run.options(name="add").step(functools.partial(add, 1), 2)
        return f"{total} {await run.step(Shop().pack, total)}"

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == "3 Parcel(number=3)"

    bench.run(scenario)


# plain functions


def test_a_plain_step_that_raises_stop_iteration_fails(bench: Bench) -> None:
    """A future cannot hold that exception, so a wait for the step would never end."""

    def first() -> int:
        empty: list[int] = []
        return next(iter(empty))

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> int:
        return await run.options(retry=ONE).step(first)

    async def scenario() -> None:
        receipt = await flow.send()
        async with asyncio.timeout(20):
            await bench.work()
        record = await bench.record(receipt)
        assert record.failure is not None
        assert "StopIteration" in record.failure.error_message

    bench.run(scenario)


def test_plain_steps_run_in_the_threads_of_tasks(sqlite_bench: Bench) -> None:
    """Not in the event loop's own threads, which name look-ups need and which a few hanging steps would use up."""
    bench, names = sqlite_bench, list[str]()

    def where() -> str:
        names.append(threading.current_thread().name)
        return names[-1]

    bench.app.task(name="as_task")(where)

    @bench.app.workflow
    async def flow(run: Run) -> str:
        return await run.step(where)

    async def scenario() -> None:
        await bench.app.tasks["as_task"].send()
        await flow.send()
        await bench.work()
        assert len(names) == 2
        assert all(name.startswith("onefold-handler-") for name in names)

    bench.run(scenario)


def test_a_plain_step_that_overstays_its_time_is_stopped(sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception is raised in its thread, which is free for others afterwards."""
    bench, release, ended = sqlite_bench, threading.Event(), list[str]()
    monkeypatch.setattr(limits, "HANDLER_GRACE", 10.0)

    def hang() -> int:
        try:
            while not release.wait(0.001):
                pass
        finally:
            ended.append("hang")
        return 1

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> int:
        return await run.options(retry=ONE, timeout=0.05).step(hang)

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        release.set()
        record = await bench.record(receipt)
        assert record.failure is not None
        assert "HandlerTimeoutError" in record.failure.error_message
        assert ended == ["hang"]

    bench.run(scenario)


@pytest.mark.parametrize("kind", ["workflow", "saga"])
def test_a_plain_step_for_which_there_is_no_thread_waits_and_has_not_failed(
    sqlite_bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is to blame; neither the step nor the run uses up an attempt, and no saga is undone for it."""
    bench, called = sqlite_bench, list[int]()
    monkeypatch.setattr(limits, "ABANDONED_THREADS_MAX", 0)

    @bench.app.step(undo=never("nothing to undo"))
    def plain() -> int:
        called.append(1)
        return 1

    @getattr(bench.app, kind)(retry=ONE)  # type: ignore[untyped-decorator]
    async def flow(run: Run) -> int:
        return await run.step(plain)

    async def scenario() -> None:
        receipt = await flow.send()
        for _ in range(3):
            await bench.work()
            bench.clock.advance(60)
        assert (called, (await bench.record(receipt)).state.ended) == ([], False)
        monkeypatch.undo()
        await bench.work()
        assert await receipt.result() == 1

    bench.run(scenario)


def test_a_plain_step_that_returns_an_awaitable_is_told_so(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    async def later() -> int:
        return 1

    def wrapped() -> Any:
        return later()

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> int:
        number: int = await run.options(retry=ONE).step(wrapped)
        return number

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        record = await bench.record(receipt)
        assert record.failure is not None
        assert "declare it with `async def`" in record.failure.error_message

    bench.run(scenario)
