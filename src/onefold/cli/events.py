"""``onefold events``: subscriptions, and published events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer

from onefold import limits
from onefold.app import App
from onefold.cli.console import AppOrUrl, AsJson, Url, UrlFile, errors, find_app, output, run_on, say
from onefold.cli.durations import read_duration, written
from onefold.clock import MICROSECONDS, first_id, to_datetime
from onefold.events.subscriptions import Subscription
from onefold.events.topic import Topic
from onefold.store import Query, Record

events = typer.Typer(help="Show events and their subscribers.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="EVENT", help="The event's name, such as order.placed.")]
Since = Annotated[str, typer.Option(help="Only events of the last 90s, 15m, 2h or 3d.")]


@events.command("list")
def list_(app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False) -> None:
    """List every subscription, and the events of this app without a subscriber.

    Changes nothing.

    Example: onefold events list shop.tasks:app
    """
    named = find_app(app, url, url_file)
    found = run_on(named, App.subscriptions)
    subscribed = {one.event for one in found}
    topics = [task.name for task in named.tasks.values() if isinstance(task, Topic)]
    without = sorted(name for name in topics if name not in subscribed)
    if as_json:
        output.print_json({"subscriptions": [one.as_dict() for one in found], "without_subscribers": without})
    elif not found and not without:
        errors.say("no events")
    else:
        _print_subscriptions([*map(_row, found), *((event, "no subscriber", "", "", "") for event in without)])


@events.command()
def show(
    name: Name,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    since: Since = "1h",
    as_json: AsJson = False,
) -> None:
    """Show the subscribers of an event, and the events published lately, with the number of copies of each.

    Changes nothing.

    Example: onefold events show order.placed shop.tasks:app --since 2h
    """
    length = read_duration("--since", since)

    async def read(opened: App) -> tuple[list[Subscription], list[Record]]:
        after = (
            "" if length is None else first_id(await opened.store.now() - round(length.total_seconds() * MICROSECONDS))
        )
        published = await opened.find(Query(message_type=name, after=after, limit=limits.PAGE_MAX))
        return [one for one in await opened.subscriptions() if one.event == name], published

    found, published = run_on(find_app(app, url, url_file), read)
    if as_json:
        answer = {"event": name, "subscriptions": [one.as_dict() for one in found]}
        output.print_json({**answer, "published": [_as_dict(one) for one in published]})
        return
    if found:
        _print_subscriptions(map(_row, found))
    else:
        output.say(f"{name}: no subscriber")
    if published:
        output.print_table(("published", "id", "subject", "copies"), map(_published_row, published))
    else:
        output.say(f"nothing was published in the last {since}")
    if len(published) == limits.PAGE_MAX:
        output.say(f"there may be more than these {limits.PAGE_MAX:,}; give a shorter --since")


@events.command()
def unsubscribe(
    name: Name,
    subscriber: Annotated[str, typer.Argument(metavar="SUBSCRIBER", help="The name of the task that subscribes.")],
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove a subscription.  One that is still declared in code comes back when a worker with that code starts.

    Changes: later events are not copied to the subscriber; earlier copies stay.

    Example: onefold events unsubscribe order.placed ship shop.tasks:app
    """
    removed = run_on(find_app(app, url, url_file), lambda opened: opened.unsubscribe(name, subscriber))
    words = f"{subscriber} no longer gets {name}" if removed else f"{subscriber} does not subscribe to {name}"
    say({"event": name, "subscriber": subscriber, "removed": removed}, as_json, words)


# output


def _row(one: Subscription) -> tuple[str, ...]:
    return (one.event, one.subscriber, one.queue, str(one.version), written(one.since))


def _print_subscriptions(rows: Iterable[tuple[str, ...]]) -> None:
    output.print_table(("event", "subscriber", "queue", "version", "since"), rows)


def copies_of(event: Record) -> int | None:
    """Return the number of subscribers to which an event was copied; None if it was not copied yet."""
    return None if event.result is None else msgspec.json.decode(event.result, type=int)


def _as_dict(event: Record) -> dict[str, Any]:
    return {
        "id": event.envelope.id,
        "subject": event.envelope.subject,
        "published_at": to_datetime(event.envelope.created_at).isoformat(),
        "state": event.state.name.lower(),
        "copies": copies_of(event),
    }


def _published_row(event: Record) -> tuple[str, ...]:
    copies = copies_of(event)
    shown = event.state.name.lower() if copies is None else f"{copies}" if copies else "no subscriber"
    return (written(to_datetime(event.envelope.created_at)), event.envelope.id, event.envelope.subject, shown)
