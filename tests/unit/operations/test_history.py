"""The history of a message for operators: its acts and their times, its waits, and its uncertain effects.  M4 to M6."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.conftest import Bench

from onefold import Chronicle, Context, RetryPolicy, Run, SignalTimeoutError, StepError, limits
from onefold.operations.history import Entry
from onefold.testing import drain


async def read(bench: Bench, run_id: str, **options: int) -> Chronicle:
    found = await bench.app.chronicle(run_id, **options)
    assert found is not None
    return found


def told(entries: tuple[Entry, ...]) -> list[tuple[str, str, str]]:
    return [(entry.kind, entry.name, entry.state) for entry in entries]


def test_steps_have_times_tries_and_failures(bench: Bench) -> None:
    async def slow(seconds: float) -> None:
        bench.clock.advance(seconds)

    @bench.app.step(retry=RetryPolicy(max_attempts=2, base=200, jitter=False))
    async def flaky() -> None:
        raise ConnectionError("away")

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(slow, 3.0)
        try:
            await run.step(flaky)
        except StepError:
            await run.step(slow, 1.0)
        run.now()

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        waiting = await read(bench, receipt.id)
        first, second = waiting.entries
        assert (first.kind, first.state, first.seconds) == ("step", "done", pytest.approx(3, abs=0.1))
        assert (second.state, [one.error_type for one in second.tries]) == ("waiting", ["ConnectionError"])
        assert second.due_at is not None
        assert second.due_at - second.tries[0].at == timedelta(seconds=200)
        assert waiting.waits == [second]
        assert (waiting.state, waiting.failure is not None, len(waiting.attempts)) == ("parked", True, 1)
        await drain(bench.app)
        ended = await read(bench, receipt.id)
        assert told(ended.entries)[1:] == [("step", "flaky#1", "failed"), ("step", "slow#2", "done")]
        assert ended.entries[1].failure is not None
        assert ended.entries[1].failure.error_message == "away"
        assert (ended.state, ended.waits, ended.failure) == ("done", [], None)

    bench.run(scenario)


def test_waits_say_until_when_and_what_became_of_them(bench: Bench) -> None:
    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.sleep(hours=1)
        try:
            await run.signal("early", timeout=60)
        except SignalTimeoutError:
            await run.signal("late")
        await run.signal("never")

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        asleep = await read(bench, receipt.id)
        assert told(asleep.entries) == [("sleep", "sleep#1", "waiting")]
        await bench.app.signal(receipt.id, "late", 7, id="one")
        await bench.app.signal(receipt.id, "other", 8, id="two")
        assert [(letter.name, letter.id) for letter in (await read(bench, receipt.id)).mailbox] == [
            ("late", "one"),
            ("other", "two"),
        ]
        await drain(bench.app)
        awake = await read(bench, receipt.id)
        assert told(awake.entries) == [
            ("sleep", "sleep#1", "done"),
            ("wait", "early#1", "timed out"),
            ("wait", "late#1", "done"),
            ("wait", "never#1", "waiting"),
        ]
        assert [letter.name for letter in awake.mailbox] == ["other"]
        assert awake.entries[1].seconds == 60
        assert (awake.due_at, [wait.name for wait in awake.waits]) == (None, ["never#1"])
        await bench.app.cancel(receipt.id, actor="ada", reason="enough")
        assert told((await read(bench, receipt.id)).entries)[-1] == ("wait", "never#1", "left")

    bench.run(scenario)


def test_branches_children_and_sends_are_nested_where_they_belong(bench: Bench) -> None:
    @bench.app.task(retry=RetryPolicy(max_attempts=1))
    async def leaf(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    @bench.app.workflow
    async def inner(run: Run) -> int:
        return await run.child(leaf, 1)

    async def branch(run: Run) -> Any:
        run.send(leaf, 5)
        return await run.gather(run.child(inner), run.child(leaf, 3))

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.gather(branch(run), run.signal("go"))

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        found = await read(bench, receipt.id)
        gather, wait = sorted(found.entries, key=lambda entry: entry.kind)
        assert (gather.kind, gather.state, wait.kind, wait.state) == ("gather", "done", "wait", "waiting")
        (only,) = gather.entries
        assert (only.kind, only.name) == ("branch", "gather#1.0")
        by_kind = {(entry.kind, entry.state): entry for entry in only.entries}
        assert set(by_kind) == {("send", "done"), ("child", "done"), ("child", "failed")}
        child = by_kind["child", "done"].message
        assert child is not None
        assert (child.state, told(child.entries)) == ("done", [("child", "leaf#1", "done")])
        failed = by_kind["child", "failed"]
        assert failed.failure is not None
        assert failed.failure.error_message == "three"
        shallow = (await read(bench, receipt.id, depth=0)).entries[0].entries[0].entries
        assert {entry.message.whole for entry in shallow if entry.message is not None} == {False}

    bench.run(scenario)


def test_effects_lie_in_their_step_or_in_their_message(bench: Bench) -> None:
    async def call() -> str:
        raise TimeoutError("no answer")

    async def charge(ctx: Context) -> str:
        await ctx.once("quote", lambda: "7 €")
        return await ctx.once("card", call)

    @bench.app.workflow
    async def flow(run: Run) -> str:
        return await run.options(retry=RetryPolicy(max_attempts=2, base=0.1)).step(charge)

    @bench.app.task(retry=RetryPolicy(max_attempts=2, base=0.1))
    async def plain(ctx: Context) -> str:
        return await ctx.once("mail", call)

    async def scenario() -> None:
        receipts = [await flow.send(), await plain.send()]
        await asyncio.wait_for(drain(bench.app), 30)
        run, message = [await read(bench, one.id) for one in receipts]
        assert told(run.entries[0].entries) == [
            ("effect", "charge#1/quote", "done"),
            ("effect", "charge#1/card", "uncertain"),
        ]
        assert (run.entries[0].state, [one.name for one in run.unknown]) == ("uncertain", ["charge#1/card"])
        assert told(message.entries) == [("effect", "mail", "uncertain")]
        assert {one.failure.reason for one in (run, message) if one.failure is not None} == {"uncertain"}

    bench.run(scenario)


def test_of_very_many_children_only_some_are_read_whole(sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = sqlite_bench
    monkeypatch.setattr(limits, "CHRONICLE_MESSAGES", 5)

    @bench.app.workflow
    async def leaf(run: Run, number: int) -> None:
        run.now()

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.gather(*(run.child(leaf, number) for number in range(20)))

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        found = await read(bench, receipt.id)
        whole = [entry.message.whole for entry in found.entries if entry.message is not None]
        assert (len(whole), sum(whole)) == (20, 4)
        assert {entry.message.state for entry in found.entries if entry.message is not None} == {"done"}
        assert await bench.app.chronicle("nothing") is None

    bench.run(scenario)
