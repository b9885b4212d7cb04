"""Drawing a chronicle as a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.tree import Tree

from onefold.cli.durations import argument, from_now, lasting, written
from onefold.cli.screen import Part, Text, line, lines
from onefold.operations.history import Chronicle, Entry, Try
from onefold.store import Failure

#: Of many entries side by side, the first ones are drawn, and some of the others that are not done.
_FIRST = 10
_OPEN = 20

#: Words for kinds of entries that would not read well beside the state.
_WORDS = {"step": "", "undo": "", "wait": "signal", "signal": "sent signal"}
_STYLES = {
    "done": "green",
    "failed": "red",
    "timed out": "red",
    "dead": "red",
    "uncertain": "bold magenta",
    "stuck": "bold magenta",
    "waiting": "yellow",
    "parked": "yellow",
    "begun": "cyan",
    "leased": "cyan",
}


def draw(chronicle: Chronicle, now: datetime, *, everything: bool = False) -> Tree:
    """Return a message as a tree; of very many entries side by side some are only counted, unless ``everything``."""
    return _TreeBuilder(now, everything).message(chronicle)


def waits_of(chronicle: Chronicle, now: datetime) -> list[str]:
    """Describe what a message waits for now."""
    waits = [_wait(entry, now) for entry in chronicle.waits[:_OPEN]]
    if len(chronicle.waits) > _OPEN:
        waits.append(f"{len(chronicle.waits) - _OPEN:,} others")
    if chronicle.state == "parked" and chronicle.failure is not None and chronicle.failure.reason in _FOR_OPERATORS:
        waits.append(f"an operator: {chronicle.failure.error_message}")
    if chronicle.state == "leased":
        waits.append(f"nothing: it runs on {chronicle.worker}")
    elif chronicle.state == "scheduled":
        waits.append("a worker")
    return waits


#: Reasons for which a message is parked until an operator acts.
_FOR_OPERATORS = ("uncertain", "replay", "stuck", "unreadable signal")


def _wait(entry: Entry, now: datetime) -> str:
    until = "" if entry.due_at is None else f", until {written(entry.due_at)} ({from_now(entry.due_at, now)})"
    if entry.kind == "wait":
        return f"the signal {entry.name.rpartition('/')[2].partition('#')[0]!r}{until}"
    if entry.kind == "child":
        return f"child {entry.message_id} ({entry.name})"
    return f"{'the next try of ' * (entry.kind == 'step')}{entry.name}{until}"


class _TreeBuilder:
    def __init__(self, now: datetime, everything: bool) -> None:
        self._now = now
        self._everything = everything

    def message(self, chronicle: Chronicle, *above: Text) -> Tree:
        tree = Tree(lines(*above, *self._head(chronicle)), highlight=False)
        for attempt in chronicle.attempts:
            tree.add(_try("attempt failed", attempt))
        self._add(tree, chronicle.entries, chronicle.id)
        for letter in chronicle.mailbox:
            came = (f"{letter.id}, came {written(letter.at)}", "dim")
            tree.add(line(("mailbox", "cyan"), f" {letter.name} ", came))
        return tree

    def _head(self, chronicle: Chronicle) -> list[Text]:
        taken = "" if chronicle.ended_at is None else f", took {_took(chronicle.created_at, chronicle.ended_at)}"
        counts = ((chronicle.crashes, "crashes"), (chronicle.replay_count, "redrives"))
        head = line(
            (chronicle.message_type, "bold"),
            f" v{chronicle.version} ",
            _styled(chronicle.state),
            (f" {chronicle.id}, since {written(chronicle.created_at)}{taken}", "dim"),
            *((f" {number} {what}", "yellow") for number, what in counts if number),
        )
        return [head] if chronicle.failure is None else [head, line((_failure(chronicle.failure), "red"))]

    def _add(self, tree: Tree, entries: Sequence[Entry], message_id: str) -> None:
        for entry, left_out in self._chosen(entries):
            if entry is None:
                tree.add(line((f"… {left_out}", "dim")))
            else:
                tree.add(self._entry(entry, message_id))

    def _chosen(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry | None, str]]:
        """Yield the entries to draw, and in place of those left out their number by state."""
        open_ = [number for number, entry in enumerate(entries) if entry.state != "done" and number >= _FIRST]
        shown = set(range(_FIRST)) | set(open_[:_OPEN])
        if self._everything or len(entries) <= _FIRST + _OPEN:
            shown = set(range(len(entries)))
        skipped: Counter[str] = Counter()
        for number, entry in enumerate(entries):
            if number not in shown:
                skipped[entry.state] += 1
                continue
            if skipped:
                yield None, _counted(skipped)
                skipped.clear()
            yield entry, ""
        if skipped:
            yield None, _counted(skipped)

    def _entry(self, entry: Entry, message_id: str) -> Tree:
        name = entry.name.rpartition("/")[2]
        kind = _WORDS.get(entry.kind, entry.kind)
        label = [line(_styled(entry.state), f" {kind} " if kind else " ", (name, "bold"), (self._times(entry), "dim"))]
        if entry.failure is not None:
            label.append(line((_failure(entry.failure), "red")))
        if entry.state == "stuck" or (entry.kind == "effect" and entry.state == "uncertain"):
            remedy = f"onefold effects resolve {argument(message_id)} {argument(entry.name)}"
            hint = f"whether it happened is unknown; find out, then: {remedy} --happened | --not-happened --reason …"
            label.append(line((hint, "magenta")))
        if entry.message is not None and (entry.kind == "child" or entry.message.entries):
            tree = self.message(entry.message, *label)
        else:
            if entry.message_id is not None:
                label[-1].append_text(line((f" {entry.message_id}", "dim")))
            if entry.message is not None:
                label[-1].append_text(line(" ", _styled(entry.message.state)))
            tree = Tree(lines(*label), highlight=False)
        for one in entry.tries:
            tree.add(_try("try failed", one))
        self._add(tree, entry.entries, message_id)
        return tree

    def _times(self, entry: Entry) -> str:
        if entry.began_at is None or entry.kind in ("now", "checkpoint", "restart", "send", "signal"):
            return f" at {written(entry.ended_at or entry.began_at)}"
        times = [] if entry.began_at is None else [f"from {written(entry.began_at)}"]
        if entry.seconds is not None:
            times.append(f"took {lasting(entry.seconds)}")
        elif entry.due_at is not None:
            times.append(f"until {written(entry.due_at)} ({from_now(entry.due_at, self._now)})")
        return f" {', '.join(times)}" if times else ""


def _try(what: str, one: Try) -> Text:
    delay = "" if one.delay is None else f", next after {lasting(one.delay)}"
    return line((what, "red"), (f" {written(one.at)}{delay} ", "dim"), _failure(one))


def _failure(one: Try | Failure) -> str:
    error = f": {one.error_type}: {one.error_message}" if one.error_type else ""
    return f"{one.reason}{error}"


def _styled(state: str) -> Part:
    return (state, _STYLES.get(state, "dim"))


def _took(began: datetime, ended: datetime) -> str:
    return lasting(max(0.0, (ended - began).total_seconds()))


def _counted(states: Counter[str]) -> str:
    counts = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    return f"{states.total():,} more: {counts}"
