"""Handlers of every kind: on the event loop, in threads, in batches; their calls and their failures."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    App,
    Batch,
    ConfigurationError,
    Context,
    HandlerError,
    HandlerTimeoutError,
    Receipt,
    RetryPolicy,
    State,
    SyncBatch,
    SyncContext,
    limits,
)
from onefold.clock import give_way
from onefold.store import Query, Record
from onefold.transactions.handler_transaction import HandlerTransaction

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

ONCE = RetryPolicy(max_attempts=1)


async def turns() -> None:
    """Let the store's threads run for a moment."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.005, done.set)
    await done.wait()


async def until(bench: Bench, receipt: Receipt[Any], true: Callable[[Record], bool], *, seconds: float = 0) -> Record:
    """Wait until a message's record is as expected, while time advances in steps of ``seconds``."""
    while not true(record := await bench.record(receipt)):
        bench.clock.advance(seconds)
        await turns()
    return record


@asynccontextmanager
async def working(bench: Bench) -> AsyncIterator[None]:
    """Run a worker with one place for the length of the block."""
    worker = asyncio.create_task(bench.app.work(concurrency=1))
    try:
        yield
    finally:
        bench.app.stop_working()
        await worker


@dataclass
class Doc:
    number: int


class Odd(BaseException):
    """Neither an error nor a signal."""


