"""The command line: ``onefold worker module:app`` and what a person needs around it."""

from __future__ import annotations

import asyncio
import shutil
from typing import Annotated

import typer

from onefold.app import App
from onefold.cli.checking import preflight
from onefold.cli.console import AppOrUrl, Url, UrlFile, find_app, output
from onefold.cli.dead import cancel, dead
from onefold.cli.effects import effects
from onefold.cli.entry import run_command
from onefold.cli.events import chain, events
from onefold.cli.fleet import restored, workers
from onefold.cli.runs import runs
from onefold.cli.schedules import schedules
from onefold.cli.working import worker
from onefold.origin import Origin
from onefold.stores import schema_text
from onefold.version import __version__

#: Columns that help in panels needs; in fewer it would cut the names of options.
_PANELS_WIDTH = 60

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _PANELS_WIDTH else None,
    # ``run_command`` prints what is unexpected, escaped; an error is often pasted somewhere, so without values.
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line and end the process with its exit code."""
    raise SystemExit(run_command(cli))


def _print_version(wanted: bool) -> None:
    if wanted:
        output.say(__version__)
        raise typer.Exit


@cli.callback()
def onefold(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Durable tasks and messages whose effect happens once."""


cli.command()(worker)
cli.command()(workers)
cli.command()(preflight)
cli.command()(cancel)
cli.command()(chain)
cli.add_typer(runs, name="runs")
cli.add_typer(effects, name="effects")
cli.add_typer(events, name="events")
cli.add_typer(dead, name="dead")
cli.add_typer(schedules, name="schedules")


@cli.command()
def migrate(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL instead of running it.")] = False,
) -> None:
    """Bring a database's schema to this version.  Safe to run twice, and from several places at once.

    Changes the schema; a SQLite file that does not exist is created.  With --print nothing.

    Example: onefold migrate --url sqlite:///shop.db
    """
    if print_:
        named = find_app(app, url, url_file, creates=True).url if app or url or url_file else None
        output.print_lines(schema_text(named or "sqlite:///"))
        return
    applied, origin = asyncio.run(_migrate(find_app(app, url, url_file, creates=True)))
    for name in applied:
        output.say(f"applied {name}")
    if not applied:
        output.say("nothing to do: the schema is up to date")
    output.say(f"database {origin.identity} of app {origin.name}")


async def _migrate(app: App) -> tuple[list[str], Origin]:
    applied = await app.migrate()
    async with app:
        return applied, app.origin


cli.command()(restored)


@cli.command()
def version() -> None:
    """Print the version.

    Changes nothing.

    Example: onefold version
    """
    output.say(__version__)
