"""``onefold dead`` and ``onefold cancel``: messages that will not run again by themselves, or are not to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from onefold import inspection, limits
from onefold.app import App
from onefold.cli.console import (
    Actor,
    AppOrUrl,
    AsJson,
    Reason,
    Url,
    UrlFile,
    errors,
    find_app,
    output,
    progress,
    run_on,
    say,
    warn_unknown_names,
    who,
)
from onefold.cli.screen import harmless
from onefold.cli.words import written
from onefold.errors import ConfigurationError, RetentionOverError
from onefold.inspection import DeadLetter
from onefold.store import Query, State

dead = typer.Typer(help="Show dead letters, let them run again, or close them.", no_args_is_help=True)

Ids = Annotated[list[str] | None, typer.Option("--id", help="This letter; may be given several times.")]
MessageId = Annotated[str, typer.Argument(metavar="MESSAGE", help="The message's id.")]
Queue = Annotated[str | None, typer.Option(help="Only of this queue.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only of this task or workflow.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="How many at most.")]
#: Characters of an error in a list; `onefold dead show` has all of it.
_ERROR_SHOWN = 80
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many it would be.")]


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
    wanted = _Wanted(None, queue, message_type, limit)
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
    """Show everything that is known of a dead letter.

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
    """Let dead letters run again, each with its key and a full set of attempts.  Repair what was broken first.

    Changes: each letter is a scheduled message again.

    Example: onefold dead redrive shop.tasks:app --type charge --reason 'the bank is back'
    """

    async def act(opened: App, page: list[str]) -> list[str]:
        try:
            return await opened.redrive(page, actor=who(actor), reason=reason)
        except RetentionOverError:
            if ids:
                raise
            return []  # among those that were looked for; the next page may have younger ones

    wanted = _Wanted(ids, queue, message_type, limit)
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

    Changes: each letter ends as discarded and cannot be redriven.

    Example: onefold dead discard shop.tasks:app --id MESSAGE --reason 'test data'
    """

    async def act(opened: App, page: list[str]) -> list[str]:
        return await inspection.discard(opened.store, page, actor=who(actor), reason=reason)

    wanted = _Wanted(ids, queue, message_type, limit)
    _move(find_app(app, url, url_file), wanted, act, dry_run, "discarded", as_json)


def cancel(
    message: MessageId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Take a message back, wherever it is; one that runs can no longer commit.

    Changes: the message ends as cancelled, or, if it is a saga, is undone; its senders see it.

    Example: onefold cancel MESSAGE shop.tasks:app --reason 'ordered twice'
    """
    if not run_on(find_app(app, url, url_file), lambda opened: opened.cancel(message, actor=who(actor), reason=reason)):
        raise ConfigurationError(f"message {message} has ended, or never was; nothing was done")
    say({"message": message, "cancelled": True}, as_json, f"{message} was cancelled")


# on the way to the store and back


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which dead letters are meant."""

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
        """Return them; when there are none, say whether the queue or the type that was named may be misspelt."""
        found = await self.letters(app)
        if not found:
            await warn_unknown_names(app, self.queue, self.message_type)
        return found

    async def chosen(self, app: App) -> list[str]:
        """Return their ids."""
        return self.ids or [letter.id for letter in await self.listed(app)]


def _move(
    app: App,
    wanted: _Wanted,
    act: Callable[[App, list[str]], Awaitable[list[str]]],
    dry_run: bool,
    done: str,
    as_json: bool,
) -> None:
    """Move letters, each page with a commit of its own, so that stopping in the midst leaves none between."""

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
    say({done: number, "dry_run": dry_run}, as_json, f"{number:,} letters {would} {done}")


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
