"""The command line: ``onefold worker module:app``, and the commands for operators."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from onefold.cli.entry import run_command
from onefold.cli.lazy_group import LazyGroup
from onefold.cli.screen import output
from onefold.version import __version__

#: Columns that help in panels needs; in fewer it would cut the names of options.
_PANELS_WIDTH = 60

cli = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _PANELS_WIDTH else None,
    # ``run_command`` prints unexpected errors, escaped and without the values of variables, which may be secret.
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
