"""``onefold events`` and ``onefold chain``: who subscribes to what, what was published, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.segment import Segments
from rich.tree import Tree

from onefold import limits
from onefold.app import App
from onefold.chain import Chain, Link
from onefold.cli.console import AppOrUrl, AsJson, Url, UrlFile, errors, find_app, output, run_on, say
from onefold.cli.screen import Part, Text, line, separated
from onefold.cli.words import lasting, read_duration, written
from onefold.clock import MICROSECONDS, first_id, to_datetime
from onefold.errors import ConfigurationError
from onefold.store import Query, Record, State
from onefold.subscription import Subscription
from onefold.topic import Topic

events = typer.Typer(help="Show events and who subscribes to them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="EVENT", help="The event's name, such as order.placed.")]
Since = Annotated[str, typer.Option(help="Only events of this long: 90s, 15m, 2h or 3d.")]

#: Columns; wider than any line of a chain that somebody could read.
_WIDE = 1_000
_STYLES = {State.DONE: "green", State.DEAD: "red", State.LEASED: "cyan", State.PARKED: "yellow"}


@events.command("list")
def list_(app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False) -> None:
    """List every subscription, and the events that this app knows and nobody subscribes to.

    Changes nothing.

    Example: onefold events list shop.tasks:app
    """
    named = find_app(app, url, url_file)
    found = run_on(named, App.subscriptions)
    told = {one.event for one in found}
    unheard = sorted(task.name for task in named.tasks.values() if isinstance(task, Topic) and task.name not in told)
    if as_json:
        output.print_json({"subscriptions": [one.as_dict() for one in found], "without_subscribers": unheard})
    elif not found and not unheard:
        errors.say("no events")
    else:
        _print_subscriptions([*map(_row, found), *((event, "no subscriber", "", "", "") for event in unheard)])


@events.command()
def show(
    name: Name,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    since: Since = "1h",
    as_json: AsJson = False,
) -> None:
    """Show who subscribes to an event, and what was published lately, how often for nobody.

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
        output.say(f"and more; these are the first {limits.PAGE_MAX:,}: say a shorter --since")


@events.command()
def unsubscribe(
    name: Name,
    subscriber: Annotated[str, typer.Argument(metavar="SUBSCRIBER", help="The name of the task that subscribes.")],
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove a subscription.  What was copied for it stays; while it stands in code, it comes back with a worker.

    Changes: later events are not copied to the subscriber.

    Example: onefold events unsubscribe order.placed ship shop.tasks:app
    """
    removed = run_on(find_app(app, url, url_file), lambda opened: opened.unsubscribe(name, subscriber))
    words = f"{subscriber} is no longer sent {name}" if removed else f"{subscriber} does not subscribe to {name}"
    say({"event": name, "subscriber": subscriber, "removed": removed}, as_json, words)


def chain(
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE", help="The id of any message of the chain.")],
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what caused a message and what came of it, as a tree, with what is uncertain.

    Changes nothing.

    Example: onefold chain MESSAGE shop.tasks:app
    """
    found = run_on(find_app(app, url, url_file), lambda opened: opened.chain(message_id))
    if found is None:
        raise ConfigurationError(f"there is no message {message_id!r}, or it is no longer kept")
    if as_json:
        output.print_json(found.as_dict())
    else:
        print_chain(output, found, message_id)


# drawing


def _row(one: Subscription) -> tuple[str, ...]:
    return (one.event, one.subscriber, one.queue, str(one.version), written(one.since))


def _print_subscriptions(rows: Iterable[tuple[str, ...]]) -> None:
    output.print_table(("event", "subscriber", "queue", "version", "since"), rows)


def copies_of(event: Record) -> int | None:
    """Return how many subscribers an event was copied to; None if it was not yet."""
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
    told = event.state.name.lower() if copies is None else f"{copies}" if copies else "no subscriber"
    return (written(to_datetime(event.envelope.created_at)), event.envelope.id, event.envelope.subject, told)


def print_chain(console: Console, chain: Chain, here: str) -> None:
    """Print a chain as a tree in which one message is marked; ids are whole, however narrow the terminal is."""
    drawn = console.render(draw_chain(chain, here), console.options.update(width=_WIDE))
    console.print(Segments(drawn), soft_wrap=True, end="")


def draw_chain(chain: Chain, here: str) -> Tree:
    """Return a chain as a tree in which the message that was asked for is marked."""
    states = Counter(link.record.state.name.lower() for link in chain.links)
    counted = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
    more = "" if chain.whole else f"; these are the first {len(chain.links):,}"
    tree = Tree(line((chain.correlation_id, "bold"), f"  {counted}{more}"))
    nodes: dict[str, Tree] = {}
    for link in chain.links:
        above = tree if link.parent is None else nodes[link.parent]
        nodes[link.id] = above.add(_told(link, marked=link.id == here))
        for effect in link.effects:
            style = "bold magenta" if effect.state == "uncertain" else "dim"
            nodes[link.id].add(line((f"effect {effect.name}: {effect.state}", style)))
    return tree


def _told(link: Link, *, marked: bool) -> Text:
    record, envelope = link.record, link.record.envelope
    words: list[Part] = [(envelope.message_type, "reverse" if marked else "")]
    words.append((record.state.name.lower(), _STYLES.get(record.state, "default")))
    if record.ended_at is not None:
        words.append(f"after {lasting((record.ended_at - envelope.created_at) / MICROSECONDS)}")
    if link.step is not None:
        words.append(f"from {link.step}")
    elif link.parent is None and envelope.causation_id not in (envelope.id, envelope.correlation_id):
        words.append(f"caused by {envelope.causation_id}")
    counts = {"failed attempt": record.attempt, "crash": record.crashes, "replay": record.replay_count}
    for what, number in {**counts, "duplicate": record.suppressed}.items():
        if number:
            words.append(f"{number} {what}{'' if number == 1 else 'es' if what == 'crash' else 's'}")
    if record.failure is not None:
        words.append((f"{record.failure.reason}: {record.failure.error_message}", "red"))
    return separated("  ", *words, (envelope.id, "dim"))
