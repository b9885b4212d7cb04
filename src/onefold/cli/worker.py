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
from onefold.child_process import leave
from onefold.cli.console import AppArgument, warn_unknown
from onefold.cli.init_process import fork_from_init
from onefold.cli.reload import AT_ONCE, RELOADER_VARIABLE, Reloader, watch_reloader
from onefold.cli.status_line import print_status
from onefold.clock import SystemClock, system_random
from onefold.errors import OnefoldError
from onefold.processes.load_app import load_app, set_up_logging, working_directory
from onefold.supervisor.health import Health, parse_address
from onefold.supervisor.settings import SupervisorSettings
from onefold.supervisor.supervisor import Supervisor
from onefold.version import __version__
from onefold.worker.settings import parse_queues

_MEBIBYTE = 1024 * 1024
_HOW_MUCH, _HOW_LONG, _OTHER = "How much at once", "How long", "Other options"


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
        help="Work on this queue only; with :N, on at most N of its messages at once. Repeatable.",
        rich_help_panel=_HOW_MUCH,
    ),
]
_MaxMessages = Annotated[
    int | None,
    typer.Option(min=1, help="Replace a process after this many messages, without a pause.", rich_help_panel=_HOW_MUCH),
]
_MaxMemory = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="MIB", help="Replace a process that uses more memory than this.", rich_help_panel=_HOW_MUCH
    ),
]
_Lease = Annotated[
    float,
    typer.Option(
        min=limits.LEASE_MIN,
        metavar="SECONDS",
        help="Other workers may take messages over that this worker has not renewed for this long.",
        rich_help_panel=_HOW_LONG,
    ),
]
_StopAfter = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How long running handlers may take to finish after a stop.",
        rich_help_panel=_HOW_LONG,
    ),
]
_StallAfter = Annotated[
    float,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Kill a process whose event loop has not run for this long.",
        rich_help_panel=_HOW_LONG,
    ),
]
_UntilIdle = Annotated[
    bool,
    typer.Option(
        "--until-idle", help="Return when nothing is due, instead of waiting for more.", rich_help_panel=_OTHER
    ),
]
_Reload = Annotated[
    bool,
    typer.Option(
        "--reload",
        help="Restart when a Python file below this directory changes.",
        rich_help_panel=_OTHER,
    ),
]
_Health = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve /live and /ready there, for probes.", rich_help_panel=_OTHER),
]
_Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Log ordinary events too.", rich_help_panel=_OTHER),
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
    """Run the handlers of an app until stopped.

    The handlers run in worker processes.  One that dies is replaced at once; messages that it had fetched and not
    started go to other workers, and a message that kills three processes becomes a dead letter with the evidence.

    SIGTERM, Ctrl-C or the end of its terminal stops it gracefully: no more messages are claimed, running handlers may
    finish, and other messages are handed back.  A second SIGTERM or Ctrl-C ends it immediately.

    Changes: messages run and are settled, due schedules fire, and expired messages are removed.

    Example: onefold worker shop.tasks:app --processes 4 --concurrency 50
    """
    if health is not None:
        parse_address(health)
    fork_from_init()
    if reload:
        raise typer.Exit(Reloader().run())
    # Read before the app is imported, because its code may change the directory, and worker processes need this one.
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
        print_status(f"onefold: {error}")
        leave(1)
    if _threads_are_left(known):
        leave(0)


def _threads_are_left(known: set[threading.Thread]) -> bool:
    """Whether the app has started threads for which the interpreter would wait at its exit, perhaps for ever."""
    return any(not thread.daemon for thread in threading.enumerate() if thread not in known)


async def _supervise(app: App, settings: SupervisorSettings, address: str | None) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app)
        clock, settings = SystemClock(), replace(settings, queues=settings.queues or app.registry.queues())
        supervisor = Supervisor(app.store, clock, system_random(), app.tasks, settings, app.announce)
        Signals(supervisor, asyncio.get_running_loop(), reloaded=RELOADER_VARIABLE in os.environ).listen()
        if RELOADER_VARIABLE in os.environ:
            stack.callback(asyncio.create_task(watch_reloader(supervisor.stop)).cancel)
        if address is not None:
            where = await stack.enter_async_context(Health(supervisor, clock).serve(address))
            print_status(f"onefold: health at http://{where}/live and /ready")
        names = ", ".join(app.tasks) or "none"
        plural = "" if settings.processes == 1 else f", {settings.processes} processes"
        status = f"onefold {__version__}: worker {os.getpid()} ready{plural}; tasks: {names}"
        settled = await supervisor.run(lambda: print_status(status))
        print_status(f"onefold: worker {os.getpid()} stopped; {settled} messages settled")


class Signals:
    """Turns signals into calls of a supervisor.

    The first signal stops it gracefully, the second at once, and a third kills the process.  SIGHUP only ever stops it
    gracefully, because at the end of a terminal both the shell and the kernel send it.  Below a reloader, which counts
    the signals itself, a signal to all processes of a service comes twice; there only ``AT_ONCE`` is a second one.
    """

    def __init__(self, supervisor: Supervisor, loop: asyncio.AbstractEventLoop, *, reloaded: bool) -> None:
        self._supervisor = supervisor
        self._loop = loop
        self._reloaded = reloaded

    def listen(self) -> None:
        """Handle signals from now on; SIGHUP stays ignored if it is, as ``nohup`` needs it."""
        numbers = [signal.SIGTERM, signal.SIGINT, *([AT_ONCE] if self._reloaded else [])]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._loop.add_signal_handler(number, self._handle, number)

    def _handle(self, number: signal.Signals) -> None:
        again = self._supervisor.stopping
        if again and (number == signal.SIGHUP or (self._reloaded and number != AT_ONCE)):
            return
        self._supervisor.stop()
        if again:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
        else:
            print_status("onefold: stopping; handlers may finish, and a second signal ends it at once")
