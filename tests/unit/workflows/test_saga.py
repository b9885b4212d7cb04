"""Sagas: every step that was begun is undone in reverse, once, whatever error the saga failed with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    App,
    ConfigurationError,
    Context,
    DeadError,
    Receipt,
    Reject,
    RestartError,
    RetryPolicy,
    Run,
    SagaError,
    SagaStatus,
    State,
    StepError,
    StepStatus,
    never,
)
from onefold.store import Query
from onefold.testing import drain

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

ONCE = RetryPolicy(max_attempts=1)
LATER = RetryPolicy(base=60.0, fixed=True, max_attempts=2)
BY = {"actor": "ada", "reason": "looked"}


class Trip:
    """Three steps with undos that write rows, and a list of all calls."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.calls: list[str] = []
        #: The functions that raise, by name, and how often they still do.
        self.failing: dict[str, int] = {}
        self.keys: dict[str, str] = {}

        async def do(ctx: Context, name: str, trip: str) -> str:
            self.calls.append(name)
            self.keys[name] = ctx.upstream_key("bank")
            await bench.insert(ctx, f"{name} {trip}")
            if self.failing.get(name, 0) > 0:
                self.failing[name] -= 1
                raise Reject(f"{name} does not work")
            return name

        async def release(ctx: Context, trip: str) -> None:
            await do(ctx, "release", trip)

        async def refund(ctx: Context, trip: str) -> None:
            await do(ctx, "refund", trip)

        async def dismiss(ctx: Context, trip: str) -> None:
            await do(ctx, "dismiss", trip)

        @bench.app.step(undo=release)
        async def hold(ctx: Context, trip: str) -> str:
            return await do(ctx, "hold", trip)

        @bench.app.step(undo=refund)
        async def pay(ctx: Context, trip: str) -> str:
            return await do(ctx, "pay", trip)

        @bench.app.step(undo=dismiss)
        async def hire(ctx: Context, trip: str) -> str:
            return await do(ctx, "hire", trip)

        @bench.app.saga(key="{trip}")
        async def book(run: Run, trip: str) -> str:
            await run.step(hold, trip)
            await run.step(pay, trip)
            await run.sleep(60.0)
            return await run.step(hire, trip)

        self.hold, self.pay, self.hire, self.book = hold, pay, hire, book

    async def status(self, receipt: Receipt[Any]) -> SagaStatus:
        found = await self.bench.app.saga_status(receipt.id)
        assert found is not None
        # M5: the views show the same.
        table = "onefold_saga" if self.bench.url.startswith("sqlite") else "onefold.saga"
        fetch, sql = self.bench.app.store.fetch, self.bench.sql
        assert await fetch(sql(f"SELECT status FROM {table} WHERE id = ?"), [receipt.id]) == [(found.status,)]
        columns = "name, completed_at IS NOT NULL, undo, undone_at IS NOT NULL"
        rows = await fetch(sql(f"SELECT {columns} FROM {table}_step WHERE id = ? ORDER BY name"), [receipt.id])
        assert rows == sorted(
            (one.name, one.status is StepStatus.COMPLETED, one.undo, one.undone_at is not None) for one in found.steps
        )
        return found.status


@pytest.fixture
def trip(bench: Bench) -> Trip:
    return Trip(bench)


async def lines(app: App, run_id: str) -> list[str]:
    return [f"{step.name} {step.kind.name}" for step in await app.journal(run_id)]


# how a saga ends


def test_a_saga_that_succeeds_undoes_nothing(bench: Bench, trip: Trip) -> None:
    """I2, I3: its status is derived from its journal."""

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        assert await trip.status(receipt) is SagaStatus.STARTED
        await bench.work()
        assert await trip.status(receipt) is SagaStatus.COMPLETING
        await drain(bench.app)
        assert await receipt.result() == "hire"
        assert await trip.status(receipt) is SagaStatus.COMPLETED
        assert trip.calls == ["hold", "pay", "hire"]

    bench.run(scenario)


