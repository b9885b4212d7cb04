"""Tasks that run in their own processes; imported by the tests and by each of those processes."""

from __future__ import annotations

import asyncio
import ctypes
import datetime as dt
import decimal
import multiprocessing
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import apsw

from onefold import App, Context, HandlerError, HandlerTimeoutError, RetryPolicy, SyncApp, SyncContext
from onefold.testing import HastyClock

app = App(clock=HastyClock())
ONCE = RetryPolicy(max_attempts=1)


@app.lifespan
@asynccontextmanager
async def resources() -> AsyncIterator[int]:
    yield os.getpid()


@app.task
async def child(name: str = "") -> None: ...


placed = app.topic("order.placed", str)
confirmed = app.topic("order.confirmed", str)


@app.on(placed, isolate=True, retry=ONCE)
async def confirm(ctx: Context, insert: str) -> int:
    await ctx.execute(insert, "confirmed")
    ctx.publish(confirmed, "yes")
    return os.getpid()


@app.task(isolate=True, retry=ONCE)
async def on_loop(ctx: Context, insert: str, fails: bool = False) -> dict[str, Any]:
    before = await ctx.fetch("SELECT count(*) FROM effect")
    await ctx.check()
    await ctx.execute(insert, "row")
    inside = await ctx.fetch("SELECT name FROM effect")
    ctx.send(child, "by ctx")
    ctx.send_many([child.call("with many")])
    await child.send("by itself")
    if fails:
        raise ValueError("no")
    return _seen(ctx, before, inside)


@app.task(isolate=True, retry=ONCE)
def in_thread(ctx: SyncContext, insert: str, fails: bool = False) -> dict[str, Any]:
    before = ctx.fetch("SELECT count(*) FROM effect")
    ctx.check()
    ctx.execute(insert, "row")
    inside = ctx.fetch("SELECT name FROM effect")
    ctx.send(child, "by ctx")
    ctx.send_many([child.call("with many")])
    child.send("by itself")
    if fails:
        raise ValueError("no")
    return _seen(ctx, before, inside)


def _seen(ctx: Context | SyncContext, before: Any, inside: Any) -> dict[str, Any]:
    return {
        "before": before,
        "inside": inside,
        "pid": os.getpid(),
        "resources": ctx.resources,
        "attempt": ctx.attempt,
        "key": ctx.idempotency_key,
        "upstream": ctx.upstream_key("stripe"),
        "held": ctx.deadline.timestamp(),
    }


def _segfault() -> None:
    ctypes.string_at(0)


def _out_of_memory() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out


DEATHS: dict[str, Callable[[], object]] = {
    "segfault": _segfault,
    "abort": os.abort,
    "exit": lambda: os._exit(0),
    "killed": _out_of_memory,
}


@app.task(isolate=True, retry=RetryPolicy(jitter=False))
async def dies(ctx: Context, how: str) -> None:
    await ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
    DEATHS[how]()


@app.task(isolate=True, retry=RetryPolicy(jitter=False))
def dies_in_thread(ctx: SyncContext, how: str) -> None:
    ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
    DEATHS[how]()


class Odd(BaseException):
    """Neither an error nor a signal."""


class UnprintableError(Exception):
    """Fails when it is formatted."""

    def __str__(self) -> str:
        raise Odd("no text")

    __repr__ = __str__


def _recurse() -> int:
    return _recurse() + 1


FAILURES: dict[str, BaseException | Callable[[], object]] = {
    "ValueError": ValueError("no"),
    "isolated_tasks.Odd": Odd("no"),
    "SystemExit": SystemExit(0),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "asyncio.exceptions.CancelledError": asyncio.CancelledError(),
    "GeneratorExit": GeneratorExit(),
    "RuntimeError": StopIteration(),
    "StopAsyncIteration": StopAsyncIteration(),
    "MemoryError": MemoryError(),
    "RecursionError": _recurse,
    "ExceptionGroup": ExceptionGroup("many", [ValueError("one")]),
    "isolated_tasks.UnprintableError": UnprintableError(),
}


