"""A run's decisions are in its journal before a step acts on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import Context, DeadError, KeyReuseError, RetryPolicy, Run, SignalTimeoutError, StepError, Task
from onefold.store import Lease, State
from onefold.store.journal_lines import LineKind

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

Tasks = dict[str, Task[[], None]]

ONE = RetryPolicy(max_attempts=1)


class Witness:
    """A step that reads the run's journal when it is called."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.saw: list[str] = []

    async def act(self, ctx: Context) -> None:
        lines = await self._bench.app.store.steps(ctx.message.id)
        self.saw = [f"{line.name} {line.kind.name}" for line in lines]


async def _now(run: Run, tasks: Tasks) -> None:
    run.now()


async def _late_signal(run: Run, tasks: Tasks) -> None:
    with pytest.raises(SignalTimeoutError):
        await run.signal("approved", timeout=60)


async def _taken_signal(run: Run, tasks: Tasks) -> None:
    await run.signal("go", type=str)


async def _failed_step(run: Run, tasks: Tasks) -> None:
    async def fail() -> None:
        raise ValueError("it does not work")

    with pytest.raises(StepError):
        await run.options(retry=ONE).step(fail)


async def _failed_child(run: Run, tasks: Tasks) -> None:
    with pytest.raises(DeadError):
        await run.child(tasks["failing"])


async def _late_command(run: Run, tasks: Tasks) -> None:
    with pytest.raises(StepError):
        await run.options(timeout=60).step(tasks["unheard"])


async def _send(run: Run, tasks: Tasks) -> None:
    run.send(tasks["unheard"])


async def _sent_signal(run: Run, tasks: Tasks) -> None:
    run.add_signal(run.id, "go", "on", None)


@pytest.mark.parametrize(
    ("decide", "line"),
    [
        (_now, "now#1 RESULT"),
        (_late_signal, "approved#1 TAKEN"),
        (_taken_signal, "go#1 TAKEN"),
        (_failed_step, "fail#1 FAILED"),
        (_failed_child, "failing#1 FAILED"),
        (_late_command, "unheard#1 FAILED"),
        (_send, "unheard#1 SENT"),
        (_sent_signal, "signal.go#1 SENT"),
    ],
)
def test_a_step_is_called_only_after_what_the_run_decided_is_durable(
    bench: Bench, decide: Callable[[Run, Tasks], Awaitable[None]], line: str
) -> None:
    """A kill while the step runs must not let the run decide again, because the step already acts on the decision."""
    witness = Witness(bench)

    @bench.app.task(retry=ONE)
    async def failing() -> None:
        raise ValueError("it does not work")

    @bench.app.task(queue="unserved")
    async def unheard() -> None: ...

    tasks: Tasks = {"failing": failing, "unheard": unheard}

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> None:
        await decide(run, tasks)
        await run.step(witness.act)

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.app.signal(receipt.id, "go", "on")
        for _ in range(3):
            await bench.app.work(queues=["default"], until_idle=True)
            bench.clock.advance(timedelta(minutes=2))
        await receipt.result()
        assert line in witness.saw

    bench.run(scenario)


