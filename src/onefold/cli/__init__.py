"""The command line: ``onefold worker module:app`` and what a person needs around it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import onefold
from onefold import limits
from onefold.app import App
from onefold.errors import ConfigurationError, OnefoldError
from onefold.stores import schema_text

cli = typer.Typer(
    help="Durable tasks and messages whose effect happens once.", no_args_is_help=True, add_completion=True
)
_errors = Console(stderr=True, highlight=False)

AppArgument = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, such as shop.tasks:app.")]


def main() -> None:
    """Run the command line; errors of ours are printed in one line, without a stack."""
    try:
        cli()
    except OnefoldError as error:
        _errors.print(f"[red]onefold:[/] {error}", soft_wrap=True)
        sys.exit(1)


def load_app(where: str) -> App:
    """Import the app a person named on the command line."""
    module_name, _, name = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), name or "app")
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise
        raise ConfigurationError(
            f"there is no module {module_name!r} here; write MODULE:APP, such as shop:app"
        ) from error
    except AttributeError as error:
        raise ConfigurationError(f"module {module_name!r} has no {name or 'app'!r}") from error
    if not isinstance(found, App):
        raise ConfigurationError(f"{where} is a {type(found).__name__}, not an App")
    return found


@cli.command()
def worker(
    app: AppArgument,
    queue: Annotated[
        list[str] | None, typer.Option("--queue", "-q", help="Work on this queue only; repeatable.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, max=limits.CONCURRENCY_MAX, help="Handlers that run at once.")
    ] = limits.CONCURRENCY,
    lease: Annotated[
        float, typer.Option(min=limits.LEASE_MIN, help="Seconds until another worker may take over what this one had.")
    ] = limits.LEASE,
    until_idle: Annotated[bool, typer.Option(help="Return when nothing is due, instead of waiting for more.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every skipped duplicate too.")] = False,
) -> None:
    """Run the handlers of an app until it is told to stop.

    SIGTERM or Ctrl-C stops it gracefully: nothing more is claimed, what runs may finish, the rest is handed back.
    A second signal ends it immediately; whatever it held is taken over when its lease runs out.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    loaded = load_app(app)
    _run(_work(loaded, queue, concurrency, lease, until_idle))


async def _work(app: App, queues: list[str] | None, concurrency: int, lease: float, until_idle: bool) -> None:
    async with app:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, app, loop)
        names = ", ".join(app.tasks) or "none"
        _errors.print(f"onefold {onefold.__version__}: worker {os.getpid()} ready; tasks: {names}")
        done = await app.work(queues=queues, concurrency=concurrency, lease=lease, until_idle=until_idle)
        _errors.print(f"onefold: worker {os.getpid()} stopped; {done} messages settled")


def _stop(app: App, loop: asyncio.AbstractEventLoop) -> None:
    """Stop gracefully, and let the next signal end the process at once."""
    app.stop_working()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop, the faster event loop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


@cli.command()
def migrate(
    app: Annotated[
        str | None, typer.Argument(metavar="MODULE:APP", help="The app, or leave out and give --url.")
    ] = None,
    url: Annotated[str | None, typer.Option(envvar="ONEFOLD_URL", help="The store's URL.")] = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL instead of running it.")] = False,
) -> None:
    """Bring a database's schema to this version.  Safe to run twice, and from several places at once."""
    if print_:
        typer.echo(schema_text(url or (load_app(app).url if app else None) or "sqlite:///"))
        return
    target = load_app(app) if app else App(url)
    applied = asyncio.run(target.migrate())
    for name in applied:
        typer.echo(f"applied {name}")
    if not applied:
        typer.echo("nothing to do: the schema is up to date")


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(onefold.__version__)
