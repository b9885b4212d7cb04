"""Threads for blocking handlers leave the interpreter as they found it."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Under ``sys.settrace`` Python 3.11 spins for ever while the interpreter's flag for pending exceptions is set.
_TRACED_AFTERWARDS = """
import asyncio, sys, threading, time
from onefold.handlers.threads import Threads

async def scenario():
    threads = Threads()
    assert await threads.run(lambda: 1) == 1
    begun = threading.Event()

    def busy():
        begun.set()
        while True:
            time.sleep(0.001)

    if "{interrupted}" == "yes":
        running = asyncio.create_task(threads.run(busy))
        await asyncio.to_thread(begun.wait)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert await threads.run(lambda: 2) == 2
    threads.close()

asyncio.run(scenario())
sys.settrace(lambda *_: None)
(lambda: None)()
sys.settrace(None)
print("over")
"""


@pytest.mark.parametrize("interrupted", ["no", "yes"])
def test_a_thread_leaves_no_exception_pending_in_the_interpreter(interrupted: str) -> None:
    """Debuggers and coverage still work in a process whose handlers ran in threads."""
    script = _TRACED_AFTERWARDS.replace("{interrupted}", interrupted)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=10, check=False)
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr
