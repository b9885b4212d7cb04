"""Beside the flow: end a process with its parent, even if a handler's C code holds the interpreter's lock.

A process reads on its line that its parent is gone, and ends.  While C code holds the interpreter's lock it cannot
read, so Linux is asked to kill it.  On other systems such a process lives until that code returns.

To the kernel the parent is the thread that started the process: here the thread of an event loop, which lives as long
as the worker or supervisor itself.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys

#: Linux: send this process a signal when its parent dies.
_PR_SET_PDEATHSIG = 1
#: SIGSTKFLT on x86 and ARM: no kernel sends it and no program uses it.  Also the number of seconds after which an
#: orphan is killed; see ``end_after``.
_ORPHANED = 16


def die_with(parent: int) -> None:
    """Let the kernel kill this process at the moment its parent ends."""
    _send_when_orphaned(parent, signal.SIGKILL)


def end_after(parent: int) -> None:
    """Let this process be killed 16 seconds after its parent has ended, unless it calls ``end_within`` before."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # The signal's handler is ``alarm`` of the C library itself.  One written in Python would wait for the
        # interpreter's lock; ``alarm`` does not, and it is safe in a signal handler.  The argument that a handler
        # gets, the number of the signal, is to ``alarm`` the number of seconds.
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(_ORPHANED, ctypes.cast(libc.alarm, ctypes.c_void_p))
        _send_when_orphaned(parent, _ORPHANED)


def end_within(seconds: float) -> None:
    """Let this process, which knows that its parent has ended, be killed if it has not ended after this time."""
    if sys.platform == "linux":
        # The line is closed a moment before the kernel sends its signal, which must not shorten the time.
        signal.signal(_ORPHANED, signal.SIG_IGN)
    signal.alarm(math.ceil(seconds))


def _send_when_orphaned(parent: int, number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            # The parent ended before ``prctl``, so the kernel will send nothing.
            os.kill(os.getpid(), number)
