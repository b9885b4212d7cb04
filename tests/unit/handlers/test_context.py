"""Handlers through the app: their context, and their one commit with its limits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    Context,
    HandlerError,
    Reject,
    Retry,
    RetryPolicy,
    State,
    TransactionOpenError,
    TransactionTooLongError,
    limits,
)
from onefold.clock import give_way

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


@pytest.mark.parametrize("fails", [False, True])
def test_rows_sends_and_result_of_a_handler_commit_together_or_not_at_all(bench: Bench, fails: bool) -> None:
    """B18, J1, C3: for ctx.send, ctx.send_many and an awaited send."""

    @bench.app.task
    async def child() -> None: ...

    @bench.app.task
    async def parent(ctx: Context) -> str:
        await bench.insert(ctx, "row")
        ctx.send(child)
        ctx.send_many([child.call()])
        await child.send()
        if fails:
            raise Reject("no")
        return "done"

    async def scenario() -> None:
        sent = await parent.send()
        await bench.app.work(queues=["default"], until_idle=True)
        children = [r for r in await bench.messages() if r.envelope.message_type == "child"]
        assert len(children) == (0 if fails else 3)
        assert await bench.effects() == ([] if fails else ["row"])
        assert (await bench.record(sent)).state is (State.DEAD if fails else State.DONE)

    bench.run(scenario)


def test_a_receipt_inside_a_handler_has_an_id_and_no_more_before_the_commit(bench: Bench) -> None:
    """J1: a parent that waited for its child would wait for ever."""
    seen: list[str] = []

    @bench.app.task
    async def child() -> None: ...

    @bench.app.task
    async def parent(ctx: Context) -> None:
        receipt = ctx.send(child)
        seen.append(receipt.id)
        with pytest.raises(TransactionOpenError):
            await receipt.result()

    async def scenario() -> None:
        await parent.send()
        await bench.work()
        assert seen[0] in {record.envelope.id for record in await bench.messages()}

    bench.run(scenario)


def test_fetch_reads_without_a_transaction_and_inside_it_once_there_is_one(bench: Bench) -> None:
    """Fetch does not begin a transaction, but sees the handler's own rows after the first execute."""
    seen: list[Any] = []

    @bench.app.task
    async def look(ctx: Context) -> None:
        seen.append((await ctx.fetch("SELECT count(*) FROM effect"), ctx.in_transaction))
        await bench.insert(ctx, "mine")
        seen.append((await ctx.fetch("SELECT count(*) FROM effect"), ctx.in_transaction))
        seen.append(await bench.app.store.fetch("SELECT count(*) FROM effect"))

    async def scenario() -> None:
        await look.send()
        await bench.work()
        assert seen == [([(0,)], False), ([(1,)], True), [(0,)]]

    bench.run(scenario)


def test_fetch_refuses_to_write(bench: Bench) -> None:
    """B18: rows written outside the commit would not be covered by any promise."""

    @bench.app.task(retry=RetryPolicy(max_attempts=1))
    async def sneak(ctx: Context) -> None:
        await ctx.fetch("INSERT INTO effect (name) VALUES ('apart')")

    async def scenario() -> None:
        sent = await sneak.send()
        await bench.work()
        assert await bench.effects() == []
        assert (await bench.record(sent)).state is State.DEAD

    bench.run(scenario)


def test_what_would_commit_apart_is_refused_in_a_handler(bench: Bench) -> None:
    """Before its transaction as well as in it, calls that would wait for the one writer are refused."""
    refused: list[str] = []

    @bench.app.task
    async def other() -> None: ...

    @bench.app.task
    async def handler(ctx: Context, message_id: str) -> None:
        await ctx.check()
        await bench.insert(ctx, "row")
        for verb in (
            ctx.check,
            lambda: bench.app.cancel(message_id, actor="ada", reason="no"),
            lambda: bench.app.redrive([message_id], actor="ada", reason="no"),
            lambda: bench.app.transaction().__aenter__(),
        ):
            with pytest.raises(TransactionOpenError):
                await verb()
            refused.append("once")

    async def scenario() -> None:
        later = await other.options(delay=60).send()
        sent = await handler.send(later.id)
        await bench.work()
        assert len(refused) == 4
        assert (await bench.record(sent)).state is State.DONE
        assert (await bench.record(later)).state is State.SCHEDULED

    bench.run(scenario)


def test_a_transaction_that_stays_open_too_long_is_rolled_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also if the handler swallows the error, and others can write meanwhile."""
    monkeypatch.setattr(limits, "TRANSACTION_SECONDS_MAX", 0.01)
    errors: list[BaseException] = []

    @bench.app.task(retry=RetryPolicy(max_attempts=1))
    async def slow(ctx: Context, swallow: bool) -> None:
        await bench.insert(ctx, "too late")
        long_enough = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, long_enough.set)
        await long_enough.wait()
        async with bench.app.store.transaction() as others:
            await others.execute("DELETE FROM effect")
        try:
            await bench.insert(ctx, "more")
        except TransactionTooLongError as error:
            errors.append(error)
            if not swallow:
                raise

    async def scenario() -> None:
        for swallow in (False, True):
            sent = await slow.send(swallow)
            await bench.work()
            record = await bench.record(sent)
            assert record.state is State.DEAD
            assert record.failure is not None
            assert record.failure.error_type == "onefold.errors.TransactionTooLongError"
        assert len(errors) == 2
        assert await bench.effects() == []

    bench.run(scenario)


def test_tasks_that_a_handler_left_behind_fail_it_and_cannot_reach_its_commit(bench: Bench) -> None:
    """C25: they are cancelled, and their later calls raise instead of losing a message."""
    refused: list[HandlerError] = []

    @bench.app.task
    async def child() -> None: ...

    @bench.app.task(retry=RetryPolicy(max_attempts=1))
    async def parent(ctx: Context) -> None:
        async def late(write: bool) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(2):  # the first call comes while the run is being ended
                    try:
                        await (bench.insert(ctx, "late") if write else child.send())
                    except HandlerError as error:
                        refused.append(error)
                    await give_way()

        stragglers.extend(asyncio.create_task(late(write), name=f"straggler-{write}") for write in (True, False))
        await give_way()

    stragglers: list[asyncio.Task[None]] = []

    async def scenario() -> None:
        sent = await parent.send()
        await bench.work()
        assert all(straggler.cancelled() for straggler in stragglers)
        failure = (await bench.record(sent)).failure
        assert failure is not None
        assert failure.error_type == "onefold.errors.HandlerError"
        assert "straggler-" in failure.error_message
        assert (await bench.effects(), len(await bench.messages())) == ([], 1)

    bench.run(scenario)


def test_a_context_knows_its_message(bench: Bench) -> None:
    """A15: key, fence, attempt, deadline and upstream key; a retry has the same key and a higher fence."""
    seen: list[tuple[str, int, int, str]] = []

    @bench.app.task(key="{order}")
    async def charge(ctx: Context, order: int) -> None:
        assert ctx.deadline > bench.clock.moment
        assert ctx.message.payload_inline == b'{"order":7}'
        seen.append((ctx.idempotency_key, ctx.attempt, ctx.fence, ctx.upstream_key("stripe")))
        if len(seen) == 1:
            raise Retry(after=1)

    async def scenario() -> None:
        await charge.send(7)
        await bench.work()
        bench.clock.advance(1)
        await bench.work()
        (key, first, fence, upstream), (key_again, second, higher, upstream_again) = seen
        assert (key, first, second) == ("7", 1, 2)
        assert (key_again, upstream_again) == (key, upstream)
        assert higher > fence

    bench.run(scenario)
