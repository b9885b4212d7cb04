"""Workflows: steps that are not done twice, their failures, and replays of changed code."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    App,
    ConfigurationError,
    Context,
    Happened,
    NotHappened,
    Reject,
    RetryPolicy,
    Run,
    State,
    StepError,
    TransactionOpenError,
)
from onefold.errors import StoreUnavailableError
from onefold.store import Query
from onefold.store.journal_lines import LineKind
from onefold.testing import drain
from onefold.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

#: Retried in place, while the worker keeps the run.
AT_ONCE = RetryPolicy(base=0.5, fixed=True, max_attempts=3)
#: Retried after the run was parked.
LATER = RetryPolicy(base=60.0, fixed=True, max_attempts=3)


async def names(bench: Bench, run_id: str) -> list[str]:
    """Return the journal as lines of ``name kind``."""
    return [f"{step.name} {step.kind.name}" for step in await bench.app.journal(run_id)]


# steps


def test_a_step_is_called_once_however_often_the_workflow_is_run(bench: Bench) -> None:
    """H1, H2: a step that was done is not done again, and its result has the same type every time."""
    calls: list[Any] = []

    async def create(user_id: int) -> tuple[int, str]:
        calls.append(user_id)
        return (user_id, "new")

    def blocking(text: str) -> str:
        calls.append(text)
        return text.upper()

    @bench.app.workflow
    async def onboard(run: Run, user_id: int) -> str:
        account = await run.step(create, user_id)
        assert account == (user_id, "new")
        await run.sleep(1.0)
        again = await run.step(create, user_id=user_id)
        await run.sleep(1.0)
        return f"{account} {again} {await run.step(blocking, 'abc')}"

    async def scenario() -> None:
        receipt = await onboard.send(7)
        await drain(bench.app)
        assert await receipt.result() == "(7, 'new') (7, 'new') ABC"
        assert calls == [7, 7, "abc"]
        assert await names(bench, receipt.id) == [
            "create#1 RESULT",
            "sleep#1 TIMER",
            "create#2 RESULT",
            "sleep#2 TIMER",
            "blocking#1 RESULT",
        ]

    bench.run(scenario)


def test_a_step_with_a_context_commits_its_rows_with_its_record(bench: Bench) -> None:
    """H2: the rows, the sends and the record of the step are one commit, or nothing."""
    tries: list[int] = []

    @bench.app.task
    async def leaf(name: str) -> None: ...

    async def write(ctx: Context, name: str) -> str:
        await bench.insert(ctx, name)
        ctx.send(leaf, name)
        tries.append(ctx.attempt)
        if len(tries) == 1:
            raise ValueError("after the write")
        return name

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.options(retry=AT_ONCE).step(write, "a")
        await run.step(write, "b")

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DONE
        assert tries == [1, 2, 1]
        assert await bench.effects() == ["a", "b"]
        leaves = [one.envelope for one in await bench.messages() if one.envelope.message_type == "leaf"]
        assert sorted(one.causation_id for one in leaves) == [
            f"workflow:{receipt.id}/write#1",
            f"workflow:{receipt.id}/write#2",
        ]

    bench.run(scenario)


def test_a_step_that_is_run_again_after_its_commit_was_lost_has_one_effect(bench: Bench) -> None:
    """H7: the record is in the same commit as the rows, so either both are visible or neither is."""

    async def write(ctx: Context, name: str) -> None:
        await bench.insert(ctx, name)

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(write, "a")
        if (await bench.app.store.find(Query(ids=(run.id,))))[0].fence == 2:
            raise ValueError("the worker's own trouble, after the step")
        await run.step(write, "b")

    async def scenario() -> None:
        await flow.send()
        await drain(bench.app)
        assert await bench.effects() == ["a", "b"]

    bench.run(scenario)


def test_a_failing_step_is_retried_in_place_when_that_is_soon(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    tries: list[int] = []

    @bench.app.step(retry=AT_ONCE, name="flaky")
    async def work() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return "done"

    @bench.app.workflow
    async def flow(run: Run) -> str:
        return await run.step(work)

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == "done"
        assert await names(bench, receipt.id) == ["flaky#1!0.0 RETRY", "flaky#1!0.1 RETRY", "flaky#1 RESULT"]

    bench.run(scenario)


def test_a_step_that_is_to_be_retried_later_holds_no_worker(bench: Bench) -> None:
    """H1: attempts are counted across parks, and shown with the message's own."""
    tries: list[int] = []

    async def work(ctx: Context) -> str:
        tries.append(ctx.attempt)
        if len(tries) < 3:
            raise ConnectionError("away")
        return "done"

    @bench.app.workflow
    async def flow(run: Run) -> str:
        return await run.options(retry=LATER).step(work)

    async def scenario() -> None:
        receipt = await flow.send()
        for _ in range(2):
            await bench.work()
            record = await bench.record(receipt)
            assert (record.state, record.attempt) == (State.PARKED, 0)
            bench.clock.advance(59)
            assert await bench.work() == 0
            bench.clock.advance(1)
        await bench.work()
        assert await receipt.result() == "done"
        assert tries == [1, 2, 3]
        failures = [one.failure.error_message for one in await bench.app.store.attempts(receipt.id)]
        assert failures == ["away", "away"]

    bench.run(scenario)


