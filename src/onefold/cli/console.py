"""Options and functions that the commands share: naming an app or a store, signing acts, warnings, progress bars."""

from __future__ import annotations

import asyncio
import difflib
import getpass
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from onefold import limits
from onefold.app import App
from onefold.cli.screen import errors as errors
from onefold.cli.screen import output as output
from onefold.errors import ConfigurationError
from onefold.processes.load_app import load_app
from onefold.store import Query
from onefold.store.open import refuse_missing

AppArgument = Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app to load, such as shop.tasks:app.")]
AppOrUrl = Annotated[str | None, typer.Argument(metavar="MODULE:APP", help="The app; leave it out and give --url.")]
Url = Annotated[
    str | None,
    typer.Option(
        envvar="ONEFOLD_URL",
        show_envvar=False,
        help="The store's URL, instead of an app; or set ONEFOLD_URL. Other users can see a password in arguments.",
    ),
]
UrlFile = Annotated[Path | None, typer.Option(help="A file that holds the URL, such as a secret.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Actor = Annotated[str | None, typer.Option(help="Your name, kept for a year; by default your user name.")]
Reason = Annotated[str, typer.Option(help="Why you do it; kept for a year.")]

#: The most names that a warning lists.
_NAMES_SHOWN = 10

Answer = TypeVar("Answer")
Advance = Callable[[int], None]


def find_app(app: str | None, url: str | None, url_file: Path | None, *, creates: bool = False) -> App:
    """Return the named app, or an app without tasks on the store of the given URL.

    The file is preferred to the URL, because the URL may come from the environment.
    A SQLite file that does not exist may be a misspelt URL, so only a command with ``creates`` creates it.
    """
    if app is not None:
        return load_app(app)
    if url_file is not None:
        url = _read_url(url_file)
    if url is None:
        raise ConfigurationError("name the store: give MODULE:APP, --url, --url-file, or the variable ONEFOLD_URL")
    if not creates:
        refuse_missing(url)
    return App(url)


def _read_url(file: Path) -> str:
    """Return the URL in a file; errors do not quote its text, because it may hold a password."""
    try:
        with file.open("rb") as opened:
            text = opened.read(limits.URL_BYTES_MAX + 1).strip().decode()
    except OSError as error:
        raise ConfigurationError(f"--url-file {str(file)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigurationError(f"--url-file {str(file)!r} is not text in UTF-8") from None
    if not text or len(text.encode()) > limits.URL_BYTES_MAX or not text.isprintable():
        raise ConfigurationError(
            f"--url-file {str(file)!r} is not one line of at most {limits.URL_BYTES_MAX:,} bytes; write the URL into it"
        )
    return text


def run_on(app: App, act: Callable[[App], Awaitable[Answer]]) -> Answer:
    """Open an app, run an act on it and return the result."""

    async def opened() -> Answer:
        async with app:
            return await act(app)

    return asyncio.run(opened())


def actor_name(actor: str | None) -> str:
    """Return the name under which an act is recorded: the given one, or that of the user."""
    try:
        return actor or getpass.getuser()
    except (KeyError, OSError) as error:  # a container may have no name for its user
        raise ConfigurationError("the system has no name for this user; give your name with --actor") from error


def read_json(option: str, text: str) -> Any:
    """Decode the value of an option that is JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{option} is not JSON: {error}; text needs its quotes: '\"yes\"'") from error


def say(answer: dict[str, Any], as_json: bool, words: str) -> None:
    """Print an answer as JSON, or the same in words."""
    if as_json:
        output.print_json(answer)
    else:
        output.say(words)


def warn_unknown(what: str, name: str | None, known: Iterable[str]) -> None:
    """Warn that a given name is not known, with similar or known ones."""
    names = sorted(set(known))
    if name is None or name in names:
        return
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {_some(names)}"
    errors.say(f"onefold: there is no {what} {name!r} here; {hint}")


async def warn_unknown_names(app: App, queue: str | None, message_type: str | None) -> None:
    """Warn that a given queue or type is known neither to the app's code nor to the store.

    It reads the store, so call it only when nothing was found.
    """
    if queue is not None:
        warn_unknown("queue", queue, {*await app.count(), *(task.queue for task in app.tasks.values())})
    if message_type is not None and app.tasks and not await app.find(Query(message_type=message_type, limit=1)):
        warn_unknown("task or workflow", message_type, app.tasks)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} others" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Advance]:
    """Show the progress of long work on a terminal; elsewhere print nothing."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.advance(task, number)
