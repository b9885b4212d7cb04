"""Thousands of hostile worlds, none of which may break the promise; and tests of the simulation itself."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from onefold.testing.world.loop import Process, SimulatedClock, SimulatedLoop
from onefold.testing.world.simulation import Kind, Simulation, main

#: pytest-xdist distributes blocks over the cores.
BLOCKS = 8
SEEDS_PER_BLOCK = 250
#: `make test-deep` goes on from there, to 20,000 seeds and more of every kind.
DEEP_BLOCKS = 80
OTHER_SEEDS = 50
#: Larger worlds with rare events; a block of them is large enough to contain some.
RUN_BLOCKS = 4
RUN_SEEDS_PER_BLOCK = 32
DEEP_RUN_BLOCKS = 32


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_seed_breaks_the_promise(block: int, record_property: Callable[[str, object], None]) -> None:
    _run_worlds(block, record_property)


@pytest.mark.deep
@pytest.mark.parametrize("block", range(BLOCKS, DEEP_BLOCKS))
def test_no_seed_of_many_breaks_the_promise(block: int, record_property: Callable[[str, object], None]) -> None:
    _run_worlds(block, record_property)


def _run_worlds(block: int, record_property: Callable[[str, object], None]) -> None:
    record_property("simulated worlds", SEEDS_PER_BLOCK)
    with Simulation() as simulation:
        results = [simulation.run(seed) for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK)]
    failed = [str(result) for result in results if result.report]
    assert not failed, "\n\n".join(failed)
    # A world without events would prove nothing, so count the events of all seeds.
    events = [line.partition(" ")[2] for result in results for line in result.history]
    for fault in (": kill", ": kill after", ": lose", ": stopped", "redrive", "cancel", "duplicate=True"):
        assert sum(fault in event for event in events) > SEEDS_PER_BLOCK // 50, fault


def test_no_seed_breaks_the_promise_on_the_interpreters_own_sqlite(
    record_property: Callable[[str, object], None],
) -> None:
    """The same worlds with the other library, in which transactions with statements of handlers commit alone."""
    record_property("simulated worlds on sqlite3", OTHER_SEEDS)
    with Simulation(driver="sqlite3") as simulation:
        results = [simulation.run(seed) for seed in range(OTHER_SEEDS)]
    failed = [str(result) for result in results if result.report]
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("block", range(RUN_BLOCKS))
def test_no_seed_breaks_a_run(block: int, record_property: Callable[[str, object], None]) -> None:
    """H1 to H8: each step takes effect once, no wake-up is lost, and a run's answers are those of its journal."""
    _run_worlds_of_runs(block, record_property)


@pytest.mark.deep
@pytest.mark.parametrize("block", range(RUN_BLOCKS, DEEP_RUN_BLOCKS))
def test_no_seed_of_many_breaks_a_run(block: int, record_property: Callable[[str, object], None]) -> None:
    _run_worlds_of_runs(block, record_property)


def _run_worlds_of_runs(block: int, record_property: Callable[[str, object], None]) -> None:
    number = RUN_SEEDS_PER_BLOCK
    record_property("simulated worlds of workflows", number)
    with Simulation("runs") as simulation:
        results = [simulation.run(seed) for seed in range(block * number, (block + 1) * number)]
    failed = [str(result) for result in results if result.report]
    assert not failed, "\n\n".join(failed)
    events = [line.partition(" ")[2] for result in results for line in result.history]
    for event in (": kill", ": lose", ": stopped", "told ", "restart ", "resume ", "redrive", "cancel"):
        assert sum(event in one for one in events) > number // 20, event


@pytest.mark.parametrize("kind", ["tasks", "runs", "programs", "deals"])
def test_the_same_seed_makes_the_same_history(kind: Kind) -> None:
    with Simulation(kind) as first, Simulation(kind) as second:
        for seed in range(10):
            assert first.run(seed).history == second.run(seed).history
        assert first.run(1).history != first.run(2).history


def test_the_history_does_not_depend_on_the_process_it_runs_in() -> None:
    def run(hash_seed: str) -> str:
        command = [sys.executable, "-m", "onefold.testing.world.simulation", "--seed", "5"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run("1") == run("2")


def test_a_run_from_the_command_line_prints_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--first", "7"]) == 0
    assert "3 seeds, 0 with violations" in capsys.readouterr().out


# the loop


def _loop(seed: int = 1) -> SimulatedLoop:
    return SimulatedLoop(random.Random(seed))


def test_time_jumps_to_the_next_timer_and_a_year_takes_no_time() -> None:
    loop = _loop()
    clock = SimulatedClock(loop, Process("one"))
    before = clock.steady()
    loop.run_until_complete(clock.sleep(365 * 86_400))
    assert clock.steady() - before == 365 * 86_400 * 1_000_000
    loop.unwind()


def test_the_seed_decides_which_task_runs_first() -> None:
    def order(seed: int) -> list[int]:
        loop, ran = _loop(seed), []
        for number in range(10):
            loop.call_soon(ran.append, number)
        loop.run_until_complete(SimulatedClock(loop, Process("one")).sleep(1))
        loop.unwind()
        return ran

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(10))


def test_a_stopped_process_gets_no_time_until_it_is_resumed() -> None:
    loop, process = _loop(), Process("one")
    clock, ticks = SimulatedClock(loop, process), []

    async def tick() -> None:
        for _ in range(6):
            await clock.sleep(1)
            ticks.append(loop.time())

    task = loop.start(process, tick())
    loop.later(2.5, loop.stop_process, process, 10)
    loop.run_until_complete(task)
    loop.unwind()
    assert ticks == [1, 2, 12.5, 13.5, 14.5, 15.5]


def test_a_dead_process_runs_no_cleanup() -> None:
    loop, process, cleaned = _loop(), Process("one"), []

    async def live() -> None:
        try:
            await SimulatedClock(loop, process).sleep(5)
        finally:
            cleaned.append(loop.time())

    loop.start(process, live())
    loop.later(1, loop.kill_process, process)
    loop.run_until_complete(SimulatedClock(loop, Process("other")).sleep(10))
    assert cleaned == []
    loop.unwind()


def test_waiting_for_what_can_never_happen_is_an_error() -> None:
    loop = _loop()
    with pytest.raises(RuntimeError, match="never happen"):
        loop.run_until_complete(asyncio.Event().wait())
    loop.unwind()
