"""What the commands share: where they print, how a person names an app or a store, and how long things take."""

from __future__ import annotations

import asyncio
import getpass
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from onefold.app import App
from onefold.errors import ConfigurationError
from onefold.loading import load_app
from onefold.stores import refuse_missing

errors = Console(stderr=True, highlight=False)
#: Where no terminal says how wide it is, lines are as long as they need to be: a cut id is of no use to a program.
_PIPED_WIDTH = 240
output = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)

AppArgument = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, such as shop.tasks:app.")]
AppOrUrl = Annotated[
    str | None, typer.Argument(metavar="[MODULE:APP]", help="The app, or leave it out and give --url.")
]
Url = Annotated[str | None, typer.Option(envvar="ONEFOLD_URL", help="The store's URL, instead of an app.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Actor = Annotated[str | None, typer.Option(help="Who you are; your user name unless you say so.  Kept for ever.")]
Reason = Annotated[str, typer.Option(help="Why; kept for ever.")]

Answer = TypeVar("Answer")
Advance = Callable[[int], None]


def find_app(app: str | None, url: str | None, *, creates: bool = False) -> App:
    """Return the app a person named, or an app without tasks on the store they named.

    A URL may be misspelt, so a SQLite file that does not exist is created only where the command ``creates``.
    """
    if app is None and url is None:
        raise ConfigurationError("say which store: MODULE:APP, or --url, or the variable ONEFOLD_URL")
    if app is not None:
        return load_app(app)
    if url is not None and not creates:
        refuse_missing(url)
    return App(url)


def run_on(app: App, act: Callable[[App], Awaitable[Answer]]) -> Answer:
    """Open an app, do something with it and return what came of it."""

    async def opened() -> Answer:
        async with app:
            return await act(app)

    return asyncio.run(opened())


def who(actor: str | None) -> str:
    """Return the name under which an act is kept: the one that was given, or that of the user."""
    try:
        return actor or getpass.getuser()
    except (KeyError, OSError) as error:  # a container may have no name for its user
        raise ConfigurationError("the system has no name for this user; say who you are with --actor") from error


def read_json(option: str, text: str) -> Any:
    """Return what a person wrote as JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{option} is not JSON: {error}; text needs its quotes: '\"yes\"'") from error


def print_json(answer: object) -> None:
    """Print for programs."""
    typer.echo(msgspec.json.encode(answer))


def say(answer: dict[str, Any], as_json: bool, words: str) -> None:
    """Print an answer for programs, or the same in words."""
    if as_json:
        print_json(answer)
    else:
        typer.echo(words)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Advance]:
    """Show how far long work is, on a terminal; elsewhere nothing."""
    told = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*told, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.advance(task, number)