def test_a_saga_that_fails_undoes_in_reverse_and_says_why(bench: Bench, trip: Trip) -> None:
    """I5, I6, I9: including the failed step, which may have had an effect; each undo has keys of its own."""
    trip.failing["hire"] = 1

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await drain(bench.app)
        assert trip.calls == ["hold", "pay", "hire", "dismiss", "refund", "release"]
        assert await trip.status(receipt) is SagaStatus.COMPENSATED
        with pytest.raises(SagaError, match="hire does not work") as raised:
            await receipt.result()
        assert (raised.value.reason, isinstance(raised.value, DeadError)) == ("compensated", True)
        assert await lines(bench.app, receipt.id) == [
            "hold#1 BEGUN",
            "hold#1 RESULT",
            "pay#1 BEGUN",
            "pay#1 RESULT",
            "sleep#1 TIMER",
            "hire#1 BEGUN",
            "hire#1 FAILED",
            "undo#0 UNDO",
            "undo:hire#1 UNDOING",
            "undo:hire#1 RESULT",
            "undo:pay#1 UNDOING",
            "undo:pay#1 RESULT",
            "undo:hold#1 UNDOING",
            "undo:hold#1 RESULT",
        ]
        assert len(set(trip.keys.values())) == len(trip.keys)
        saga = await bench.app.saga_status(receipt.id)
        assert saga is not None
        assert saga.cause is not None
        assert saga.cause.reason == "step failed"
        assert [(one.name, one.status, one.undo, one.undo_status) for one in saga.steps] == [
            ("hold#1", "completed", "release", "completed"),
            ("pay#1", "completed", "refund", "completed"),
            ("hire#1", "failed", "dismiss", "completed"),
        ]
        assert saga.steps[2].error is not None
        assert "does not work" in saga.steps[2].error.error_message

    bench.run(scenario)


def test_a_saga_that_fails_before_its_first_step_has_failed_and_may_be_redriven(bench: Bench) -> None:
    """I3: there is nothing to undo."""
    tries: list[int] = []

    @bench.app.step(undo=never("it is only looked at"))
    async def look() -> str:
        return "seen"

    @bench.app.saga(retry=ONCE)
    async def refused(run: Run) -> str:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not today")
        return await run.step(look)

    async def scenario() -> None:
        receipt = await refused.send()
        await drain(bench.app)
        status = await bench.app.saga_status(receipt.id)
        assert status is not None
        assert status.status is SagaStatus.FAILED
        assert await bench.app.redrive([receipt.id], **BY) == [receipt.id]
        await drain(bench.app)
        assert await receipt.result() == "seen"
        (step,) = (await bench.app.saga_status(receipt.id)).steps  # type: ignore[union-attr]
        assert (step.undo, step.never) == (None, "it is only looked at")

    bench.run(scenario)


def test_code_that_raises_for_good_undoes_what_it_has_done(bench: Bench, trip: Trip) -> None:
    """Before that it is retried by its policy, as any handler is; a step without an undo is refused without a retry."""

    async def naked(trip: str) -> None:
        raise AssertionError("it must not be called")

    steps: dict[str, Any] = {"naked": naked}

    @bench.app.saga(retry=LATER)
    async def wrong(run: Run, name: str) -> None:
        await run.step(trip.hold, name)
        if name in steps:
            await run.step(steps[name], name)
        raise ValueError("a defect")

    async def scenario() -> None:
        receipt = await wrong.send("rome")
        await drain(bench.app)
        assert trip.calls == ["hold", "release"]
        with pytest.raises(SagaError, match="a defect"):
            await receipt.result()
        assert (await bench.record(receipt)).attempt == 2
        refused = await wrong.send("naked")
        await bench.work()
        with pytest.raises(SagaError, match="its step naked has no undo"):
            await refused.result()
        assert trip.calls == ["hold", "release"] * 2

    bench.run(scenario)


def test_a_saga_may_catch_a_failure_and_go_another_way(bench: Bench, trip: Trip) -> None:
    """A step that failed and was caught is undone too if the saga fails later."""
    trip.failing["pay"] = 1

    @bench.app.saga
    async def other(run: Run, name: str) -> str:
        try:
            await run.step(trip.pay, name)
        except StepError:
            await run.step(trip.hold, name)
        await run.signal("go")
        raise ValueError("after all")

    async def scenario() -> None:
        receipt = await other.send("rome")
        await bench.work()
        await bench.app.cancel(receipt.id, **BY)
        await drain(bench.app)
        assert trip.calls == ["pay", "hold", "release", "refund"]

    bench.run(scenario)


