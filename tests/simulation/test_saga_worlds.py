"""Hostile worlds of sagas, none of which may be left half done; and defects that they must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onefold.testing.world.simulation import Simulation
from onefold.workflows import compensation

#: pytest-xdist distributes blocks over the cores.
BLOCKS = 4
SEEDS_PER_BLOCK = 25


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_seed_leaves_a_saga_half_done(block: int, record_property: Callable[[str, object], None]) -> None:
    """Fault 37: timeouts race with success, answers come twice, operators cancel, resume and redrive, workers die."""
    record_property("simulated worlds of sagas", SEEDS_PER_BLOCK)
    with Simulation("sagas") as simulation:
        results = [simulation.run(seed) for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK)]
    failed = [str(result) for result in results if result.report]
    assert not failed, "\n\n".join(failed)
    events = [line.partition(" ")[2] for result in results for line in result.history]
    for event in (": kill", ": lose", ": stopped", "answered again ", "cancel ", "resume ", "redrive "):
        assert sum(event in one for one in events) > 0, event


async def nothing(self: Any) -> None:
    """Do not cancel commands that were not answered."""


def completed(lines: Any) -> list[Any]:
    """Leave out failed steps, as if they could have had no effect."""
    through = {line.name for line in lines if line.kind in (0, 10)}
    return [line for line in lines if line.kind == 12 and line.name in through]


@pytest.mark.parametrize(
    ("of", "name", "defect"),
    [
        pytest.param(compensation._Undo, "_cancel_command", nothing, id="commands may come late"),
        pytest.param(compensation, "begun_steps", completed, id="only what succeeded is undone"),
        pytest.param(compensation, "reversed", iter, id="undone in the order of doing"),
    ],
)
def test_a_defect_of_sagas_is_found(monkeypatch: pytest.MonkeyPatch, of: Any, name: str, defect: Any) -> None:
    """Late commands, failed steps that had an effect, and undos in the wrong order."""
    monkeypatch.setattr(of, name, defect, raising=False)
    with Simulation("sagas") as simulation:
        assert any(simulation.run(seed).report for seed in range(40))
