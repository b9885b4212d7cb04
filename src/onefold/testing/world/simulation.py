"""Deterministic simulation: the real app, worker and SQLite statements in a world with faults drawn from a seed.

Several workers, producers and an operator run in one thread as simulated processes on one database file.
The seed decides which process runs next, which dies before, after or during which call, which answers are lost,
which process is stopped for longer than its lease, which clock jumps, and how handlers fail.
At the end the faults stop, a new worker drains the queues, and the checker compares what is left.
The same seed gives the same history, so a failure can be replayed.

``python -m onefold.testing.world.simulation --seeds 2000`` runs many; ``--seed 17`` replays one and prints its history.
``--runs``, ``--sagas``, ``--programs`` and ``--deals`` choose another kind of world; see ``KINDS``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from onefold.app import App
from onefold.store.sqlite import SQLiteStore
from onefold.store.sqlite.drivers import Library
from onefold.testing.clock import FakeClock
from onefold.testing.programs.worlds import Deals, Programs, declare_programs
from onefold.testing.world.bookings import Bookings, declare_bookings
from onefold.testing.world.journeys import Journeys, declare_journeys
from onefold.testing.world.loop import SimulatedClock, SimulatedLoop
from onefold.testing.world.workload import Tasks, Workload, declare
from onefold.testing.world.world import BOOT, Result, World

__all__ = ["Result", "SimulatedClock", "SimulatedLoop", "Simulation", "World", "main"]

Kind = Literal["tasks", "runs", "sagas", "programs", "deals"]
#: The kinds of worlds: tasks, workflows and sagas written by hand, and workflows and sagas drawn from the seed.
KINDS: dict[Kind, tuple[type[Workload], Callable[[App], Tasks]]] = {
    "tasks": (Workload, declare),
    "runs": (Journeys, declare_journeys),
    "sagas": (Bookings, declare_bookings),
    "programs": (Programs, declare_programs),
    "deals": (Deals, declare_programs),
}

#: Shared memory, where it exists, saves thousands of small files on the disk.
_FAST_DIRECTORY = "/dev/shm"


class Simulation:
    """Runs seeds, each on its own copy of one migrated database; use it as a context manager.

    ``kind`` chooses the kind of the worlds, ``driver`` the SQLite library.
    """

    def __init__(self, kind: Kind = "tasks", *, driver: Library = "apsw") -> None:
        self._driver = driver
        parent = _FAST_DIRECTORY if Path(_FAST_DIRECTORY).is_dir() else None
        self._directory = Path(tempfile.mkdtemp(prefix="onefold-simulation-", dir=parent))
        self._template = self._directory / "template.db"
        self._declared = App()
        self._workload, declares = KINDS[kind]
        self._tasks: Tasks = declares(self._declared)
        asyncio.run(self._migrate())

    async def _migrate(self) -> None:
        store = SQLiteStore(
            str(self._template), clock=FakeClock(), synchronous="OFF", inline=True, boot=BOOT, driver=self._driver
        )
        await store.open()
        async with store.transaction() as transaction:
            for statement in self._workload.tables:
                await transaction.execute(statement)
        await store.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, seed: int) -> Result:
        """Run one seed."""
        file = self._directory / "world.db"
        for left in self._directory.glob("world.db*"):
            left.unlink()
        shutil.copyfile(self._template, file)
        level, logging.getLogger("onefold").level = logging.getLogger("onefold").level, logging.CRITICAL
        try:
            return World(seed, file, self._declared, self._tasks, self._workload, self._driver).run()
        finally:
            logging.getLogger("onefold").level = level


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds from the command line; the exit status is 0 if all of them passed."""
    parser = argparse.ArgumentParser(
        prog="python -m onefold.testing.world.simulation", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one and print its history")
    for kind, (workload, _) in KINDS.items():
        told = f"worlds of {workload.__name__}"
        parser.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="tasks", help=told)
    parser.add_argument("--driver", choices=["apsw", "sqlite3"], default="apsw", help="the SQLite library")
    given = parser.parse_args(arguments)
    failed = 0
    with Simulation(given.kind, driver=given.driver) as simulation:
        if given.seed is not None:
            result = simulation.run(given.seed)
            print(*result.history, sep="\n")
            print(result)
            return int(bool(result.report))
        started = time.perf_counter()
        for seed in range(given.first, given.first + given.seeds):
            result = simulation.run(seed)
            if result.report:
                failed += 1
                print(result)
        seconds = time.perf_counter() - started
    print(f"{given.seeds} seeds, {failed} with violations, {given.seeds / seconds:.0f} seeds/s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
