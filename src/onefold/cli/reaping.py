"""``onefold worker`` as the first process of a container: a process in front of it that buries orphans.

The kernel makes the first process the parent of every orphan, and an orphan that has ended stays as a zombie until its
parent asks how.  A supervisor asks about its own processes only, so a handler that leaves a few behind with each
message would fill the table of processes.
"""

from __future__ import annotations

import os
import signal

_FIRST = 1
#: Passed on to the process behind, which decides what they mean.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def stand_in_front(*, first: int = _FIRST) -> None:
    """In the first process of a container, go on in a process behind it, and stay to bury; elsewhere do nothing.

    Must be called before there are threads.
    """
    if os.getpid() != first:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    behind = os.fork()
    if behind == 0:
        # In a group of its own, so that Ctrl-C does not reach it twice: from the terminal and from the process before.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(behind, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        ended, status = os.wait()
        if ended == behind:
            code = os.waitstatus_to_exitcode(status)
            # As a shell tells it when a signal was the end.  What is left ends with the first process.
            os._exit(code if code >= 0 else 128 - code)
