"""Every way a handler can fail: its outcome, its rows, and that the worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from onefold import Batch, Context, LeaseLostError, Retry, RetryPolicy, Snooze, State, limits
from onefold.errors import StoreUnavailableError
from onefold.store import Lease, Outcome

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


class Odd(BaseException):
    """Neither an error nor a signal."""


FAILURES: dict[str, tuple[BaseException, str]] = {
    "Exception": (ValueError("no"), "ValueError"),
    "BaseException": (Odd("no"), "test_execution.Odd"),
    "SystemExit": (SystemExit(0), "SystemExit"),
    "KeyboardInterrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "CancelledError": (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
    "GeneratorExit": (GeneratorExit(), "GeneratorExit"),
    "StopIteration": (StopIteration(), "RuntimeError"),
    "StopAsyncIteration": (StopAsyncIteration(), "StopAsyncIteration"),
    "ExceptionGroup": (ExceptionGroup("many", [ValueError("one"), TypeError("two")]), "ExceptionGroup"),
    "BaseExceptionGroup": (BaseExceptionGroup("many", [SystemExit(1)]), "BaseExceptionGroup"),
}


@pytest.mark.parametrize(("error", "kind"), FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("with_rows", [False, True], ids=["plain", "with rows"])
def test_whatever_a_handler_raises_is_a_failure_and_the_worker_lives(
    bench: Bench, error: BaseException, kind: str, with_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 19: counted as an attempt, none of its rows stays, and the same worker handles the next message."""
    monkeypatch.setattr(limits, "TRANSACTION_SECONDS_MAX", 3_600)  # its rows are to be rolled back before that limit

    @bench.app.task(retry=RetryPolicy(max_attempts=2, jitter=False))
    async def fails(ctx: Context) -> None:
        if with_rows:
            await bench.insert(ctx, "undone")
        raise error

    @bench.app.task
    async def works() -> str:
        return "alive"

    async def scenario() -> None:
        bad, good = await bench.app.send_many([fails.call(), works.call()])
        assert await bench.app.work(until_idle=True, concurrency=1) == 2
        assert await good.result() == "alive"
        record = await bench.record(bad)
        assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 1, 0)
        bench.clock.advance(5)
        await bench.work()
        record = await bench.record(bad)
        assert (record.state, record.attempt, record.crashes) == (State.DEAD, 2, 0)
        assert record.failure is not None
        assert (record.failure.error_type, record.failure.reason) == (kind, "attempts exhausted")
        assert await bench.effects() == []

    bench.run(scenario)


def test_a_handler_past_its_timeout_is_cancelled_and_fails(bench: Bench) -> None:
    """C20, G5: its rows are rolled back; a TimeoutError of its own is not mistaken for it."""
    cleaned: list[str] = []

    @bench.app.task(timeout=0.05, retry=RetryPolicy(max_attempts=1))
    async def endless(ctx: Context) -> None:
        await bench.insert(ctx, "undone")
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("up")

    @bench.app.task(timeout=60, retry=RetryPolicy(max_attempts=1))
    async def own() -> None:
        raise TimeoutError("upstream")

    async def scenario() -> None:
        late, upstream = await bench.app.send_many([endless.call(), own.call()])
        await bench.work()
        failures = [(await bench.record(one)).failure for one in (late, upstream)]
        assert [failure and failure.error_type for failure in failures] == [
            "onefold.errors.HandlerTimeoutError",
            "TimeoutError",
        ]
        assert (cleaned, await bench.effects()) == (["up"], [])

    bench.run(scenario)


def test_every_failed_run_leaves_a_line_in_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Also when several fail at once."""

    @bench.app.task(retry=RetryPolicy(max_attempts=2, jitter=False))
    async def fails(number: int) -> None:
        raise ValueError("no")

    async def scenario() -> None:
        sent = await bench.app.send_many(fails.call(number) for number in range(3))
        await bench.work()
        assert sorted(_logged(caplog)) == sorted(("retry", one.id, "1", "5.0", "ValueError") for one in sent)
        caplog.clear()
        bench.clock.advance(5)
        await bench.work()
        assert sorted(_logged(caplog)) == sorted(("dead", one.id, "2", "-", "ValueError") for one in sent)

    bench.run(scenario)


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_stack_begins_in_the_handler(bench: Bench, timeout: float | None) -> None:
    @bench.app.task(retry=RetryPolicy(max_attempts=1), timeout=timeout)
    async def fails() -> None:
        raise ValueError("no")

    async def scenario() -> None:
        sent = await fails.send()
        await bench.work()
        failure = (await bench.record(sent)).failure
        assert failure is not None
        assert failure.stack.startswith(f'  File "{__file__}", line ')
        assert failure.stack.count("  File ") == 1

    bench.run(scenario)


def test_a_failure_is_logged_before_the_commit_that_records_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A handler with rows of its own settles by itself."""
    logged: list[tuple[str, ...]] = []

    @bench.app.task(batch=2)
    async def half(batch: Batch[int]) -> None:
        await bench.insert(batch, "kept")
        batch[0].done()
        batch[1].reject("no")
        batch.after(look)

    async def look() -> None:
        logged.extend(_logged(caplog))

    async def scenario() -> None:
        sent = await bench.app.send_many(half.call(number) for number in range(2))
        await bench.work()
        dead = [one.id for one in sent if (await bench.record(one)).state is State.DEAD]
        assert logged == [("dead", *dead, "1", "-", "Reject")]

    bench.run(scenario)


