"""Handlers in their own processes: the same calls, one commit in the worker, and deaths that affect only themselves."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import isolated_tasks as tasks
import pytest
from isolated_scene import SECONDS_MAX, Bench, result_of
from isolated_tasks import app

from onefold import App, Context, LeaseLostError, State, limits
from onefold.store import Query

HERE = Path(__file__).parent


@pytest.mark.parametrize("task", [tasks.on_loop, tasks.in_thread], ids=["on loop", "in thread"])
def test_rows_sends_and_result_commit_together_or_not_at_all(bench: Bench, task: Any) -> None:
    """P6, B18: the calls are the same as elsewhere, and the commit is the worker's."""

    async def scenario() -> None:
        failed = await task.send(bench.insert, fails=True)
        await app.work(queues=["default"], until_idle=True)
        assert (await bench.record(failed)).state is State.DEAD
        assert (await bench.effects(), await bench.children()) == ([], [])
        sent = await task.send(bench.insert)
        await app.work(queues=["default"], until_idle=True)
        seen = await sent.result()
        assert (seen["before"], seen["inside"]) == ([[0]], [["row"]])
        assert await bench.effects() == ["row"]
        children = await bench.children()
        assert len({one.envelope.idempotency_key for one in children}) == 3
        assert {one.envelope.causation_id for one in children} == {sent.id}
        message = (await bench.record(sent)).envelope
        assert (seen["attempt"], seen["key"]) == (1, message.idempotency_key)
        assert seen["held"] >= bench.clock.now() / 1e6
        assert seen["upstream"].startswith("onefold-stripe-")
        # Resources opened by the lifespan belong to the process of the handler.
        assert seen["resources"] == seen["pid"] != os.getpid()

    bench.run(scenario)


def test_an_isolated_subscriber_publishes_with_its_commit(sqlite_bench: Bench) -> None:
    """I12."""

    async def scenario() -> None:
        await tasks.placed.publish(sqlite_bench.insert)
        while await sqlite_bench.work():
            pass
        messages = {one.envelope.message_type: one for one in await app.find(Query())}
        assert await sqlite_bench.effects() == ["confirmed"]
        assert int(messages["confirm"].result or b"") != os.getpid()
        event = messages["order.confirmed"].envelope
        assert (event.causation_id, event.payload_inline) == (messages["confirm"].envelope.id, b'"yes"')

    sqlite_bench.run(scenario)


#: The ways in which a process dies, and how each is reported.
DEATHS = {"segfault": "SIGSEGV", "abort": "SIGABRT", "exit": "exit code 0", "killed": "SIGKILL"}


@pytest.mark.parametrize("task", [tasks.dies, tasks.dies_in_thread], ids=["on loop", "in thread"])
def test_a_process_that_dies_is_a_crash_and_three_are_enough(sqlite_bench: Bench, task: Any) -> None:
    """Fault 20: exit 0 is no success, no attempt is used up, and the evidence is kept."""
    bench = sqlite_bench

    async def scenario() -> None:
        receipts = dict(zip(DEATHS, await app.send_many(task.call(how) for how in DEATHS), strict=True))
        neighbour = await tasks.tells_its_pid.send()
        await bench.work()
        assert (await bench.record(neighbour)).state is State.DONE
        for how, sent in receipts.items():
            record = await bench.record(sent)
            assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 0, 1)
            (attempt,) = await app.store.attempts(sent.id)
            assert (attempt.failure.reason, attempt.delay) == ("crashed", 5.0)
            assert DEATHS[how] in attempt.failure.error_message
            assert ("isolated_tasks.py" in attempt.failure.stack) == (how in ("segfault", "abort"))
        for seconds in (5, 10):
            bench.clock.advance(seconds)
            await bench.work()
        for sent in receipts.values():
            record = await bench.record(sent)
            assert (record.state, record.attempt) == (State.DEAD, 0)
            assert record.failure is not None
            assert record.failure.reason == "quarantined"
            assert "3 times" in record.failure.error_message
        assert await bench.effects() == []

    bench.run(scenario)


