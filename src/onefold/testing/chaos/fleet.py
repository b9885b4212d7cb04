"""The processes of a chaos run: started, signalled, replaced when they are gone, and all ended at the end."""

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

from onefold import tether
from onefold.app import URL_VARIABLE
from onefold.clock import MICROSECONDS, SystemClock
from onefold.testing.chaos.process import FOLDER_VARIABLE, Orders, ready_file
from onefold.testing.servers import children_of

Role = Literal["worker", "supervisor", "sender"]

#: How often processes are chosen that have perhaps not begun yet.
UNREADY_PART = 0.1
#: Seconds between two looks at processes that are to end.
_LOOK_SECONDS = 0.05
#: How much of a log is kept of a process that ended by itself.
_LOG_TAIL = 1_500


def processes_with(mark: str) -> set[int]:
    """Return every process of this machine that has this in its environment, such as ``NAME=value``."""
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
    return found - {os.getpid()}


class Member:
    """One process that was started here."""

    def __init__(self, role: Role, slot: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.role = role
        self.slot = slot
        self.process = process
        self.log = log
        #: It was killed or told to stop, so its end is no surprise.
        self.doomed = False

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    @property
    def ready(self) -> list[int]:
        """The processes that have begun with their work: this one, or those below it."""
        pids = [self.process.pid, *children_of(self.process.pid)]
        return [pid for pid in pids if ready_file(self.log.parent, pid).exists()]

    def signal(self, number: int) -> list[int]:
        """Signal the process and those below it; return their numbers."""
        pids = [self.process.pid, *children_of(self.process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def kill(self) -> None:
        """End the process at once; those below a supervisor notice and end by themselves."""
        self.doomed = True
        self.process.kill()
        self.process.wait()


class Fleet:
    """Every process of one run.  ``orders_for`` says what the process of a role and slot is told."""

    def __init__(self, folder: Path, seed: str, orders_for: Callable[[Role, int, str], Orders]) -> None:
        self.figures: Counter[str] = Counter()
        #: The last lines of processes that ended although nothing had been done to them.
        self.surprises: list[str] = []
        self._folder = folder
        #: In the environment of every process, so that none is forgotten.
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
                preexec_fn=partial(tether.die_with, os.getpid()),
            )
        member = Member(role, slot, process, log)
        self._members.append(member)
        return member

    def tend(self) -> None:
        """Start again what is gone, and write down what ended by itself."""
        for member in [member for member in self._members if member.gone]:
            self._bury(member)
            self.start(member.role, member.slot)

    def _bury(self, member: Member) -> None:
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
        """Choose one that lives, but not the first worker if that is to be spared.

        Most are not harmed before they are ready: on a slow machine nothing would be, and nothing would happen.
        """
        living = [member for member in self._members if member.role in roles and not member.gone]
        if self._chance.random() > UNREADY_PART:
            living = [member for member in living if member.ready]
        if spare_first:
            living = [member for member in living if (member.role, member.slot) != ("worker", 0)]
        return self._chance.choice(living) if living else None

    # ending

    def of(self, *roles: Role) -> list[Member]:
        """Return the processes of these roles."""
        return [member for member in self._members if member.role in roles]

    async def until_ready(self, within: float) -> None:
        """Wait until all of them have begun, for so many seconds at most."""
        await self._wait(lambda: all(member.ready for member in self._members), within)

    async def stop(self, members: Iterable[Member], within: float) -> list[Member]:
        """Tell them to stop; return those that have not within so many seconds, which are killed."""
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
        """Wait until these have ended by themselves; return those that failed or have not ended, which are killed."""
        await self._wait(lambda: all(member.gone for member in members), within)
        failed = [member for member in members if member.process.poll() != 0]
        for member in failed:
            member.kill()
        self._members = [member for member in self._members if member not in members]
        return failed

    async def left_behind(self, within: float) -> set[int]:
        """Return the processes that are still there after so many seconds although they were to end."""
        await self._wait(lambda: not processes_with(self._mark), within)
        return processes_with(self._mark)

    def end(self) -> None:
        """Kill whatever is left, by its number."""
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
