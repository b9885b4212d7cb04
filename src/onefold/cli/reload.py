"""``onefold worker --reload``: a parent process of the supervisor, which restarts it when the code changes.

It imports nothing of the app, so that each supervisor that it starts imports the code as it is then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from onefold.cli.status_line import print_status
from onefold.clock import SystemClock, pause

#: The signal with which the reloader tells the supervisor to end at once.
AT_ONCE = signal.SIGUSR1
#: Environment variable with the process id of the reloader, so that the supervisor does not outlive it.
RELOADER_VARIABLE = "ONEFOLD_RELOADER"
#: Seconds between two checks for changed files, or for the reloader.
_CHECK_SECONDS = 0.5
#: Directories without code of the app; hidden ones and virtual environments are left out too.
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


class Reloader:
    """Runs this command without ``--reload``, and restarts it when a file has changed."""

    def __init__(self) -> None:
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._signals = 0

    def run(self) -> int:
        """Run until the supervisor was stopped or has ended by itself, and return its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        while True:
            before = _snapshot(Path.cwd())
            self._supervisor = self._start()
            while (code := self._supervisor.poll()) is None and (self._stopping or _snapshot(Path.cwd()) == before):
                pause(_CHECK_SECONDS)
            if code is None:
                self._supervisor.terminate()
                print_status("onefold: the code has changed; starting again")
                code = self._supervisor.wait()
            elif code and not self._stopping:
                print_status("onefold: waiting until the code changes")
                while not self._stopping and _snapshot(Path.cwd()) == before:
                    pause(_CHECK_SECONDS)
            else:
                return code
            if self._stopping:
                return code

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [argument for argument in sys.argv[1:] if argument != "--reload"]
        environment = {**os.environ, RELOADER_VARIABLE: str(os.getpid())}
        # In its own process group, so that Ctrl-C reaches it once, from here, and not from the terminal as well.
        return subprocess.Popen([sys.executable, "-m", "onefold", *arguments], env=environment, process_group=0)

    def _pass_on(self, number: int, _: object) -> None:
        """Pass on the first signal as SIGTERM, the second as ``AT_ONCE`` and the third as SIGKILL.

        The signals are counted here, because one that is sent to all processes of a service reaches the supervisor too
        and must not count twice.
        """
        self._signals += number != signal.SIGHUP or not self._signals
        self._stopping = True
        if self._supervisor is not None:
            passed = (signal.SIGTERM, AT_ONCE, signal.SIGKILL)[min(self._signals, 3) - 1]
            self._supervisor.send_signal(passed)


def _snapshot(directory: Path) -> dict[str, int]:
    """Return the time of the last change of each Python file below a directory."""
    found: dict[str, int] = {}
    for here, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if _is_own(Path(here, name))]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(here, name)
                try:
                    found[path] = os.stat(path).st_mtime_ns
                except OSError:
                    continue  # an editor may be replacing it at this moment
    return found


def _is_own(directory: Path) -> bool:
    name = directory.name
    return not name.startswith(".") and name not in _SKIPPED and not (directory / "pyvenv.cfg").exists()


async def watch_reloader(stop: Callable[[], None]) -> None:
    """Stop the supervisor when the reloader has ended."""
    clock, reloader = SystemClock(), int(os.environ[RELOADER_VARIABLE])
    while os.getppid() == reloader:
        await clock.sleep(_CHECK_SECONDS)
    stop()