@pytest.mark.parametrize("task", [tasks.fails_on_loop, tasks.fails_in_thread], ids=["on loop", "in thread"])
def test_whatever_an_isolated_handler_raises_is_a_failure(sqlite_bench: Bench, task: Any) -> None:
    """Fault 19: it is no crash, and the process lives to run the next message."""
    bench = sqlite_bench

    async def scenario() -> None:
        receipts = dict(zip(tasks.FAILURES, await app.send_many(map(task.call, tasks.FAILURES)), strict=True))
        others = await app.send_many(tasks.tells_its_pid.call() for _ in receipts)
        await app.work(until_idle=True, concurrency=1)
        for how, sent in receipts.items():
            record = await bench.record(sent)
            assert (record.state, record.attempt, record.crashes) == (State.DEAD, 1, 0)
            assert record.failure is not None
            assert record.failure.error_type == how
        assert await bench.effects() == []
        assert len({await one.result() for one in others}) == 1

    bench.run(scenario)


def test_a_failure_is_judged_by_the_policy_and_keeps_its_stack(sqlite_bench: Bench) -> None:
    """C9: the policy is applied in the process of the handler, where the exception exists."""
    bench = sqlite_bench

    async def scenario() -> None:
        sent = await tasks.judged.send()
        await bench.work()
        failure = (await bench.record(sent)).failure
        assert failure is not None
        assert (failure.reason, failure.error_type) == ("permanent", "isolated_tasks.GoneError")
        assert "in judged" in failure.stack

    bench.run(scenario)


def test_a_result_that_cannot_be_kept_fails_the_run(sqlite_bench: Bench) -> None:
    """Fault 22."""
    bench = sqlite_bench

    async def scenario() -> None:
        receipts = await app.send_many(tasks.bad_result.call(how) for how in ("object", "large", "nan"))
        await app.work(until_idle=True, concurrency=1)
        for sent in receipts:
            record = await bench.record(sent)
            assert record.failure is not None
            assert (record.state, record.failure.reason) == (State.DEAD, "contract")
            assert record.failure.error_message.startswith("result: ")
        assert await bench.effects() == []

    bench.run(scenario)


@pytest.mark.parametrize("task", [tasks.catches_everything, tasks.cleans_up, tasks.holds_the_interpreter])
def test_a_handler_past_its_time_ends_whatever_it_does(
    sqlite_bench: Bench, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C20, fault 21: it ends by itself or with its process; a failure, not a crash, and only its own."""
    bench = sqlite_bench
    # The process has the usual grace, and the worker intervenes soon after it.
    monkeypatch.setattr(limits, "HARD_TIMEOUT_GRACE", limits.HANDLER_GRACE + 1)

    async def scenario() -> None:
        sent = await task.send()
        before, after = await tasks.tells_its_pid.send(), await tasks.tells_its_pid.send()
        await app.work(until_idle=True, concurrency=1)
        record = await bench.record(sent)
        assert (record.state, record.attempt, record.crashes) == (State.DEAD, 1, 0)
        assert record.failure is not None
        assert record.failure.error_type == "onefold.errors.HandlerTimeoutError"
        assert await bench.effects() == []
        assert [(await bench.record(one)).state for one in (before, after)] == [State.DONE, State.DONE]

    bench.run(scenario)


async def read_line(path: Path) -> tuple[int, Any]:
    """Return the process id from the pipe, and the open pipe, which reaches its end when all writers are gone."""
    file = await asyncio.to_thread(path.open)
    return int(await asyncio.to_thread(file.readline)), file


@pytest.mark.parametrize("by", ["stop", "lost lease"])
def test_the_process_is_killed_when_its_run_is_over(sqlite_bench: Bench, tmp_path: Path, by: str) -> None:
    """G4, C30: a run that can no longer commit need not continue, and uses up no attempt."""
    bench, pipe = sqlite_bench, tmp_path / "pipe"
    os.mkfifo(pipe)

    async def scenario() -> None:
        sent = await tasks.hangs.send(str(pipe))
        working = asyncio.create_task(app.work(stop_after=0.05))
        pid, file = await read_line(pipe)
        if by == "stop":
            app.stop_working()
        else:
            assert await app.cancel(sent.id, actor="test", reason="taken over")
        ended = asyncio.create_task(asyncio.to_thread(file.read))
        while not ended.done():
            bench.clock.advance(5)
            await asyncio.wait([ended], timeout=0.01)
        app.stop_working()
        await working
        assert pid != os.getpid()
        record = await bench.record(sent)
        assert (record.attempt, record.crashes) == (0, 0)
        assert record.state is (State.SCHEDULED if by == "stop" else State.CANCELLED)
        file.close()

    bench.run(scenario)


@pytest.mark.parametrize("where", ["python", "c", "program"])
def test_when_its_worker_is_killed_a_process_ends_too(sqlite_url: str, tmp_path: Path, where: str) -> None:
    """Fault 20: even while its handler never yields, or holds the interpreter's lock in C."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = (
        "import asyncio, isolated_tasks as tasks\n"
        "async def main():\n"
        "    await tasks.app.migrate()\n"
        "    async with tasks.app:\n"
        f"        await tasks.hangs.send({str(pipe)!r}, {where!r})\n"
        "        await tasks.app.work()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "ONEFOLD_URL": sqlite_url, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    worker = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        with pipe.open() as file:
            pid = int(file.readline())
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            assert pid != worker.pid
            # The pipe reaches its end when the process of the handler is gone.
            ended, _, _ = select.select([file], [], [], SECONDS_MAX / 4)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            assert ended
            assert file.read() == ""
    finally:
        worker.kill()
        worker.wait()


def test_processes_are_used_again_and_end_with_the_worker(sqlite_bench: Bench) -> None:
    """P6: starting a process takes longer than most handlers do."""
    bench = sqlite_bench

    async def scenario() -> None:
        receipts = await app.send_many(tasks.tells_its_pid.call() for _ in range(5))
        await app.work(until_idle=True, concurrency=1)
        pids = {await one.result() for one in receipts}
        assert len(pids) == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pids.pop(), 0)

    bench.run(scenario)


