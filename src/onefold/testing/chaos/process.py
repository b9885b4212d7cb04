"""The common part of the processes of a chaos run: their settings, their event loop, and disk faults.

Workers and senders are started as ``python -m onefold.testing.chaos.worker ORDERS``, with their settings as JSON.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec

from onefold.app import App
from onefold.clock import SystemClock
from onefold.errors import StoreUnavailableError
from onefold.testing.vfs import FaultyFiles, FileFault

Loop = Literal["asyncio", "uvloop"]

#: Names the folder of the run for supervised workers, which get no orders.
FOLDER_VARIABLE = "ONEFOLD_CHAOS_FOLDER"
#: Seconds between two disk faults in one process.
_FAULT_SECONDS = (0.2, 1.0)
#: A fault hits one of the next this many calls.
_FAULT_CALLS_MAX = 40
#: How a call to the disk may fail; a plain error is the most frequent.  Only locks fail with "busy": SQLite repeats
#: such a call, and apsw then raises the error of the first call although the second succeeded.
_FAULTS = ("io error", "io error", "io error", "full", "torn", "kill")
_OPERATIONS = ("read", "write", "write", "sync", "truncate", "lock")
#: Seconds between two attempts to open a store.
_AGAIN_SECONDS = 0.1


class Orders(msgspec.Struct, frozen=True):
    """The settings of one process."""

    url: str
    #: The directory for its journal and its log of faults.
    folder: str
    name: str
    seed: str
    loop: Loop = "asyncio"
    lease_seconds: float = 1.0
    #: Whether calls of this process to the disk fail now and then; only for SQLite through apsw.
    faulty_files: bool = False
    #: For senders: the slot that decides its numbers, its sends a second, and whether it only repeats unanswered sends.
    slot: int = 0
    rate: float = 50.0
    only_repeat: bool = False


def read_orders() -> Orders:
    """Read the orders of this process from its command line."""
    return msgspec.json.decode(sys.argv[1], type=Orders)


def run(main: Coroutine[Any, Any, None], loop: Loop) -> None:
    """Run the coroutine on the chosen event loop, and log to standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def say_ready(folder: str) -> None:
    """Create the file that says this process has begun to work."""
    ready_file(Path(folder), os.getpid()).touch()


def ready_file(folder: Path, pid: int) -> Path:
    """Return the file that exists once a process has begun to work."""
    return folder / f"{pid}.ready"


def on_stop(call: Callable[[], None]) -> None:
    """Call this function when the process gets SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, call)


def open_log(folder: str, name: str) -> Callable[[bytes], object]:
    """Return a function that appends to a file and syncs it, so that the lines survive the process and the machine."""
    file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC, 0o600)
    return lambda line: os.write(file, line)


@asynccontextmanager
async def opened(app: App, orders: Orders) -> AsyncIterator[None]:
    """Open the app, retrying for as long as it takes, and let its files fail while it is open."""
    with FaultyFiles() if orders.faulty_files else nullcontext() as files:
        while True:
            try:
                await app.open()
                break
            except StoreUnavailableError:
                await SystemClock().sleep(_AGAIN_SECONDS)
        say_ready(orders.folder)
        breaking = asyncio.create_task(_break_files(files, orders))
        try:
            yield
        finally:
            breaking.cancel()
            if files is not None:
                files.heal()
            await app.close()


async def _break_files(files: FaultyFiles | None, orders: Orders) -> None:
    """Plan one disk fault after another, and log those that happened."""
    if files is None:
        return
    chance = random.Random(orders.seed)
    log, clock = open_log(orders.folder, f"{orders.name}.faults"), SystemClock()
    while True:
        operation = chance.choice(_OPERATIONS)
        kind = chance.choice(_FAULTS if operation != "lock" else (*_FAULTS, "busy"))
        files.plan(FileFault(kind, operation, at=chance.randint(1, _FAULT_CALLS_MAX)))  # type: ignore[arg-type]
        await clock.sleep(chance.uniform(*_FAULT_SECONDS))
        if files.fired:
            log(f"{kind} at {operation}\n".encode())
