"""``onefold chain``: what caused a message and what it caused, as a tree."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.segment import Segments
from rich.tree import Tree

from onefold.cli.console import AppOrUrl, AsJson, Url, UrlFile, find_app, output, run_on
from onefold.cli.durations import lasting
from onefold.cli.screen import Part, Text, line, separated
from onefold.clock import MICROSECONDS
from onefold.errors import ConfigurationError
from onefold.operations.chain import Chain, ChainNode
from onefold.store import State

#: Columns; wider than any line of a chain that a person could read.
_WIDE = 1_000
_STYLES = {State.DONE: "green", State.DEAD: "red", State.LEASED: "cyan", State.PARKED: "yellow"}


def chain(
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE", help="The id of any message of the chain.")],
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what caused a message and what it caused, as a tree, with uncertain effects.

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


def print_chain(console: Console, chain: Chain, here: str) -> None:
    """Print a chain as a tree in which one message is marked; ids are never cut, however narrow the terminal is."""
    drawn = console.render(draw_chain(chain, here), console.options.update(width=_WIDE))
    console.print(Segments(drawn), soft_wrap=True, end="")


def draw_chain(chain: Chain, here: str) -> Tree:
    """Return a chain as a tree in which one message is marked."""
    states = Counter(link.record.state.name.lower() for link in chain.links)
    counted = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
    more = "" if chain.whole else f"; these are the first {len(chain.links):,}"
    tree = Tree(line((chain.correlation_id, "bold"), f"  {counted}{more}"))
    nodes: dict[str, Tree] = {}
    for link in chain.links:
        above = tree if link.parent is None else nodes[link.parent]
        nodes[link.id] = above.add(_label(link, marked=link.id == here))
        for effect in link.effects:
            style = "bold magenta" if effect.state == "uncertain" else "dim"
            nodes[link.id].add(line((f"effect {effect.name}: {effect.state}", style)))
    return tree


def _label(link: ChainNode, *, marked: bool) -> Text:
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