def test_a_process_that_dies_between_two_messages_blames_no_message(sqlite_bench: Bench) -> None:
    """Fault 20: the next message goes to another process, and is not blamed."""
    bench = sqlite_bench

    async def scenario() -> None:
        working = asyncio.create_task(app.work(concurrency=1))
        pid = await result_of(await tasks.tells_its_pid.send())
        os.kill(pid, signal.SIGKILL)
        second = await tasks.tells_its_pid.send()
        assert await result_of(second) != pid
        assert (await bench.record(second)).crashes == 0
        app.stop_working()
        await working

    bench.run(scenario)


def test_no_more_processes_are_started_than_allowed(sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a message that waits for a process uses up no attempt."""
    bench = sqlite_bench
    monkeypatch.setattr(limits, "ISOLATED_PROCESSES_MAX", 2)

    async def scenario() -> None:
        receipts = await app.send_many(tasks.tells_its_pid.call() for _ in range(12))
        await app.work(until_idle=True, concurrency=6)
        assert len({await one.result() for one in receipts}) <= 2

    bench.run(scenario)


@pytest.mark.parametrize("how", ["die", "live"])
def test_a_fork_that_outlives_its_handler_does_not_hide_its_death(sqlite_bench: Bench, how: str) -> None:
    """Fault 21: the fork keeps the pipe open, and the death is noticed nevertheless."""
    bench = sqlite_bench

    async def scenario() -> None:
        sent = await tasks.leaves_a_child.send(how)
        await bench.work()
        record = await bench.record(sent)
        if how == "die":
            assert (record.crashes, record.state) == (1, State.SCHEDULED)
            (attempt,) = await app.store.attempts(sent.id)
            assert "exit code 7" in attempt.failure.error_message
        else:
            assert record.state is State.DONE
            os.kill(await sent.result(), signal.SIGKILL)

    bench.run(scenario)


def test_tasks_that_outlive_the_handler_and_late_work_are_refused(sqlite_bench: Bench) -> None:
    """C25: as elsewhere; after the commit there would be no process to run them."""
    bench = sqlite_bench

    async def scenario() -> None:
        receipts = await app.send_many([tasks.stray.call(), tasks.late.call()])
        await bench.work()
        stray, late = [(await app.store.attempts(one.id) or [None])[0] for one in receipts]
        assert stray is not None
        assert "left-alone" in stray.failure.error_message
        assert (await bench.record(receipts[1])).state is State.DEAD
        failure = (await bench.record(receipts[1])).failure
        assert failure is not None
        assert "ctx.send()" in failure.error_message
        assert late is None or late.failure == failure

    bench.run(scenario)


def test_values_of_postgresql_arrive_as_what_they_are(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: in both directions, without pickle."""
    monkeypatch.setenv("ONEFOLD_URL", postgres_url)

    async def scenario() -> None:
        sent = await tasks.echoes.send()
        await app.work(until_idle=True)
        assert await sent.result() is True

    Bench(postgres_url).run(scenario)


def test_what_cannot_pass_is_refused_with_a_reason(sqlite_bench: Bench) -> None:
    """P3: a value without a plain form, and a value larger than a frame; the run continues."""
    bench = sqlite_bench

    async def scenario() -> None:
        impossible, too_much = await app.send_many([tasks.asks_for_the_impossible.call(), tasks.asks_too_much.call()])
        await bench.work()
        assert "builtins.object cannot pass" in await impossible.result()
        assert str(limits.FRAME_BYTES_MAX) in await too_much.result()

    bench.run(scenario)


def test_errors_of_the_driver_can_be_caught(sqlite_bench: Bench) -> None:
    """P6: by their own class."""
    bench = sqlite_bench

    async def scenario() -> None:
        sent = await tasks.catches_the_drivers_error.send()
        await bench.work()
        assert "NOT NULL" in await sent.result()

    bench.run(scenario)


def test_a_handler_whose_message_was_taken_over_cannot_commit(sqlite_bench: Bench) -> None:
    """C14: the fence is checked in the worker, where the commit is."""
    bench = sqlite_bench

    @app.middleware
    async def take_over(ctx: Context, proceed: Callable[[], Awaitable[Any]]) -> Any:
        result = await proceed()
        if ctx.message.message_type == "on_loop":
            await ctx.roll_back(LeaseLostError("for the test, so that the store can be written"))
            raise LeaseLostError("taken over")
        return result

    async def scenario() -> None:
        sent = await tasks.on_loop.send(bench.insert)
        await bench.work()
        assert (await bench.record(sent)).state is State.LEASED
        assert await bench.effects() == []

    try:
        bench.run(scenario)
    finally:
        app._middleware.remove(take_over)


@pytest.mark.parametrize("how", ["known", "unknown"])
def test_an_effect_is_recorded_as_elsewhere(sqlite_bench: Bench, how: str) -> None:
    """B20: ``ctx.once`` in a process writes the same journal, and its effects can be uncertain as well."""
    bench = sqlite_bench

    async def scenario() -> None:
        sent = await tasks.charges_once.options(key="charge").send(how)
        await bench.work()
        record = await bench.record(sent)
        (entry,) = await app.ledger(sent.id)
        if how == "known":
            assert (await sent.result(), entry.state) == ("charged", "done")
            return
        assert (entry.name, entry.state, record.state) == ("charge", "uncertain", State.DEAD)
        assert await app.redrive([sent.id], actor="ada", reason="try")
        await bench.work()
        assert (await bench.record(sent)).state is State.PARKED

    bench.run(scenario)


def test_a_task_of_a_plain_app_can_be_isolated(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: its process finds it in the same way."""
    monkeypatch.setenv("ONEFOLD_URL", sqlite_url)
    with tasks.plain as plain:
        plain.migrate()
        sent = tasks.of_a_plain_app.send(21)
        plain.work(until_idle=True)
        assert sent.result() == 42


def test_a_task_that_its_process_cannot_find_says_so(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: the app must be found in the module of the handler."""
    monkeypatch.setenv("ONEFOLD_URL", sqlite_url)

    async def scenario() -> None:
        hidden: App = tasks.HIDDEN[0]
        await hidden.migrate()
        async with hidden:
            sent = await hidden.tasks["lost"].send()
            await hidden.work(until_idle=True)
            (found,) = await hidden.find(Query(ids=(sent.id,)))
            assert found.failure is not None
            assert "holds neither the isolated task lost nor the app" in found.failure.error_message

    asyncio.run(scenario())


def test_a_task_of_the_main_program_is_refused(sqlite_url: str) -> None:
    """P3: at its declaration, not at its first run."""
    program = (
        "from onefold import App, ConfigurationError\n"
        "app = App()\n"
        "try:\n"
        "    @app.task(isolate=True)\n"
        "    async def handler() -> None: ...\n"
        "except ConfigurationError as error:\n"
        "    print(error)\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "declare it in a module of its own" in printed


def test_nothing_but_the_lines_thread_is_left_in_an_idle_process(sqlite_bench: Bench) -> None:
    """A waiting process should use as little memory as possible."""
    bench = sqlite_bench

    async def scenario() -> None:
        sent = await tasks.prints_its_threads.send()
        await bench.work()
        assert await sent.result() == "MainThread onefold-line"

    bench.run(scenario)
