"""Defects of restarts of sagas, put back: ``tests/unit/workflows/test_saga_restart.py`` finds each of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.conftest import Bench
from tests.unit.workflows import test_saga_restart as restarts

from onefold.workflows import compensation
from onefold.workflows import restart as restarting


@pytest.fixture
def bench(sqlite_url: str) -> Bench:
    """SQLite only, because these defects are the same on every store."""
    return Bench(sqlite_url)


async def _nothing(*_: object) -> None:
    return None


def _found(restart: Any, *args: Any) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        restart(*args)


def test_an_undo_whose_beginning_is_not_journaled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart during the undo is accepted: the saga completes, and the seat is gone."""
    monkeypatch.setattr(compensation._Undo, "_begin", _nothing)
    _found(restarts.test_a_saga_does_not_go_back_while_its_undo_is_called, bench)


def test_a_restart_while_a_worker_undoes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running undo continues after its step was done again."""
    monkeypatch.setattr(restarting, "_refuse_running", lambda *_: None)
    _found(restarts.test_a_saga_does_not_go_back_while_its_undo_is_called, bench)


def test_a_restart_while_an_undo_runs_as_a_command(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for an undo that another worker runs."""
    monkeypatch.setattr(restarting, "_refuse_running", lambda *_: None)
    _found(restarts.test_a_saga_does_not_go_back_while_its_undo_runs_as_a_command, bench)


@pytest.mark.parametrize("waits", ["for its turn", "for its retry"])
def test_a_restart_that_leaves_undo_commands_alive(bench: Bench, monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    """They run after the saga has completed."""
    monkeypatch.setattr(restarting, "_take_back", _nothing)
    _found(restarts.test_a_restart_takes_back_an_undo_that_waits, bench, waits)


@pytest.mark.parametrize("kind", ["workflow", "saga"])
def test_a_restart_that_leaves_forward_commands_alive(bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """They run beside the commands that are sent again."""
    monkeypatch.setattr(restarting, "_take_back", _nothing)
    _found(restarts.test_a_restart_takes_back_a_forward_command, bench, kind)
