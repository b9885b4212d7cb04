"""Defects of the pipe between a worker and its isolated handlers, put back: the tests of the pipe find them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import isolated_tasks as tasks
import pytest
from isolated_scene import Bench
from msgspec.structs import replace
from tests.isolation.test_isolated_forks import a_fork_answers_for_no_message, a_fork_does_not_answer_before_its_parent
from tests.unit.isolation.test_isolation_process import an_answer_of_another_run_is_refused, become

from onefold import DeadError
from onefold.isolation.frames import AnsweredFrame, AskedFrame, FailedFrame, ReturnedFrame, RunFrame
from onefold.isolation.process import IsolatedProcess
from onefold.store import Said


@pytest.fixture
def bench(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ONEFOLD_URL", sqlite_url)
    return Bench(sqlite_url)


@pytest.fixture
def forks_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork continues as its parent does, and writes its answer into its parent's pipe."""
    monkeypatch.setenv("ISOLATED_MUTANT", "forks")


@pytest.fixture
def any_run_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker takes the next answer in the pipe for that of the message it sent last."""

    async def begin(self: IsolatedProcess, frame: RunFrame) -> None:
        self._run += 1
        await self._send(replace(frame, run=self._run))
        await self._receive()

    async def finish(
        self: IsolatedProcess, answer: Callable[[AskedFrame], Awaitable[AnsweredFrame]], report: Callable[[Said], None]
    ) -> ReturnedFrame | FailedFrame:
        while True:
            said = await self._receive()
            if isinstance(said, AskedFrame):
                await self._send(await answer(said))
            elif isinstance(said, ReturnedFrame | FailedFrame):
                return said

    monkeypatch.setattr(IsolatedProcess, "begin", begin)
    monkeypatch.setattr(IsolatedProcess, "finish", finish)


@pytest.mark.usefixtures("forks_write", "any_run_will_do")
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_message_is_settled_with_the_answer_of_anothers_fork(bench: Bench, tmp_path: Path, how: str) -> None:
    """A fork of an earlier message answers."""
    with pytest.raises((AssertionError, DeadError)):
        bench.run(lambda: a_fork_answers_for_no_message(bench, tmp_path, tasks.forks, how))


@pytest.mark.usefixtures("forks_write")
def test_without_the_writers_care_a_fork_answers_for_its_own_run(bench: Bench) -> None:
    """The number of the run is right then, but the answer is the fork's."""
    with pytest.raises(AssertionError):
        bench.run(lambda: a_fork_does_not_answer_before_its_parent(tasks.waits_for_its_fork))


@pytest.mark.usefixtures("any_run_will_do")
def test_without_comparing_runs_an_old_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of the answer does not matter."""
    with pytest.raises(pytest.fail.Exception):
        asyncio.run(an_answer_of_another_run_is_refused(lambda program: become(monkeypatch, program)))
