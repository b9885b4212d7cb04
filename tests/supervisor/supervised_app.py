"""An app with harmful handlers, for ``onefold worker supervised_app:app``.

``ONEFOLD_URL`` names its store; ``RUNS`` names a file to which every handler adds a line when it begins.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from onefold import App, Context, Snooze

app = App()
_runs = os.open(os.environ.get("RUNS", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
_insert = "INSERT INTO effect VALUES (?)" if os.environ.get("ONEFOLD_URL", "").startswith("sqlite") else None
_kept: list[bytearray] = []


def began(what: str) -> None:
    """Record the beginning in one write, which no rollback removes."""
    os.write(_runs, f"{what} {os.getpid()} {os.getcwd()}\n".encode())


def times_begun(what: str) -> int:
    return Path(os.environ["RUNS"]).read_text().count(what)


@app.lifespan
@asynccontextmanager
async def resources() -> AsyncIterator[None]:
    if "BROKEN" in os.environ:
        raise RuntimeError("the lifespan is broken")
    yield


@app.task
async def note(ctx: Context, name: str) -> None:
    began(f"note:{name}")
    await ctx.execute(_insert or "INSERT INTO effect VALUES (%s)", name)


@app.task
async def quick(name: str) -> None:
    began(f"quick:{name}")


@app.task
async def wait(name: str, seconds: float) -> None:
    began(f"wait:{name}")
    await asyncio.sleep(seconds)


@app.task
async def neighbour(name: str) -> None:
    """Run until the process dies; a second run is short."""
    began(f"neighbour:{name}")
    if times_begun(f"neighbour:{name} ") == 1:
        await asyncio.sleep(3_600)


@app.task
async def die(how: str, beside: int) -> None:
    """End the process once this many others run beside this one; later runs, which are alone, end it at once."""
    began("die")
    while times_begun("neighbour:") < beside:  # noqa: ASYNC110 - what happens in a file has no event
        await asyncio.sleep(0.01)
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "exit":
        os._exit(0)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task
async def later(seconds: float) -> None:
    """Use a number from the message as a duration, past the check that every duration goes through."""
    began("later")
    snooze = Snooze(after=1.0)
    snooze.after_seconds = seconds
    raise snooze


@app.task
async def hold(name: str, seconds: int) -> None:
    """Sleep in C without releasing the interpreter's lock: no other thread of this process can run."""
    began(f"hold:{name}")
    ctypes.PyDLL(None).sleep(seconds)


@app.task
def hold_in_a_thread(name: str, seconds: int) -> None:
    began(f"hold_in_a_thread:{name}")
    ctypes.PyDLL(None).sleep(seconds)


@app.task(timeout=0.2)
async def stubborn() -> None:
    began("stubborn")
    await ignore_cancellation()


@app.task
async def endless() -> None:
    began("endless")
    await ignore_cancellation()


async def ignore_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            continue


@app.task
async def grow(megabytes: int) -> None:
    began("grow")
    _kept.append(bytearray(os.urandom(1) * (megabytes * 1024 * 1024)))


@app.task
async def wander() -> None:
    """Change global state of the process, and leave a thread behind that never ends."""
    began("wander")
    os.chdir("/")
    threading.Thread(target=threading.Event().wait).start()


@app.task(isolate=True)
def apart(name: str, seconds: float) -> None:
    began(f"apart:{name}")
    time.sleep(seconds)


@app.task
async def fork(how: str) -> str:
    """Make a fork that continues as if it were the worker, and live longer than it."""
    return outlive_a_fork(how)


@app.task
def fork_in_a_thread(how: str) -> str:
    return outlive_a_fork(how)


def outlive_a_fork(how: str) -> str:
    began("fork")
    if pid := os.fork():
        if how == "is told to end":
            os.kill(pid, signal.SIGTERM)
        return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if how == "is told to end":
        signal.pause()
    return "fork"
