"""The examples do what they describe, on both stores."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    """Import an example again, so that its app has used no other store before."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paper() -> Console:
    return Console(file=io.StringIO(), width=160)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_approval_takes_a_week_of_its_own_time(store_url: str) -> None:
    """H4: waits outlive the processes that began them."""
    approval, console = load("approval"), paper()
    assert asyncio.run(approval.play(store_url, console)) == approval.EXPECTED
    told = printed(console)
    assert "timed out signal decision#2" in told
    assert "waits for the signal 'decision'" in told


def test_a_fan_out_has_every_result_in_its_place(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEFOLD_URL", store_url)
    fan_out = load("fan_out")
    assert asyncio.run(fan_out.play(paper(), 140)) == f"summer: 140 pictures, {sum(range(140)) * 10:,} bytes"


def test_a_choreography_ships_what_it_can_and_takes_back_the_rest(store_url: str) -> None:
    """I12: an order is handled without a coordinator."""
    choreography, console = load("choreography"), paper()
    assert asyncio.run(choreography.play(store_url, console)) == choreography.EXPECTED
    told = printed(console)
    assert "1 message waits for shipping" in told
    assert "payment.refunded  done" in told


def test_orders_are_fulfilled_or_undone_and_the_books_balance(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6, I8: with a step that failed, and with one whose outcome is unknown."""
    monkeypatch.setenv("ONEFOLD_URL", store_url)
    fulfilment, console = load("fulfilment"), paper()
    ends = asyncio.run(fulfilment.play(console, 15))
    assert {status.value: number for status, number in ends.items()} == {"completed": 10, "compensated": 5}
    assert "done undo:take_payment#1" in printed(console)
