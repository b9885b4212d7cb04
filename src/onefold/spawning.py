"""Beside the flow: how processes of ours are started and ended, and what a fork of one of them must not do.

Everything here is about one process; who owns it, and what its end means, is decided elsewhere.
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

#: Signals that ask a program to end.  They often reach a whole group or service at once; the owner decides.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: How a fork ends that came back from the code that made it: EX_SOFTWARE of sysexits.h.
_FORK_CODE = 70
#: Carries where Python looks for modules to a process that is started.
_PATH_VARIABLE = "ONEFOLD_SYS_PATH"
#: While onefold and what it needs are imported, the standard library comes first: a file of the project named
#: ``queue.py`` must not take the place of a module that onefold imports.  The path is the starter's after that.
_BOOT = f"""\
import importlib, json, os, sys
path = json.loads(os.environ.pop({_PATH_VARIABLE!r}))
sys.path += [entry for entry in path if entry not in sys.path]
main = importlib.import_module(sys.argv.pop(1)).main
sys.path[:] = path
main()
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main()`` of a module of onefold in a new interpreter; see ``environment``."""
    return [sys.executable, "-P", "-c", _BOOT, module, *arguments]


def environment() -> dict[str, str]:
    """Return the environment for such a command: this one, and where this process finds its modules."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return {**os.environ, _PATH_VARIABLE: json.dumps(path)}


def unnamed_file(name: str) -> int:
    """Return the descriptor of a new file that no other process can open and that leaves nothing behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return descriptor


def kill_group(leader: int) -> None:
    """Kill a process that leads a group of its own, and all that is in the group; harmless when it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


# forks


def end_forks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, end every fork of this process that goes on where the original does: on its event loop.

    Such a fork shares the loop's descriptors, so it takes away events of the original and answers in its name.
    A fork that ends by itself or becomes another program is left alone, but it has none of our signal handlers:
    one that is told to end must do so, and must not pass the signal on to the original.
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

    # Blocked meanwhile: a signal that comes before the fork is disowned would reach the original through the loop.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=disown)


def end_fork(error: BaseException | None = None) -> NoReturn:
    """End this process, a fork that came back from the handler that made it; nothing it says or does may count."""
    with suppress(Exception):
        if error is not None:
            traceback.print_exception(error)
        print(
            f"onefold: process {os.getpid()} is a fork that came back from its handler; it was ended, and nothing it "
            "returned counts.  End a fork with os._exit(), or use subprocess.",
            file=sys.stderr,
            flush=True,
        )
    os._exit(_FORK_CODE)


# ending


def leave(code: int) -> NoReturn:
    """End without waiting for threads that were left behind: an ordinary end would, for ever."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Closed descriptors are None here; a full disk or a reader that is gone must not keep it from ending.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
