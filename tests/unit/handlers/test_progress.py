"""G2 and G3: the progress of a handler, and whether it still moves, can be read while it runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    App,
    Batch,
    Context,
    LeaseLostError,
    LimitError,
    Progress,
    Receipt,
    RetryPolicy,
    Run,
    StoreError,
    SyncBatch,
    SyncContext,
    TransactionOpenError,
    limits,
)
from onefold.handlers.progress import Pulse, make_said
from onefold.store import Said
from onefold.testing import drain
from onefold.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


async def look(app: App) -> None:
    """Report now what the worker reports every second."""
    await app._workers[0]._reporter.look()


async def progress(bench: Bench, receipt: Receipt[Any]) -> Progress:
    found = await bench.app.progress(receipt.id)
    assert found is not None
    return found


# limits


def test_what_is_said_is_brought_into_its_limits() -> None:
    """G2: clamped, cut and made storable; a report never fails its handler."""
    assert make_said(-3, "") == Said(0.0, "")
    assert make_said(250, "") == Said(100.0, "")
    assert make_said(float("nan"), "") == Said(0.0, "")
    assert make_said(33, "a\0b\ud800") == Said(33.0, "ab?")
    assert len(make_said(1, "x" * 10_000).message) == limits.PROGRESS_MESSAGE_MAX


def test_the_last_word_is_taken_once_and_again_if_it_did_not_arrive() -> None:
    pulse = Pulse()
    assert pulse.take() is None
    for number in range(1_000):
        pulse.say(Said(float(number)))
    assert pulse.take() == Said(999.0)
    assert pulse.take() is None
    pulse.beat()
    assert pulse.take() == Said(), "a beat has nothing new to tell"
    pulse.untake()
    assert pulse.take() == Said(999.0)


# while it runs


def test_progress_is_read_while_the_handler_runs_and_after(bench: Bench) -> None:
    """G2: the worker writes it, including the last report, though the handler has its own commit on one writer."""
    said, go = asyncio.Event(), asyncio.Event()

    @bench.app.task
    async def imports(ctx: Context) -> None:
        for percent in range(50):
            ctx.progress(percent, f"row {percent}")
        said.set()
        await go.wait()
        await bench.insert(ctx, "row")
        ctx.progress(120, "all rows")

    async def scenario() -> None:
        receipt = await imports.send()
        assert await bench.app.progress(receipt.id) is None
        working = asyncio.create_task(bench.work())
        await said.wait()
        await look(bench.app)
        now = await progress(bench, receipt)
        assert (now.percent, now.message, now.running, now.stalled) == (49.0, "row 49", True, False)
        assert now.at == now.beat_at == bench.clock.now()
        go.set()
        await working
        end = await progress(bench, receipt)
        assert (end.percent, end.message, end.running) == (100.0, "all rows", False)
        assert await bench.effects() == ["row"]

    bench.run(scenario)


def test_progress_may_be_said_inside_the_open_transaction(bench: Bench) -> None:
    """The call commits nothing, so it cannot wait for the writer that the handler holds."""
    said, go = asyncio.Event(), asyncio.Event()

    @bench.app.task
    async def writes(ctx: Context) -> None:
        await bench.insert(ctx, "row")
        ctx.progress(50)
        said.set()
        await go.wait()

    async def scenario() -> None:
        receipt = await writes.send()
        working = asyncio.create_task(bench.work())
        await said.wait()
        looking = asyncio.create_task(look(bench.app))
        go.set()
        await asyncio.gather(working, looking)
        assert (await progress(bench, receipt)).percent == 50.0

    bench.run(scenario)


def test_a_handler_that_says_nothing_costs_no_statement(sqlite_bench: Bench) -> None:
    """Short and silent runs are not even asked about."""

    @sqlite_bench.app.task
    async def quick() -> None: ...

    async def scenario() -> None:
        store = FaultyStore(sqlite_bench.app.store)
        sqlite_bench.app._store = store
        await sqlite_bench.app.send_many(quick.call() for _ in range(50))
        await sqlite_bench.work()
        assert "report" not in store.calls

    sqlite_bench.run(scenario)


def test_a_failed_run_leaves_its_last_word(bench: Bench) -> None:
    @bench.app.task
    async def fails(ctx: Context) -> None:
        ctx.progress(40, "row 1234")
        raise ValueError("a bad row")

    async def scenario() -> None:
        receipt = await fails.send()
        await bench.work()
        found = await progress(bench, receipt)
        assert (found.percent, found.message, found.running) == (40.0, "row 1234", False)

    bench.run(scenario)


def test_a_handler_in_a_thread_and_a_step_report_too(bench: Bench) -> None:
    """P6: the same calls on both sides."""
    threads: list[str] = []

    @bench.app.task
    def blocking(ctx: SyncContext) -> None:
        threads.append(threading.current_thread().name)
        ctx.progress(70, "in a thread")
        ctx.beat()

    async def load(ctx: Context) -> None:
        ctx.progress(30, "in a step")

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(load)

    async def scenario() -> None:
        one, other = await blocking.send(), await flow.send()
        await bench.work()
        assert (await progress(bench, one)).message == "in a thread"
        assert (await progress(bench, other)).message == "in a step"
        assert threads[0].startswith("onefold-handler")

    bench.run(scenario)


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_each_message_of_a_batch_has_its_own_progress(bench: Bench, kind: str) -> None:
    """G2, G3: a report of one item belongs to its message only; a beat of the batch counts for all of them."""

    def handle(batch: Batch[int] | SyncBatch[int]) -> None:
        for item in batch:
            if item.value:
                item.progress(10 * item.value, f"item {item.value}")
            item.done()
        batch.beat()

    async def on_loop(batch: Batch[int]) -> None:
        handle(batch)

    def in_thread(batch: SyncBatch[int]) -> None:
        handle(batch)

    task: Any = bench.app.task(name="many", batch=10)(on_loop if kind == "coroutine" else in_thread)

    async def scenario() -> None:
        receipts = await bench.app.send_many(task.call(number) for number in range(3))
        await bench.work()
        silent, *others = [await progress(bench, receipt) for receipt in receipts]
        assert (silent.percent, silent.at) == (0.0, None)
        assert silent.beat_at > 0
        assert [(one.percent, one.message) for one in others] == [(10.0, "item 1"), (20.0, "item 2")]

    bench.run(scenario)


def test_what_could_not_be_written_is_written_later(sqlite_bench: Bench) -> None:
    said, go = asyncio.Event(), asyncio.Event()

    @sqlite_bench.app.task
    async def works(ctx: Context) -> None:
        ctx.progress(10, "first")
        said.set()
        await go.wait()
        ctx.progress(20, "last")

    async def scenario() -> None:
        app = sqlite_bench.app
        app._store = FaultyStore(app.store, [Fault("refuse", at=at, verb="report") for at in (1, 3)])
        receipt = await works.send()
        working = asyncio.create_task(sqlite_bench.work())
        await said.wait()
        await look(app)
        assert await app.progress(receipt.id) is None
        await look(app)
        assert (await progress(sqlite_bench, receipt)).message == "first"
        worker = app._workers[0]
        go.set()
        while worker._held:
            await app.clock.sleep(0)
        await worker._reporter.look()
        await working
        assert (await progress(sqlite_bench, receipt)).message == "last", "after the refusal it was asked again"

    sqlite_bench.run(scenario)


# beating


def test_a_handler_that_does_not_beat_is_shown_and_logged_while_its_lease_lives(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """G3: the worker's lease and the handler's beats are watched apart."""
    started, beaten, beat, go = (asyncio.Event() for _ in range(4))

    @bench.app.task(beat_within=timedelta(seconds=3))
    async def silent(ctx: Context) -> None:
        started.set()
        await beat.wait()
        ctx.beat()
        beaten.set()
        await go.wait()

    def warnings() -> int:
        return sum(record.getMessage().startswith("stalled ") for record in caplog.records)

    async def scenario() -> None:
        receipt = await silent.send()
        working = asyncio.create_task(bench.work())
        await started.wait()
        await look(bench.app)
        assert not (await progress(bench, receipt)).stalled, "its beginning is a sign of life"
        bench.clock.stall(3.5)
        for _ in range(3):
            await look(bench.app)
        stalled = await progress(bench, receipt)
        assert (stalled.stalled, stalled.running, stalled.at, warnings()) == (True, True, None, 1)
        beat.set()
        await beaten.wait()
        await look(bench.app)
        assert not (await progress(bench, receipt)).stalled
        go.set()
        assert await working == 1, "its lease was never touched"

    with caplog.at_level(logging.WARNING, "onefold"):
        bench.run(scenario)


def test_without_a_limit_of_its_own_it_is_shown_after_a_minute(bench: Bench) -> None:
    said, go = asyncio.Event(), asyncio.Event()

    @bench.app.task
    async def works(ctx: Context) -> None:
        ctx.progress(10)
        said.set()
        await go.wait()

    async def scenario() -> None:
        receipt = await works.send()
        working = asyncio.create_task(bench.app.work(until_idle=True, lease=600))
        await said.wait()
        await look(bench.app)
        bench.clock.stall(limits.BEAT_SECONDS)
        assert not (await progress(bench, receipt)).stalled
        bench.clock.stall(0.001)
        assert (await progress(bench, receipt)).stalled
        go.set()
        await working
        assert not (await progress(bench, receipt)).stalled, "what has ended cannot stall"

    bench.run(scenario)


# results


def test_a_result_is_there_for_its_whole_window_and_gone_afterwards(bench: Bench) -> None:
    """G1: readable for as long as the key is kept, and not after that, though no purge has run."""

    @bench.app.task(key="{number}")
    async def doubled(number: int) -> int:
        return 2 * number

    async def scenario() -> None:
        receipt = await doubled.send(4)
        await bench.work()
        bench.clock.advance(timedelta(days=23) - timedelta(microseconds=1))
        assert await receipt.result() == 8
        again = await doubled.send(4)
        assert again.duplicate
        assert await again.result() == 8
        bench.clock.advance(timedelta(microseconds=1))
        with pytest.raises(StoreError, match="key window is over"):
            await receipt.result()
        assert not (await doubled.send(4)).duplicate

    bench.run(scenario)


# checkpoints


def test_the_next_run_goes_on_from_the_last_checkpoint(bench: Bench) -> None:
    """G6: after a failure, and in every kind of handler."""
    began: list[object] = []

    @bench.app.task
    async def imports(ctx: Context) -> None:
        at = await ctx.last_checkpoint() or {"row": 0}
        began.append(at)
        for row in range(at["row"] + 1, 4):
            await ctx.checkpoint({"row": row})
            if row == 2 and ctx.attempt == 1:
                raise ValueError("the connection broke")
        assert await ctx.last_checkpoint() == {"row": 3}

    @bench.app.task
    def counts(ctx: SyncContext) -> None:
        began.append(ctx.last_checkpoint())
        ctx.checkpoint(ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError("the connection broke")

    async def scenario() -> None:
        for task in (imports, counts):
            receipt = await task.send()
            await bench.work()
            bench.clock.advance(limits.RETRY_CAP)
            await bench.work()
            await receipt.result()
        assert began == [{"row": 0}, {"row": 2}, None, 1]

    bench.run(scenario)


def test_of_several_checkpoints_at_once_the_last_one_counts(bench: Bench) -> None:
    """They are written in the order of the calls, so the next run finds the one that this run saw last."""
    seen = list[Any]()

    @bench.app.task(retry=RetryPolicy(base=1.0, fixed=True))
    async def work(ctx: Context) -> None:
        seen.append(await ctx.last_checkpoint())
        await asyncio.gather(*(ctx.checkpoint(number) for number in range(5)))
        seen.append(await ctx.last_checkpoint())
        if ctx.attempt == 1:
            raise ValueError("again")

    async def scenario() -> None:
        await work.send()
        await drain(bench.app)
        assert seen == [None, 4, 4, 4]

    bench.run(scenario)


def test_a_checkpoint_that_the_caller_gave_up_does_not_swallow_the_next(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line may be written all the same, so the next one takes another number."""
    bench, seen = sqlite_bench, list[Any]()

    @bench.app.task(retry=RetryPolicy(base=1.0, fixed=True))
    async def work(ctx: Context) -> None:
        seen.append(await ctx.last_checkpoint())
        if ctx.attempt > 1:
            return
        store = bench.app.store
        record = store.record

        async def hang(owner: Any, steps: Any) -> Any:
            await record(owner, steps)
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(store, "record", hang)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await ctx.checkpoint("given up")
        await ctx.checkpoint("last")
        raise ValueError("again")

    async def scenario() -> None:
        await work.send()
        await drain(bench.app)
        assert seen == [None, "last"]

    bench.run(scenario)


