"""``onefold dead``: dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from onefold import limits
from onefold.app import App
from onefold.cli.console import (
    Actor,
    AppOrUrl,
    AsJson,
    Reason,
    Url,
    UrlFile,
    actor_name,
    errors,
    find_app,
    output,
    progress,
    run_on,
    say,
    warn_unknown_names,
)
from onefold.cli.durations import written
from onefold.cli.screen import harmless
from onefold.errors import ConfigurationError, RetentionOverError
from onefold.operations import dead_letters
from onefold.operations.dead_letters import DeadLetter
from onefold.store import Query, State

dead = typer.Typer(help="Show dead letters, let them run again, or close them.", no_args_is_help=True)

Ids = Annotated[list[str] | None, typer.Option("--id", help="This dead letter; may be given several times.")]
MessageId = Annotated[str, typer.Argument(metavar="MESSAGE", help="The message's id.")]
Queue = Annotated[str | None, typer.Option(help="Only of this queue.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only of this task or workflow.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="At most this many.")]
#: Characters of an error in a list; `onefold dead show` has the whole text.
_ERROR_SHOWN = 80
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print how many it would be.")]


@dead.command("list")
def list_(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    queue: Queue = None,
    message_type: TypeOption = None,
    limit: Limit = limits.PAGE,
    as_json: AsJson = False,
) -> None:
    """List dead letters, the oldest first.

    Changes nothing.

    Example: onefold dead list shop.tasks:app --queue mail
    """
    wanted = _Selection(None, queue, message_type, limit)
    found = run_on(find_app(app, url, url_file), wanted.listed)
    if as_json:
        output.print_json([_as_dict(letter) for letter in found])
    elif not found:
        errors.say("no dead letters")
    else:
        output.print_table(("message", "type", "queue", "died", "reason", "error"), map(_row, found))


@dead.command()
def show(
    message: MessageId, app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False
) -> None:
    """Show a dead letter with its failure and its attempts.

    Changes nothing.

    Example: onefold dead show MESSAGE shop.tasks:app
    """

    async def look(opened: App) -> dict[str, Any]:
        found = await opened.find(Query(ids=(message,), states=(State.DEAD,)))
        if not found:
            raise ConfigurationError(f"there is no dead letter {message!r}; see onefold runs show {message}")
        return await DeadLetter(found[0], opened.store).as_dict()

    found = run_on(find_app(app, url, url_file), look)
    if as_json:
        output.print_json(found)
        return
    output.print_fields(found)


@dead.command()
def redrive(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    ids: Ids = None,
    queue: Queue = None,
    message_type: TypeOption = None,
    limit: Limit = limits.REDRIVE_MAX,
    dry_run: DryRun = False,
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Let dead letters run again, each with its key and all of its attempts.  Correct the cause first.

    Changes: each dead letter is a scheduled message again.

    Example: onefold dead redrive shop.tasks:app --type charge --reason 'the bank is back'
    """

    async def act(opened: App, page: list[str]) -> list[str]:
        try:
            return await opened.redrive(page, actor=actor_name(actor), reason=reason)
        except RetentionOverError:
            if ids:
                raise
            return []  # letters that were found and not named: the next page may have ones that can be redriven

    wanted = _Selection(ids, queue, message_type, limit)
    _move(find_app(app, url, url_file), wanted, act, dry_run, "redriven", as_json)


@dead.command()
def discard(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    ids: Ids = None,
    queue: Queue = None,
    message_type: TypeOption = None,
    limit: Limit = limits.REDRIVE_MAX,
    dry_run: DryRun = False,
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Close dead letters for good; their keys are free again.

    Changes: each dead letter ends as discarded and cannot be redriven.

    Example: onefold dead discard shop.tasks:app --id MESSAGE --reason 'test data'
    """

    async def act(opened: App, page: list[str]) -> list[str]:
        return await dead_letters.discard(opened.store, page, actor=actor_name(actor), reason=reason)

    wanted = _Selection(ids, queue, message_type, limit)
    _move(find_app(app, url, url_file), wanted, act, dry_run, "discarded", as_json)


# store and output


@dataclass(frozen=True, slots=True)
class _Selection:
    """The dead letters that a command acts on."""

    ids: list[str] | None
    queue: str | None
    message_type: str | None
    limit: int

    async def letters(self, app: App) -> list[DeadLetter]:
        """Return them, the oldest first."""
        found: list[DeadLetter] = []
        async for letter in app.dead_letters(queue=self.queue, message_type=self.message_type):
            if len(found) == self.limit:
                break
            found.append(letter)
        return found

    async def listed(self, app: App) -> list[DeadLetter]:
        """Return them; if there are none, warn when the queue or the type that was given may be misspelt."""
        found = await self.letters(app)
        if not found:
            await warn_unknown_names(app, self.queue, self.message_type)
        return found

    async def chosen(self, app: App) -> list[str]:
        """Return their ids."""
        return self.ids or [letter.id for letter in await self.listed(app)]


def _move(
    app: App,
    wanted: _Selection,
    act: Callable[[App, list[str]], Awaitable[list[str]]],
    dry_run: bool,
    done: str,
    as_json: bool,
) -> None:
    """Redrive or discard the letters page by page, one commit each, so that Ctrl-C leaves every letter old or new."""

    async def move(opened: App) -> int:
        ids, moved = await wanted.chosen(opened), 0
        if dry_run:
            return len(ids)
        with progress(done, len(ids)) as advance:
            for start in range(0, len(ids), limits.REDRIVE_MAX):
                page = ids[start : start + limits.REDRIVE_MAX]
                moved += len(await act(opened, page))
                advance(len(page))
        return moved

    number = run_on(app, move)
    would = "would be" if dry_run else "were"
    say({done: number, "dry_run": dry_run}, as_json, f"{number:,} dead letters {would} {done}")


def _row(letter: DeadLetter) -> tuple[str, ...]:
    message, failure = letter.message, letter.failure
    error = harmless(f"{failure.error_type}: {failure.error_message}", _ERROR_SHOWN)
    return (letter.id, message.message_type, message.queue, written(letter.failed_at), failure.reason, error)


def _as_dict(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "message_type": letter.message.message_type,
        "queue": letter.message.queue,
        "subject": letter.message.subject,
        "failed_at": letter.failed_at,
        "failure": letter.failure,
        "replay_count": letter.replay_count,
    }