def test_a_step_that_fails_for_good_kills_the_run_and_a_redrive_tries_it_anew(bench: Bench) -> None:
    tries: list[int] = []

    async def before() -> None:
        tries.append(0)

    async def work() -> str:
        tries.append(1)
        if len(tries) < 6:
            raise ConnectionError("away")
        return "done"

    @bench.app.workflow
    async def flow(run: Run) -> str:
        await run.step(before)
        return await run.options(retry=LATER).step(work)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        record = await bench.record(receipt)
        assert record.state is State.DEAD
        assert record.failure is not None
        assert record.failure.reason == "step failed"
        assert "work#1" in record.failure.error_message
        assert "ConnectionError: away" in record.failure.error_message
        await bench.app.redrive([receipt.id], actor="ada", reason="it is back")
        await drain(bench.app)
        assert await receipt.result() == "done"
        assert tries == [0, 1, 1, 1, 1, 1]  # a full set of attempts again

    bench.run(scenario)


def test_a_failure_that_was_caught_stays_the_same_on_every_replay(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    seen: list[str] = []

    async def work() -> None:
        raise Reject("no such card")

    async def refund() -> str:
        return "refunded"

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            await run.step(work)
        except StepError as error:
            seen.append(f"{error.step} {error.reason} {error.error_type}")
        await run.sleep(1.0)
        return await run.step(refund)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == "refunded"
        assert seen == ["work#1 rejected onefold.errors.Reject"] * 2
        assert (await names(bench, receipt.id))[0] == "work#1 FAILED"

    bench.run(scenario)


def test_a_step_has_a_time_limit(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    async def hangs() -> None:
        await asyncio.Event().wait()

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            await run.options(timeout=0.01, retry=RetryPolicy(max_attempts=1)).step(hangs)
        except StepError as error:
            return error.error_type
        return "never"

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == "onefold.errors.HandlerTimeoutError"

    bench.run(scenario)


def test_a_workflow_that_fails_by_itself_is_retried_like_a_task(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    tries: list[int] = []

    async def work() -> int:
        tries.append(1)
        return len(tries)

    @bench.app.workflow(retry=RetryPolicy(max_attempts=3))
    async def flow(run: Run) -> int:
        number = await run.step(work)
        if (await bench.app.store.attempts(run.id)) == []:
            raise ValueError("a defect, mended by the next deployment")
        return number

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == 1
        assert len(await bench.app.store.attempts(receipt.id)) == 1

    bench.run(scenario)


def test_time_and_chance_are_the_same_on_every_replay(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    seen: list[Any] = []

    async def nothing() -> None: ...

    @bench.app.workflow
    async def flow(run: Run) -> None:
        given = (run.now(), run.random(), run.uuid(), run.uuid(), run.random())
        seen.append(given)
        await run.step(nothing)
        await run.sleep(days=1)
        assert run.now() - given[0] == timedelta(days=1)

    async def scenario() -> None:
        await flow.send()
        await flow.send()
        await drain(bench.app)
        assert len(seen) == 4
        assert len(set(seen)) == 2
        now, first, one, other, second = seen[0]
        assert now == bench.clock.moment - timedelta(days=1)
        assert 0 <= first < 1
        assert first != second
        assert one != other
        assert one.version == 4

    bench.run(scenario)


def test_what_a_run_sends_leaves_once(bench: Bench) -> None:
    """B23, H5: it leaves with the next record of the run, and is named after its place in the workflow."""
    ids: list[str] = []

    @bench.app.task
    async def mail(to: str) -> None:
        await asyncio.to_thread(lambda: None)

    async def nothing() -> None: ...

    @bench.app.workflow
    async def flow(run: Run) -> None:
        ids.append(run.send(mail, "a").id)
        await run.step(nothing)
        ids.append((await mail.send("b")).id)
        await run.sleep(1.0)
        run.send(mail.options(delay=5), "c")

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        mails = [one.envelope for one in await bench.messages() if one.envelope.message_type == "mail"]
        mails.sort(key=lambda one: one.causation_id)
        assert [one.causation_id for one in mails] == [f"workflow:{receipt.id}/mail#{n}" for n in (1, 2, 3)]
        assert {one.correlation_id for one in mails} == {receipt.id}
        assert set(ids) == {one.id for one in mails[:2]}

    bench.run(scenario)


def test_a_send_that_never_left_leaves_with_the_next_try(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.task
    async def mail(to: str) -> None: ...

    @bench.app.workflow
    async def flow(run: Run) -> None:
        run.send(mail, "a")
        if not await bench.app.store.attempts(run.id):
            raise ValueError("before anything was recorded")

    async def scenario() -> None:
        await flow.send()
        await bench.work()
        assert len(await bench.messages()) == 1
        await drain(bench.app)
        assert len(await bench.messages()) == 2

    bench.run(scenario)


# inside a workflow


def test_what_would_be_repeated_is_refused_inside_a_workflow(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    raised: list[str] = []

    @bench.app.task
    async def leaf() -> None: ...

    async def attempt(verb: Any) -> None:
        try:
            await verb
        except TransactionOpenError as error:
            raised.append(str(error))

    async def nothing() -> None: ...

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(nothing)
        receipt = run.send(leaf)
        with contextlib.suppress(TransactionOpenError):
            async with bench.app.transaction():
                raise AssertionError
        await attempt(bench.app.redrive([receipt.id], actor="a", reason="b"))
        await attempt(bench.app.cancel(receipt.id, actor="a", reason="b"))

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert (await bench.record(receipt)).state is State.DONE
        assert len(raised) == 2
        assert all("do it in a step" in one for one in raised)

    bench.run(scenario)


def test_steps_may_send_and_use_transactions(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.task
    async def leaf(name: str) -> None: ...

    async def plain(name: str) -> None:
        await leaf.send(name)

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(plain, "a")
        await run.sleep(1.0)
        await run.step(plain, "b")

    async def scenario() -> None:
        await flow.send()
        await drain(bench.app)
        assert len(await bench.messages()) == 3

    bench.run(scenario)


def test_a_step_cannot_use_its_run(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.workflow
    async def flow(run: Run) -> str:
        async def step() -> None:
            await run.sleep(1.0)

        try:
            await run.options(retry=RetryPolicy(max_attempts=1)).step(step)
        except StepError as error:
            return error.error_type
        return "never"

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == "onefold.errors.HandlerError"

    bench.run(scenario)


def test_effects_of_steps_are_kept_under_the_name_of_their_step(bench: Bench) -> None:
    """B20: a crash in a step does not repeat the call, and two steps have different upstream keys."""
    calls: list[str] = []

    async def charge(ctx: Context, fails: bool) -> str:
        async def call() -> str:
            calls.append(ctx.upstream_key("stripe"))
            return f"receipt-{len(calls)}"

        receipt = await ctx.once("charge", call)
        if fails and ctx.attempt == 1:
            raise ConnectionError
        return receipt

    @bench.app.workflow
    async def flow(run: Run) -> tuple[str, str]:
        one = await run.options(retry=AT_ONCE).step(charge, True)
        await run.sleep(1.0)
        return one, await run.step(charge, False)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == ("receipt-1", "receipt-2")
        assert len(set(calls)) == 2
        assert [one.name for one in await bench.app.ledger(receipt.id)] == ["charge#1/charge", "charge#2/charge"]

    bench.run(scenario)


@pytest.mark.parametrize("swallows", [False, True])
def test_an_uncertain_effect_in_a_step_parks_the_run_for_a_person(bench: Bench, swallows: bool) -> None:
    calls: list[int] = []

    async def call() -> str:
        calls.append(1)
        raise ConnectionError("the answer was lost")

    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", call)

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            return await run.options(retry=AT_ONCE).step(pay)
        except Exception:
            if swallows:
                return "all is well"
            raise

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.PARKED
        name = (await bench.app.ledger(receipt.id))[0].name
        assert await bench.app.resolve(receipt.id, name, happened=True, value="ok", actor="ada", reason="found")
        await drain(bench.app)
        assert await receipt.result() == "ok"
        assert calls == [1]

    bench.run(scenario)


def test_a_probe_in_a_step_is_asked(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    async def call() -> str:
        raise ConnectionError("the answer was lost")

    async def ask() -> Happened[str] | NotHappened:
        return Happened("found")

    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", call, reconcile=ask)

    @bench.app.workflow
    async def flow(run: Run) -> str:
        return await run.options(retry=LATER).step(pay)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == "found"

    bench.run(scenario)


def test_middleware_wraps_every_step_that_is_really_called(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    wrapped: list[str | None] = []

    @bench.app.middleware
    async def note(ctx: Context, proceed: Any) -> Any:
        wrapped.append(ctx.step)
        return await proceed()

    async def nothing() -> None: ...

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(nothing)
        await run.sleep(1.0)
        await run.step(nothing)

    async def scenario() -> None:
        await flow.send()
        await drain(bench.app)
        assert wrapped == ["nothing#1", "nothing#2"]

    bench.run(scenario)


def test_a_step_that_leaves_tasks_running_has_failed(sqlite_bench: Bench) -> None:
    """C25."""
    bench = sqlite_bench
    strays: list[asyncio.Task[object]] = []

    async def work() -> None:
        strays.append(asyncio.create_task(asyncio.Event().wait()))

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            await run.options(retry=RetryPolicy(max_attempts=1)).step(work)
        except StepError as error:
            return error.error_type
        return "never"

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == "onefold.errors.HandlerError"
        assert strays[0].cancelled()

    bench.run(scenario)


@pytest.mark.parametrize("verb", ["record", "steps", "begin", "transaction.record"])
def test_an_absent_store_costs_no_attempt_even_if_the_workflow_swallows_it(sqlite_bench: Bench, verb: str) -> None:
    """Fault 34: infrastructure errors use up no attempts, and do not count as failures of the step."""
    bench = sqlite_bench
    done: list[str] = []

    async def write(ctx: Context, name: str) -> None:
        await bench.insert(ctx, name)

    async def plain(name: str) -> None:
        done.append(name)

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.sleep(1.0)
        try:
            await run.step(plain, "a")
            await run.step(write, "b")
        except StoreUnavailableError:
            pass
        await run.step(write, "c")

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        bench.clock.advance(1)
        inner = bench.app._store
        bench.app._store = FaultyStore(inner, [Fault("refuse", 1, verb)], clock=bench.clock)  # type: ignore[arg-type]
        await bench.work()
        bench.app._store = inner
        assert (await bench.record(receipt)).attempt == 0
        await drain(bench.app)
        assert await bench.effects() == ["b", "c"]

    bench.run(scenario)


# declaring


def test_what_cannot_work_is_refused_when_it_is_declared(sqlite_bench: Bench) -> None:
    app = sqlite_bench.app
    with pytest.raises(ConfigurationError, match="run: Run"):

        @app.workflow
        async def no_run(user_id: int) -> None: ...

    with pytest.raises(ConfigurationError, match="async"):

        @app.workflow
        def plain(run: Run) -> None: ...

    with pytest.raises(ConfigurationError, match="async"):

        @app.step
        def blocking(ctx: Context) -> None: ...

    with pytest.raises(ConfigurationError, match="no JSON form"):

        @app.step
        async def odd() -> object: ...

    with pytest.raises(ConfigurationError, match="known: name"):
        app.step(colour="red")(_nothing)  # type: ignore[call-overload]


async def _nothing() -> None: ...


def test_a_step_needs_a_name(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.workflow
    async def flow(run: Run) -> int:
        with pytest.raises(ConfigurationError, match=r"run\.options\(name="):
            await run.step(lambda: 1)
        return await run.options(name="one").step(lambda: 1)

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == 1

    bench.run(scenario)


def test_a_run_with_too_many_steps_waits_for_a_person(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H3: the log warns of many steps; above the limit, which can be raised, the run is parked: nothing is lost."""
    monkeypatch.setattr("onefold.limits.STEPS_WARNED", 18)
    calls = list[int]()

    async def act(number: int) -> None:
        calls.append(number)

    async def code(run: Run, number: int) -> int:
        for one in range(number):
            with contextlib.suppress(Exception):  # catching the exception that parks the run does not help
                await run.step(act, one)
            if one == 18:
                await run.sleep(1)
        return len(calls)

    few = bench.app.workflow(name="few", max_steps=20)(code)

    async def scenario() -> None:
        enough, too_many = await few.send(19), await few.send(21)
        await drain(bench.app)
        assert (await bench.record(enough)).state is State.DONE
        record = await bench.record(too_many)
        assert record.state is State.PARKED
        assert record.failure is not None
        assert record.failure.reason == "too many steps"
        assert record.failure.error_type.endswith(".StepLimitError")
        assert "max_steps=" in record.failure.error_message
        assert sum("many_steps" in one.message for one in caplog.records) == 2
        assert len(calls) == 19 + 19
        monkeypatch.setattr(few, "max_steps", 22)
        assert await bench.app.resume(too_many.id, actor="ada", reason="it is nearly through")
        await drain(bench.app)
        assert await too_many.result() == 19 + 21

    bench.run(scenario)


@pytest.mark.parametrize("number", [0, -1, 100_001])
def test_the_number_of_steps_is_bounded_and_only_for_workflows(sqlite_bench: Bench, number: int) -> None:
    async def code(run: Run) -> None: ...

    async def task() -> None: ...

    with pytest.raises(ConfigurationError, match="it must be from 1 to 100000"):
        sqlite_bench.app.workflow(max_steps=number)(code)
    settings: Any = {"max_steps": 5}
    with pytest.raises(ConfigurationError, match="max_steps= is for workflows"):
        sqlite_bench.app.task(**settings)(task)


def test_attempts_of_a_run_are_forgiven_when_it_has_gone_on(bench: Bench) -> None:
    """One failure in each of five months is no reason to give up, while three in a row are."""
    failed = set[int]()

    @bench.app.workflow(retry=RetryPolicy(max_attempts=3, base=1.0, fixed=True))
    async def flow(run: Run) -> int:
        for month in range(5):
            await run.sleep(days=30)
            if month not in failed:
                failed.add(month)
                raise ConnectionError("a hiccup")
        raise ValueError("for good")

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        record = await bench.record(receipt)
        assert failed == set(range(5))
        assert record.failure is not None
        assert (record.state, record.attempt, record.failure.error_message) == (State.DEAD, 3, "for good")

    bench.run(scenario)


def test_a_large_result_of_a_step_is_kept(bench: Bench) -> None:
    """H3."""

    async def large() -> str:
        return "x" * 3_000_000

    @bench.app.workflow
    async def flow(run: Run) -> int:
        text = await run.step(large)
        await run.sleep(1.0)
        return len(text)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == 3_000_000

    bench.run(scenario)


def test_starting_the_same_run_twice_is_one_run(bench: Bench) -> None:
    """B5: a run is a message, with a key, a receipt and a result."""

    @bench.app.workflow(key="{user_id}")
    async def onboard(run: Run, user_id: int) -> str:
        await run.sleep(days=1)
        return f"user {user_id}"

    async def scenario() -> None:
        first = await onboard.send(7)
        await bench.work()
        second = await onboard.send(7)
        assert (second.duplicate, second.id, second.state) == (True, first.id, State.PARKED)
        await drain(bench.app)
        assert await second.result() == "user 7"

    bench.run(scenario)


def test_a_graceful_stop_hands_the_run_back_and_the_next_worker_goes_on(bench: Bench) -> None:
    """C30, H7."""
    calls: list[str] = []
    started = asyncio.Event()

    async def first() -> None:
        calls.append("first")

    async def hangs() -> None:
        calls.append("hangs")
        if len(calls) == 2:
            started.set()
            await asyncio.Event().wait()

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.step(first)
        await run.step(hangs)

    async def scenario() -> None:
        receipt = await flow.send()
        working = asyncio.create_task(bench.app.work(stop_after=0.01))
        await started.wait()
        bench.app.stop_working()
        await working
        record = await bench.record(receipt)
        assert (record.state, record.attempt) == (State.SCHEDULED, 0)
        await bench.work()
        assert (await bench.record(receipt)).state is State.DONE
        assert calls == ["first", "hangs", "hangs"]

    bench.run(scenario)


def test_a_workflow_cannot_keep_the_run_from_parking(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    cleaned: list[str] = []

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            await run.sleep(days=1)
        except Exception:  # an ordinary ``except`` does not catch it
            return "never"
        except BaseException:
            cleaned.append("swallowed")
            with contextlib.suppress(BaseException):
                await run.step(_nothing)
            return "never either"
        return "slept"

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert (await bench.record(receipt)).state is State.PARKED
        assert cleaned == ["swallowed"]
        await drain(bench.app)
        assert await receipt.result() == "slept"
        assert LineKind.RESULT not in {step.kind for step in await bench.app.journal(receipt.id)}

    bench.run(scenario)


def test_tasks_and_workflows_have_unique_names(sqlite_bench: Bench) -> None:
    app: App = sqlite_bench.app

    @app.workflow(name="same")
    async def one(run: Run) -> None: ...

    with pytest.raises(ConfigurationError, match="two tasks"):
        app.task(name="same")(_nothing)
    with pytest.raises(ConfigurationError, match="with the version"):
        app.workflow(name="same")(one.function)  # type: ignore[arg-type]
