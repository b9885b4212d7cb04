"""Workflows whose code changes under running instances, and runs that an operator restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from onefold import App, Context, Run, State, Workflow
from onefold.store import Query
from onefold.testing import drain

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

Body = Callable[[Run], Awaitable[Any]]


async def first(number: int = 1) -> int:
    return number


async def second(number: int = 1) -> int:
    return number + 1


async def third() -> str:
    return "third"


def another(bench: Bench) -> App:
    """Return an app on the same database, as another deployment has it."""
    return App(bench.url, clock=bench.clock)


async def journal(app: App, run_id: str) -> list[tuple[str, bytes]]:
    return [(step.name, step.value) for step in await app.journal(run_id)]


# replay


async def original(run: Run) -> int:
    await run.step(first, 1)
    await run.step(second, 2)
    await run.signal("go")
    await run.step(third)
    return 1


async def without_a_step(run: Run) -> int:
    await run.step(first, 1)
    await run.signal("go")
    await run.step(third)
    return 1


async def with_a_new_step(run: Run) -> int:
    await run.step(third)
    return await original(run)


async def with_other_arguments(run: Run) -> int:
    await run.step(first, 1)
    await run.step(second, 3)
    await run.signal("go")
    return 1


async def as_something_else(run: Run) -> int:
    await run.step(first, 1)
    await run.signal("second")
    return 1


async def shorter(run: Run) -> int:
    await run.step(first, 1)
    return 1


CHANGES = [
    (without_a_step, "go#1", "second#1"),
    (with_a_new_step, "third#1", "first#1"),
    (with_other_arguments, "second#1 with these arguments", "second#1 with others"),
    (as_something_else, "second#1 as something else", "second#1 as a result"),
    (shorter, "that it is over", "second#1"),
]


@pytest.mark.parametrize(("changed", "code", "recorded"), CHANGES, ids=lambda one: getattr(one, "__name__", None))
@pytest.mark.parametrize("swallows", [False, True])
def test_changed_code_is_noticed_and_the_run_is_parked_unharmed(
    sqlite_bench: Bench, changed: Body, code: str, recorded: str, swallows: bool
) -> None:
    """Fault 38, H8: the error names both sides, nothing is written, and the right code continues the run."""
    bench = sqlite_bench
    old = bench.app.workflow(name="flow")(original)
    new = another(bench)

    @new.workflow(name="flow")
    async def flow(run: Run) -> Any:
        try:
            return await changed(run)
        except Exception:
            if swallows:
                return await run.step(third)
            raise

    async def scenario() -> None:
        receipt = await old.send()
        await bench.work()
        before = await journal(bench.app, receipt.id)
        async with new:
            (problem,) = await new.preflight()
            assert (problem.message_id, problem.kind) == (receipt.id, "journal")
            assert code in problem.detail
            assert recorded in problem.detail
            await bench.app.signal(receipt.id, "go")
            await drain(new)
        assert (await bench.record(receipt)).state is State.PARKED
        (failure,) = [one.failure for one in await bench.app.store.attempts(receipt.id)]
        assert failure.reason == "replay"
        assert f"the code says {code}" in failure.error_message
        assert f"its journal says {recorded}" in failure.error_message
        assert (await journal(bench.app, receipt.id))[: len(before)] == before
        assert not [name for name, _ in await journal(bench.app, receipt.id) if name.startswith("third")]
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.PARKED  # until an operator acts, not the next worker
        assert await bench.app.resume(receipt.id, actor="ada", reason="deployed the right code again")
        await drain(bench.app)
        assert await receipt.result() == 1

    bench.run(scenario)


@pytest.mark.parametrize("wait", ["sleep#1", "go#1"])
def test_a_step_that_is_gone_is_noticed_before_the_wait_after_it_is_over(sqlite_bench: Bench, wait: str) -> None:
    """H6: the journal has the wait and all steps before it."""
    bench = sqlite_bench
    new = another(bench)

    async def pause(run: Run) -> Any:
        return await (run.sleep(60) if wait == "sleep#1" else run.signal("go"))

    @bench.app.workflow(name="flow")
    async def old(run: Run) -> None:
        await run.step(first, 1)
        await pause(run)

    @new.workflow(name="flow")
    async def flow(run: Run) -> None:
        await pause(run)

    async def scenario() -> None:
        await old.send()
        await bench.work()
        async with new:
            (problem,) = await new.preflight()
        assert problem.detail == f"the code says {wait}, the journal says first#1"

    bench.run(scenario)


def test_steps_added_after_what_was_done_are_fine(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    old = bench.app.workflow(name="flow")(original)
    new = another(bench)

    @new.workflow(name="flow")
    async def longer(run: Run) -> str:
        await original(run)
        return await run.step(third)

    async def scenario() -> None:
        receipt = await old.send()
        await bench.work()
        async with new:
            assert await new.preflight() == []
            await bench.app.signal(receipt.id, "go")
            await drain(new)
            assert (await new.find(Query(ids=(receipt.id,))))[0].result == b'"third"'

    bench.run(scenario)


def test_a_step_that_was_being_retried_is_missed_too(sqlite_bench: Bench) -> None:
    """H8: tries of a step that has not succeeded yet are in the journal too."""
    bench = sqlite_bench

    async def away(ctx: Context) -> None:
        raise ConnectionError

    @bench.app.workflow(name="flow")
    async def old(run: Run) -> None:
        await run.step(away)

    new = another(bench)

    @new.workflow(name="flow")
    async def flow(run: Run) -> None:
        await run.step(third)

    async def scenario() -> None:
        await old.send()
        await bench.work()
        async with new:
            (problem,) = await new.preflight()
            assert "away#1" in problem.detail

    bench.run(scenario)


# versions


def versions(app: App, *numbers: int) -> dict[int, Workflow[[], int]]:
    """Declare versions of one workflow, each of which returns its number."""

    def make(number: int) -> Workflow[[], int]:
        @app.workflow(name="flow", version=number)
        async def flow(run: Run) -> int:
            if number == 1:
                await run.step(first)
            await run.signal("go")
            return number

        return flow

    return {number: make(number) for number in numbers}


def test_a_run_stays_with_the_version_it_was_started_with(bench: Bench) -> None:
    """H6: old and new side by side; a worker takes only the versions it has."""
    old_app, new_app = another(bench), another(bench)
    both = versions(bench.app, 1, 2)
    versions(old_app, 1)
    versions(new_app, 2, 3)

    async def scenario() -> None:
        async with old_app, new_app:
            one, two = await both[1].send(), await both[2].send()
            assert await old_app.work(until_idle=True) == 1
            assert (await bench.record(one)).state is State.PARKED
            assert (await bench.record(two)).state is State.SCHEDULED
            await new_app.work(until_idle=True)
            for receipt in (one, two):
                await bench.app.signal(receipt.id, "go")
            await new_app.work(until_idle=True)
            assert (await bench.record(one)).state is State.SCHEDULED
            assert (await bench.record(two)).result == b"2"
            (problem,) = await new_app.preflight()
            assert (problem.kind, problem.version) == ("unknown version", 1)
            assert await bench.app.preflight() == []
            await old_app.work(until_idle=True)
            assert await one.result() == 1
            assert bench.app.tasks["flow"] is both[2]

    bench.run(scenario)


def test_a_run_from_elsewhere_goes_to_the_newest_version(sqlite_bench: Bench) -> None:
    """A sender that knows nothing of pinning names only the workflow."""
    bench = sqlite_bench
    both = versions(bench.app, 1, 2)

    async def scenario() -> None:
        for version, schema_version in ((1, 1), (2, 2)):
            sent, receipt = bench.app.prepare(both[version].call(), None, 0)
            await bench.app.store.put([msgspec.structs.replace(sent, pinned=False)])
            assert sent.schema_version == schema_version
            await bench.app.signal(receipt.id, "go")
        await bench.work()
        assert sorted(record.result or b"" for record in await bench.messages()) == [b"1", b"2"]

    bench.run(scenario)


def test_preflight_names_what_this_code_cannot_handle(bench: Bench) -> None:
    """H6, O7."""

    @bench.app.task
    async def gone(number: int) -> None: ...

    @bench.app.task(version=2)
    async def newer(number: int) -> None: ...

    @bench.app.task
    async def changed(number: int) -> None: ...

    @bench.app.task
    async def same(number: int) -> None: ...

    new = another(bench)

    @new.task(name="newer")
    async def older(number: int) -> None: ...

    @new.task(name="changed")
    async def stricter(number: str) -> None: ...

    new.task(name="same")(same.function)

    async def scenario() -> None:
        for task in (gone, newer, changed, same):
            await task.options(delay=60).send(7)
        async with new:
            found = {problem.message_type: problem.kind for problem in await new.preflight()}
        assert found == {"gone": "unknown type", "newer": "unknown version", "changed": "arguments"}
        assert await bench.app.preflight() == []

    bench.run(scenario)


def test_a_rehearsal_does_nothing(sqlite_bench: Bench) -> None:
    """O7: no step is called, nothing is sent, nothing is written."""
    bench = sqlite_bench
    called: list[str] = []

    @bench.app.task(key="{number}")
    async def leaf(number: int) -> int:
        return number

    async def note(text: str) -> str:
        called.append(text)
        return text

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(note, "a")
        run.send(leaf, 1)
        await run.gather(run.sleep(1.0), run.child(leaf, 2))
        run.now()
        await run.step(note, "b")

    async def scenario() -> None:
        await leaf.options(delay=100).send(2)
        await flow.send()
        await bench.work()
        for _ in range(3):
            lines = len(await bench.messages()), called.copy()
            assert await bench.app.preflight() == []
            assert (len(await bench.messages()), called) == lines
            bench.clock.advance(60)
        await drain(bench.app)
        assert called == ["a", "b"]

    bench.run(scenario)


def test_a_rehearsal_of_a_run_that_waits_for_the_outside_ends(sqlite_bench: Bench, monkeypatch: Any) -> None:
    bench = sqlite_bench
    monkeypatch.setattr("onefold.operations.preflight.REHEARSAL_SECONDS_MAX", 0.05)
    waits: list[int] = []

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(first)
        if waits:
            await asyncio.Event().wait()
        await run.signal("go")

    async def scenario() -> None:
        await flow.send()
        await bench.work()
        waits.append(1)
        (problem,) = await bench.app.preflight()
        assert "not a step" in problem.detail

    bench.run(scenario)


# going back


def test_a_run_goes_back_to_a_step(bench: Bench) -> None:
    """An operator's act: later steps are done again, with new messages, and the current owner can no longer commit."""
    called: list[str] = []

    @bench.app.task
    async def leaf(name: str) -> str:
        called.append(f"leaf {name}")
        return name

    async def note(ctx: Context, text: str) -> str:
        called.append(text)
        ctx.send(leaf, "sent")
        return text

    @bench.app.workflow
    async def flow(run: Run) -> str:
        await run.step(note, "a")
        await run.child(leaf, "child")
        answer = await run.signal("go", type=str)
        await run.step(note, "b")
        await run.signal("again")
        return answer

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        await bench.app.signal(receipt.id, "go", "yes")
        await drain(bench.app)
        assert sorted(called) == ["a", "b", "leaf child", "leaf sent", "leaf sent"]
        assert await bench.app.restart(receipt.id, from_step="nothing#1", actor="ada", reason="a mistake") == []
        assert (await bench.record(receipt)).state is State.PARKED
        called.clear()
        forgotten = await bench.app.restart(receipt.id, from_step="leaf#1", actor="ada", reason="a mistake")
        assert {step.name for step in forgotten} == {"leaf#1", "go#1", "note#2", "again#1"}
        await drain(bench.app)
        assert sorted(called) == ["b", "leaf child", "leaf sent"]
        await bench.app.signal(receipt.id, "again")
        await drain(bench.app)
        assert await receipt.result() == "yes"
        assert await bench.app.restart(receipt.id, from_step="note#1", actor="ada", reason="too late") == []

    bench.run(scenario)


def test_a_dead_run_goes_back_and_lives(bench: Bench) -> None:
    broken, called = [True], list[str]()

    async def note(text: str) -> str:
        called.append(text)
        if broken and text == "b":
            raise ValueError
        return text

    @bench.app.workflow
    async def flow(run: Run) -> str:
        await run.step(note, "a")
        return await run.step(note, "b")

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DEAD
        broken.clear()
        called.clear()
        await bench.app.restart(receipt.id, from_step="note#1", actor="ada", reason="mended")
        await drain(bench.app)
        assert await receipt.result() == "b"
        assert called == ["a", "b"]

    bench.run(scenario)
