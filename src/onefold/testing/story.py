"""The checker of runs: what a workflow did, what its journal says and what others told it must be one story.

Like the checker of messages it knows nothing of stores and workers; it reads what is left when all has calmed down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from onefold.step import Step, StepKind, asked_name
from onefold.store import Ended, State
from onefold.testing.checker import Effect, Entry, Violation, stale

_decode = msgspec.json.decode
_decode_ended = msgspec.json.Decoder(Ended).decode

#: Kinds of lines that the code asked for, one after the other.
_OWN = (StepKind.RESULT, StepKind.FAILED, StepKind.TIMER, StepKind.SENT, StepKind.TAKEN)


@dataclass(frozen=True, slots=True)
class StepEffect:
    """One effect of a step that was found committed; given in the order of the commits."""

    run_id: str
    step: str
    #: How often the run had gone back by then: after a restart a step is done anew.
    restarts: int
    fence: int
    position: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.step}" + (f" after restart {self.restarts}" if self.restarts else "")


@dataclass(frozen=True)
class Story:
    """One run as it was left: where it stands, what it returned, what is in its journal and what its steps did."""

    run_id: str
    key: str
    state: State
    lines: Sequence[Step]
    effects: Sequence[StepEffect]
    result: bytes | None = None

    @cached_property
    def restarts(self) -> int:
        """How often it went back."""
        return sum(line.kind is StepKind.RESTART for line in self.lines)

    @cached_property
    def found(self) -> dict[tuple[str, StepKind], Step]:
        """Its lines by what tells them apart."""
        return {(line.name, line.kind): line for line in self.lines}

    @cached_property
    def taken(self) -> list[str]:
        """The signals that its waits were given, in the order in which they were."""
        values = [_decode(line.value) for line in self.lines if line.kind is StepKind.TAKEN]
        return [value for value in values if value is not None]

    @property
    def unheard(self) -> list[str]:
        """What it was told and has not taken."""
        told = [line.name for line in self.lines if line.kind is StepKind.SIGNAL]
        return [name for name in told if name not in self.taken]

    def says(self, name: str) -> Any:
        """Return what the journal answers when the code asks for this; a missing line is its own answer."""
        if (line := self.found.get((name, StepKind.RESULT))) is not None:
            return _decode(line.value)
        if (line := self.found.get((name, StepKind.TAKEN))) is not None:
            signal = _decode(line.value)
            return None if signal is None else _decode(self.found[signal, StepKind.SIGNAL].value)
        if (line := self.found.get((name, StepKind.FAILED))) is not None:
            return _fate(line) if (name, StepKind.SENT) in self.found else "failed"
        if ends := self.ends(name):
            return _fate(ends[-1])
        return "there is no line"

    def ends(self, name: str) -> list[Step]:
        """Return what the child that was sent under this name told of its ends, the last of which counts."""
        sent = self.found.get((name, StepKind.SENT))
        child = None if sent is None else _decode(sent.value)["id"]
        told = [line for line in self.lines if line.kind is StepKind.CHILD and asked_name(line.name) == name]
        return [line for line in told if _decode_ended(line.value).id == child]


def check_runs(entries: Sequence[Entry], stories: Iterable[Story], *, transactional: frozenset[str]) -> list[Violation]:
    """Return every violation that these runs prove; ``transactional`` names the steps that must leave an effect."""
    found: list[Violation] = []
    for run in stories:
        rules = (_duplicated(run), _torn(run, transactional), _gaps(run), _signals(run), _children(run), _wrong(run))
        found += [violation for rule in rules for violation in rule]
        found += _stuck(run)
        found += stale(entries, [Effect(str(one), one.run_id, one.fence, one.position) for one in run.effects])
    return found


def _duplicated(run: Story) -> Iterable[Violation]:
    for what, number in Counter(map(str, run.effects)).items():
        if number > 1:
            yield _violation("duplicated", run, f"the effect of {what} happened {number} times")


def _torn(run: Story, transactional: frozenset[str]) -> Iterable[Violation]:
    """A step's effect and its record commit together."""
    for effect in run.effects:
        if effect.restarts == run.restarts and (effect.step, StepKind.RESULT) not in run.found:
            yield _violation("torn", run, f"{effect.step} took effect, and the journal does not know")
    happened = {effect.step for effect in run.effects}
    for line in run.lines:
        does = line.name.rpartition("/")[2].partition("#")[0]
        if line.kind is StepKind.RESULT and does in transactional and line.name not in happened:
            yield _violation("lost", run, f"{line.name} is in the journal, and its effect never happened")


def _gaps(run: Story) -> Iterable[Violation]:
    """What the code asked for the second time it has asked for before."""
    for name in {line.name for line in run.lines if line.kind in _OWN}:
        what, _, number = name.rpartition("#")
        before = f"{what}#{int(number) - 1}"
        if int(number) > 1 and not any((before, kind) in run.found for kind in _OWN):
            yield _violation("gap", run, f"{name} is in the journal, and {before} is not")


def _signals(run: Story) -> Iterable[Violation]:
    """Each signal is given to one wait, the oldest first."""
    places = []
    for name, number in Counter(run.taken).items():
        if number > 1:
            yield _violation("duplicated", run, f"signal {name} was taken {number} times")
        if (line := run.found.get((name, StepKind.SIGNAL))) is None:
            yield _violation("phantom", run, f"signal {name} was taken, and nobody sent it")
        else:
            places.append(line.seq)
    if places != sorted(places):
        yield _violation("wrong", run, "a later signal was taken before an earlier one")


def _children(run: Story) -> Iterable[Violation]:
    """What a child has told stands."""
    for line in run.lines:
        dealt_with = line.kind is StepKind.FAILED and (line.name, StepKind.SENT) in run.found
        if dealt_with and line.value not in [end.value for end in run.ends(line.name)]:
            yield _violation("wrong", run, f"what {line.name} had told was changed afterwards")


def _wrong(run: Story) -> Iterable[Violation]:
    """What it returned is what the journal says."""
    if run.state is not State.DONE or run.result is None:
        return
    for name, saw in _decode(run.result).items():
        if (says := run.says(name)) != saw:
            yield _violation("wrong", run, f"for {name} it saw {saw!r}, and the journal says {says!r}")


def _stuck(run: Story) -> Iterable[Violation]:
    """Parked, and what it waits for is in its journal."""
    if run.state is State.PARKED and run.unheard:
        yield _violation("stuck", run, f"it waits, and was told {run.unheard}")


def _fate(line: Step) -> Any:
    ended = _decode_ended(line.value)
    if ended.state is State.DONE:
        return _decode(bytes(ended.result))
    return "dead" if ended.state is State.DEAD else "gone"


def _violation(kind: Any, run: Story, problem: str) -> Violation:
    return Violation(kind, run.key, (run.run_id,), problem)
