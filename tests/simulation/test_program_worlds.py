"""Workflows and sagas drawn from seeds, in worlds where workers die at any point: nothing may happen twice.

Defects that onefold once had are put back, and the same worlds must find them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onefold.handlers import effects
from onefold.store.journal_lines import Line, LineKind
from onefold.testing.programs.description import parts_of, read
from onefold.testing.programs.worlds import draw_programs
from onefold.testing.world.simulation import Kind, Simulation
from onefold.workflows import compensation
from onefold.workflows import restart as restarting
from onefold.workflows.replay import Replay

RecordProperty = Callable[[str, object], None]

#: In the short run, pytest-xdist distributes blocks over the cores.
BLOCKS = 4
PROGRAMS_PER_BLOCK = 25
DEEP_BLOCKS = 4
DEEP_PROGRAMS_PER_BLOCK = 250

#: A defect that takes more seeds than this would be missed too often by a thousand programs.
SEEDS_MAX = 150

NAMES: dict[Kind, str] = {"programs": "generated workflows simulated", "deals": "generated sagas simulated"}
#: Events that a large block must contain, or it proves nothing.
EVENTS: dict[Kind, tuple[str, ...]] = {
    "programs": ("commit: kill", "before ", "after ", ": lose", "told ", "resume ", "resolve "),
    "deals": ("before undo", "after undo", ": kill", ": lose", "cancel ", "restart ", "refused", "redrive "),
}


def _simulate(kind: Kind, block: int, programs: int, record_property: RecordProperty) -> None:
    """Run worlds with this many programs in all."""
    ran, events, failed = 0, set[str](), list[str]()
    with Simulation(kind) as simulation:
        for seed in range(block * programs, (block + 1) * programs):
            result = simulation.run(seed)
            ran += len(result.programs)
            if result.report:
                failed.append(str(result))
            events |= {event for event in EVENTS[kind] for line in result.history if event in line}
            if ran >= programs:
                break
    record_property(NAMES[kind], ran)
    assert not failed, "\n\n".join(failed)
    assert ran >= programs
    assert events == set(EVENTS[kind]) or programs < DEEP_PROGRAMS_PER_BLOCK


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("kind", list(NAMES))
def test_no_seed_breaks_a_generated_program(kind: Kind, block: int, record_property: RecordProperty) -> None:
    """Faults 1 and 37: the effects are those implied by the journal's decisions, once, and nothing is half done."""
    _simulate(kind, block, PROGRAMS_PER_BLOCK, record_property)


@pytest.mark.deep
@pytest.mark.parametrize("block", range(DEEP_BLOCKS))
@pytest.mark.parametrize("kind", list(NAMES))
def test_no_seed_of_many_breaks_a_generated_program(kind: Kind, block: int, record_property: RecordProperty) -> None:
    """Faults 1 and 37: a thousand workflows and a thousand sagas."""
    _simulate(kind, block + BLOCKS, DEEP_PROGRAMS_PER_BLOCK, record_property)


def test_the_programs_have_everything_in_them() -> None:
    """A node that is never drawn is never tested."""
    found = set[str]()

    def note(block: Any) -> None:
        for node in block:
            tag = type(node).__name__.lower()
            found.update({tag, *(f"{tag} {getattr(node, name)}" for name in ("style", "what", "how", "undo")
                                 if getattr(node, name, None))})  # fmt: skip
            for part in parts_of(node):
                note(part)

    for sagas in (False, True):
        for text in draw_programs(1, 200, sagas=sagas):
            note(read(text))
    styles = ("async", "def", "sql", "once", "probed", "kept", "command", "child", "function", "task", "never")
    assert {f"act {style}" for style in styles} <= found
    assert {"ask now", "ask signal", "choose", "sleep", "both", "repeat", "tell send", "tell publish", "nest"} <= found


# the defects, put back


async def _nothing(*_: object) -> None:
    return None


def _void_clears_all(line: str, lines: dict[tuple[str, LineKind], Line]) -> list[Line]:
    """A try that did nothing clears all earlier tries."""
    found = list[Line]()
    for one in effects.intents(line, lines):
        found = [] if (one.name, LineKind.VOID) in lines else [*found, one]
    return found


def _act_on_pending_decisions(patch: pytest.MonkeyPatch) -> None:
    """Decisions of a run are recorded with the next step's result, after steps have acted on them."""
    patch.setattr(Replay, "record_pending", _nothing)


def _repeat_what_is_unknown(patch: pytest.MonkeyPatch) -> None:
    """A call is repeated after the provider has forgotten the key of a try that may have had its effect."""
    patch.setattr(effects, "open_tries", _void_clears_all)


def _go_back_behind_an_undo(patch: pytest.MonkeyPatch) -> None:
    """A saga is restarted although an undo is running."""
    patch.setattr(compensation._Undo, "_begin", _nothing)
    patch.setattr(restarting, "_refuse_running", lambda *_: None)


def _leave_commands_alive(patch: pytest.MonkeyPatch) -> None:
    """Commands that a restart has removed from the journal take effect afterwards."""
    patch.setattr(restarting, "_take_back", _nothing)
    patch.setattr(restarting, "_refuse_running", lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "mutate", "problem", "first"),
    [
        ("programs", _act_on_pending_decisions, "a way that was not gone", 10),
        ("programs", _act_on_pending_decisions, "and what stands is", 5),
        ("programs", _repeat_what_is_unknown, "(kept) took effect 2 times", 0),
        ("deals", _go_back_behind_an_undo, "does not stand", 60),
        ("deals", _leave_commands_alive, "stand", 0),
    ],
)
def test_the_programs_find_the_defect(
    kind: Kind, mutate: Callable[[pytest.MonkeyPatch], None], problem: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is found within a bounded number of seeds; without the defect the same seed finds nothing.

    ``first`` is close to the seed that finds it today, to save time.
    """
    mutate(monkeypatch)
    with Simulation(kind) as simulation:
        for seed in range(first, first + SEEDS_MAX):
            found = [one for one in simulation.run(seed).report.violations if problem in one.problem]
            if found:
                print(f"seed {seed}: {found[0]}")
                break
        else:
            pytest.fail(f"the defect was not found by {SEEDS_MAX} seeds")
        monkeypatch.undo()
        assert not simulation.run(seed).report
