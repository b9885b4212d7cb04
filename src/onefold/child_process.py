"""Beside the flow: the command that starts a process of onefold, how one ends, and how a stray fork of one is stopped.

Each function is about one process; the supervisor and the pool of isolated handlers decide when to start and end one.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

#: Signals that ask a program to end.  A terminal or a service manager often sends them to every process of a group, so
#: a process of ours ignores those that are its parent's to act on.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Exit code of a fork that returned from the handler that made it: EX_SOFTWARE of sysexits.h.
_FORK_CODE = 70
#: The environment variable that passes ``sys.path`` to a process that is started.
_PATH_VARIABLE = "ONEFOLD_SYS_PATH"
#: While onefold and its dependencies are imported, the standard library comes first in the path: a file of the project
#: named ``queue.py`` must not be imported in its place.  After that the path is that of the parent.
_BOOT = f"""\
import importlib, json, os, sys
path = json.loads(os.environ.pop({_PATH_VARIABLE!r}))
sys.path += [entry for entry in path if entry not in sys.path]
main = importlib.import_module(sys.argv.pop(1)).main
sys.path[:] = path
main()
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main()`` of a module in a new interpreter; it needs ``environment()``."""
    return [sys.executable, "-P", "-c", _BOOT, module, *arguments]


def environment() -> dict[str, str]:
    """Return the environment for such a command: that of this process, with its ``sys.path``."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return {**os.environ, _PATH_VARIABLE: json.dumps(path)}


def unnamed_file(name: str) -> int:
    """Return the descriptor of a new file that has no name, so that it is gone when its last descriptor is closed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return descriptor


def kill_group(leader: int) -> None:
    """Kill a process group by the id of its leader; does nothing when the group is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


# forks


def end_forks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, end every fork of this process that returns to the event loop.

    Such a fork shares the loop's descriptors, so it would take events from its parent and answer in its name.
    A fork that ends by itself or becomes another program is left alone, but loses the loop's signal handlers:
    a signal that should end the fork must end it, and must not reach its parent through the shared descriptors.
    """
    thread, masks = threading.get_ident(), threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def disown() -> None:
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if threading.get_ident() == thread:
            loop.call_soon(end_fork)
        unblock()

    # Blocked meanwhile: a signal that comes before disown() would reach the parent through the shared descriptors.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=disown)


def end_fork(error: BaseException | None = None) -> NoReturn:
    """End this process, a fork that returned from the handler that made it; its result must not be taken as one."""
    with suppress(Exception):
        if error is not None:
            traceback.print_exception(error)
        print(
            f"onefold: process {os.getpid()} is a fork that returned from its handler; it was ended and its result "
            "discarded.  End a fork with os._exit(), or use subprocess.",
            file=sys.stderr,
            flush=True,
        )
    os._exit(_FORK_CODE)


# ending


def leave(code: int) -> NoReturn:
    """End this process without waiting for its threads: an ordinary exit would wait for ever for one that hangs."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A closed stream is None or raises; a full disk or a closed pipe must not prevent the exit.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