def test_branches_are_undone_in_the_reverse_of_the_order_in_which_they_began(bench: Bench, trip: Trip) -> None:
    @bench.app.saga
    async def both(run: Run, name: str) -> None:
        async def branch() -> None:
            await run.step(trip.pay, name)
            await run.step(trip.hire, name)

        await run.gather(branch(), run.step(trip.hold, name))
        raise Reject("enough")

    async def scenario() -> None:
        await both.send("rome")
        await drain(bench.app)
        forward, back = trip.calls[:3], trip.calls[3:]
        of = {"pay": "refund", "hire": "dismiss", "hold": "release"}
        assert (sorted(forward), back[-1]) == (sorted(of), of[forward[0]])
        assert sorted(back) == sorted(of.values())

    bench.run(scenario)


# common mistakes of sagas that are written by hand


def test_that_it_is_compensating_is_saved_before_anything_is_undone(bench: Bench, trip: Trip) -> None:
    """I13: a worker that continues after a crash at this point continues to undo."""
    trip.failing["pay"] = 1
    seen: list[SagaStatus] = []

    @bench.app.middleware
    async def look(ctx: Any, proceed: Any) -> Any:
        if ctx.step is not None and ctx.step.startswith("undo:"):
            found = await bench.app.saga_status(ctx.message.id)
            assert found is not None
            seen.append(found.status)
        return await proceed()

    async def scenario() -> None:
        await trip.book.send("rome")
        await drain(bench.app)
        assert seen == [SagaStatus.COMPENSATING] * 2

    bench.run(scenario)


def test_a_compensated_saga_says_so_and_does_not_run_again(bench: Bench, trip: Trip) -> None:
    """Redriving it is refused; going back to its first step starts it again, with new keys."""
    trip.failing["hire"] = 1

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await drain(bench.app)
        assert await trip.status(receipt) is SagaStatus.COMPENSATED
        (letter,) = [one async for one in bench.app.dead_letters()]
        assert (letter.failure.reason, await letter.redrive(**BY)) == ("compensated", False)
        with pytest.raises(RestartError, match=r"undo:hold#1.*restart from there"):
            await bench.app.restart(receipt.id, from_step="pay#1", **BY)
        assert await trip.status(receipt) is SagaStatus.COMPENSATED
        first = dict(trip.keys)
        assert await bench.app.restart(receipt.id, from_step="hold#1", **BY)
        await drain(bench.app)
        assert await receipt.result() == "hire"
        assert trip.calls[6:] == ["hold", "pay", "hire"]
        assert not {trip.keys[name] for name in ("hold", "pay", "hire")} & set(first.values())

    bench.run(scenario)


def test_a_local_step_that_is_too_slow_is_undone(bench: Bench) -> None:
    """I8: the default timeout of one try is 30 s; after a timeout the outcome is unknown."""
    undone: list[str] = []

    async def forget(name: str) -> None:
        undone.append(name)

    @bench.app.step(undo=forget, timeout=0.01, retry=ONCE)
    async def slow(name: str) -> None:
        await asyncio.Event().wait()

    @bench.app.saga
    async def wait(run: Run, name: str) -> None:
        await run.step(slow, name)

    async def scenario() -> None:
        receipt = await wait.send("a")
        await drain(bench.app)
        assert undone == ["a"]
        with pytest.raises(SagaError, match="ran longer than"):
            await receipt.result()

    bench.run(scenario)


# stuck


def test_an_undo_that_gives_up_leaves_the_saga_stuck_until_a_person_resumes_it(bench: Bench, trip: Trip) -> None:
    """I3: it is retried with a full set of attempts, and steps undone before are not undone again."""
    trip.failing.update(hire=1, refund=1)

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await drain(bench.app)
        assert await trip.status(receipt) is SagaStatus.STUCK
        record = await bench.record(receipt)
        assert record.state is State.PARKED
        assert [one.failure.reason for one in await bench.app.store.attempts(receipt.id)][-1] == "stuck"
        saga = await bench.app.saga_status(receipt.id)
        assert saga is not None
        assert [one.undo_status for one in saga.steps] == ["pending", "stuck", "completed"]
        assert saga.steps[1].undo_error is not None
        assert "refund" in saga.steps[1].undo_error.error_message
        assert await bench.app.resume(receipt.id, **BY)
        await drain(bench.app)
        assert await trip.status(receipt) is SagaStatus.COMPENSATED
        assert trip.calls == ["hold", "pay", "hire", "dismiss", "refund", "refund", "release"]

    bench.run(scenario)