def test_a_run_that_has_decided_nothing_pays_no_extra_commit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record per step, and one more only if there was a decision before it."""
    recorded = list[list[str]]()

    async def act(number: int) -> int:
        return number

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(act, 1)
        await run.step(act, 2)
        run.now()
        await run.step(act, 3)

    async def scenario() -> None:
        store = bench.app.store
        record = store.record

        async def counted(owner: Lease | str, steps: Any) -> Any:
            recorded.append([step.name for step in steps])
            return await record(owner, steps)

        monkeypatch.setattr(store, "record", counted)
        await flow.send()
        await bench.work()
        assert recorded == [["act#1"], ["act#2"], ["now#1"], ["act#3"]]

    bench.run(scenario)


def decisions_are_carried(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three branches decide, and one commit has the decisions of all: none may act before that commit."""
    events = list[str]()

    async def act(ctx: Context, name: str) -> str:
        events.append(f"call {name}")
        return name

    async def decide(run: Run, name: str) -> str:
        run.now()
        # Another branch runs before the step is called.
        (answer,) = await run.gather(run.step(act, name))
        return answer

    @bench.app.workflow
    async def flow(run: Run) -> tuple[str, ...]:
        return await run.gather(*(decide(run, name) for name in "abc"))

    async def scenario() -> None:
        store = bench.app.store
        record = store.record

        async def slow(owner: Lease | str, steps: Any) -> Any:
            lines = await record(owner, steps)
            await bench.clock.sleep(0.01)
            events.append("recorded " + " ".join(step.name for step in steps))
            return lines

        monkeypatch.setattr(store, "record", slow)
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == ("a", "b", "c")
        for number, name in enumerate("abc"):
            recorded = next(n for n, one in enumerate(events) if f"gather#1.{number}/now#1" in one)
            assert recorded < events.index(f"call {name}"), events

    bench.run(scenario)


def test_a_branch_waits_for_the_commit_that_carries_its_decision(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision of one branch may be part of a commit that another branch has begun."""
    decisions_are_carried(sqlite_bench, monkeypatch)


def test_a_send_that_cannot_leave_is_a_failure_of_the_run_and_not_of_the_next_step(bench: Bench) -> None:
    """Its key belongs to another payload, which shows when it leaves: before the step is called."""
    called, caught = list[str](), list[str]()

    @bench.app.task(key="{key}", queue="unserved")
    async def order(key: str, number: int) -> None: ...

    async def act() -> None:
        called.append("act")

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> None:
        run.send(order, "k", 2)
        try:
            await run.step(act)
        except KeyReuseError as error:
            caught.append(error.key)
            raise

    async def scenario() -> None:
        await order.send("k", 1)
        receipt = await flow.send()
        await bench.app.work(queues=["default"], until_idle=True)
        record = await bench.record(receipt)
        assert record.failure is not None
        assert record.failure.reason == "key reuse"
        assert (called, caught) == ([], ["k"])

    bench.run(scenario)


# retries in place


def test_a_retry_that_is_waited_for_in_place_is_in_the_journal_before_the_next_try(bench: Bench) -> None:
    """However often the worker dies, the tries of a step are counted, and operators can see them."""
    saw = list[list[str]]()
    attempts = list[int]()

    async def flaky(ctx: Context) -> str:
        lines = await bench.app.store.steps(ctx.message.id)
        saw.append([line.name for line in lines if line.kind is LineKind.RETRY])
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise ConnectionError("not yet")
        return "done"

    @bench.app.workflow
    async def flow(run: Run) -> str:
        answer = await run.options(retry=RetryPolicy(max_attempts=3, base=0.5, fixed=True)).step(flaky)
        await run.signal("go")
        return answer

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert attempts == [1, 2, 3]
        assert saw == [[], ["flaky#1!0.0"], ["flaky#1!0.0", "flaky#1!0.1"]]
        chronicle = await bench.app.chronicle(receipt.id)
        assert chronicle is not None
        assert [len(entry.tries) for entry in chronicle.entries if entry.name == "flaky#1"] == [2]

    bench.run(scenario)


def test_a_retry_that_was_waited_for_in_place_is_not_waited_for_again(bench: Bench) -> None:
    """A run that a person resumes goes on at once, although its step was retried a moment ago."""

    async def charge(ctx: Context) -> str:
        async def call() -> str:
            raise TimeoutError("no answer")

        return await ctx.once("card", call)

    @bench.app.workflow
    async def pay(run: Run) -> str:
        return await run.options(retry=RetryPolicy(max_attempts=3, base=0.5, fixed=True)).step(charge)

    async def scenario() -> None:
        receipt = await pay.send()
        await bench.work()
        act = {"actor": "ada", "reason": "the bank says so"}
        assert await bench.app.resolve(receipt.id, "charge#1/card", happened=True, value="paid", **act)
        await bench.work()
        assert (await bench.record(receipt)).state is State.DONE

    bench.run(scenario)
