"""The processes of a chaos run: started, signalled, replaced when they end, and all killed at the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from onefold.app import URL_VARIABLE
from onefold.clock import MICROSECONDS, SystemClock
from onefold.processes import parent_death
from onefold.testing.chaos.process import FOLDER_VARIABLE, Orders, ready_file
from onefold.testing.servers import children_of

Role = Literal["worker", "supervisor", "sender"]

#: How often a process may be picked that is not ready yet.
UNREADY_PART = 0.1
#: Seconds between two checks of whether processes have ended.
_LOOK_SECONDS = 0.05
#: How many characters are kept of the log of a process that ended by itself.
_LOG_TAIL = 1_500


def processes_with(mark: str) -> set[int]:
    """Return every process of this machine with this mark in its environment, such as ``NAME=value``."""
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
    return found - {os.getpid()}


class Member:
    """One process of the run."""

    def __init__(self, role: Role, slot: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.role = role
        self.slot = slot
        self.process = process
        self.log = log
        #: The run killed it or told it to stop, so its end is no surprise.
        self.doomed = False

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    @property
    def ready(self) -> list[int]:
        """The processes that have begun to work: this one or its children."""
        pids = [self.process.pid, *children_of(self.process.pid)]
        return [pid for pid in pids if ready_file(self.log.parent, pid).exists()]

    def signal(self, number: int) -> list[int]:
        """Signal the process and its children; return their process ids."""
        pids = [self.process.pid, *children_of(self.process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def kill(self) -> None:
        """End the process at once; the children of a supervisor notice and end by themselves."""
        self.doomed = True
        self.process.kill()
        self.process.wait()


class Fleet:
    """Every process of one run.  ``orders_for`` returns the settings for the process of a role and slot."""

    def __init__(self, folder: Path, seed: str, orders_for: Callable[[Role, int, str], Orders]) -> None:
        self.figures: Counter[str] = Counter()
        #: The last lines of processes that ended although the run did nothing to them.
        self.surprises: list[str] = []
        self._folder = folder
        #: In the environment of every process, so that leftover processes can be found.
        self._mark = f"{FOLDER_VARIABLE}={folder}"
        self._orders_for = orders_for
        self._chance = random.Random(f"{seed} fleet")
        self._members: list[Member] = []
        self._started = 0

    # starting

    def start(self, role: Role, slot: int, *, only_repeat: bool = False) -> Member:
        """Start one process; it ends with this one."""
        self._started += 1
        name = f"{role}-{slot}-{self._started}"
        orders = self._orders_for(role, slot, name)
        if role == "supervisor":
            options = ["--processes", "2", "--stop-after", "5", "--lease", str(orders.lease_seconds)]
            words = ["-m", "onefold", "worker", "onefold.testing.chaos.app:app", *options]
        else:
            orders = msgspec.structs.replace(orders, only_repeat=only_repeat)
            words = ["-m", f"onefold.testing.chaos.{role}", msgspec.json.encode(orders).decode()]
        environment = {**os.environ, URL_VARIABLE: orders.url, FOLDER_VARIABLE: orders.folder}
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=partial(parent_death.die_with, os.getpid()),
            )
        member = Member(role, slot, process, log)
        self._members.append(member)
        return member

    def tend(self) -> None:
        """Replace every process that ended, and record those that ended by themselves."""
        for member in [member for member in self._members if member.gone]:
            self._remove(member)
            self.start(member.role, member.slot)

    def _remove(self, member: Member) -> None:
        self._members.remove(member)
        code = member.process.returncode
        if member.doomed:
            return
        if code == -signal.SIGKILL:
            self.figures[f"{member.role}s killed in the middle of a write"] += 1
        else:
            self.surprises.append(f"{member.log.stem} ended with {code}:\n{member.log.read_text()[-_LOG_TAIL:]}")

    # harming

    def pick(self, *roles: Role, spare_first: bool = False) -> Member | None:
        """Choose a live process; ``spare_first`` leaves out the first worker.

        Most picks are limited to ready processes: on a slow machine the rest would always be killed before they worked.
        """
        living = [member for member in self._members if member.role in roles and not member.gone]
        if self._chance.random() > UNREADY_PART:
            living = [member for member in living if member.ready]
        if spare_first:
            living = [member for member in living if (member.role, member.slot) != ("worker", 0)]
        return self._chance.choice(living) if living else None

    # ending

    def of(self, *roles: Role) -> list[Member]:
        """Return the processes with these roles."""
        return [member for member in self._members if member.role in roles]

    async def until_ready(self, within: float) -> None:
        """Wait until all of them have begun to work, for ``within`` seconds at most."""
        await self._wait(lambda: all(member.ready for member in self._members), within)

    async def stop(self, members: Iterable[Member], within: float) -> list[Member]:
        """Tell processes to stop; kill and return those that have not ended ``within`` seconds."""
        stopping = list(members)
        for member in stopping:
            member.doomed = True
            member.signal(signal.SIGCONT)
            with suppress(ProcessLookupError):
                member.process.terminate()
        await self._wait(lambda: all(member.gone for member in stopping), within)
        late = [member for member in stopping if not member.gone]
        for member in late:
            member.kill()
        self._members = [member for member in self._members if member not in stopping]
        return late

    async def ended(self, members: Sequence[Member], within: float) -> list[Member]:
        """Wait until these have ended by themselves; kill and return those that failed or have not ended in time."""
        await self._wait(lambda: all(member.gone for member in members), within)
        failed = [member for member in members if member.process.poll() != 0]
        for member in failed:
            member.kill()
        self._members = [member for member in self._members if member not in members]
        return failed

    async def left_behind(self, within: float) -> set[int]:
        """Return the processes that still run ``within`` seconds after they were told to end."""
        await self._wait(lambda: not processes_with(self._mark), within)
        return processes_with(self._mark)

    def end(self) -> None:
        """Kill every process that is left, by its process id."""
        for member in self._members:
            member.kill()
        for pid in processes_with(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _wait(self, until: Callable[[], bool], within: float) -> None:
        clock = SystemClock()
        give_up_at = clock.steady() + within * MICROSECONDS
        while not until() and clock.steady() < give_up_at:
            await clock.sleep(_LOOK_SECONDS)
