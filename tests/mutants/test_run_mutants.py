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
from tests.unit.handlers.test_effects import doubtful_then_void
from tests.unit.workflows.test_workflow_decisions import decisions_are_carried

from onefold.handlers import effects
from onefold.store.journal_lines import Line, LineKind
from onefold.store.sqlite import SQLiteStore
from onefold.testing import HastyClock
from onefold.workflows.replay import Replay


def test_decisions_that_are_only_pending_when_a_step_is_called_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash points find each kind of decision."""

    async def record_nothing(self: Replay) -> None: ...

    def open_store(clock: HastyClock, trace: Any) -> SQLiteStore:
        return SQLiteStore(str(tmp_path / "mutant.db"), clock=clock, trace=trace)

    async def migrate() -> None:
        await open_store(HastyClock(), None).migrate()

    monkeypatch.setattr(Replay, "record_pending", record_nothing)
    asyncio.run(migrate())
    report = crash_decisions(open_store, tmp_path)
    found = {what for what in ("now", "signal", "step", "child", "command", "sent") if f"after {what}:" in str(report)}
    assert found == {"now", "signal", "step", "child", "command", "sent"}, report


def test_a_branch_that_does_not_wait_for_its_decision_under_way_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With branches, a decision may be neither pending nor durable yet."""

    @asynccontextmanager
    async def committing_pending(self: Replay) -> AsyncIterator[Any]:
        with self.journal.taking_pending() as taken, self.noting_fatal():
            yield taken

    monkeypatch.setattr(Replay, "committing_pending", committing_pending)
    with pytest.raises(AssertionError):
        decisions_are_carried(Bench(f"sqlite:///{tmp_path}/mutant.db"), monkeypatch)


def test_a_void_that_clears_earlier_tries_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is repeated after the provider has forgotten the key of a try that may have had its effect."""

    def open_tries(line: str, lines: dict[tuple[str, LineKind], Line]) -> list[Line]:
        found = list[Line]()
        for one in effects.intents(line, lines):
            found = [] if (one.name, LineKind.VOID) in lines else [*found, one]
        return found

    monkeypatch.setattr(effects, "open_tries", open_tries)
    with pytest.raises(AssertionError):
        doubtful_then_void(Bench(f"sqlite:///{tmp_path}/mutant.db"))