class UnprintableError(Exception):
    """Fails when it is formatted."""

    def __str__(self) -> str:
        raise Odd("no text")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise Odd("no attributes")


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def raises(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


#: The ways in which a handler may fail, and the error type that is recorded for each.
FAILURES: dict[str, tuple[Callable[[], object], str]] = {
    "Exception": (raises(ValueError("no")), "ValueError"),
    "BaseException": (raises(Odd("no")), "test_handler_kinds.Odd"),
    "SystemExit": (raises(SystemExit(0)), "SystemExit"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "CancelledError": (raises(asyncio.CancelledError()), "asyncio.exceptions.CancelledError"),
    "GeneratorExit": (raises(GeneratorExit()), "GeneratorExit"),
    "StopIteration": (raises(StopIteration()), "RuntimeError"),
    "StopAsyncIteration": (raises(StopAsyncIteration()), "StopAsyncIteration"),
    "MemoryError": (raises(MemoryError()), "MemoryError"),
    "RecursionError": (recurse, "RecursionError"),
    "ExceptionGroup": (raises(ExceptionGroup("many", [ValueError("one"), TypeError("two")])), "ExceptionGroup"),
    "BaseExceptionGroup": (raises(BaseExceptionGroup("many", [SystemExit(1)])), "BaseExceptionGroup"),
    "unprintable": (raises(UnprintableError()), "test_handler_kinds.UnprintableError"),
    "a TimeoutError of its own": (raises(TimeoutError("upstream")), "TimeoutError"),
}


def declare_failing(app: App, kind: str, fail: Callable[[], object], **settings: Any) -> Any:
    """Declare a task of this kind that writes a row and then fails."""
    row = "INSERT INTO effect (name) VALUES ('undone')"
    if kind == "async":

        @app.task(**settings)
        async def fails(ctx: Context, value: int) -> None:
            await ctx.execute(row)
            fail()

    elif kind == "sync":

        @app.task(**settings)
        def fails(ctx: SyncContext, value: int) -> None:
            ctx.execute(row)
            fail()

    elif kind == "batch":

        @app.task(batch=10, **settings)
        async def fails(batch: Batch[int]) -> None:
            await batch.execute(row)
            fail()

    else:

        @app.task(batch=10, **settings)
        def fails(batch: SyncBatch[int]) -> None:
            batch.execute(row)
            fail()

    return fails


KINDS = ["async", "sync", "batch", "sync batch"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fail", "error_type"), FAILURES.values(), ids=FAILURES.keys())
def test_whatever_a_handler_raises_is_a_failure_and_the_worker_lives(
    sqlite_bench: Bench, kind: str, fail: Callable[[], object], error_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 19: counted as an attempt, none of its rows stays, and the same worker continues."""
    bench = sqlite_bench
    monkeypatch.setattr(limits, "TRANSACTION_SECONDS_MAX", 3_600)  # its rows are to be rolled back before that limit
    fails = declare_failing(bench.app, kind, fail, retry=RetryPolicy(max_attempts=2, jitter=False), timeout=60)

    @bench.app.task
    async def works() -> str:
        return "alive"

    async def scenario() -> None:
        bad, good = await bench.app.send_many([fails.call(1), works.call()])
        assert await bench.app.work(until_idle=True, concurrency=1) == 2
        assert await good.result() == "alive"
        record = await bench.record(bad)
        assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 1, 0)
        bench.clock.advance(5)
        await bench.work()
        record = await bench.record(bad)
        assert (record.state, record.attempt, record.crashes) == (State.DEAD, 2, 0)
        assert record.failure is not None
        assert (record.failure.error_type, record.failure.reason) == (error_type, "attempts exhausted")
        assert await bench.effects() == []

    bench.run(scenario)


class Unrepresentable:
    """Fails when it is formatted."""

    def __repr__(self) -> str:
        raise Odd("no text")


class Undumpable:
    """Looks like a model that can be written as JSON, but cannot."""

    def model_dump(self, mode: str) -> Any:
        raise UnprintableError


RESULTS: dict[str, tuple[Any, str]] = {
    "not serialisable": (object(), "result: cannot be written as JSON"),
    "not serialisable, inside": ({"a": [Unrepresentable()]}, "result: cannot be written as JSON"),
    "fails to be written": (Undumpable(), "result: cannot be written as JSON"),
    "too large": ("x" * (limits.RESULT_BYTES_MAX + 1), "at most"),
    "not finite": (float("nan"), "has no JSON form"),
    "too deep": (eval("[" * 80 + "]" * 80), "nested deeper"),
}


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize(("result", "complaint"), RESULTS.values(), ids=RESULTS.keys())
def test_a_result_that_cannot_be_kept_fails_the_run(
    sqlite_bench: Bench, kind: str, result: Any, complaint: str
) -> None:
    """Fault 22: with a clear error, and nothing is committed."""
    bench = sqlite_bench
    if kind == "async":

        @bench.app.task
        async def returns(ctx: Context):
            await bench.insert(ctx, "undone")
            return result
    else:

        @bench.app.task
        def returns(ctx: SyncContext):
            ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
            return result

    async def scenario() -> None:
        sent = await returns.send()
        await bench.work()
        record = await bench.record(sent)
        assert record.failure is not None
        assert (record.state, record.failure.reason) == (State.DEAD, "contract")
        assert complaint in record.failure.error_message
        assert await bench.effects() == []

    bench.run(scenario)


# threads


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_handler_in_a_thread_does_commits_together_or_not_at_all(bench: Bench, fails: bool) -> None:
    """P6, B18: rows, ctx.send, ctx.send_many and a plain task.send(), which is not awaited in a thread."""

    @bench.app.task
    async def child() -> None: ...

    @bench.app.task(retry=ONCE)
    def parent(ctx: SyncContext) -> int:
        assert ctx.fetch("SELECT count(*) FROM effect") == [(0,)]
        assert not ctx.in_transaction
        ctx.execute(bench.sql("INSERT INTO effect (name) VALUES (?)"), "row")
        assert ctx.fetch("SELECT name FROM effect") == [("row",)]
        ctx.send(child)
        ctx.send_many([child.call()])
        child.send()
        if fails:
            raise ValueError("no")
        return threading.get_ident()

    async def scenario() -> None:
        sent = await parent.send()
        await bench.app.work(queues=["default"], until_idle=True)
        children = [r for r in await bench.messages() if r.envelope.message_type == "child"]
        assert len(children) == (0 if fails else 3)
        assert len({r.envelope.idempotency_key for r in children}) == len(children)
        assert {r.envelope.causation_id for r in children} <= {sent.id}
        assert await bench.effects() == ([] if fails else ["row"])
        if not fails:
            assert await sent.result() != threading.get_ident()

    bench.run(scenario)


def test_a_context_in_a_thread_knows_its_message(sqlite_bench: Bench) -> None:
    """P4, P6: it has the same members as that of a coroutine."""
    bench, seen = sqlite_bench, list[Any]()

    @bench.app.task(key="{order}")
    def charge(ctx: SyncContext, order: int) -> None:
        ctx.check()
        seen.append((ctx.idempotency_key, ctx.attempt, ctx.fence, ctx.upstream_key("stripe"), ctx.message.id))
        assert ctx.deadline > bench.clock.moment
        assert (ctx.scheduled_for, ctx.missed, ctx.resources) == (None, 0, None)

    async def scenario() -> None:
        sent = await charge.send(7)
        await bench.work()
        (key, attempt, fence, upstream, id_) = seen[0]
        assert (key, attempt, id_) == ("7", 1, sent.id)
        assert fence >= 1
        assert upstream.startswith("onefold-stripe-")

    bench.run(scenario)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


#: Members that belong to the worker that runs a handler, and not to the handler.
MACHINERY = {
    "add",
    "add_signal",
    "add_start",
    "buffer",
    "buffered",
    "cancel_tasks",
    "close",
    "commit",
    "commit_with",
    "late",
    "ledger",
    "needs_transaction",
    "note_task",
    "notes",
    "over",
    "refuse",
    "register",
    "report",
    "roll_back",
    "sends",
    "tasks",
    "uncertain",
}
#: The driver's connection belongs to the event loop: a thread cannot use it.
ONLY_ASYNCHRONOUS = {"connection"}


@pytest.mark.parametrize(("theirs", "ours"), [(Context, SyncContext), (Batch, SyncBatch)])
def test_no_verb_is_forgotten_in_threads(theirs: type, ours: type) -> None:
    """P6: every method of a context, with the same parameters."""
    import inspect

    assert public(theirs) - MACHINERY - ONLY_ASYNCHRONOUS == public(ours)
    for name in public(ours):
        one, other = getattr(theirs, name), getattr(ours, name)
        assert isinstance(one, property) == isinstance(other, property)
        if inspect.isfunction(one):
            expected = [(p.name, p.kind, p.default) for p in inspect.signature(one).parameters.values()]
            found = [(p.name, p.kind, p.default) for p in inspect.signature(other).parameters.values()]
            assert expected == found, name


def test_attributes_of_a_context_are_there_in_threads_too(sqlite_bench: Bench) -> None:
    """P6: those that are set in ``__init__`` and not declared."""
    bench, seen = sqlite_bench, dict[str, set[str]]()

    @bench.app.task
    async def loop(ctx: Context) -> None:
        seen["loop"] = {name for name in vars(ctx) if not name.startswith("_")}

    @bench.app.task
    def thread(ctx: SyncContext) -> None:
        seen["thread"] = {name for name in vars(ctx) if not name.startswith("_")}

    async def scenario() -> None:
        await bench.app.send_many([loop.call(), thread.call()])
        await bench.work()
        assert seen["loop"] - {"leases", "step", "message"} == seen["thread"] - {"message"}

    bench.run(scenario)


def test_context_variables_reach_the_thread(sqlite_bench: Bench) -> None:
    """P6: middleware on the event loop sets tenants, traces and the like."""
    bench = sqlite_bench
    tenant = contextvars.ContextVar("tenant", default="unknown")

    @bench.app.middleware
    async def set_tenant(ctx: Any, proceed: Callable[[], Awaitable[Any]]) -> Any:
        tenant.set("acme")
        return await proceed()

    @bench.app.task
    def whose() -> str:
        return tenant.get()

    async def scenario() -> None:
        sent = await whose.send()
        await bench.work()
        assert await sent.result() == "acme"

    bench.run(scenario)


def test_as_many_threads_run_at_once_as_the_worker_may_and_are_used_again(sqlite_bench: Bench) -> None:
    """P6: three handlers meet at a barrier, twice."""
    bench = sqlite_bench
    barrier = threading.Barrier(3, timeout=30)
    threads: list[int] = []

    @bench.app.task
    def meet() -> None:
        barrier.wait()
        threads.append(threading.get_ident())

    async def scenario() -> None:
        await bench.app.send_many(meet.call() for _ in range(6))
        assert await bench.app.work(until_idle=True, concurrency=3) == 6
        assert len(threads) == 6
        assert len(set(threads)) == 3

    bench.run(scenario)


def test_a_plain_function_that_returns_an_awaitable_says_what_to_write(sqlite_bench: Bench) -> None:
    """P3: a coroutine that is not awaited is not a result."""
    bench = sqlite_bench

    async def elsewhere() -> int:
        return 7

    @bench.app.task(retry=ONCE)
    def forgets():
        return elsewhere()

    async def scenario() -> None:
        sent = await forgets.send()
        await bench.work()
        failure = (await bench.record(sent)).failure
        assert failure is not None
        assert "async def" in failure.error_message

    bench.run(scenario)


def spin() -> None:
    """Never end by itself."""
    while True:
        pass


@pytest.mark.parametrize("kind", ["sync", "sync batch"])
def test_a_thread_past_its_timeout_gets_an_exception(sqlite_bench: Bench, kind: str) -> None:
    """C20, G5: its rows are rolled back, it can clean up, and its thread is used again."""
    bench, cleaned = sqlite_bench, list[type[BaseException]]()

    def endless() -> None:
        try:
            spin()
        except BaseException as error:
            cleaned.append(type(error))
            raise

    late = declare_failing(bench.app, kind, endless, retry=ONCE, timeout=0.05)

    @bench.app.task
    def where() -> str:
        return threading.current_thread().name

    async def scenario() -> None:
        sent = await late.send(1)
        after = await where.send()
        await bench.app.work(until_idle=True, concurrency=1)
        failure = (await bench.record(sent)).failure
        assert failure is not None
        assert failure.error_type == "onefold.errors.HandlerTimeoutError"
        assert "longer than 0.05 s" in failure.error_message
        assert cleaned == [HandlerTimeoutError]
        assert await bench.effects() == []
        assert await after.result() == "onefold-handler-1"

    bench.run(scenario)


def test_a_thread_that_waits_for_a_verb_is_woken_when_its_time_is_up(
    sqlite_bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """C20: another process's lock does not delay it."""
    bench, ended = sqlite_bench, threading.Event()
    started, locked = threading.Event(), threading.Event()

    @bench.app.task(retry=ONCE, timeout=0.2)
    def blocked(ctx: SyncContext) -> None:
        started.set()
        locked.wait(30)
        try:
            ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
        finally:
            ended.set()

    async def scenario() -> None:
        sent = await blocked.send()
        async with working(bench):
            assert await asyncio.to_thread(started.wait, 30)
            async with bench.app.transaction() as tx:
                await bench.insert(tx, "held")
                locked.set()
                assert await asyncio.to_thread(ended.wait, 30)
            record = await until(bench, sent, lambda record: record.state is State.DEAD)
        assert record.failure is not None
        assert record.failure.error_type == "onefold.errors.HandlerTimeoutError"
        assert await bench.effects() == ["held"]
        assert "thread_abandoned" not in caplog.text

    bench.run(scenario)


def test_a_handler_may_catch_its_timeout_and_return(sqlite_bench: Bench) -> None:
    """C20: a result that is returned in time after all counts, in a thread as on the event loop."""
    bench = sqlite_bench

    @bench.app.task(timeout=0.05)
    def thread() -> str:
        try:
            spin()
        except HandlerTimeoutError:
            return "half"
        return "never"

    @bench.app.task(timeout=0.05)
    async def loop() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "half"
        return "never"

    async def scenario() -> None:
        receipts = await bench.app.send_many([thread.call(), loop.call()])
        await bench.work()
        assert [await one.result() for one in receipts] == ["half", "half"]

    bench.run(scenario)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDLER_GRACE", 0.05)


@pytest.mark.usefixtures("no_grace")
def test_a_thread_that_does_not_react_is_abandoned_and_replaced(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 21: the run fails, the worker continues, and later acts of the thread are not committed."""
    release, over = threading.Event(), threading.Event()
    refused: list[BaseException] = []

    @bench.app.task
    async def child() -> None: ...

    @bench.app.task(retry=ONCE, timeout=0.05)
    def stuck(ctx: SyncContext) -> None:
        while not release.is_set():
            try:
                release.wait()
            except HandlerTimeoutError:
                continue
        for verb in (
            lambda: ctx.execute("INSERT INTO effect (name) VALUES ('late')"),
            lambda: ctx.fetch("SELECT 1"),
            ctx.check,
            lambda: ctx.send(child),
            child.send,
            lambda: ctx.after(print),
        ):
            try:
                verb()
            except HandlerError as error:
                refused.append(error)
        over.set()

    @bench.app.task
    def where() -> str:
        return threading.current_thread().name

    async def scenario() -> None:
        sent = await stuck.send()
        async with working(bench):
            record = await until(bench, sent, lambda record: record.state is State.DEAD)
            after = await where.send()
            await until(bench, after, lambda record: record.state is State.DONE)
        assert record.attempt == 1
        assert record.failure is not None
        assert record.failure.error_type == "onefold.errors.HandlerTimeoutError"
        assert await after.result() == "onefold-handler-2"
        assert f'thread_abandoned thread=onefold-handler-1 running="stuck {sent.id}"' in caplog.text
        release.set()
        await asyncio.to_thread(over.wait, 30)
        assert len(refused) == 6
        assert (await bench.effects(), len(await bench.messages())) == ([], 2)

    bench.run(scenario)


@pytest.mark.usefixtures("no_grace")
def test_a_process_full_of_hanging_threads_burns_no_more_attempts(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 21: other workers may take the message; handlers on the event loop continue."""
    bench, release = sqlite_bench, threading.Event()
    monkeypatch.setattr(limits, "ABANDONED_THREADS_MAX", 1)

    @bench.app.task(retry=ONCE, timeout=0.05)
    def stuck() -> None:
        release.wait()

    @bench.app.task
    async def loop() -> str:
        return "alive"

    async def scenario() -> None:
        async with working(bench):
            await until(bench, await stuck.send(), lambda record: record.state is State.DEAD)
            second, third = await bench.app.send_many([stuck.call(), loop.call()])
            await until(bench, third, lambda record: record.state is State.DONE)
            record = await until(bench, second, lambda record: record.envelope.due_at > bench.clock.now())
            assert (record.state, record.attempt) == (State.SCHEDULED, 0)
        release.set()

    bench.run(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_swallows_its_stop_is_handed_back_nevertheless(sqlite_bench: Bench, kind: str) -> None:
    """C30, fault 40: in time or not, it costs no attempt, and the worker ends."""
    bench, started = sqlite_bench, threading.Event()

    def swallow() -> None:
        started.set()
        try:
            spin()
        except HandlerTimeoutError:
            return

    if kind in ("sync", "sync batch"):
        task = declare_failing(bench.app, kind, swallow)
    elif kind == "async":

        @bench.app.task
        async def task(value: int) -> str:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "done anyway"
            return "never"

    else:

        @bench.app.task(batch=2)
        async def task(batch: Batch[int]) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                batch[0].done()

    async def scenario() -> None:
        sent = await task.send(1)
        working = asyncio.create_task(bench.app.work(stop_after=0.05))
        assert await asyncio.to_thread(started.wait, 30)
        bench.app.stop_working()
        await working
        record = await bench.record(sent)
        assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 0, 0)
        assert await bench.effects() == []

    bench.run(scenario)


@pytest.mark.parametrize("awaits", [False, True])
def test_a_handler_that_cancels_itself_has_failed_and_the_worker_lives(sqlite_bench: Bench, awaits: bool) -> None:
    """Fault 19: it is not mistaken for a stop, and affects no other handler."""
    bench = sqlite_bench

    @bench.app.task(retry=ONCE)
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if awaits:
            await give_way()

    @bench.app.task
    async def works(ctx: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await bench.insert(ctx, "works")

    async def scenario() -> None:
        calls = [cancels.call(), works.call(), works.call()] * 3
        receipts = await bench.app.send_many(calls)
        assert await bench.app.work(until_idle=True, concurrency=1) == 9
        for call, sent in zip(calls, receipts, strict=True):
            failed = awaits and call.task.name == "cancels"
            assert (await bench.record(sent)).state is (State.DEAD if failed else State.DONE)
        assert await bench.effects() == ["works"] * 6

    bench.run(scenario)


def test_losing_the_lease_interrupts_the_thread(sqlite_bench: Bench) -> None:
    """C14: it gets an exception, none of its rows stays, and the worker continues."""
    bench = sqlite_bench
    started, interrupted = threading.Event(), threading.Event()

    @bench.app.task
    def spins(ctx: SyncContext) -> None:
        started.set()
        try:
            spin()
        except HandlerTimeoutError:
            interrupted.set()
            ctx.execute("INSERT INTO effect (name) VALUES ('late')")

    async def scenario() -> None:
        sent = await spins.send()
        working = asyncio.create_task(bench.app.work())
        assert await asyncio.to_thread(started.wait, 30)
        assert await bench.app.cancel(sent.id, actor="test", reason="taken over")
        while not interrupted.is_set():
            bench.clock.advance(5)
            await turns()
        bench.app.stop_working()
        await working
        assert await bench.effects() == []
        assert (await bench.record(sent)).state is State.CANCELLED

    bench.run(scenario)


# declaring


def test_the_other_kind_of_context_is_refused(sqlite_bench: Bench) -> None:
    """P3: the error says what to write instead."""
    app = sqlite_bench.app

    def plain(ctx: Context) -> None: ...

    async def coroutine(ctx: SyncContext) -> None: ...

    def batch(batch: Batch[int]) -> None: ...

    async def many(batch: SyncBatch[int]) -> None: ...

    for function, right in ((plain, "SyncContext"), (coroutine, "Context, not"), (batch, "SyncBatch"), (many, "Batch")):
        with pytest.raises(ConfigurationError, match=f"annotate its first parameter as {right}"):
            app.task(function)  # type: ignore[call-overload]


def test_what_cannot_be_a_handler_is_refused_at_once(sqlite_bench: Bench) -> None:
    """P3."""
    app = sqlite_bench.app

    def yields() -> Iterator[int]:
        yield 1

    async def two(batch: Batch[int], more: int) -> None: ...

    async def no_batch(value: int) -> None: ...

    async def a_batch(batch: Batch[int]) -> None: ...

    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (yields, {}, "yields"),
        (two, {"batch": 3}, "exactly one parameter"),
        (no_batch, {"batch": 3}, "exactly one parameter"),
        (a_batch, {}, "batch="),
        (a_batch, {"batch": 101}, "from 1 to 100"),
        (a_batch, {"batch": -1}, "from 1 to 100"),
        (a_batch, {"batch": 3, "isolate": True}, "exclude each other"),
        (no_batch, {"isolate": True}, "top of its module"),
    ]
    for function, settings, complaint in refusals:
        with pytest.raises(ConfigurationError, match=complaint):
            app.task(**settings)(function)


def test_an_unannotated_ctx_is_the_context_of_its_kind(sqlite_bench: Bench) -> None:
    """P4."""
    bench, seen = sqlite_bench, list[type]()

    @bench.app.task
    async def loop(ctx) -> None:
        seen.append(type(ctx))

    @bench.app.task
    def thread(ctx) -> None:
        seen.append(type(ctx))

    async def scenario() -> None:
        await bench.app.send_many([loop.call(), thread.call()])
        await bench.app.work(until_idle=True, concurrency=1)
        assert set(seen) == {Context, SyncContext}

    bench.run(scenario)


# tasks that outlive their handler, and late work


def test_tasks_that_have_ended_are_no_error(sqlite_bench: Bench) -> None:
    """C25: awaited, gathered, in a group, or explicitly of no handler."""
    bench = sqlite_bench
    over, detached = asyncio.Event(), list[asyncio.Task[None]]()

    async def wait() -> None:
        await over.wait()

    @bench.app.task
    async def busy(ctx: Context) -> int:
        async def one(number: int) -> int:
            await give_way()
            await ctx.fetch("SELECT 1")
            return number

        async with asyncio.TaskGroup() as group:
            group.create_task(one(1))
        await asyncio.create_task(one(2))
        asyncio.create_task(give_way())  # noqa: RUF006 - it is done before the handler
        detached.append(asyncio.create_task(wait(), context=contextvars.Context()))
        return sum(await asyncio.gather(one(3), one(4)))

    async def scenario() -> None:
        sent = await busy.send()
        await bench.work()
        assert await sent.result() == 7
        assert not detached[0].done()
        over.set()
        await detached[0]

    bench.run(scenario)


def test_a_stray_task_is_cancelled_whatever_becomes_of_the_handler(sqlite_bench: Bench) -> None:
    """C25: the handler's own error is the one that is reported."""
    bench, strays = sqlite_bench, list[asyncio.Task[bool]]()

    @bench.app.task(retry=ONCE)
    async def fails() -> None:
        strays.append(asyncio.create_task(asyncio.Event().wait()))
        raise ValueError("no")

    async def scenario() -> None:
        sent = await fails.send()
        await bench.work()
        failure = (await bench.record(sent)).failure
        assert failure is not None
        assert failure.error_type == "ValueError"
        assert strays[0].cancelled()

    bench.run(scenario)


def test_the_task_factory_of_others_is_respected_and_given_back(sqlite_bench: Bench) -> None:
    """C25: a worker does not own its event loop."""
    bench, made = sqlite_bench, list[str]()

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine.__name__)
        return asyncio.Task(coroutine, loop=loop, **options)

    @bench.app.task
    async def task() -> None:
        async def mine() -> None: ...

        await asyncio.create_task(mine())

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        for former in (None, factory):
            loop.set_task_factory(former)  # type: ignore[arg-type]
            await task.send()
            await asyncio.gather(bench.work(), bench.work())
            assert loop.get_task_factory() is former  # type: ignore[comparison-overlap]
        assert "mine" in made
        loop.set_task_factory(None)

    bench.run(scenario)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("with_rows", [False, True], ids=["plain", "with rows"])
@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_late_work_follows_the_commit(bench: Bench, kind: str, with_rows: bool, fails: bool) -> None:
    """C25: it sees the committed rows, belongs to no commit, is waited for, and does not run after a failure."""
    late = list[Any]()

    @bench.app.task
    async def child() -> None: ...

    async def see(sent: str) -> None:
        found = await bench.app.find(Query(ids=(sent,)))
        late.append((found[0].state, await bench.effects()))
        await child.send()

    def see_blocking(sent: str) -> None:
        late.append(sent)

    if kind == "async":

        @bench.app.task(retry=ONCE)
        async def parent(ctx: Context) -> None:
            ctx.after(see, ctx.message.id)
            if with_rows:
                await bench.insert(ctx, "row")
            if fails:
                raise ValueError("no")
    else:

        @bench.app.task(retry=ONCE)
        def parent(ctx: SyncContext) -> None:
            ctx.after(see_blocking, sent=ctx.message.id)
            if with_rows:
                ctx.execute("INSERT INTO effect (name) VALUES ('row')")
            if fails:
                raise ValueError("no")

    async def scenario() -> None:
        sent = await parent.send()
        await bench.app.work(until_idle=True)
        if fails:
            assert late == []
        elif kind == "sync":
            assert late == [sent.id]
        else:
            assert late == [(State.DONE, ["row"] if with_rows else [])]
            assert {r.envelope.message_type for r in await bench.messages()} == {"parent", "child"}

    bench.run(scenario)


def test_late_work_that_fails_is_logged_and_one_that_hangs_is_given_up(
    sqlite_bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """C25: late work is best effort."""
    bench, cancelled = sqlite_bench, list[str]()

    async def fail() -> None:
        raise ValueError("no")

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("hang")

    @bench.app.task
    async def parent(ctx: Context) -> None:
        ctx.after(fail)
        ctx.after(hang)

    async def scenario() -> None:
        sent = await parent.send()
        await bench.app.work(until_idle=True, stop_after=0.05)
        assert (await bench.record(sent)).state is State.DONE
        assert cancelled == ["hang"]
        assert f"late_work_failed message_id={sent.id} error=ValueError" in caplog.text

    bench.run(scenario)


# batches


def test_a_batch_gets_what_is_due_of_its_type_and_no_more_than_it_wants(bench: Bench) -> None:
    """C22: 10 by default, even with other messages in between, and however slowly the worker claims."""
    sizes, values = list[int](), list[int]()

    @bench.app.task
    async def other() -> None: ...

    @bench.app.task(batch=True)
    async def index(batch: Batch[Doc]) -> None:
        sizes.append(len(batch))
        bench.clock.advance(10)  # the handler is slow, so nothing is claimed ahead
        for item in batch:
            values.append(item.value.number)
            item.done(item.value.number * 2)

    async def scenario() -> None:
        calls = [call for number in range(25) for call in (index.call(Doc(number)), other.call())]
        receipts = await bench.app.send_many(calls)
        assert await bench.app.work(until_idle=True, concurrency=1) == 50
        assert sizes == [limits.BATCH_DEFAULT, limits.BATCH_DEFAULT, 5]
        assert sorted(values) == list(range(25))
        assert await receipts[8].result() == 8

    bench.run(scenario)


def test_a_lone_message_does_not_wait_for_company(bench: Bench) -> None:
    """C22: the clock of this test stands still."""
    sizes: list[int] = []

    @bench.app.task(batch=100)
    async def index(batch: Batch[int]) -> None:
        sizes.append(len(batch))
        batch[0].done()

    async def scenario() -> None:
        sent = await index.send(1)
        await bench.work()
        assert (sizes, (await bench.record(sent)).state) == ([1], State.DONE)

    bench.run(scenario)


@pytest.mark.parametrize("kind", ["batch", "sync batch"])
@pytest.mark.parametrize("with_rows", [False, True], ids=["plain", "with rows"])
def test_each_message_of_a_batch_has_its_own_verdict(bench: Bench, kind: str, with_rows: bool) -> None:
    """C4: done, retried or rejected; a message without a verdict is retried."""

    def judge(batch: Any) -> None:
        verdicts = {item.value: item for item in batch}
        verdicts["done"].done("kept")
        verdicts["text"].retry("later")
        verdicts["after"].retry("much later", after=60)
        verdicts["error"].retry(ValueError("no"))
        verdicts["permanent"].retry(KeyError("gone"))
        verdicts["rejected"].reject("never")
        verdicts["changed"].reject("never")
        verdicts["changed"].done()

    if kind == "batch":

        @bench.app.task(batch=10, retry=RetryPolicy(jitter=False, permanent=(KeyError,)))
        async def index(batch: Batch[str]) -> None:
            if with_rows:
                await bench.insert(batch, "row")
            judge(batch)
    else:

        @bench.app.task(batch=10, retry=RetryPolicy(jitter=False, permanent=(KeyError,)))
        def index(batch: SyncBatch[str]) -> None:
            if with_rows:
                batch.execute("INSERT INTO effect (name) VALUES ('row')")
            judge(batch)

    async def scenario() -> None:
        names = ["done", "text", "after", "error", "permanent", "rejected", "changed", "forgotten"]
        receipts = await bench.app.send_many(index.call(name) for name in names)
        await bench.app.work(until_idle=True, concurrency=1)
        records = {name: await bench.record(one) for name, one in zip(names, receipts, strict=True)}
        assert {name: record.state for name, record in records.items()} == {
            "done": State.DONE,
            "text": State.SCHEDULED,
            "after": State.SCHEDULED,
            "error": State.SCHEDULED,
            "permanent": State.DEAD,
            "rejected": State.DEAD,
            "changed": State.DONE,
            "forgotten": State.SCHEDULED,
        }
        assert await receipts[0].result() == "kept"
        again = {name: (await bench.app.store.attempts(records[name].envelope.id))[-1] for name in names[1:4]}
        assert [again[name].delay for name in ("text", "after", "error")] == [5.0, 60.0, 5.0]
        assert again["error"].failure.error_type == "ValueError"
        (forgotten,) = await bench.app.store.attempts(records["forgotten"].envelope.id)
        assert "without a verdict" in forgotten.failure.error_message
        assert await bench.effects() == (["row"] if with_rows else [])

    bench.run(scenario)


def test_rows_sends_and_outcomes_of_a_batch_are_one_commit(bench: Bench) -> None:
    """C4, B18: even when every message of the batch is to be retried."""

    @bench.app.task
    async def child(name: str) -> None: ...

    @bench.app.task(batch=5, retry=RetryPolicy(jitter=False))
    async def index(batch: Batch[int]) -> None:
        await bench.insert(batch, "row")
        batch.send(child, "by ctx")
        await child.send("by itself")
        batch.send_many([child.call("with many")])
        for item in batch:
            item.retry("again")

    async def scenario() -> None:
        await bench.app.send_many(index.call(number) for number in range(3))
        for _ in range(2):
            await bench.app.work(queues=["default"], until_idle=True, concurrency=1)
            bench.clock.advance(60)
        children = [r for r in await bench.messages() if r.envelope.message_type == "child"]
        # Both runs have sent: the second batch is another one although its first message is the same.
        assert len(children) == 6
        assert len({r.envelope.idempotency_key for r in children}) == 6
        assert await bench.effects() == ["row", "row"]

    bench.run(scenario)


@pytest.mark.parametrize("with_rows", [False, True], ids=["plain", "with rows"])
def test_when_a_batch_handler_raises_only_those_without_a_verdict_have_failed(bench: Bench, with_rows: bool) -> None:
    """C4: done messages stay done unless their rows had to be rolled back; then they are handed back."""

    @bench.app.task(batch=5)
    async def index(batch: Batch[int]) -> None:
        if with_rows:
            await bench.insert(batch, "undone")
        items = {item.value: item for item in batch}
        if 0 in items:
            items[0].done()
            items[1].reject("never")
        raise ValueError("no")

    async def scenario() -> None:
        receipts = await bench.app.send_many(index.call(number) for number in range(4))
        async with working(bench):
            await until(bench, receipts[3], lambda record: record.attempt == 1)
        first, second, third, fourth = [await bench.record(one) for one in receipts]
        assert (second.state, third.state, fourth.state) == (State.DEAD, State.SCHEDULED, State.SCHEDULED)
        assert (third.attempt, fourth.attempt) == (1, 1)
        # Handed back, it was claimed again, and now no message before it is done.
        assert first.state is (State.SCHEDULED if with_rows else State.DONE)
        assert await bench.effects() == []

    bench.run(scenario)


@pytest.mark.parametrize(("trouble", "attempts"), [("raises", 3), ("sends what clashes", 1)])
def test_a_batch_that_was_done_and_then_failed_is_tried_as_often_as_any_message(
    bench: Bench, trouble: str, attempts: int
) -> None:
    """C4: handed back without counting a failure, it would be retried for ever."""
    runs = 0

    @bench.app.task(key="{number}")
    async def other(number: int) -> None: ...

    @bench.app.task(batch=5, retry=RetryPolicy(max_attempts=3, jitter=False))
    async def index(batch: Batch[int]) -> None:
        nonlocal runs
        runs += 1
        await bench.insert(batch, "undone")
        for item in batch:
            item.done()
        if trouble == "raises":
            raise ValueError("no")
        batch.send(other.options(key="taken"), 2)

    async def scenario() -> None:
        await other.options(key="taken").send(1)
        receipt = await index.send(1)
        for _ in range(4):
            await bench.app.work(until_idle=True, concurrency=1)
            bench.clock.advance(60)
        record = await bench.record(receipt)
        assert (runs, record.state, record.attempt) == (attempts, State.DEAD, attempts)
        assert await bench.effects() == []

    bench.run(scenario)


def test_a_message_gets_its_last_attempt_alone(sqlite_bench: Bench) -> None:
    """C17: a bad message in its batch cannot make dead letters of the others."""
    bench, alone = sqlite_bench, list[int]()

    @bench.app.task(batch=10, retry=RetryPolicy(max_attempts=3, jitter=False))
    async def index(batch: Batch[int]) -> None:
        if any(item.value == 0 for item in batch):
            raise ValueError("poison")
        if len(batch) == 1:
            alone.append(batch[0].attempt)
        for item in batch:
            item.done()

    async def scenario() -> None:
        receipts = await bench.app.send_many(index.call(number) for number in range(8))
        for _ in range(4):
            await bench.app.work(until_idle=True, concurrency=1)
            bench.clock.advance(60)
        states = [(await bench.record(one)).state for one in receipts]
        assert states == [State.DEAD] + [State.DONE] * 7
        assert alone == [3] * 7

    bench.run(scenario)


def test_one_lost_lease_undoes_the_whole_batch_and_costs_the_others_nothing(bench: Bench) -> None:
    """C4, C14: no message's attempt is used up, and nothing of the batch stays."""
    runs: list[int] = []

    @bench.app.task
    async def child() -> None: ...

    @bench.app.task(batch=5)
    async def index(batch: Batch[int]) -> None:
        runs.append(len(batch))
        batch.send(child)
        for item in batch:
            if item.value == 1:
                assert await bench.app.cancel(item.message.id, actor="test", reason="taken over")
        await bench.insert(batch, f"run {len(runs)}")
        for item in batch:
            item.done()

    async def scenario() -> None:
        receipts = await bench.app.send_many(index.call(number) for number in range(3))
        await bench.app.work(until_idle=True, concurrency=1)
        states = [(await bench.record(one)).state for one in receipts]
        assert states == [State.DONE, State.CANCELLED, State.DONE]
        assert [(await bench.record(one)).attempt for one in receipts] == [0, 0, 0]
        assert runs == [3, 2]
        assert await bench.effects() == ["run 2"]
        assert len(await bench.messages()) == 4

    bench.run(scenario)


def test_a_lost_lease_cancels_the_batch(sqlite_bench: Bench) -> None:
    """C14: the renewer notices, the handler is cancelled, the others run again."""
    bench = sqlite_bench
    started, runs = asyncio.Event(), list[list[int]]()

    @bench.app.task(batch=5)
    async def index(batch: Batch[int]) -> None:
        runs.append(sorted(item.value for item in batch))
        if len(runs) == 1:
            started.set()
            await asyncio.Event().wait()
        for item in batch:
            item.done()

    async def scenario() -> None:
        receipts = await bench.app.send_many(index.call(number) for number in range(3))
        async with working(bench):
            await started.wait()
            assert await bench.app.cancel(receipts[1].id, actor="test", reason="taken over")
            await until(bench, receipts[2], lambda record: record.state is State.DONE, seconds=5)
        assert runs == [[0, 1, 2], [0, 2]]
        assert [(await bench.record(one)).attempt for one in (receipts[0], receipts[2])] == [0, 0]

    bench.run(scenario)


def test_a_message_of_a_batch_that_cannot_be_read_or_has_expired_costs_only_itself(sqlite_bench: Bench) -> None:
    """C4, A14: the others run."""
    bench, seen = sqlite_bench, list[list[int]]()

    @bench.app.task(batch=5)
    async def index(batch: Batch[int]) -> None:
        seen.append([item.value for item in batch])
        for item in batch:
            item.done()

    async def scenario() -> None:
        good, bad, late = await bench.app.send_many([index.call(1), index.call(2), index.options(expires=10).call(3)])
        async with bench.app.transaction() as tx:
            await tx.execute("UPDATE onefold_message SET payload = ? WHERE id = ?", b'{"value":"x"}', bad.id)
        bench.clock.advance(20)
        await bench.app.work(until_idle=True, concurrency=1)
        assert seen == [[1]]
        assert (await bench.record(good)).state is State.DONE
        failures = [(await bench.record(one)).failure for one in (bad, late)]
        assert [failure and failure.reason for failure in failures] == ["contract", "expired"]

    bench.run(scenario)


def test_a_result_that_cannot_be_kept_is_refused_where_it_is_given(sqlite_bench: Bench) -> None:
    """Fault 22: inside the batch handler, which may still give another verdict."""
    bench = sqlite_bench

    @bench.app.task(batch=5, retry=ONCE)
    async def index(batch: Batch[int]) -> None:
        with pytest.raises(Exception, match="cannot be written as JSON"):
            batch[0].done(object())
        batch[0].retry("bad result")

    async def scenario() -> None:
        sent = await index.send(1)
        await bench.work()
        failure = (await bench.record(sent)).failure
        assert failure is not None
        assert failure.error_message == "bad result"

    bench.run(scenario)


def test_an_item_knows_its_message(sqlite_bench: Bench) -> None:
    """P4: key, attempt, fence and upstream key are the message's own."""
    bench, seen = sqlite_bench, list[Any]()

    @bench.app.task(batch=5, key="{value}")
    async def index(batch: Batch[int]) -> None:
        assert (len(batch), batch[-1].value, [item.value for item in batch[:1]]) == (2, 2, [1])
        for item in batch:
            seen.append((item.idempotency_key, item.attempt, item.upstream_key("es"), item.message.id))
            assert item.fence >= 1
            item.done()
        await batch.check()

    async def scenario() -> None:
        receipts = await bench.app.send_many([index.call(1), index.call(2)])
        await bench.app.work(until_idle=True, concurrency=1)
        assert [(key, attempt, id_) for key, attempt, _, id_ in seen] == [
            ("1", 1, receipts[0].id),
            ("2", 1, receipts[1].id),
        ]
        assert seen[0][2] != seen[1][2]

    bench.run(scenario)


def test_the_grace_of_a_handler_ends_before_its_process_is_killed() -> None:
    """Fault 21: a thread is given up while its worker can still report it."""
    assert limits.HANDLER_GRACE < limits.HARD_TIMEOUT_GRACE


def test_only_members_that_a_worker_needs_are_public_beside_the_verbs() -> None:
    """P4: handlers see no member that was added by accident."""
    assert public(HandlerTransaction) - MACHINERY == {
        "after",
        "check",
        "connection",
        "execute",
        "fetch",
        "in_transaction",
        "publish",
        "send",
        "send_many",
        "signal",
        "signal_with_start",
    }
