"""``onefold worker`` as the first process of a container: a parent process that reaps orphans.

The kernel makes the first process the parent of every orphan, and an orphan that has ended stays as a zombie until its
parent reads its exit status.  A supervisor reads only that of its own processes, so a handler that leaves some
processes behind with each message would fill the process table.
"""

from __future__ import annotations

import os
import signal

_FIRST = 1
#: Signals that are passed on to the supervisor, which acts on them.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_from_init(*, first: int = _FIRST) -> None:
    """In the first process of a container, return in a forked child and reap orphans in the parent; else do nothing.

    Must be called before there are threads, because a fork has only the thread that forked.
    """
    if os.getpid() != first:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        # In its own process group, so that Ctrl-C reaches it once, from its parent, and not from the terminal as well.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            # 128 plus the number of the signal, as shells do.  Other processes end with the first one.
            os._exit(code if code >= 0 else 128 - code)