def _fail(how: str) -> None:
    failure = FAILURES[how]
    if isinstance(failure, BaseException):
        raise failure
    failure()


@app.task(isolate=True, retry=ONCE)
async def fails_on_loop(ctx: Context, how: str) -> None:
    await ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
    _fail(how)


@app.task(isolate=True, retry=ONCE)
def fails_in_thread(ctx: SyncContext, how: str) -> None:
    ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
    _fail(how)


class GoneError(Exception):
    """A permanent failure; the worker knows that only from the task's policy."""


@app.task(isolate=True, retry=RetryPolicy(permanent=(GoneError,)))
async def judged() -> None:
    raise GoneError("for good")


@app.task(isolate=True)
async def bad_result(ctx: Context, how: str) -> Any:
    await ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
    return {"object": object(), "large": "x" * 2_000_000, "nan": float("nan")}[how]


@app.task(isolate=True, retry=ONCE, timeout=0.2)
def catches_everything() -> None:
    while True:
        try:
            threading.Event().wait()
        except HandlerTimeoutError:
            continue


@app.task(isolate=True, retry=ONCE, timeout=0.2)
async def cleans_up(ctx: Context) -> None:
    await ctx.execute("INSERT INTO effect (name) VALUES ('undone')")
    await asyncio.Event().wait()


@app.task(isolate=True, retry=ONCE, timeout=0.2)
async def holds_the_interpreter() -> None:
    """Keep every thread of the process from running, as a careless C library does."""
    ctypes.PyDLL(None).sleep(600)


def _start_a_program(file: int) -> None:
    subprocess.Popen(["sleep", "600"], stdout=file)


@app.task(isolate=True)
async def hangs(path: str, where: str = "python") -> None:
    """Write its process id, then never end; the pipe reaches its end when the process and its programs are gone."""
    file = os.open(path, os.O_WRONLY)
    if where == "program":
        _start_a_program(file)
    os.write(file, f"{os.getpid()}\n".encode())
    while True:
        if where == "c":
            ctypes.PyDLL(None).sleep(600)


@app.task(isolate=True)
async def tells_its_pid() -> int:
    return os.getpid()


@app.task(isolate=True)
async def leaves_a_child(how: str) -> int:
    """Fork and leave the fork running, which keeps its parent's pipe open; then die or return."""
    if (pid := os.fork()) == 0:
        signal.pause()
        os._exit(0)
    if how == "die":
        os._exit(7)
    return pid


@app.task(isolate=True)
def dies_with_a_program(path: str) -> None:
    """Start a program that holds a pipe open, and die."""
    with open(path, "w") as pipe:
        subprocess.Popen(["sleep", "600"], stdout=pipe)
    os._exit(7)


def _fork(path: str) -> int:
    """Return 0 in a fork, which waits until the pipe at ``path`` is opened for writing."""
    if pid := os.fork():
        return pid
    with open(path):
        return 0


@app.task(isolate=True, retry=ONCE, timeout=10)
async def forks(path: str, how: str) -> str:
    """Make a fork that continues as if it were its parent."""
    if pid := _fork(path):
        return str(pid)
    if how == "raises":
        os.execvp("no-such-program", ["no-such-program"])
    if how == "awaits":
        await asyncio.get_running_loop().run_in_executor(None, os.getpid)
    return "fork"


@app.task(isolate=True, retry=ONCE, timeout=10)
def forks_in_a_thread(path: str, how: str) -> str:
    if pid := _fork(path):
        return str(pid)
    if how == "raises":
        os.execvp("no-such-program", ["no-such-program"])
    return "fork"


@app.task(isolate=True, retry=ONCE, timeout=10)
async def waits_for_its_fork() -> str:
    """Return after the fork, which returns at once, is gone."""
    return _outlive_a_fork()


@app.task(isolate=True, retry=ONCE, timeout=10)
def waits_for_its_fork_in_a_thread() -> str:
    return _outlive_a_fork()


def _outlive_a_fork() -> str:
    if pid := os.fork():
        os.waitpid(pid, 0)
        return "parent"
    return "fork"


