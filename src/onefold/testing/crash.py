"""Crash points: a real process, killed before and after every statement it sends to its database.

The same scenario runs again and again, each time in a forked child that kills itself with SIGKILL one statement later
than the child before; after each death the parent opens the database, recovers and checks.  The loop ends when a child
finishes alive, so every point is tried without a list of points.

::

    def test_a_crash_anywhere_leaves_one_order() -> None:
        async def act(point: Point) -> None:
            store = SQLiteStore(path, trace=point.trace)
            …

        report = crash_points(act, recover)
        assert not report.failures, report

The fork happens before anything is opened: ``act`` and ``recover`` must not use a connection made outside of them.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from onefold.testing.checker import Journal

#: A scenario with more points than this does not end, or should be split.
POINTS_MAX = 2_000
#: A child that takes longer hangs; it is killed and counts as a failure, not as a crash point.
CHILD_SECONDS_MAX = 30.0

_DEATH = b"\0"


@dataclass(slots=True)
class Point:
    """One run of the scenario."""

    #: Counted from 1; the child dies before or after a statement, each of which counts as one event.
    number: int
    #: The requests that the child's clients made and the answers they got before it died.
    journal: Journal = field(default_factory=Journal)
    #: Statements count only while this is true; a scenario may leave out those that others try, such as opening.
    armed: bool = True
    #: Where the child died, such as ``before COMMIT``; None if it finished alive.
    died: str | None = None
    _seen: int = 0
    _pipe: int = -1

    def trace(self, when: Literal["before", "after"], statement: str) -> None:
        """Count the statement events of the child's stores, to which it is passed, and kill the process at one."""
        self._seen += self.armed
        if self.armed and self._seen == self.number:
            os.write(self._pipe, _DEATH + f"{when} {' '.join(statement.split())[:80]}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class CrashReport:
    """The number of points, and the failures with the points where they happened."""

    points: int = 0
    #: Where the children died, in the order of the points.
    deaths: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.points} crash points, {len(self.failures)} with failures", *self.failures])


Act = Callable[[Point], Awaitable[None]]
#: Returns a description of the problem, or a false value; an exception counts as a failure too.
Recover = Callable[[Point], Awaitable[object]]
Prepare = Callable[[int], Awaitable[None]]


def crash_points(
    act: Act, recover: Recover, *, prepare: Prepare | None = None, points_max: int = POINTS_MAX
) -> CrashReport:
    """Kill ``act`` at each of its statements in turn, and let ``recover`` repair and check what is left.

    ``prepare`` gets the number of the point and makes the database; ``act`` runs in a child process and passes
    ``point.trace`` to every store it opens; ``recover`` runs in this process after the child is gone.
    """
    report = CrashReport()
    for number in range(1, points_max + 1):
        if prepare is not None:
            asyncio.run(_awaited(prepare(number)))
        point = Point(number)
        _run_child(act, point)
        try:
            wrong = asyncio.run(_awaited(recover(point)))
        except Exception:
            wrong = traceback.format_exc()
        if wrong:
            report.failures.append(f"point {number}, killed {point.died or 'never'}:\n{wrong}")
        if point.died is None:
            return report
        report.points += 1
        report.deaths.append(point.died)
    raise RuntimeError(f"the scenario is not through after {points_max} points")


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _run_child(act: Act, point: Point) -> None:
    """Fork, run ``act``, and record where it died; any end other than success or the planned kill is an error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(act, point, writing)
    os.close(writing)
    try:
        said = _hear(reading, child)
    finally:
        os.close(reading)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    journal, _, death = said.partition(_DEATH)
    point.journal.read(journal)
    if status == -signal.SIGKILL and death:
        point.died = death.decode().rstrip("\n")
    elif status != 0:
        raise RuntimeError(f"the child ended with {status} instead of being killed at point {point.number}")


def _be_child(act: Act, point: Point, pipe: int) -> NoReturn:
    status = 1
    try:
        point._pipe = pipe
        point.journal = Journal(lambda line: os.write(pipe, line))
        asyncio.run(_awaited(act(point)))
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        # Skip the exit handlers and the buffers inherited from the parent: they must run only there.
        os._exit(status)


def _hear(pipe: int, child: int) -> bytes:
    """Read the child's output until it exits."""
    said = b""
    while True:
        if not select.select([pipe], [], [], CHILD_SECONDS_MAX)[0]:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"the child said nothing for {CHILD_SECONDS_MAX:g} s and did not end")
        part = os.read(pipe, 65_536)
        if not part:
            return said
        said += part
