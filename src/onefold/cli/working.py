"""``onefold worker``: a supervisor and its worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated

import typer

from onefold import limits
from onefold.app import App
from onefold.cli.console import AppArgument, errors, warn_unknown
from onefold.cli.reloading import RELOADER_VARIABLE, Reloader, watch_reloader
from onefold.clock import SystemClock, system_random
from onefold.crew import SupervisorSettings
from onefold.fleet import parse_queues
from onefold.health import Health, parse_address
from onefold.loading import load_app, set_up_logging
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

    SIGTERM or Ctrl-C stops gracefully: nothing more is claimed, what runs may finish, the rest is handed back.
    A second signal ends it immediately.

    Changes: messages run and are settled, due schedules fire, and what has outlived its time is removed.

    Example: onefold worker shop.tasks:app --processes 4 --concurrency 50
    """
    if health is not None:
        parse_address(health)
    if reload:
        raise typer.Exit(Reloader().run())
    loaded = load_app(app)
    for name in parse_queues(queue or ())[0]:
        warn_unknown("queue", name, [task.queue for task in loaded.tasks.values()])
    set_up_logging(verbose=verbose)
    settings = SupervisorSettings(
        where=app,
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


async def _supervise(app: App, settings: SupervisorSettings, address: str | None) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app)
        clock, settings = SystemClock(), replace(settings, queues=settings.queues or app._registry.queues())
        supervisor = Supervisor(app.store, clock, system_random(), app.tasks, settings, app.announce)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, supervisor, loop)
        if RELOADER_VARIABLE in os.environ:
            stack.callback(loop.create_task(watch_reloader(supervisor.stop)).cancel)
        if address is not None:
            where = await stack.enter_async_context(Health(supervisor, clock).serve(address))
            errors.print(f"onefold: health at http://{where}/live and /ready")
        names = ", ".join(app.tasks) or "none"
        plural = "" if settings.processes == 1 else f", {settings.processes} processes"
        told = f"onefold {__version__}: worker {os.getpid()} ready{plural}; tasks: {names}"
        settled = await supervisor.run(lambda: errors.print(told, soft_wrap=True))
        errors.print(f"onefold: worker {os.getpid()} stopped; {settled} messages settled")


def _stop(supervisor: Supervisor, loop: asyncio.AbstractEventLoop) -> None:
    """Stop gracefully, at the second signal at once, and let a third one end the process as it is."""
    if supervisor.stopping:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
    else:
        errors.print("onefold: stopping; handlers may finish, and a second signal ends it at once")
    supervisor.stop()
