"""The command line: ``onefold worker module:app`` and what a person needs around it."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from onefold.app import App
from onefold.cli.checking import preflight
from onefold.cli.console import AppOrUrl, Url, errors, find_app
from onefold.cli.dead import cancel, dead
from onefold.cli.effects import effects
from onefold.cli.events import chain, events
from onefold.cli.fleet import restored, workers
from onefold.cli.runs import runs
from onefold.cli.schedules import schedules
from onefold.cli.working import worker
from onefold.errors import OnefoldError
from onefold.loading import load_app
from onefold.origin import Origin
from onefold.stores import schema_text
from onefold.version import __version__

cli = typer.Typer(
    help="Durable tasks and messages whose effect happens once.",
    no_args_is_help=True,
    add_completion=True,
    # What handlers and settings hold may be secret, and an error is often pasted somewhere.
    pretty_exceptions_show_locals=False,
)


def main() -> None:
    """Run the command line; errors of ours are printed as they are, without a stack."""
    try:
        cli()
    except OnefoldError as error:
        errors.print("[red]onefold:[/]", end=" ")
        errors.print(str(error), soft_wrap=True, markup=False)
        sys.exit(1)


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
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL instead of running it.")] = False,
) -> None:
    """Bring a database's schema to this version.  Safe to run twice, and from several places at once."""
    if print_:
        typer.echo(schema_text(url or (load_app(app).url if app else None) or "sqlite:///"))
        return
    applied, origin = asyncio.run(_migrate(find_app(app, url, creates=True)))
    for name in applied:
        typer.echo(f"applied {name}")
    if not applied:
        typer.echo("nothing to do: the schema is up to date")
    typer.echo(f"database {origin.identity} of app {origin.name}")


async def _migrate(app: App) -> tuple[list[str], Origin]:
    applied = await app.migrate()
    async with app:
        return applied, app.origin


cli.command()(restored)


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
