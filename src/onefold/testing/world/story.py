"""The checker of runs: the effects of a workflow, its journal and the signals it got must agree.

Like the checker of messages it imports nothing of stores and workers; it reads what is left after the faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from onefold.store import Ended, State
from onefold.store.journal_lines import Line, LineKind, asked_name
from onefold.testing.checker import Effect, Entry, Violation, stale

_decode = msgspec.json.decode
_decode_ended = msgspec.json.Decoder(Ended).decode

#: The kinds of lines that the workflow's code asked for.
_OWN = (LineKind.RESULT, LineKind.FAILED, LineKind.TIMER, LineKind.SENT, LineKind.TAKEN)


@dataclass(frozen=True, slots=True)
class StepEffect:
    """One committed effect of a step; effects are passed in the order of their commits."""

    run_id: str
    step: str
    #: The number of restarts before it; after a restart a step may run again.
    restarts: int
    fence: int
    position: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.step}" + (f" after restart {self.restarts}" if self.restarts else "")


@dataclass(frozen=True)
class Story:
    """One run at the end: its state, its result, its journal and the effects of its steps."""

    run_id: str
    key: str
    state: State
    lines: Sequence[Line]
    effects: Sequence[StepEffect]
    result: bytes | None = None

    @cached_property
    def restarts(self) -> int:
        """The number of restarts."""
        return sum(line.kind is LineKind.RESTART for line in self.lines)

    @cached_property
    def found(self) -> dict[tuple[str, LineKind], Line]:
        """Its lines by name and kind."""
        return {(line.name, line.kind): line for line in self.lines}

    @cached_property
    def taken(self) -> list[str]:
        """The signals that its waits received, in order."""
        values = [_decode(line.value) for line in self.lines if line.kind is LineKind.TAKEN]
        return [value for value in values if value is not None]

    @property
    def unheard(self) -> list[str]:
        """The signals that it got and has not received."""
        told = [line.name for line in self.lines if line.kind is LineKind.SIGNAL]
        return [name for name in told if name not in self.taken]

    def says(self, name: str) -> Any:
        """Return the journal's answer to this request of the code; a missing line has an answer of its own."""
        if (line := self.found.get((name, LineKind.RESULT))) is not None:
            return _decode(line.value)
        if (line := self.found.get((name, LineKind.TAKEN))) is not None:
            signal = _decode(line.value)
            return None if signal is None else _decode(self.found[signal, LineKind.SIGNAL].value)
        if (line := self.found.get((name, LineKind.FAILED))) is not None:
            return _fate(line) if (name, LineKind.SENT) in self.found else "failed"
        if ends := self.ends(name):
            return _fate(ends[-1])
        return "there is no line"

    def ends(self, name: str) -> list[Line]:
        """Return the ends reported by the child that was sent under this name; the last one counts."""
        sent = self.found.get((name, LineKind.SENT))
        child = None if sent is None else _decode(sent.value)["id"]
        told = [line for line in self.lines if line.kind is LineKind.CHILD and asked_name(line.name) == name]
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
    """Yield effects of steps without their record, and records without their effect; both commit together."""
    for effect in run.effects:
        if effect.restarts == run.restarts and (effect.step, LineKind.RESULT) not in run.found:
            yield _violation("torn", run, f"{effect.step} took effect, and the journal does not know")
    happened = {effect.step for effect in run.effects}
    for line in run.lines:
        does = line.name.rpartition("/")[2].partition("#")[0]
        if line.kind is LineKind.RESULT and does in transactional and line.name not in happened:
            yield _violation("lost", run, f"{line.name} is in the journal, and its effect never happened")


def _gaps(run: Story) -> Iterable[Violation]:
    """Yield journal lines that skip a number: the n-th request of a name needs the one before it."""
    for name in {line.name for line in run.lines if line.kind in _OWN}:
        what, _, number = name.rpartition("#")
        before = f"{what}#{int(number) - 1}"
        if int(number) > 1 and not any((before, kind) in run.found for kind in _OWN):
            yield _violation("gap", run, f"{name} is in the journal, and {before} is not")


def _signals(run: Story) -> Iterable[Violation]:
    """Yield signals that were received twice, never sent, or received out of order."""
    places = []
    for name, number in Counter(run.taken).items():
        if number > 1:
            yield _violation("duplicated", run, f"signal {name} was taken {number} times")
        if (line := run.found.get((name, LineKind.SIGNAL))) is None:
            yield _violation("phantom", run, f"signal {name} was taken although it was never sent")
        else:
            places.append(line.seq)
    if places != sorted(places):
        yield _violation("wrong", run, "a later signal was taken before an earlier one")


def _children(run: Story) -> Iterable[Violation]:
    """Yield children with a reported end that was changed afterwards."""
    for line in run.lines:
        dealt_with = line.kind is LineKind.FAILED and (line.name, LineKind.SENT) in run.found
        if dealt_with and line.value not in [end.value for end in run.ends(line.name)]:
            yield _violation("wrong", run, f"what {line.name} had told was changed afterwards")


def _wrong(run: Story) -> Iterable[Violation]:
    """Yield answers in the result that differ from the journal."""
    if run.state is not State.DONE or run.result is None:
        return
    for name, saw in _decode(run.result).items():
        if (says := run.says(name)) != saw:
            yield _violation("wrong", run, f"for {name} it saw {saw!r}, and the journal says {says!r}")


def _stuck(run: Story) -> Iterable[Violation]:
    """Yield runs that are parked although their journal has a signal for them."""
    if run.state is State.PARKED and run.unheard:
        yield _violation("stuck", run, f"it waits, and was told {run.unheard}")


def _fate(line: Line) -> Any:
    ended = _decode_ended(line.value)
    if ended.state is State.DONE:
        return _decode(bytes(ended.result))
    return "dead" if ended.state is State.DEAD else "gone"


def _violation(kind: Any, run: Story, problem: str) -> Violation:
    return Violation(kind, run.key, (run.run_id,), problem)
