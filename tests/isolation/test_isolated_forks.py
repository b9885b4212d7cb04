"""Processes that handlers start in their own: forks that come back, programs that stay, signals to all of them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from pathlib import Path
from typing import Any, NoReturn

import isolated_tasks as tasks
import pytest
from isolated_scene import Bench, result_of
from isolated_tasks import app

from onefold import State, limits


async def a_fork_answers_for_no_message(bench: Bench, directory: Path, task: Any, how: str) -> None:
    """A run makes a fork; during the next run in the same process the fork comes back up the stack."""
    pipe = directory / "pipe"
    os.mkfifo(pipe)
    working = asyncio.create_task(app.work(concurrency=1))
    try:
        fork = int(await result_of(await task.send(str(pipe), how)))
        sent = await tasks.lets_the_fork_go_on.send(bench.insert, str(pipe), fork)
        assert await result_of(sent) == "own"
        assert await bench.effects() == ["own"]
        record = await bench.record(sent)
        assert (record.state, record.attempt, record.crashes) == (State.DONE, 0, 0)
    finally:
        app.stop_working()
        await working


@pytest.mark.parametrize(
    ("task", "how"),
    [
        (tasks.forks, "returns"),
        (tasks.forks, "raises"),
        (tasks.forks, "awaits"),
        (tasks.forks_in_a_thread, "returns"),
        (tasks.forks_in_a_thread, "raises"),
    ],
    ids=["returns", "raises", "awaits", "returns in a thread", "raises in a thread"],
)
def test_a_fork_that_comes_back_answers_for_no_message(
    sqlite_bench: Bench, tmp_path: Path, task: Any, how: str
) -> None:
    """A failed ``os.execvp`` is enough; the next message must not be settled with the fork's answer."""
    sqlite_bench.run(lambda: a_fork_answers_for_no_message(sqlite_bench, tmp_path, task, how))


async def a_fork_does_not_answer_before_its_parent(task: Any) -> None:
    """The fork of a run comes back up the stack while its parent waits for it."""
    sent = await task.send()
    await app.work(until_idle=True)
    assert await sent.result() == "parent"


@pytest.mark.parametrize("task", [tasks.waits_for_its_fork, tasks.waits_for_its_fork_in_a_thread])
def test_a_fork_does_not_answer_before_its_parent(sqlite_bench: Bench, task: Any) -> None:
    """Within one run the number of the run is the same, so the fork must not write at all."""
    sqlite_bench.run(lambda: a_fork_does_not_answer_before_its_parent(task))


def test_forks_of_a_handler_can_be_told_to_end(sqlite_bench: Bench) -> None:
    """A process that leaves signals to its worker must not make its forks ignore them."""

    async def scenario() -> None:
        sent = await tasks.makes_a_pool.send(7)
        await sqlite_bench.work()
        assert await sent.result() == 14

    sqlite_bench.run(scenario)


def test_a_program_of_a_handler_ends_with_its_process(sqlite_bench: Bench, tmp_path: Path) -> None:
    """The process dies by itself; the pipe reaches its end when the program it started is gone too."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def scenario() -> None:
        sent = await tasks.dies_with_a_program.send(str(pipe))
        reading = asyncio.create_task(asyncio.to_thread(pipe.read_bytes))
        await sqlite_bench.work()
        assert await reading == b""
        assert (await sqlite_bench.record(sent)).crashes == 1

    sqlite_bench.run(scenario)


async def _open_for_writing(pipe: Path) -> None:
    await asyncio.to_thread(lambda: pipe.open("w").close())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_everything_does_not_reach_a_running_handler(
    sqlite_bench: Bench, tmp_path: Path, number: int
) -> None:
    """Systemd signals all processes of a service; the worker decides how long a handler may continue."""
    bench, pipe, release = sqlite_bench, tmp_path / "pipe", tmp_path / "release"
    os.mkfifo(pipe)
    os.mkfifo(release)

    async def scenario() -> None:
        sent = await tasks.stops_at.send(str(pipe), str(release))
        working = asyncio.create_task(app.work(concurrency=1))
        pid = int((await asyncio.to_thread(pipe.read_text)).strip())
        os.kill(pid, number)
        app.stop_working()
        await _open_for_writing(release)
        await working
        assert await sent.result() == pid
        assert (await bench.record(sent)).crashes == 0

    bench.run(scenario)


@pytest.mark.parametrize("first", ["the death", "the stop"])
def test_a_death_while_the_worker_stops_does_not_count(sqlite_bench: Bench, tmp_path: Path, first: str) -> None:
    """Otherwise three deployments would quarantine the message."""
    bench, pipe, release = sqlite_bench, tmp_path / "pipe", tmp_path / "release"
    os.mkfifo(pipe)
    os.mkfifo(release)

    async def scenario() -> None:
        sent = await tasks.stops_at.send(str(pipe), str(release), resists=False)
        working = asyncio.create_task(app.work(concurrency=1))
        pid = int((await asyncio.to_thread(pipe.read_text)).strip())
        if first == "the stop":
            app.stop_working()
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)
            app.stop_working()
        await working
        record = await bench.record(sent)
        assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 0, 0)

    bench.run(scenario)


def test_a_process_that_hangs_between_two_messages_is_replaced(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the next message nor a stop may wait for it, and the message is not to blame."""
    bench = sqlite_bench
    monkeypatch.setattr(limits, "ISOLATED_BEGIN_SECONDS", 0.5)

    async def scenario() -> None:
        working = asyncio.create_task(app.work(concurrency=1))
        pid = await result_of(await tasks.tells_its_pid.send())
        os.kill(pid, signal.SIGSTOP)
        second = await tasks.tells_its_pid.send()
        assert await result_of(second) != pid
        record = await bench.record(second)
        assert (record.attempt, record.crashes) == (0, 0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        app.stop_working()
        await working

    bench.run(scenario)


def test_a_lack_of_descriptors_is_no_failure_of_the_message(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message waits, without an attempt being counted, until there are descriptors."""
    bench = sqlite_bench

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    async def scenario() -> None:
        sent = await tasks.charges_once.send("known")
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socketpair", refuse)
            await bench.work()
            record = await bench.record(sent)
            assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 0, 0)
        bench.clock.advance(60)
        await bench.work()
        assert await sent.result() == "charged"

    bench.run(scenario)
