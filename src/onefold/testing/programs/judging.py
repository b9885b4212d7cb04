"""The checker of generated programs: each must have done, once, what the decisions in its journal imply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from onefold.store import Record, State
from onefold.store.journal_lines import UNDO_PREFIX, Line, LineKind
from onefold.testing.checker import Kind, Violation
from onefold.testing.programs.description import read
from onefold.testing.programs.outside import Deed
from onefold.testing.programs.reference import Reference
from onefold.testing.programs.walking import LOST, told
from onefold.testing.world.story import Story
from onefold.workflows.journal import decode_begun, decode_ended, standing
from onefold.workflows.saga import begun_steps
from onefold.workflows.saga_status import SagaStatus, read_saga

#: Styles that take effect at the provider; the others write rows.
_OUTSIDE = ("async", "def", "once", "probed", "kept")
_NO_LINE = "there is no line"


@dataclass(slots=True)
class Evidence:
    """All that a run left: its record, its journal and its effects."""

    record: Record
    lines: Sequence[Line]
    #: The effects at the provider and the committed rows, each in their order.
    deeds: Sequence[Deed]
    rows: Sequence[Deed]
    program: str = field(init=False)
    story: Story = field(init=False)

    def __post_init__(self) -> None:
        envelope = self.record.envelope
        self.program = msgspec.json.decode(envelope.payload_inline or b"")["body"]
        key = f"{envelope.message_type}:{envelope.subject or envelope.id}"
        self.story = Story(envelope.id, key, self.record.state, standing(self.lines), (), self.record.result)

    @property
    def happened(self) -> list[Deed]:
        """All effects; a repeated call that the provider recognised is not one."""
        return [*(one for one in self.deeds if not one.again), *self.rows]

    def violation(self, kind: Kind, problem: str) -> Violation:
        """Return a violation of this run."""
        return Violation(kind, self.story.key, (self.story.run_id,), problem)


def judge_program(run: Evidence) -> list[Violation]:
    """Return every difference between what a workflow did and what its decisions imply."""
    if run.record.state is not State.DONE:
        return [run.violation("stuck", f"it is {run.record.state.name.lower()}")]
    reference = Reference(read(run.program), run.story)
    found: list[Violation] = []
    if msgspec.json.decode(run.record.result or b"") != told(reference.seen):
        problem = f"it decided {run.record.result!r}, and its journal says {told(reference.seen)}"
        found.append(run.violation("wrong", problem))
    found += _phantoms(run, reference)
    for expected in reference.acts:
        number = sum(one.place == expected.place for one in run.happened)
        if expected.answer == _NO_LINE:
            found.append(run.violation("lost", f"{expected.place} ({expected.how}) is not in the journal"))
        at_provider, failed = expected.how in _OUTSIDE, expected.answer in LOST
        if failed and expected.how == "sql":
            least, most = 0, 0
        else:
            # A sent message is worked on until it is done, whatever the run did with its answer.
            least, most = int(not (failed and at_provider)), 1
        if number < least:
            found.append(run.violation("lost", f"{expected.place} ({expected.how}) took no effect"))
        if number > most:
            found.append(run.violation("duplicated", f"{expected.place} ({expected.how}) took effect {number} times"))
    return found


def _phantoms(run: Evidence, reference: Reference) -> Iterable[Violation]:
    """Yield effects on branches that were not taken, or after decisions other than the recorded ones."""
    known = {expected.place: expected for expected in reference.acts}
    for deed in (*run.deeds, *run.rows):
        if deed.place not in known:
            yield run.violation("phantom", f"{deed.place} took effect on a way that was not gone: {deed.seen}")
        elif deed.seen != known[deed.place].seen:
            problem = f"{deed.place} took effect after {deed.seen}, and what stands is {known[deed.place].seen}"
            yield run.violation("torn", problem)


# sagas


def judge_saga(run: Evidence) -> list[Violation]:
    """Return every way in which a saga was left half done."""
    saga = read_saga(run.record, run.lines)
    if saga.status not in (SagaStatus.COMPLETED, SagaStatus.COMPENSATED, SagaStatus.FAILED):
        return [run.violation("stuck", f"it is {saga.status}")]
    stand = {one.place: one.op == "do" for one in (*run.deeds, *run.rows)}
    begun = [_place(line.name) for line in begun_steps(run.lines) if decode_begun(line.value).undo is not None]
    problems: list[str] = []
    if saga.status is SagaStatus.COMPLETED:
        reference = Reference(read(run.program), run.story)
        if msgspec.json.decode(run.record.result or b"") != told(reference.seen):
            problems.append(f"it decided {run.record.result!r}, and its journal says {told(reference.seen)}")
        problems += [f"completed, and {one.place} does not stand" for one in reference.acts if not stand.get(one.place)]
    else:
        problems += [f"{saga.status}, and {place} stands" for place in begun if stand.get(place)]
    if not run.story.restarts:
        problems += _disorder(run, saga.status, begun)
    return [run.violation("wrong", problem) for problem in problems]


def _place(name: str) -> str:
    """Return the place of a step or undo, from its name in the journal."""
    return name.removeprefix(UNDO_PREFIX).rpartition("/")[2].partition("#")[0].removeprefix("a")


def _disorder(run: Evidence, status: SagaStatus, begun: Sequence[str]) -> Iterable[str]:
    """Yield problems of order: without a restart a saga is undone in reverse, each step once, or not at all."""
    for (place, op), number in Counter((one.place, one.op) for one in run.rows).items():
        if number > 1:
            yield f"the row of {op} {place} was written {number} times"
    possible = {_place(line.name) for line in begun_steps(run.lines)}
    for place in {one.place for one in run.happened} - possible:
        yield f"{place} took effect, and was never begun"
    ops = [one.op for one in run.deeds]
    if "undo" in ops and "do" in ops[ops.index("undo") :]:
        yield f"the provider was told to do something after the first undo: {run.deeds}"
    undone = [_place(line.name) for line in run.lines if line.name.startswith(UNDO_PREFIX) and _ends(line)]
    if status is SagaStatus.COMPLETED and (undone or any(one.op == "undo" for one in run.happened)):
        yield f"it is completed, and undid {undone}"
    if status is SagaStatus.COMPENSATED and undone != begun[::-1]:
        yield f"it is compensated, began {begun} and undid {undone}"


def _ends(line: Line) -> bool:
    """Whether a line records the end of an undo."""
    if line.kind is LineKind.CHILD:
        return decode_ended(line.value).state is State.DONE
    return line.kind is LineKind.RESULT
