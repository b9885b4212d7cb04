"""``onefold effects``: uncertain effects, and recording whether they happened."""

from __future__ import annotations

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
    read_json,
    run_on,
    say,
)
from onefold.cli.durations import written
from onefold.errors import ConfigurationError
from onefold.operations.history import Chronicle
from onefold.store import Query, State

effects = typer.Typer(help="Show and resolve uncertain effects and stuck undos.", no_args_is_help=True)

MessageId = Annotated[str, typer.Argument(metavar="MESSAGE", help="The message's id; of a workflow, the run's.")]
Effect = Annotated[str, typer.Argument(metavar="EFFECT", help="Its name, such as charge, pay#1/charge or undo:pay#1.")]
#: Reasons for which a message is parked until an operator resolves an effect.
_UNKNOWN = ("uncertain", "stuck")


@effects.command("list")
def list_(app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False) -> None:
    """List the messages that are parked because an effect is uncertain or an undo has failed.

    Changes nothing.

    Example: onefold effects list shop.tasks:app
    """

    async def look(opened: App) -> list[Chronicle]:
        total = sum(counts.parked for counts in (await opened.count()).values())
        found, after = list[Chronicle](), ""
        with progress("reading parked messages", total) as advance:
            while page := await opened.find(Query(states=(State.PARKED,), after=after, limit=limits.PAGE_MAX)):
                for one in page:
                    if one.failure is not None and one.failure.reason in _UNKNOWN:
                        whole = await opened.chronicle(one.envelope.id, depth=0)
                        found += [] if whole is None else [whole]
                after = page[-1].envelope.id
                advance(len(page))
        return found

    found = run_on(find_app(app, url, url_file), look)
    if as_json:
        output.print_json([_as_dict(one) for one in found])
    elif not found:
        errors.say("nothing is uncertain")
    else:
        rows = [
            (one.id, one.message_type, entry.name, entry.state, written(entry.began_at), one.subject or "-")
            for one in found
            for entry in one.unknown
        ]
        output.print_table(("message", "type", "effect", "state", "begun", "subject"), rows)


@effects.command()
def show(
    message: MessageId, app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False
) -> None:
    """Show every effect that a message has begun, and its outcome if known.

    Changes nothing.

    Example: onefold effects show MESSAGE shop.tasks:app
    """
    found = run_on(find_app(app, url, url_file), lambda opened: opened.ledger(message))
    if as_json:
        output.print_json(found)
    elif not found:
        errors.say("the message has begun no effect")
    else:
        rows = [(entry.name, entry.state, written(entry.began_at), str(entry.tries)) for entry in found]
        output.print_table(("effect", "state", "last begun", "tries"), rows)


@effects.command()
def resolve(
    message: MessageId,
    effect: Effect,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    happened: Annotated[bool, typer.Option("--happened", help="It happened; see --value.")] = False,
    not_happened: Annotated[bool, typer.Option("--not-happened", help="It did not: the call is made again.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Run the message again, whose code may have a probe now.")
    ] = False,
    value: Annotated[str, typer.Option(help="The value that the call would have returned, as JSON.")] = "null",
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Record whether an uncertain effect happened; the message, which is parked because of it, runs again.

    Changes: the outcome is recorded, and the message is scheduled.

    Example: onefold effects resolve MESSAGE charge#1/card shop.tasks:app --not-happened --reason 'asked the bank'
    """
    if happened + not_happened + again != 1:
        raise ConfigurationError("give one of --happened, --not-happened and --again")
    returned = read_json("--value", value)

    async def act(opened: App) -> bool:
        if again:
            return await opened.resume(message, actor=actor_name(actor), reason=reason)
        return await opened.resolve(
            message, effect, happened=happened, value=returned, actor=actor_name(actor), reason=reason
        )

    if not run_on(find_app(app, url, url_file), act):
        raise ConfigurationError(
            f"{effect} of {message} is not uncertain, or the message runs or has ended; "
            f"see onefold effects show {message}"
        )
    outcome = "happened" if happened else "did not happen" if not_happened else "is looked at again"
    words = f"recorded: {effect} {outcome}; the message runs again"
    say({"message": message, "effect": effect, "resolved": outcome}, as_json, words)


def _as_dict(one: Chronicle) -> dict[str, Any]:
    unknown = [{"name": entry.name, "state": entry.state, "began_at": entry.began_at} for entry in one.unknown]
    return {"id": one.id, "message_type": one.message_type, "subject": one.subject, "effects": unknown}
