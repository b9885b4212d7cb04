"""Beside the flow: what ties a process to its parent, so that it does not outlive it whatever its code is doing.

A process hears on its line that its parent is gone, and ends.  One whose handler sits in C code with the interpreter's
lock hears nothing, so Linux is asked to end it.  Elsewhere such a process lives until that code returns.

The kernel counts the thread that started the process as the parent: here that is the thread of an event loop, which
lives as long as anything it has started is of use.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys

#: Linux: send this process a signal when its parent dies.
_PR_SET_PDEATHSIG = 1
#: No kernel sends it and no program uses it.  Its number is also for how many seconds an orphan may hang; see below.
_ORPHANED = 16


def die_with(parent: int) -> None:
    """Have this process killed at the moment its parent is gone; for one that could save nothing by living on."""
    _send_when_orphaned(parent, signal.SIGKILL)


def follow(parent: int) -> None:
    """Have this process killed 16 seconds after its parent is gone, unless it has noticed by then; see ``noticed``."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # A handler written in Python waits for the interpreter's lock.  ``alarm`` of the C library does not, it may be
        # called in a signal handler, and what it is given there, the number of the signal, are seconds to it.
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(_ORPHANED, ctypes.cast(libc.alarm, ctypes.c_void_p))
        _send_when_orphaned(parent, _ORPHANED)


def noticed(seconds: float) -> None:
    """The parent is known to be gone: end in good order, or be killed after so many seconds."""
    if sys.platform == "linux":
        # The line goes silent a moment before the kernel sends its signal, which must not shorten the time.
        signal.signal(_ORPHANED, signal.SIG_IGN)
    signal.alarm(math.ceil(seconds))


def _send_when_orphaned(parent: int, number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            # It died before the kernel was asked.
            os.kill(os.getpid(), number)
