"""Defects of runs and of the effect ledger, put back: the crash points and the tests of the ledger find them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.crash.decision_scenario import crash_decisions
from tests.unit.conftest import Bench
from tests.unit.test_effects import doubtful_then_void
from tests.unit.test_workflow_decisions import decisions_are_carried

from onefold import effects
from onefold.step import Step, StepKind
from onefold.stores.sqlite import SQLiteStore
from onefold.stretch import Stretch
from onefold.testing import HastyClock


def test_decisions_that_are_only_pending_when_a_step_is_called_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: the crash points find each kind of decision."""

    async def secure_nothing(self: Stretch) -> None: ...

    def open_store(clock: HastyClock, trace: Any) -> SQLiteStore:
        return SQLiteStore(str(tmp_path / "mutant.db"), clock=clock, trace=trace)

    async def migrate() -> None:
        await open_store(HastyClock(), None).migrate()

    monkeypatch.setattr(Stretch, "secure", secure_nothing)
    asyncio.run(migrate())
    report = crash_decisions(open_store, tmp_path)
    found = {what for what in ("now", "signal", "step", "child", "command", "sent") if f"after {what}:" in str(report)}
    assert found == {"now", "signal", "step", "child", "command", "sent"}, report


def test_a_branch_that_does_not_wait_for_its_decision_under_way_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12 with branches: nothing is pending any more, but it is not durable either."""

    @asynccontextmanager
    async def leaving(self: Stretch) -> AsyncIterator[Any]:
        with self.journal.leaving() as left, self.fatal:
            yield left

    monkeypatch.setattr(Stretch, "leaving", leaving)
    with pytest.raises(AssertionError):
        decisions_are_carried(Bench(f"sqlite:///{tmp_path}/mutant.db"), monkeypatch)


def test_a_void_that_clears_earlier_tries_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: the call is repeated after the provider has forgotten the key of a try that may have had its effect."""

    def open_tries(line: str, lines: dict[tuple[str, StepKind], Step]) -> list[Step]:
        found = list[Step]()
        for one in effects.intents(line, lines):
            found = [] if (one.name, StepKind.VOID) in lines else [*found, one]
        return found

    monkeypatch.setattr(effects, "open_tries", open_tries)
    with pytest.raises(AssertionError):
        doubtful_then_void(Bench(f"sqlite:///{tmp_path}/mutant.db"))
