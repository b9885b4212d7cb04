"""Defects of the line between a worker and its isolated handlers, put back: the tests of the line find each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import isolated_tasks as tasks
import pytest
from isolated_scene import Bench
from msgspec.structs import replace
from tests.isolation.test_isolated_forks import a_fork_answers_for_no_message, a_fork_does_not_answer_before_its_parent
from tests.unit.test_cell import an_answer_of_another_run_is_refused, become

from onefold import DeadError
from onefold.cell import Process
from onefold.frames import Answered, Asked, Failed, Returned, Run
from onefold.store import Said


@pytest.fixture
def bench(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ONEFOLD_URL", sqlite_url)
    return Bench(sqlite_url)


@pytest.fixture
def forks_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork goes on as its parent does, and says what it has to say on its parent's line."""
    monkeypatch.setenv("ISOLATED_MUTANT", "forks")


@pytest.fixture
def any_run_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker takes whatever comes next for the answer of the message that it gave last."""

    async def begin(self: Process, frame: Run) -> None:
        self._run += 1
        await self._say(replace(frame, run=self._run))
        await self._hear()

    async def finish(
        self: Process, answer: Callable[[Asked], Awaitable[Answered]], listen: Callable[[Said], None]
    ) -> Returned | Failed:
        while True:
            said = await self._hear()
            if isinstance(said, Asked):
                await self._say(await answer(said))
            elif isinstance(said, Returned | Failed):
                return said

    monkeypatch.setattr(Process, "begin", begin)
    monkeypatch.setattr(Process, "finish", finish)


@pytest.mark.usefixtures("forks_write", "any_run_will_do")
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_message_is_settled_with_the_answer_of_anothers_fork(bench: Bench, tmp_path: Path, how: str) -> None:
    """C15 as it was found."""
    with pytest.raises((AssertionError, DeadError)):
        bench.run(lambda: a_fork_answers_for_no_message(bench, tmp_path, tasks.forks, how))


@pytest.mark.usefixtures("forks_write")
def test_without_the_writers_care_a_fork_answers_for_its_own_run(bench: Bench) -> None:
    """The number of the run is right then, and the answer is the fork's."""
    with pytest.raises(AssertionError):
        bench.run(lambda: a_fork_does_not_answer_before_its_parent(tasks.waits_for_its_fork))


@pytest.mark.usefixtures("any_run_will_do")
def test_without_comparing_runs_an_old_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote it."""
    with pytest.raises(pytest.fail.Exception):
        asyncio.run(an_answer_of_another_run_is_refused(lambda program: become(monkeypatch, program)))
