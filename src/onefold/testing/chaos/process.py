"""The common part of the processes of a chaos run: their orders, their event loop, and disks that fail.

Workers and senders are started as ``python -m onefold.testing.chaos.worker ORDERS``, with their orders as JSON.
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

#: Where supervised workers, which have no orders, are told the folder of the run.
FOLDER_VARIABLE = "ONEFOLD_CHAOS_FOLDER"
#: Seconds between two failures of the disk in one process.
_FAULT_SECONDS = (0.2, 1.0)
#: The next so many calls are in danger.
_FAULT_CALLS_MAX = 40
#: How each call to the disk may fail; most often it only fails.  Only a lock can be "busy": SQLite makes such a call
#: again, and apsw raises the error of the first one although the second succeeded.
_FAULTS = ("io error", "io error", "io error", "full", "torn", "kill")
_OPERATIONS = ("read", "write", "write", "sync", "truncate", "lock")
#: Seconds before a store that could not be opened is tried again.
_AGAIN_SECONDS = 0.1


class Orders(msgspec.Struct, frozen=True):
    """The settings of one process."""

    url: str
    #: Where it keeps its journal and what it suffered.
    folder: str
    name: str
    seed: str
    loop: Loop = "asyncio"
    lease_seconds: float = 1.0
    #: Let the calls of this process to the disk fail now and then; SQLite below apsw only.
    faulty_files: bool = False
    #: For senders: which numbers are theirs, how many they send a second, and whether they only repeat what is open.
    slot: int = 0
    rate: float = 50.0
    only_repeat: bool = False


def read_orders() -> Orders:
    """Read the orders of this process from its command line."""
    return msgspec.json.decode(sys.argv[1], type=Orders)


def run(main: Coroutine[Any, Any, None], loop: Loop) -> None:
    """Run on the event loop that was ordered, with a log on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def say_ready(folder: str) -> None:
    """Show that this process has begun with its work."""
    ready_file(Path(folder), os.getpid()).touch()


def ready_file(folder: Path, pid: int) -> Path:
    """Return the file that is there when a process has begun."""
    return folder / f"{pid}.ready"


def on_stop(call: Callable[[], None]) -> None:
    """Call this when the process is told to stop."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, call)


def open_log(folder: str, name: str) -> Callable[[bytes], object]:
    """Return what appends to a file, durably: it outlives its process, and the machine."""
    file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC, 0o600)
    return lambda line: os.write(file, line)


@asynccontextmanager
async def opened(app: App, orders: Orders) -> AsyncIterator[None]:
    """Open the app, however often it takes, and let its files fail while it is open."""
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
    """Let one call after another fail, and write down how."""
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