@pytest.mark.parametrize("happened", [True, False])
def test_a_person_can_say_whether_an_undo_happened(bench: Bench, trip: Trip, happened: bool) -> None:
    """By the same call as for an uncertain effect."""
    trip.failing.update(hire=1, refund=1)

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await drain(bench.app)
        assert not await bench.app.resolve(receipt.id, "undo:hold#1", happened=True, **BY)
        assert await bench.app.resolve(receipt.id, "undo:pay#1", happened=happened, **BY)
        await drain(bench.app)
        assert await trip.status(receipt) is SagaStatus.COMPENSATED
        assert trip.calls[4:] == ["refund"] * (1 if happened else 2) + ["release"]

    bench.run(scenario)


def test_a_stuck_saga_may_go_forward_again(bench: Bench, trip: Trip) -> None:
    """The step whose undo gave up, and all undone steps, are done again."""
    trip.failing.update(hire=1, refund=1)

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await drain(bench.app)
        with pytest.raises(RestartError, match="restart from there"):
            await bench.app.restart(receipt.id, from_step="hire#1", **BY)
        assert await trip.status(receipt) is SagaStatus.STUCK
        assert await bench.app.restart(receipt.id, from_step="pay#1", **BY)
        await drain(bench.app)
        assert await receipt.result() == "hire"
        assert trip.calls[5:] == ["pay", "hire"]

    bench.run(scenario)


# operators


def test_cancelling_a_saga_undoes_it(bench: Bench, trip: Trip) -> None:
    """The worker that runs it can no longer commit; a second or late cancellation changes nothing."""

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await bench.work()
        assert await bench.app.cancel(receipt.id, **BY)
        assert not await bench.app.cancel(receipt.id, **BY)
        assert await trip.status(receipt) is SagaStatus.COMPENSATING
        await drain(bench.app)
        assert trip.calls == ["hold", "pay", "refund", "release"]
        assert not await bench.app.cancel(receipt.id, **BY)
        with pytest.raises(SagaError, match="Cancelled: ada: looked"):
            await receipt.result()

    bench.run(scenario)


def test_cancelling_a_saga_while_a_step_runs_undoes_that_step_too(bench: Bench) -> None:
    """The step's outcome is unknown; the worker that ran it can no longer commit."""
    began, end = asyncio.Event(), asyncio.Event()
    undone: list[str] = []

    async def forget(name: str) -> None:
        undone.append(name)

    @bench.app.step(undo=forget)
    async def slow(name: str) -> None:
        began.set()
        await end.wait()

    @bench.app.saga
    async def wait(run: Run, name: str) -> None:
        run.now()
        await run.step(slow, name)

    async def scenario() -> None:
        receipt = await wait.send("a")
        working = asyncio.create_task(bench.work())
        await began.wait()
        assert await bench.app.cancel(receipt.id, **BY)
        end.set()
        await working
        await drain(bench.app)
        assert undone == ["a"]
        (record,) = await bench.app.find(Query(ids=(receipt.id,)))
        assert record.failure is not None
        assert record.failure.reason == "compensated"

    bench.run(scenario)


def test_a_saga_that_may_not_go_on_is_undone(bench: Bench, trip: Trip) -> None:
    """One that expired after it had begun, and one whose workers keep dying."""

    @bench.app.saga(retry=LATER)
    async def wrong(run: Run, name: str) -> None:
        await run.step(trip.hold, name)
        raise ValueError("it is tried again")

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await bench.work()
        bench.clock.advance(60.0)
        for _ in range(5):
            # A worker claims it and dies.
            leases = await bench.app.store.claim(["default"], types=["book@1"], limit=1, lease=30.0, worker="dead")
            assert await bench.app.store.extend(leases, lease=30.0, starting=True) == [True]
            bench.clock.advance(31.0)
        await drain(bench.app)
        assert trip.calls == ["hold", "pay", "refund", "release"]
        with pytest.raises(SagaError, match="its worker died"):
            await receipt.result()
        calls = len(trip.calls)
        for cancelled in (False, True):
            begun = await wrong.options(expires=100.0).send("oslo")
            await bench.work()
            bench.clock.advance(200.0)
            if cancelled:
                assert await bench.app.cancel(begun.id, **BY)
            await drain(bench.app)
            with pytest.raises(SagaError, match="Cancelled" if cancelled else "not done within its time"):
                await begun.result()
        assert trip.calls[calls:] == ["hold", "release"] * 2
        calls = len(trip.calls)
        late = await trip.book.options(expires=5.0).send("bonn")
        bench.clock.advance(6.0)
        await drain(bench.app)
        assert await trip.status(late) is SagaStatus.FAILED
        assert len(trip.calls) == calls

    bench.run(scenario)


