"""One checker for every chaos test: it compares what clients were told with the effects and the final states.

Clients keep a journal of their requests and the answers; effects are rows that name their key, their message and the
fence they were written under; the final states of all messages are read at the end.
From these three the checker derives each way in which the promise can be broken.
It imports nothing of stores and workers, so it cannot contain the same mistakes as they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from onefold.store import State

Event = Literal["invoke", "ok", "fail", "unknown", "claim"]
Kind = Literal["lost", "duplicated", "phantom", "stale", "torn", "stuck", "gap", "wrong"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a journal."""

    client: str
    event: Event
    #: Names the work in the words of the test; effects use the same key.
    key: str = ""
    message_id: str = ""
    fence: int = 0

    def __str__(self) -> str:
        fence = f" fence {self.fence}" if self.fence else ""
        return f"{self.client}: {self.event} {self.key} {self.message_id}{fence}".rstrip()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class Journal:
    """Requests of clients, the answers they got, and claims of workers, in the order in which they happened.

    ``write`` receives every line at once, so that the journal outlives the process that keeps it.
    """

    def __init__(self, write: Callable[[bytes], object] | None = None) -> None:
        self.entries: list[Entry] = []
        self._write = write

    def note(self, entry: Entry) -> None:
        """Append one entry."""
        self.entries.append(entry)
        if self._write is not None:
            self._write(_encode(entry) + b"\n")

    def invoke(self, client: str, key: str) -> None:
        """Record that a client is about to ask for this work."""
        self.note(Entry(client, "invoke", key))

    def ok(self, client: str, key: str, message_id: str = "") -> None:
        """Record that the client was told that the work is accepted: from here on it must not be lost."""
        self.note(Entry(client, "ok", key, message_id))

    def fail(self, client: str, key: str) -> None:
        """Record that the client was told that the work is refused: it must not happen."""
        self.note(Entry(client, "fail", key))

    def unknown(self, client: str, key: str) -> None:
        """Record that the client got no reliable answer: the work may happen or not, but not twice."""
        self.note(Entry(client, "unknown", key))

    def claim(self, client: str, message_id: str, fence: int) -> None:
        """Record that a worker was given the message under this fence."""
        self.note(Entry(client, "claim", message_id=message_id, fence=fence))

    def read(self, lines: bytes) -> None:
        """Append the lines of another journal; a half-written last line of a killed process is dropped."""
        for line in lines.split(b"\n")[:-1]:
            self.note(_decode(line))


@dataclass(frozen=True, slots=True)
class Effect:
    """One committed effect; effects are passed in the order of their commits."""

    key: str
    message_id: str
    fence: int
    #: The number of journal entries when it was written; None if that is not known.
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """The state of one message after all faults have ended and the queues are drained."""

    message_id: str
    key: str
    state: State
    #: Whether the message must have left an effect under its key if it succeeded.
    has_effect: bool = True
    #: Whether it is rightly parked for an event that will not come.
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    kind: Kind
    key: str
    message_ids: tuple[str, ...]
    problem: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.key}: {self.problem}"


@dataclass(slots=True)
class Report:
    """Every violation found; printed with the journal entries that concern it."""

    violations: list[Violation]
    journal: Sequence[Entry] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return bool(self.violations)

    def __str__(self) -> str:
        lines = []
        for violation in self.violations:
            lines.append(str(violation))
            lines += [
                f"    {number:4} {entry}"
                for number, entry in enumerate(self.journal)
                if (entry.key and entry.key == violation.key) or entry.message_id in violation.message_ids
            ]
        return "\n".join(lines) or "no violations"


def check(journal: Journal, effects: Sequence[Effect], finals: Iterable[Final]) -> Report:
    """Return every violation that the journal, the effects and the final states prove."""
    entries = journal.entries
    by_id = {final.message_id: final for final in finals}
    found = [
        *_lost(entries, effects, by_id),
        *_duplicated(effects, by_id),
        *_phantom(entries, effects, by_id),
        *stale(entries, effects),
        *_torn(effects, by_id),
        *_stuck(by_id),
    ]
    return Report(found, entries)


