"""``onefold worker --reload``: a process around the supervisor that starts it again when the code changes.

It imports nothing of the app, so that what it starts always has the code as it is now.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from onefold.cli.telling import tell
from onefold.clock import SystemClock, pause

#: To the supervisor, instead of a second signal: end at once.
AT_ONCE = signal.SIGUSR1
#: Names the process around a supervisor, so that the supervisor does not outlive it.
RELOADER_VARIABLE = "ONEFOLD_RELOADER"
#: How often to look whether a file has changed, or whether the process around is still there.
_LOOK_SECONDS = 0.5
#: Directories that hold no code of the app; hidden ones and virtual environments are left out too.
_FOREIGN = frozenset({"__pycache__", "node_modules", "site-packages"})


class Reloader:
    """Runs this very command without ``--reload``, again whenever a file has changed."""

    def __init__(self) -> None:
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._signals = 0

    def run(self) -> int:
        """Return the exit code of the supervisor when it was stopped or is done."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        while True:
            before = _snapshot(Path.cwd())
            self._supervisor = self._start()
            while (code := self._supervisor.poll()) is None and (self._stopping or _snapshot(Path.cwd()) == before):
                pause(_LOOK_SECONDS)
            if code is None:
                self._supervisor.terminate()
                tell("onefold: the code has changed; starting again")
                code = self._supervisor.wait()
            elif code and not self._stopping:
                tell("onefold: waiting until the code changes")
                while not self._stopping and _snapshot(Path.cwd()) == before:
                    pause(_LOOK_SECONDS)
            else:
                return code
            if self._stopping:
                return code

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [argument for argument in sys.argv[1:] if argument != "--reload"]
        environment = {**os.environ, RELOADER_VARIABLE: str(os.getpid())}
        # In a group of its own, so that Ctrl-C does not reach it twice: from the terminal and from here.
        return subprocess.Popen([sys.executable, "-m", "onefold", *arguments], env=environment, process_group=0)

    def _pass_on(self, number: int, _: object) -> None:
        """Count here: a signal to all processes of a service reaches the supervisor as well, and means one."""
        self._signals += number != signal.SIGHUP or not self._signals
        self._stopping = True
        if self._supervisor is not None:
            passed = (signal.SIGTERM, AT_ONCE, signal.SIGKILL)[min(self._signals, 3) - 1]
            self._supervisor.send_signal(passed)


def _snapshot(directory: Path) -> dict[str, int]:
    """Return when each Python file below a directory was last written."""
    found: dict[str, int] = {}
    for here, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if _is_own(Path(here, name))]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(here, name)
                try:
                    found[path] = os.stat(path).st_mtime_ns
                except OSError:
                    continue  # an editor is replacing it at this moment
    return found


def _is_own(directory: Path) -> bool:
    name = directory.name
    return not name.startswith(".") and name not in _FOREIGN and not (directory / "pyvenv.cfg").exists()


async def watch_reloader(stop: Callable[[], None]) -> None:
    """Stop the supervisor when the process around it is gone."""
    clock, reloader = SystemClock(), int(os.environ[RELOADER_VARIABLE])
    while os.getppid() == reloader:
        await clock.sleep(_LOOK_SECONDS)
    stop()