def test_a_failure_is_logged_though_the_store_is_away(
    sqlite_bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[int] = []

    @sqlite_bench.app.task
    async def fails() -> None:
        raise ValueError("no")

    async def scenario() -> None:
        await fails.send()
        settle = sqlite_bench.app.store.settle

        async def away_at_first(settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
            logged.append(len(_logged(caplog)))
            if len(logged) < 3:
                raise StoreUnavailableError("away")
            return await settle(settlements)

        monkeypatch.setattr(sqlite_bench.app.store, "settle", away_at_first)
        await sqlite_bench.work()
        assert logged == [1, 1, 1]

    sqlite_bench.run(scenario)


def _logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    """Return the lines about failures: event, message, attempt, delay and error."""
    lines = [record.getMessage().split() for record in caplog.records if " attempt=" in record.getMessage()]
    return [(line[0], *(word.partition("=")[2] for word in line if word.startswith(_WORDS))) for line in lines]


_WORDS = ("message_id=", "attempt=", "delay=", "error=")


def test_instructions_are_followed(bench: Bench) -> None:
    """C9, C10, C11: Retry counts, Snooze does not, Reject ends it."""
    runs: list[int] = []
    todo: list[Exception | None] = [Snooze(after=60), Retry("later", after=60), Snooze(after=60), None]

    @bench.app.task(retry=RetryPolicy(max_attempts=2))
    async def obey(ctx: Context) -> int:
        runs.append(ctx.attempt)
        if instruction := todo[len(runs) - 1]:
            raise instruction
        return ctx.attempt

    async def scenario() -> None:
        sent = await obey.send()
        for _ in range(4):
            bench.clock.advance(timedelta(seconds=60))
            assert await bench.work() == 1
        assert runs == [1, 1, 2, 2]
        assert await sent.result() == 2
        assert len(await bench.app.store.attempts(sent.id)) == 1

    bench.run(scenario)


def test_a_store_that_was_away_burns_no_attempt(bench: Bench) -> None:
    """C18, fault 34: a failed store is not the message's fault."""
    runs: list[int] = []

    @bench.app.task(retry=RetryPolicy(max_attempts=1))
    async def unlucky(ctx: Context) -> None:
        runs.append(ctx.attempt)
        if len(runs) < 3:
            raise StoreUnavailableError("away")

    async def scenario() -> None:
        sent = await unlucky.send()
        for _ in range(3):
            await bench.work()
            bench.clock.advance(10)
        assert runs == [1, 1, 1]
        assert (await bench.record(sent)).state is State.DONE

    bench.run(scenario)


def test_a_message_of_a_newer_version_waits_for_a_newer_worker(bench: Bench) -> None:
    """Fault 25: deferred without using up an attempt, and a dead letter only when its time is over."""
    ran: list[int] = []

    @bench.app.task
    async def ping(number: int) -> None:
        ran.append(number)

    async def scenario() -> None:
        sent = await ping.send(7)
        async with bench.app.transaction() as tx:
            table = "onefold_message" if bench.url.startswith("sqlite") else "onefold.message"
            await tx.execute(f"UPDATE {table} SET schema_version = 2")
        await bench.work()
        assert (await bench.record(sent)).state is State.SCHEDULED
        bench.clock.advance(timedelta(days=8))
        await bench.work()
        record = await bench.record(sent)
        assert (record.state, ran) == (State.DEAD, [])
        assert record.failure is not None
        assert record.failure.reason == "expired"

    bench.run(scenario)


def test_a_lease_lost_error_that_a_handler_raises_itself_is_a_loss_and_not_a_failure(bench: Bench) -> None:
    """C14: as ``ctx.check`` raises it; nothing is recorded, and the message comes back after its lease."""
    runs: list[int] = []

    @bench.app.task
    async def checks(ctx: Context) -> None:
        runs.append(ctx.attempt)
        if len(runs) == 1:
            raise LeaseLostError("taken over")

    async def scenario() -> None:
        sent = await checks.send()
        await bench.work()
        assert (await bench.record(sent)).state is State.LEASED
        bench.clock.advance(31)
        await bench.work()
        assert runs == [1, 1]
        assert (await bench.record(sent)).state is State.DONE

    bench.run(scenario)