def _lost(entries: Sequence[Entry], effects: Sequence[Effect], finals: dict[str, Final]) -> Iterable[Violation]:
    """Yield work that was accepted and has no message, and messages that are done without their effect."""
    keys = {final.key for final in finals.values()}
    for entry in dict.fromkeys(entry for entry in entries if entry.event == "ok"):
        if entry.message_id and entry.message_id not in finals:
            yield Violation(
                "lost", entry.key, (entry.message_id,), f"message {entry.message_id} was accepted, and is gone"
            )
        elif entry.key not in keys:
            yield Violation("lost", entry.key, (), "it was accepted, and there is no message for it")
    happened = {effect.key for effect in effects}
    for final in finals.values():
        if final.state is State.DONE and final.has_effect and final.key not in happened:
            yield Violation("lost", final.key, (final.message_id,), "it is done, and its effect never happened")


def _duplicated(effects: Sequence[Effect], finals: dict[str, Final]) -> Iterable[Violation]:
    """Yield keys with two effects, and keys held by two messages."""
    for key, number in Counter(effect.key for effect in effects).items():
        if number > 1:
            ids = tuple(dict.fromkeys(effect.message_id for effect in effects if effect.key == key))
            yield Violation("duplicated", key, ids, f"its effect happened {number} times")
    # A message that was cancelled before it ran, or discarded, has given up its key.
    holders = [final for final in finals.values() if final.state not in (State.CANCELLED, State.DISCARDED)]
    for key, number in Counter(final.key for final in holders).items():
        if number > 1:
            ids = tuple(final.message_id for final in holders if final.key == key)
            yield Violation("duplicated", key, ids, f"{number} messages hold the same key")


def _phantom(entries: Sequence[Entry], effects: Sequence[Effect], finals: dict[str, Final]) -> Iterable[Violation]:
    """Yield effects and messages that no client asked for, or that were refused to the client."""
    asked = Counter(entry.key for entry in entries if entry.event == "invoke")
    refused = Counter(entry.key for entry in entries if entry.event == "fail")
    for effect in effects:
        if asked[effect.key] <= refused[effect.key]:
            yield Violation("phantom", effect.key, (effect.message_id,), "its effect happened without a request")
    for final in finals.values():
        if asked[final.key] <= refused[final.key]:
            yield Violation("phantom", final.key, (final.message_id,), "there is a message without a request")


def stale(entries: Sequence[Entry], effects: Sequence[Effect]) -> Iterable[Violation]:
    """Yield effects that were committed under a fence older than one already given to another owner."""
    committed: dict[str, int] = {}
    for effect in effects:
        before = entries[: effect.position] if effect.position is not None else ()
        given = max((e.fence for e in before if e.event == "claim" and e.message_id == effect.message_id), default=0)
        highest = max(given, committed.get(effect.message_id, 0))
        if effect.fence < highest:
            problem = f"its effect was committed under fence {effect.fence} after fence {highest} had been given out"
            yield Violation("stale", effect.key, (effect.message_id,), problem)
        committed[effect.message_id] = max(highest, effect.fence)


def _torn(effects: Sequence[Effect], finals: dict[str, Final]) -> Iterable[Violation]:
    """Yield effects of messages that are not done: the effect and the outcome did not commit together."""
    for effect in effects:
        final = finals.get(effect.message_id)
        if final is not None and final.state is not State.DONE:
            problem = f"its effect happened, and its message is {final.state.name.lower()}"
            yield Violation("torn", effect.key, (effect.message_id,), problem)


def _stuck(finals: dict[str, Final]) -> Iterable[Violation]:
    """Yield messages that have not ended although they had enough time."""
    for final in finals.values():
        if not final.state.ended and not final.waits:
            problem = f"it is still {final.state.name.lower()} after everything has calmed down"
            yield Violation("stuck", final.key, (final.message_id,), problem)
