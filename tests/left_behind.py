"""Processes that a test session has started and left: looked for when it ends, whichever test it was.

Every process of a session carries a mark in its environment, from the process that runs pytest and from the workers of
pytest-xdist to what handlers start.  A process that changes its environment is found all the same, because the kernel
shows the environment that it was started with.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onefold.clock import MICROSECONDS, SystemClock, pause

VARIABLE = "ONEFOLD_TEST_SESSION"
#: What lost its parent notices by itself: at once, or after 16 s when it hangs (``onefold.processes.parent_death``).
PATIENCE_SECONDS = 20.0
_PROC = Path("/proc")


class LeftBehind(NamedTuple):
    """A process that should be gone."""

    pid: int
    parent: int
    command: str
    #: The test that started it, as far as pytest had said so.
    test: str

    def __str__(self) -> str:
        return f"process {self.pid} below {self.parent}: {self.command} (started by {self.test})"


def is_possible() -> bool:
    """Whether processes can be looked at here."""
    return (_PROC / "self" / "environ").exists()


def find(mark: str) -> list[LeftBehind]:
    """Return the processes that carry a mark, and are neither this one nor waiting to be buried."""
    return [found for entry in _PROC.iterdir() if entry.name.isdigit() and (found := _look_at(entry, mark))]


def _look_at(entry: Path, mark: str) -> LeftBehind | None:
    pid = int(entry.name)
    try:
        environment = dict(
            variable.split("=", 1)
            for variable in (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            if "=" in variable
        )
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None  # gone meanwhile, or of another user
    if environment.get(VARIABLE) != mark or state in "ZX" or pid == os.getpid():
        return None
    return LeftBehind(pid, int(parent), command, environment.get("PYTEST_CURRENT_TEST", "no test"))


def wait_for_none(mark: str, seconds: float = PATIENCE_SECONDS) -> list[LeftBehind]:
    """Wait until no process with a mark is there any more; return those that stay, and end them."""
    clock = SystemClock()
    give_up_at = clock.steady() + round(seconds * MICROSECONDS)
    while (left := find(mark)) and clock.steady() < give_up_at:
        pause(0.05)
    for one in left:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    return left
