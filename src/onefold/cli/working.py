"""``onefold worker``: a supervisor and its worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated

import typer

from onefold import limits
from onefold.app import App
from onefold.cli.console import AppArgument, warn_unknown
from onefold.cli.reaping import stand_in_front
from onefold.cli.reloading import AT_ONCE, RELOADER_VARIABLE, Reloader, watch_reloader
from onefold.cli.telling import tell
from onefold.clock import SystemClock, system_random
from onefold.crew import SupervisorSettings
from onefold.errors import OnefoldError
from onefold.fleet import parse_queues
from onefold.health import Health, parse_address
from onefold.loading import load_app, set_up_logging, working_directory
from onefold.spawning import leave
from onefold.supervisor import Supervisor
from onefold.version import __version__

_MEBIBYTE = 1024 * 1024
_HOW_MUCH, _HOW_LONG, _AROUND = "How much at once", "How long", "Around it"


_Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        "-p",
        min=1,
        max=limits.PROCESSES_MAX,
        help="Worker processes. One per core is a good start.",
        rich_help_panel=_HOW_MUCH,
    ),
]
_Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency",
        "-c",
        min=1,
        max=limits.CONCURRENCY_MAX,
        help="Handlers that run at once in each process.",
        rich_help_panel=_HOW_MUCH,
    ),
]
_Queue = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        "-q",
        help="Work on this queue only, with :N on N of its messages at once; repeatable.",
        rich_help_panel=_HOW_MUCH,
    ),
]
_MaxMessages = Annotated[
    int | None,
    typer.Option(min=1, help="Replace a process after this many messages; nothing waits.", rich_help_panel=_HOW_MUCH),
]
_MaxMemory = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="MIB", help="Replace a process that takes more memory than this.", rich_help_panel=_HOW_MUCH
    ),
]
_Lease = Annotated[
    float,
    typer.Option(
        min=limits.LEASE_MIN,
        metavar="SECONDS",
        help="After how long without a sign of life others may take over what this worker had.",
        rich_help_panel=_HOW_LONG,
    ),
]
_StopAfter = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How long handlers may take to finish when it is told to stop.",
        rich_help_panel=_HOW_LONG,
    ),
]
_StallAfter = Annotated[
    float,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Kill a process whose event loop has not moved for this long.",
        rich_help_panel=_HOW_LONG,
    ),
]
_UntilIdle = Annotated[
    bool,
    typer.Option(
        "--until-idle", help="Return when nothing is due, instead of waiting for more.", rich_help_panel=_AROUND
    ),
]
_Reload = Annotated[
    bool,
    typer.Option(
        "--reload",
        help="Start again whenever a Python file below this directory changes.",
        rich_help_panel=_AROUND,
    ),
]
_Health = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Answer /live and /ready there, for probes.", rich_help_panel=_AROUND),
]
_Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Log what is ordinary too.", rich_help_panel=_AROUND),
]


def worker(
    app: AppArgument,
    processes: _Processes = 1,
    concurrency: _Concurrency = limits.CONCURRENCY,
    queue: _Queue = None,
    max_messages: _MaxMessages = None,
    max_memory: _MaxMemory = None,
    lease: _Lease = limits.LEASE,
    stop_after: _StopAfter = limits.STOP_SECONDS,
    stall_after: _StallAfter = limits.STALL_SECONDS,
    until_idle: _UntilIdle = False,
    reload: _Reload = False,
    health: _Health = None,
    verbose: _Verbose = False,
) -> None:
    """Run the handlers of an app until it is told to stop.

    The handlers run in processes of their own.  One that dies, whatever killed it, is replaced at once; what it had
    only fetched goes to others, and a message that kills three is set aside as a dead letter with the evidence.

    SIGTERM, Ctrl-C or the end of its terminal stops gracefully: nothing more is claimed, what runs may finish, the
    rest is handed back.  A second SIGTERM or Ctrl-C ends it immediately.

    Changes: messages run and are settled, due schedules fire, and what has outlived its time is removed.

    Example: onefold worker shop.tasks:app --processes 4 --concurrency 50
    """
    if health is not None:
        parse_address(health)
    stand_in_front()
    if reload:
        raise typer.Exit(Reloader().run())
    # What the app does to it when it is imported must not keep its processes from finding it.
    directory = working_directory()
    known = set(threading.enumerate())
    try:
        loaded = load_app(app)
        for name in parse_queues(queue or ())[0]:
            warn_unknown("queue", name, [task.queue for task in loaded.tasks.values()])
        set_up_logging(verbose=verbose)
        settings = SupervisorSettings(
            where=app,
            directory=directory,
            queues=queue or (),
            processes=processes,
            concurrency=concurrency,
            lease_seconds=lease,
            stop_seconds=stop_after,
            stall_seconds=stall_after,
            max_messages=max_messages,
            max_memory_bytes=None if max_memory is None else max_memory * _MEBIBYTE,
            until_idle=until_idle,
            verbose=verbose,
        )
        asyncio.run(_supervise(loaded, settings, health))
    except OnefoldError as error:
        if not _threads_are_left(known):
            raise
        tell(f"onefold: {error}")
        leave(1)
    if _threads_are_left(known):
        leave(0)


def _threads_are_left(known: set[threading.Thread]) -> bool:
    """Whether the app has begun threads for which the interpreter would wait at its end, perhaps for ever."""
    return any(not thread.daemon for thread in threading.enumerate() if thread not in known)


async def _supervise(app: App, settings: SupervisorSettings, address: str | None) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app)
        clock, settings = SystemClock(), replace(settings, queues=settings.queues or app._registry.queues())
        supervisor = Supervisor(app.store, clock, system_random(), app.tasks, settings, app.announce)
        Signals(supervisor, asyncio.get_running_loop(), reloaded=RELOADER_VARIABLE in os.environ).listen()
        if RELOADER_VARIABLE in os.environ:
            stack.callback(asyncio.create_task(watch_reloader(supervisor.stop)).cancel)
        if address is not None:
            where = await stack.enter_async_context(Health(supervisor, clock).serve(address))
            tell(f"onefold: health at http://{where}/live and /ready")
        names = ", ".join(app.tasks) or "none"
        plural = "" if settings.processes == 1 else f", {settings.processes} processes"
        told = f"onefold {__version__}: worker {os.getpid()} ready{plural}; tasks: {names}"
        settled = await supervisor.run(lambda: tell(told))
        tell(f"onefold: worker {os.getpid()} stopped; {settled} messages settled")


class Signals:
    """What signals mean to a supervisor.

    The first stops it gracefully, the second at once, and a third ends the process as it is.  The end of a terminal
    only ever stops it gracefully: a shell and the kernel both tell of it.  Below a reloader, which counts for itself,
    the same signal comes twice when it was sent to all processes of a service; there only ``AT_ONCE`` is a second one.
    """

    def __init__(self, supervisor: Supervisor, loop: asyncio.AbstractEventLoop, *, reloaded: bool) -> None:
        self._supervisor = supervisor
        self._loop = loop
        self._reloaded = reloaded

    def listen(self) -> None:
        """Take signals from now on; one that is ignored stays so, as ``nohup`` wants it."""
        numbers = [signal.SIGTERM, signal.SIGINT, *([AT_ONCE] if self._reloaded else [])]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        again = self._supervisor.stopping
        if again and (number == signal.SIGHUP or (self._reloaded and number != AT_ONCE)):
            return
        self._supervisor.stop()
        if again:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
        else:
            tell("onefold: stopping; handlers may finish, and a second signal ends it at once")
