"""Workflows that wait: for time, for signals, for children, and for several things at once."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    CancelledMessageError,
    ConfigurationError,
    Context,
    DeadError,
    DecodeError,
    Reject,
    RetryPolicy,
    Run,
    SignalTimeoutError,
    State,
    StepError,
)
from onefold.store import Query
from onefold.testing import drain

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


async def names(bench: Bench, run_id: str) -> list[str]:
    return [f"{step.name} {step.kind.name}" for step in await bench.app.journal(run_id)]


async def _nothing() -> None: ...


# time


def test_a_run_sleeps_for_weeks_and_holds_no_worker(bench: Bench) -> None:
    """H4."""
    woken: list[Any] = []

    @bench.app.workflow
    async def remind(run: Run) -> int:
        began = run.now()
        for _ in range(3):
            await run.sleep(days=14, hours=1)
            woken.append(bench.clock.moment - began)
        await run.sleep(timedelta(minutes=5))
        return len(woken)

    async def scenario() -> None:
        receipt = await remind.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DONE
        week = timedelta(days=14, hours=1)
        assert sorted(set(woken)) == [week, 2 * week, 3 * week, 3 * week + timedelta(minutes=5)]
        assert (await bench.record(receipt)).attempt == 0

    bench.run(scenario)


def test_a_run_that_has_parked_does_not_expire(sqlite_bench: Bench) -> None:
    """Expiry applies to messages that never started or are being retried."""
    bench = sqlite_bench

    @bench.app.workflow(expires=timedelta(hours=1))
    async def slow(run: Run) -> str:
        await run.sleep(days=30)
        return "slept"

    async def scenario() -> None:
        late, receipt = await slow.options(delay=0).send(), None
        bench.clock.advance(timedelta(hours=2))
        receipt = await slow.send()
        await drain(bench.app)
        assert (await bench.record(late)).state is State.DEAD
        assert await receipt.result() == "slept"

    bench.run(scenario)


# signals


def test_a_run_waits_for_a_signal(bench: Bench) -> None:
    """H4: a signal that came before the wait, and one that comes during it, with a type."""

    @bench.app.workflow
    async def onboard(run: Run) -> str:
        answer = await run.signal("confirmed", type=bool)
        await run.sleep(1.0)
        note = await run.signal("note")
        return f"{answer!r} {note!r}"

    async def scenario() -> None:
        receipt = await onboard.send()
        assert await bench.app.signal(receipt.id, "note", {"early": 1})
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.PARKED
        assert await bench.app.signal(receipt.id, "confirmed", True)
        await drain(bench.app)
        assert await receipt.result() == "True {'early': 1}"

    bench.run(scenario)


def test_signals_of_one_name_are_given_out_in_their_order_and_each_once(bench: Bench) -> None:
    @bench.app.workflow
    async def collect(run: Run) -> list[int]:
        found = []
        for number in range(4):
            found.append(await run.signal("item", type=int))
            if number == 1:
                await run.step(_nothing)
        return found

    async def scenario() -> None:
        receipt = await collect.send()
        await bench.work()
        for number, id_ in ((3, "c"), (1, "a"), (3, "c"), (2, "b")):
            await bench.app.signal(receipt.id, "item", number, id=id_)
        await drain(bench.app)
        await bench.app.signal(receipt.id, "item", 9, id="a")
        assert (await bench.record(receipt)).state is State.PARKED
        await bench.app.signal(receipt.id, "item", 4)
        await drain(bench.app)
        assert await receipt.result() == [3, 1, 2, 4]
        assert not await bench.app.signal(receipt.id, "item", 5)

    bench.run(scenario)


def test_a_signal_that_does_not_come_in_time_is_given_up(bench: Bench) -> None:
    """H4: the time counts from the first wait, and a wait that was given up stays given up."""
    seen: list[str] = []

    @bench.app.workflow
    async def onboard(run: Run) -> str:
        try:
            return str(await run.signal("confirmed", timeout=timedelta(days=7)))
        except SignalTimeoutError:
            seen.append("late")
        await run.step(_nothing)
        await run.sleep(days=1)
        return f"late, then {await run.signal('confirmed')}"

    async def scenario() -> None:
        receipt = await onboard.send()
        await bench.work()
        await bench.app.signal(receipt.id, "other", 1)
        await bench.work()
        bench.clock.advance(timedelta(days=6, hours=23))
        assert await bench.work() == 0
        bench.clock.advance(timedelta(hours=1))
        await bench.work()
        await bench.app.signal(receipt.id, "confirmed", "yes")
        await drain(bench.app)
        assert await receipt.result() == "late, then yes"
        assert len(seen) >= 2

    bench.run(scenario)


def test_a_signal_that_comes_with_the_deadline_is_still_taken(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.workflow
    async def onboard(run: Run) -> str:
        return await run.signal("confirmed", timeout=60, type=str)

    async def scenario() -> None:
        receipt = await onboard.send()
        await bench.work()
        bench.clock.advance(60)
        await bench.app.signal(receipt.id, "confirmed", "yes")
        await drain(bench.app)
        assert await receipt.result() == "yes"

    bench.run(scenario)


def test_an_uncaught_deadline_ends_the_run_and_a_redrive_takes_what_came_since(bench: Bench) -> None:
    @bench.app.workflow
    async def onboard(run: Run) -> str:
        return await run.signal("confirmed", timeout=60, type=str)

    async def scenario() -> None:
        receipt = await onboard.send()
        await drain(bench.app)
        record = await bench.record(receipt)
        assert record.failure is not None
        assert record.failure.reason == "no signal"
        assert await bench.app.signal(receipt.id, "confirmed", "after all")
        await bench.app.redrive([receipt.id], actor="ada", reason="the customer called")
        await drain(bench.app)
        assert await receipt.result() == "after all"

    bench.run(scenario)


def test_a_signal_leaves_with_the_commit_it_is_part_of(bench: Bench) -> None:
    """B23: from a transaction, from a handler, from a step and from another workflow, all or nothing."""

    @bench.app.workflow
    async def collect(run: Run, number: int) -> list[str]:
        return [await run.signal("item", type=str) for _ in range(number)]

    @bench.app.task(retry=RetryPolicy(max_attempts=2))
    async def plain(ctx: Context, run_id: str) -> None:
        ctx.signal(run_id, "item", "handler")
        await bench.app.signal(run_id, "item", "handler again")
        if ctx.attempt == 1:
            raise ValueError

    @bench.app.task
    async def writing(ctx: Context, run_id: str) -> None:
        await bench.insert(ctx, "row")
        ctx.signal(run_id, "item", "writer")

    async def step(ctx: Context, run_id: str) -> None:
        ctx.signal(run_id, "item", "step")

    @bench.app.workflow
    async def other(run: Run, run_id: str) -> None:
        await bench.app.signal(run_id, "item", "workflow")
        await run.step(step, run_id)
        await run.sleep(1.0)

    async def scenario() -> None:
        receipt = await collect.send(7)
        await bench.work()
        with pytest.raises(ZeroDivisionError):
            await failing(receipt.id)
        async with bench.app.transaction() as tx:
            tx.signal(receipt.id, "item", "transaction", id="t")
            await bench.app.signal(receipt.id, "item", "transaction again")
        await plain.send(receipt.id)
        await bench.work()
        await writing.send(receipt.id)
        await other.send(receipt.id)
        await drain(bench.app)
        assert sorted(await receipt.result()) == [
            "handler",
            "handler again",
            "step",
            "transaction",
            "transaction again",
            "workflow",
            "writer",
        ]

    async def failing(run_id: str) -> None:
        async with bench.app.transaction() as tx:
            tx.signal(run_id, "item", "never")
            raise ZeroDivisionError

    bench.run(scenario)


def test_a_signal_that_does_not_fit_parks_the_run_with_a_clear_word(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.workflow
    async def collect(run: Run) -> int:
        return await run.signal("item", type=int)

    async def scenario() -> None:
        receipt = await collect.send()
        await bench.app.signal(receipt.id, "item", "seven")
        await drain(bench.app)
        record = await bench.record(receipt)
        assert record.failure is not None
        assert (record.state, record.failure.reason) == (State.PARKED, "unreadable signal")
        assert "signal 'item'" in record.failure.error_message
        with pytest.raises(DecodeError):
            await bench.app.signal(receipt.id, "item", object())
        with pytest.raises(ConfigurationError):
            await bench.app.signal(receipt.id, "not a name", 1)

    bench.run(scenario)


# children


def test_a_run_waits_for_its_children(bench: Bench) -> None:
    """H4, H5: tasks and workflows, with options; named after their step."""

    @bench.app.task
    async def double(number: int) -> int:
        return number * 2

    @bench.app.workflow
    async def inner(run: Run, number: int) -> int:
        await run.sleep(days=1)
        return await run.child(double, number) + 1

    @bench.app.workflow
    async def outer(run: Run) -> list[int]:
        return [
            await run.child(double, 2),
            await run.child(double.options(delay=60), 3),
            await run.child(inner, 4),
        ]

    async def scenario() -> None:
        receipt = await outer.send()
        await drain(bench.app)
        assert await receipt.result() == [4, 6, 9]
        children = [one.envelope for one in await bench.messages() if one.envelope.id != receipt.id]
        assert {one.correlation_id for one in children} == {receipt.id}
        own = {one.causation_id for one in children if receipt.id in one.causation_id}
        assert own == {f"workflow:{receipt.id}/{name}" for name in ("double#1", "double#2", "inner#1")}

    bench.run(scenario)


def test_the_failure_of_a_child_is_raised_and_may_be_caught(bench: Bench) -> None:
    @bench.app.task
    async def fails(number: int) -> None:
        raise Reject(f"no {number}")

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            await run.child(fails, 1)
        except DeadError as error:
            await run.sleep(1.0)
            return f"{error.reason}: {error.error_message}"
        return "never"

    @bench.app.workflow
    async def careless(run: Run) -> None:
        await run.child(fails, 2)

    async def scenario() -> None:
        caught, uncaught = await flow.send(), await careless.send()
        await drain(bench.app)
        assert await caught.result() == "rejected: no 1"
        record = await bench.record(uncaught)
        assert record.failure is not None
        assert record.failure.reason == "child failed"

    bench.run(scenario)


def test_a_child_that_is_redriven_and_then_its_parent_succeed(bench: Bench) -> None:
    broken = [True]

    @bench.app.task
    async def fails() -> str:
        if broken:
            raise Reject("broken")
        return "mended"

    @bench.app.workflow
    async def flow(run: Run) -> str:
        return await run.child(fails)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        dead = [one.envelope.id for one in await bench.messages() if one.state is State.DEAD]
        assert len(dead) == 2
        broken.clear()
        child = next(id_ for id_ in dead if id_ != receipt.id)
        await bench.app.redrive([child], actor="ada", reason="mended")
        await drain(bench.app)
        await bench.app.redrive([receipt.id], actor="ada", reason="its child is through")
        await drain(bench.app)
        assert await receipt.result() == "mended"

    bench.run(scenario)


def test_what_the_code_made_of_a_childs_failure_stays_true(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    broken, seen = [True], list[str]()

    @bench.app.task
    async def fails() -> str:
        if broken:
            raise Reject("broken")
        return "mended"

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            seen.append(await run.child(fails))
        except DeadError:
            seen.append("failed")
        await run.sleep(days=1)
        return seen[-1]

    async def scenario() -> None:
        receipt = await flow.send()
        for _ in range(3):
            await bench.work()
        child = next(one.envelope.id for one in await bench.messages() if one.state is State.DEAD)
        broken.clear()
        await bench.app.redrive([child], actor="ada", reason="mended")
        await drain(bench.app)
        assert await receipt.result() == "failed"

    bench.run(scenario)


def test_a_cancelled_child_is_reported_to_its_parent(bench: Bench) -> None:
    @bench.app.task
    async def leaf() -> None: ...

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            await run.child(leaf.options(delay=3_600))
        except CancelledMessageError as error:
            return str(error)
        return "never"

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        (child,) = [one.envelope.id for one in await bench.messages() if one.envelope.message_type == "leaf"]
        assert await bench.app.cancel(child, actor="ada", reason="not needed")
        await bench.work()
        assert "cancelled" in await receipt.result()

    bench.run(scenario)


@pytest.mark.parametrize("already", ["done", "waiting"])
def test_a_child_that_was_sent_before_is_not_sent_again(bench: Bench, already: str) -> None:
    """B1: the same work under the same key happens once, however many senders ask for it."""
    ran: list[int] = []

    @bench.app.task(key="{order}")
    async def charge(order: int) -> str:
        ran.append(order)
        return f"paid {order}"

    @bench.app.workflow
    async def flow(run: Run) -> tuple[str, ...]:
        return await run.gather(run.child(charge, 7), run.child(charge, 8), run.child(charge, 7))

    async def scenario() -> None:
        await charge.options(delay=0 if already == "done" else 7 * 86_400).send(7)
        await bench.work()
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == ("paid 7", "paid 8", "paid 7")
        assert sorted(ran) == [7, 8]
        assert len([one for one in await bench.messages() if one.envelope.message_type == "charge"]) == 2

    bench.run(scenario)


def test_a_childs_key_with_another_payload_ends_the_run(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.task(key="{order}")
    async def charge(order: int, cents: int) -> None: ...

    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.child(charge, 7, 200)

    async def scenario() -> None:
        await charge.send(7, 100)
        receipt = await flow.send()
        await drain(bench.app)
        record = await bench.record(receipt)
        assert record.failure is not None
        assert record.failure.reason == "key reuse"

    bench.run(scenario)


def test_a_run_that_is_cancelled_stays_so(bench: Bench) -> None:
    @bench.app.workflow
    async def flow(run: Run) -> None:
        await run.signal("never")

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await bench.app.cancel(receipt.id, actor="ada", reason="not needed")
        assert not await bench.app.signal(receipt.id, "never")
        assert await bench.work() == 0
        assert (await bench.record(receipt)).state is State.CANCELLED

    bench.run(scenario)


# several at once


def test_steps_are_gathered_concurrently(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    both = asyncio.Barrier(2)

    async def meet(name: str) -> str:
        await both.wait()
        return name

    @bench.app.workflow
    async def flow(run: Run) -> tuple[str, str, str]:
        one, two = await run.gather(run.step(meet, "a"), run.step(meet, "b"))
        await run.sleep(1.0)
        return one, two, "c"

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == ("a", "b", "c")
        assert sorted(await names(bench, receipt.id)) == ["meet#1 RESULT", "meet#2 RESULT", "sleep#1 TIMER"]

    bench.run(scenario)


def test_a_thousand_children_wake_their_run_once(bench: Bench) -> None:
    """H4: the run is claimed to start them and to take their results, and not in between."""
    stretches: list[int] = []

    @bench.app.task
    async def square(number: int) -> int:
        return number * number

    @bench.app.workflow
    async def flow(run: Run) -> int:
        stretches.append(1)
        return sum(await run.gather(*(run.child(square, n) for n in range(1_000))))

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == sum(n * n for n in range(1_000))
        assert len(stretches) == 2

    bench.run(scenario)


def test_branches_wait_for_different_things_and_go_on_by_themselves(bench: Bench) -> None:
    """H2: steps of concurrent branches are told apart, in whatever order they end."""
    order: list[str] = []

    async def note(text: str) -> str:
        order.append(text)
        return text

    @bench.app.task
    async def leaf(text: str) -> str:
        return text

    async def branch(run: Run, name: str, length: float) -> str:
        await run.step(note, f"{name} begins")
        await run.sleep(length)
        told = await run.child(leaf, name)
        return await run.step(note, f"{name} ends, {told}")

    @bench.app.workflow
    async def flow(run: Run) -> tuple[Any, ...]:
        both = await run.gather(branch(run, "slow", 600), branch(run, "quick", 60), run.signal("go"))
        return (*both, await run.step(note, "over"))

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        await bench.app.signal(receipt.id, "go", "went")
        await drain(bench.app)
        assert await receipt.result() == ("slow ends, slow", "quick ends, quick", "went", "over")
        assert order == ["slow begins", "quick begins", "quick ends, quick", "slow ends, slow", "over"]
        assert "gather#1.0/note#2 RESULT" in await names(bench, receipt.id)

    bench.run(scenario)


def test_a_gather_waits_for_all_and_raises_the_first_by_place(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    late = asyncio.Event()
    done: list[str] = []

    async def fails_late(text: str) -> None:
        await late.wait()
        raise Reject(text)

    async def fails_soon(text: str) -> None:
        late.set()
        raise Reject(text)

    async def works() -> None:
        await late.wait()
        done.append("works")

    @bench.app.workflow
    async def flow(run: Run) -> str:
        try:
            await run.gather(run.step(fails_late, "one"), run.step(fails_soon, "two"), run.step(works))
        except StepError as error:
            await run.sleep(1.0)
            return error.error_message
        return "never"

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == "one"
        assert done == ["works"]

    bench.run(scenario)


def test_a_branch_that_retries_later_does_not_hold_up_the_others(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    tries: list[int] = []

    async def flaky() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return "flaky"

    async def steady() -> str:
        return "steady"

    policy = RetryPolicy(base=600.0, fixed=True)

    @bench.app.workflow
    async def flow(run: Run) -> tuple[str, str]:
        return await run.gather(run.options(retry=policy).step(flaky), run.step(steady))

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert "steady#1 RESULT" in await names(bench, receipt.id)
        await drain(bench.app)
        assert await receipt.result() == ("flaky", "steady")
        assert len(tries) == 3

    bench.run(scenario)


def test_gathers_may_be_nested_and_empty(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    async def one(number: int) -> int:
        return number

    async def pair(run: Run, number: int) -> int:
        return sum(await run.gather(run.step(one, number), run.step(one, number + 1)))

    @bench.app.workflow
    async def flow(run: Run) -> tuple[Any, ...]:
        assert await run.gather() == ()
        return await run.gather(pair(run, 1), run.gather(run.step(one, 7), run.sleep(1.0)), pair(run, 10))

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == (3, [7, None], 21)

    bench.run(scenario)


def test_many_runs_at_once_keep_their_journals_apart(bench: Bench) -> None:
    async def add(one: int, other: int) -> int:
        return one + other

    @bench.app.workflow
    async def flow(run: Run, number: int) -> int:
        for _ in range(5):
            number = await run.step(add, number, 1)
        return number

    async def scenario() -> None:
        receipts = await bench.app.send_many(flow.call(n) for n in range(60))
        await bench.work()
        assert [await receipt.result() for receipt in receipts] == [n + 5 for n in range(60)]
        assert await bench.app.find(Query(states=(State.SCHEDULED, State.LEASED, State.PARKED))) == []

    bench.run(scenario)


def test_single_failures_may_be_kept_among_the_results(bench: Bench) -> None:
    """Of steps, children, waits and coroutines; every replay returns the same failures."""
    once = RetryPolicy(max_attempts=1)

    @bench.app.task(retry=once)
    async def child(number: int) -> int:
        if number == 2:
            raise ValueError("the child fails")
        return number

    async def step(number: int) -> int:
        if number == 2:
            raise ValueError("the step fails")
        return number

    async def branch(run: Run, number: int) -> int:
        if number == 2:
            raise KeyError("the branch fails")
        return await run.child(child, number)

    @bench.app.workflow(retry=once)
    async def flow(run: Run) -> list[str]:
        strict = run.options(retry=once)
        found = await run.gather(
            run.child(child, 1), run.child(child, 2), strict.step(step, 1), strict.step(step, 2),
            branch(run, 1), branch(run, 2), run.signal("go", timeout=1),
            return_exceptions=True,
        )  # fmt: skip
        await run.sleep(1)
        return [type(one).__name__ if isinstance(one, Exception) else str(one) for one in found]

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert await receipt.result() == ["1", "DeadError", "1", "StepError", "1", "KeyError", "SignalTimeoutError"]

    bench.run(scenario)


def test_branches_that_wait_leave_no_noise_behind(sqlite_bench: Bench) -> None:
    """Asyncio complains when a task is collected with an exception that was never retrieved."""
    bench, noise = sqlite_bench, list[str]()

    @bench.app.task
    async def item(number: int) -> int:
        return number

    @bench.app.workflow
    async def fan(run: Run) -> int:
        async def one(number: int) -> int:
            return await run.child(item, number)

        return sum(await run.gather(*(one(number) for number in range(10))))

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context["message"]))
        receipt = await fan.send()
        await bench.work()
        assert await receipt.result() == 45
        gc.collect()
        assert noise == []

    bench.run(scenario)


def test_commands_of_others_that_were_given_up_do_not_keep_the_run_busy(bench: Bench) -> None:
    """They are no longer awaited, so they count neither among the reported children nor among those to look for."""
    stretches = list[int]()

    @bench.app.task(key="{key}", queue="unserved")
    async def foreign(key: str) -> int:
        return 1

    @bench.app.task(queue="unserved")
    async def own() -> int:
        return 2

    @bench.app.workflow
    async def flow(run: Run) -> int:
        stretches.append(1)
        first, second = (run.options(timeout=1).step(foreign, key) for key in "ab")
        found = await run.gather(first, second, run.child(own), return_exceptions=True)
        assert all(isinstance(one, StepError) for one in found[:2])
        assert isinstance(found[2], int)
        return found[2]

    async def scenario() -> None:
        await foreign.send("a")
        await foreign.send("b")
        receipt = await flow.send()
        for _ in range(20):
            await bench.app.work(queues=["default"], until_idle=True)
            bench.clock.advance(1)
        assert len(stretches) == 2
        await bench.app.work(queues=["unserved"], until_idle=True)
        await bench.work()
        assert (await receipt.result(), len(stretches)) == (2, 3)

    bench.run(scenario)


@pytest.mark.parametrize("verb", ["child", "step", "send"])
def test_a_run_cannot_reopen_the_dead_letter_of_another(sqlite_bench: Bench, verb: str) -> None:
    """The option would have no effect; so it is refused, at the call."""
    bench = sqlite_bench

    @bench.app.task(key="{key}")
    async def task(key: str) -> None: ...

    @bench.app.workflow(retry=RetryPolicy(max_attempts=1))
    async def flow(run: Run) -> str:
        with pytest.raises(ConfigurationError, match="if_dead='redrive' reopens another message"):
            await getattr(run, verb)(task.options(if_dead="redrive"), "k")
        return "refused"

    async def scenario() -> None:
        receipt = await flow.send()
        await bench.work()
        assert await receipt.result() == "refused"

    bench.run(scenario)