# declaring


def test_what_can_be_known_at_import_is_refused_there(sqlite_bench: Bench) -> None:
    """I5."""
    app = sqlite_bench.app

    async def naked(name: str) -> None: ...

    @app.task
    async def command(name: str) -> None: ...

    async def undo(other: str) -> None: ...

    with pytest.raises(ConfigurationError, match=r"its step naked has no undo.*undo=never"):

        @app.saga
        async def with_step(run: Run, name: str) -> None:
            await run.step(naked, name)

    with pytest.raises(ConfigurationError, match="its step command has no undo"):

        @app.saga
        async def with_child(run: Run, name: str) -> None:
            await run.child(command, name)

    with pytest.raises(ConfigurationError, match=r"undo takes \(other\).*\(name\)"):
        app.step(undo=undo)(naked)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="retried by its own policy"):
        app.step(undo=undo, retry=ONCE)(command)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no function, task or never"):
        app.step(undo="undo")(naked)  # type: ignore[call-overload]

    @app.saga
    async def with_options(run: Run, name: str) -> None:
        await run.options(undo=never("a look")).step(naked, name)
        await later(run, name)

    async def later(run: Run, name: str) -> None: ...


def test_preflight_knows_sagas(bench: Bench, trip: Trip) -> None:
    """O7: a saga that goes forward is rehearsed; one that is being undone needs every step that was begun."""
    trip.failing.update(hire=1, refund=1)

    async def scenario() -> None:
        await trip.book.send("rome")
        await drain(bench.app)
        await trip.book.send("bonn")
        await bench.work()
        assert await bench.app.preflight() == []
        changed = App(store=bench.app.store, clock=bench.clock)

        @changed.saga(name="book", key="{trip}")
        async def book(run: Run, trip: str) -> None: ...

        await changed.open()
        found = {problem.detail for problem in await changed.preflight()}
        assert found == {
            "the code says that it is over, the journal says hold#1",
            "it has to undo hold#1, a step that the code does not take",
        }

    bench.run(scenario)


def test_a_saga_whose_code_has_changed_is_parked_and_not_half_undone(bench: Bench, trip: Trip) -> None:
    trip.failing.update(hire=1, refund=1)

    async def scenario() -> None:
        receipt = await trip.book.send("rome")
        await drain(bench.app)
        changed = App(store=bench.app.store, clock=bench.clock)

        @changed.saga(name="book", key="{trip}")
        async def book(run: Run, trip: str) -> None: ...

        await changed.open()
        await changed.resume(receipt.id, **BY)
        await changed.work(until_idle=True)
        assert [one.failure.reason for one in await changed.store.attempts(receipt.id)][-1] == "replay"
        assert trip.calls == ["hold", "pay", "hire", "dismiss", "refund"]
        await bench.app.resume(receipt.id, **BY)
        await drain(bench.app)
        assert await trip.status(receipt) is SagaStatus.COMPENSATED

    bench.run(scenario)


def test_the_history_of_a_saga_shows_its_undos(bench: Bench, trip: Trip) -> None:
    """M5: the steps that were begun, why they are undone, and where that is stuck."""
    trip.failing.update(refund=1)

    @bench.app.saga
    async def both(run: Run, name: str) -> None:
        async def branch() -> None:
            await run.step(trip.pay, name)

        await run.gather(branch(), run.step(trip.hold, name))
        raise Reject("enough")

    async def scenario() -> None:
        receipt = await both.send("rome")
        await drain(bench.app)
        found = await bench.app.chronicle(receipt.id)
        assert found is not None
        told = {entry.name: (entry.kind, entry.state) for entry in found.walk()}
        assert told["undo#0"] == ("undo", "done")
        assert told["gather#1.0/pay#1"] == ("step", "done")
        assert told["undo:gather#1.0/pay#1"] == ("undo", "stuck")

    bench.run(scenario)