def test_a_stale_owner_makes_no_checkpoint(bench: Bench) -> None:
    """G6: the fence is checked, as for every other write."""
    lost: list[str] = []

    @bench.app.task
    async def slow(ctx: Context) -> None:
        if ctx.fence > 2:
            assert await ctx.last_checkpoint() is None
            return
        bench.clock.stall(limits.LEASE)
        await bench.app.store.claim(["default"], types=["slow"], limit=1, lease=1, worker="thief")
        with pytest.raises(LeaseLostError):
            await ctx.checkpoint("mine")
        lost.append(ctx.message.id)

    async def scenario() -> None:
        await slow.send()
        await bench.work()
        assert len(lost) == 1

    bench.run(scenario)


def test_checkpoints_are_bounded_and_not_for_an_open_transaction(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHECKPOINTS_MAX", 2)
    seen: list[str] = []

    @sqlite_bench.app.task
    async def works(ctx: Context) -> None:
        for number in (1, 2):
            await ctx.checkpoint(number)
        with pytest.raises(LimitError, match="less often"):
            await ctx.checkpoint(3)
        await sqlite_bench.insert(ctx, "row")
        with pytest.raises(TransactionOpenError):
            await ctx.checkpoint(4)
        seen.append(ctx.message.id)

    async def scenario() -> None:
        await works.send()
        await sqlite_bench.work()
        assert len(seen) == 1

    sqlite_bench.run(scenario)
