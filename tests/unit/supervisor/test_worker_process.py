"""Starting worker processes, and a supervisor that is the first process of a container."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from onefold.supervisor import process, shared_memory
from onefold.supervisor.process import start_process

SECONDS_MAX = 30


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EMFILE, "too many open files")


def _orders(_: int) -> Any:
    """Return nothing: the process is ended before it would get any settings."""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc, which Linux has")
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (shared_memory, "unnamed_file"),
        (shared_memory.Board, "__init__"),
        (process, "unnamed_file"),
        (socket, "socketpair"),
        (asyncio, "create_subprocess_exec"),
        (process, "WorkerProcess"),
    ],
)
def test_a_start_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """A supervisor retries for ever; each failed attempt must not cost descriptors."""

    async def scenario() -> int:
        if name == "WorkerProcess":
            # The first process makes the event loop watch processes, for which it needs descriptors of its own.
            await (await asyncio.create_subprocess_exec(sys.executable, "--version", stdout=subprocess.DEVNULL)).wait()
        before = set(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, refuse)
            with pytest.raises(OSError, match="too many open files"):
                await start_process("shop:app", _orders, 10)
        return len(set(os.listdir("/proc/self/fd")) - before)

    assert asyncio.run(scenario()) == 0


#: Is the parent of orphans, as the first process of a container is, and leaves some.
_FIRST = """\
import ctypes, os, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)
from onefold.cli.init_process import fork_from_init
first = os.getpid()
fork_from_init(first=first)
assert os.getppid() == first
pids = []
for _ in range(20):
    left = subprocess.run(["sh", "-c", "sleep 0 >&- & echo $!"], stdout=subprocess.PIPE)
    pids.append(left.stdout.strip().decode())
while any(os.path.exists(f"/proc/{pid}") for pid in pids):
    pass
print("buried", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
@pytest.mark.parametrize(("number", "code"), [("TERM", 143), ("KILL", 137)])
def test_the_first_process_of_a_container_reaps_orphans(number: str, code: int) -> None:
    """Orphans must not stay as zombies.  Signals are passed to the supervisor, and its exit code is returned."""
    with subprocess.Popen([sys.executable, "-c", _FIRST], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == b"buried\n"
            (behind,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
            target = str(first.pid) if number == "TERM" else behind
            subprocess.run(["kill", f"-{number}", target], check=True)
            assert first.wait(SECONDS_MAX) == code
        finally:
            first.kill()
