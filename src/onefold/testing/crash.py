"""Crash points: a real process, killed before and after every statement it sends to its database.

The same work is done again and again, each time in a forked child that kills itself with SIGKILL at the next
statement; after each death the parent opens the database, recovers and checks.  The loop ends when a child gets
through alive, so that every point was tried, without anybody having listed them.

::

    def test_a_crash_anywhere_leaves_one_order() -> None:
        async def act(point: Point) -> None:
            store = SQLiteStore(path, trace=point.trace)
            …

        report = crash_points(act, recover)
        assert not report.failures, report

Fork happens before anything is opened: neither ``act`` nor ``recover`` may use a connection made outside of them.
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

#: A scenario with more points than this does not end, or is several scenarios.
POINTS_MAX = 2_000
#: A child that takes longer hangs, and is killed; that is a failure, not a crash point.
CHILD_SECONDS_MAX = 30.0

_DEATH = b"\0"


@dataclass(slots=True)
class Point:
    """One run of the scenario."""

    #: Counted from 1; the child dies at this statement event.
    number: int
    #: What the child's clients asked for and were told before it died.
    journal: Journal = field(default_factory=Journal)
    #: Statements count only while this is true; a scenario may leave out what others have tried, such as opening.
    armed: bool = True
    #: Where it died, such as ``before COMMIT``; None when it got through alive.
    died: str | None = None
    _seen: int = 0
    _pipe: int = -1

    def trace(self, when: Literal["before", "after"], statement: str) -> None:
        """To be given to the stores of the child: counts their statements and ends the process at the right one."""
        self._seen += self.armed
        if self.armed and self._seen == self.number:
            os.write(self._pipe, _DEATH + f"{when} {' '.join(statement.split())[:80]}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class CrashReport:
    """How many points there were, and what went wrong at which."""

    points: int = 0
    #: Where the children died, in the order of the points.
    deaths: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.points} crash points, {len(self.failures)} with failures", *self.failures])


Act = Callable[[Point], Awaitable[None]]
#: Returns what is wrong, or something false; an exception is a failure too.
Recover = Callable[[Point], Awaitable[object]]
Prepare = Callable[[int], Awaitable[None]]


def crash_points(
    act: Act, recover: Recover, *, prepare: Prepare | None = None, points_max: int = POINTS_MAX
) -> CrashReport:
    """Kill ``act`` at each of its statements in turn, and let ``recover`` put things right and look at them.

    ``prepare`` gets the number of the point and sets the scene for it; ``act`` runs in a child process and gives
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
    """Fork, run, and take down how it ended; only a child that got through or killed itself as planned is fine."""
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
        # Neither the parent's buffers nor its exit handlers are this process's to run.
        os._exit(status)


def _hear(pipe: int, child: int) -> bytes:
    """Read what the child says until it is gone."""
    said = b""
    while True:
        if not select.select([pipe], [], [], CHILD_SECONDS_MAX)[0]:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"the child said nothing for {CHILD_SECONDS_MAX:g} s and did not end")
        part = os.read(pipe, 65_536)
        if not part:
            return said
        said += part