@app.task(isolate=True, retry=ONCE, timeout=10)
def lets_the_fork_go_on(ctx: SyncContext, insert: str, path: str, pid: int) -> str:
    """Let the fork of an earlier run continue, and return after its end."""
    with open(path, "w"):
        os.waitpid(pid, 0)
    ctx.execute(insert, "own")
    return "own"


@app.task(isolate=True, retry=ONCE, timeout=10)
def makes_a_pool(number: int) -> int:
    """Use a pool of processes that are forked, told to end by a signal, and waited for."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return sum(pool.map(abs, [-number, -number]))


@app.task(isolate=True)
async def stops_at(path: str, release: str, resists: bool = True) -> int:
    """Write its process id, then wait until the second pipe is opened for writing."""
    if not resists:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    await asyncio.to_thread(_rest, path, release)
    return os.getpid()


def _rest(path: str, release: str) -> None:
    with open(path, "w") as pipe:
        pipe.write(f"{os.getpid()}\n")
    with open(release):
        pass


@app.task(isolate=True)
async def stray() -> None:
    asyncio.create_task(asyncio.Event().wait(), name="left-alone")  # noqa: RUF006


@app.task(isolate=True, retry=ONCE)
async def late(ctx: Context) -> None:
    ctx.after(asyncio.Event().wait)


#: Values, by their type in PostgreSQL.
VALUES: list[tuple[str, Any]] = [
    ("text", None),
    ("boolean", True),
    ("bigint", -7),
    ("bigint", 2**62),
    ("float8", 1.5),
    ("text", "text ☃"),
    ("bytea", b"\0\xff"),
    ("timestamptz", dt.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)),
    ("date", dt.date(2030, 1, 2)),
    ("time", dt.time(3, 4, 5)),
    ("interval", dt.timedelta(days=-1, microseconds=5)),
    ("numeric", decimal.Decimal("1.10")),
    ("uuid", uuid.UUID(int=7)),
    ("bigint[]", [1, 2, 3]),
]


@app.task(isolate=True, retry=ONCE)
async def echoes(ctx: Context) -> bool:
    """Send values of every type to the database and read them back."""
    columns = ", ".join(f"%s::{kind}" for kind, _ in VALUES)
    (row,) = await ctx.fetch(f"SELECT {columns}", *(value for _, value in VALUES))
    assert row == tuple(value for _, value in VALUES), row
    return True


@app.task(isolate=True, retry=ONCE)
async def asks_for_the_impossible(ctx: Context) -> str:
    try:
        await ctx.fetch("SELECT ?", object())
    except HandlerError as error:
        return str(error)
    return "no error"


@app.task(isolate=True, retry=ONCE)
async def asks_too_much(ctx: Context) -> str:
    try:
        await ctx.fetch("SELECT hex(zeroblob(40000000))")
    except HandlerError as error:
        return str(error)
    return "no error"


@app.task(isolate=True, retry=ONCE)
async def catches_the_drivers_error(ctx: Context) -> str:
    try:
        await ctx.execute("INSERT INTO effect (name) VALUES (NULL)")
    except apsw.ConstraintError as error:
        return str(error)
    return "no error"


@app.task(isolate=True, retry=ONCE)
async def charges_once(ctx: Context, how: str) -> str:
    async def charge() -> str:
        if how == "unknown" and ctx.attempt == 1:
            raise ConnectionError("lost")
        return "charged"

    return await ctx.once("charge", charge)


@app.task(isolate=True)
async def prints_its_threads() -> str:
    return " ".join(sorted(thread.name for thread in threading.enumerate()))


plain = SyncApp(clock=HastyClock())


@plain.task(isolate=True)
def of_a_plain_app(number: int) -> int:
    return number * 2


def _hidden() -> App:
    hidden = App(clock=HastyClock())

    async def lost() -> None: ...

    lost.__qualname__ = "lost"
    hidden.task(isolate=True, retry=ONCE)(lost)
    return hidden


#: Apps that a process cannot find, because no name of the module refers to them.
HIDDEN = [_hidden()]


if "ISOLATED_MUTANT" in os.environ:
    import isolated_mutants

    isolated_mutants.put_back()
