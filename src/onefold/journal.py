"""Stage 7, handle: what one run has done so far, and what of it is not written down yet.

A workflow is run again from its beginning whenever its run is claimed.  What it did before is not done again: each
thing it asks for has a name, made of what it is and how often that was asked for, and the journal has the answer.
Asked for something that the journal does not have although it goes on with something else, the code has changed.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.codec import ResultCodec
from onefold.envelope import Envelope
from onefold.errors import LimitError, ReplayError
from onefold.step import UNDONE, Note, Step, StepKind, asked_name
from onefold.store import Ended, Failure, Lease, Store

logger = logging.getLogger("onefold")

#: Kinds that stand for what the code asked for, under the name it asked with.
_ASKED = (StepKind.RESULT, StepKind.FAILED, StepKind.TIMER, StepKind.SENT, StepKind.TAKEN)
#: Those of them that may be given a second time, after a redrive: how a step or child failed, what a wait was given.
_VERDICTS = (StepKind.FAILED, StepKind.TAKEN)
#: Those of them that say nothing more.
_PLAIN = frozenset(_ASKED) - set(_VERDICTS)
_STEPS_WARNED = round(limits.STEPS_MAX * limits.STEPS_WARNING)

encode = msgspec.json.Encoder().encode
decode_failure = msgspec.json.Decoder(Failure).decode
decode_ended = msgspec.json.Decoder(Ended).decode
decode_text = msgspec.json.Decoder(str | None).decode
_decode_seconds = msgspec.json.Decoder(float | None).decode


class Retried(msgspec.Struct, frozen=True):
    """One failed try of a step, after which another is to come."""

    failure: Failure | None
    delay: float
    #: Whether it used up one of the step's attempts.
    counted: bool


class Sent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message or signal that left with the journal."""

    id: str
    #: It was there before, sent by somebody else under the same key: it does not report to this run.
    foreign: bool = False
    #: Whether the run waits for its end; or it is no message but a signal, and the id is that of the run it was for.
    role: Literal["send", "child", "signal"] = "send"


class Begun(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step of a saga that may have had an effect."""

    #: What takes it back; None if nothing does.
    undo: str | None
    #: Why nothing does.
    never: str | None = None
    timeout: float | None = None


decode_begun = msgspec.json.Decoder(Begun).decode
decode_retried = msgspec.json.Decoder(Retried).decode
decode_sent = msgspec.json.Decoder(Sent).decode


class Journal:
    """The steps of one run as its owner knows them."""

    __slots__ = (
        "_ends",
        "_last",
        "_lines",
        "_mailbox",
        "_ordinals",
        "_replay_count",
        "_run_id",
        "_taken",
        "_unasked",
        "_verdicts",
        "asked",
        "notes",
        "pending",
        "restarts",
        "rounds",
        "sends",
        "struck",
    )

    def __init__(self, run_id: str, steps: Iterable[Step] = (), *, replay_count: int = 0) -> None:
        self._run_id = run_id
        self._replay_count = replay_count
        self._lines: dict[tuple[str, StepKind], Step] = {}
        #: Names the code has not asked for yet, by the branch they lie in, and after how many lines they were recorded.
        self._unasked: dict[str, dict[str, int]] = {}
        self._mailbox: dict[str, list[Step]] = {}
        #: What children told of their ends, by the names under which they were sent.
        self._ends: dict[str, list[Ended]] = {}
        self._taken: set[str] = set()
        self._ordinals: dict[str, int] = {}
        #: In which replay the verdict on a name was given.
        self._verdicts: dict[str, int] = {}
        #: Names of which the code was told a failure from before a redrive, and where, until it has dealt with that.
        self.struck: dict[str, str] = {}
        #: What the code asked for last, by branch.
        self._last: dict[str, str] = {}
        #: How many steps the code has asked for.
        self.asked = 0
        #: How often a person made the run go back.
        self.restarts = 0
        #: How often that was after something had been undone, which is then done as if for the first time.
        self.rounds = 0
        #: Decisions and what belongs to them, written with the next record: before a step is called, at the latest.
        self.pending: list[Step] = []
        self.sends: list[Envelope] = []
        self.notes: list[Note] = []
        for step in steps:
            self._read(step)

    def _read(self, step: Step) -> None:
        # Most lines are of these kinds, and every run that goes on reads all of its own.
        if step.kind in _PLAIN:
            self._lines[step.name, step.kind] = step
            name: str | None = step.name
        else:
            name = self._read_special(step)
        if name is not None:
            self._unasked.setdefault(branch_of(name), {}).setdefault(name, step.seq)

    def _read_special(self, step: Step) -> str | None:
        """Take in a line that says more than its name, and return for which step it was written, if it tells."""
        if step.kind is StepKind.SIGNAL:
            self._mailbox.setdefault(step.name.partition("/")[0], []).append(step)
            return None
        self._keep(step)
        if step.kind is StepKind.RESTART:
            self.restarts += 1
            self.rounds += step.value == UNDONE
        elif step.kind is StepKind.TAKEN and (taken := decode_text(step.value)) is not None:
            self._taken.add(taken)
        elif step.kind is StepKind.RETRY and (reopened := _reopened(step)) is not None:
            self._verdicts.pop(reopened, None)
            for kind in _VERDICTS:
                self._lines.pop((reopened, kind), None)
        return _asked_for(step)

    # names

    def ordinal(self, what: str) -> int:
        """Say the how-manieth of its kind this is that the code asks for."""
        number = self._ordinals[what] = self._ordinals.get(what, 0) + 1
        return number

    def name(self, branch: str, what: str) -> str:
        """Name the next step of this kind that the code asks for in this branch."""
        name = f"{branch}{what}#{self.ordinal(branch + what)}"
        if len(name) > limits.STEP_NAME_BYTES_MAX:
            raise LimitError(
                "step", f"{name!r} has {len(name)} bytes; at most {limits.STEP_NAME_BYTES_MAX} are allowed: nest less"
            )
        self.asked += 1
        if self.asked >= _STEPS_WARNED:
            self._limit_steps()
        if unasked := self._unasked.get(branch):
            unasked.pop(name, None)
        if self.struck:
            self._deal(branch)
        self._last[branch] = name
        return name

    def _deal(self, branch: str) -> None:
        """The code goes on in this branch: it has dealt with the failures that it was told there or below."""
        for name, place in list(self.struck.items()):
            if place.startswith(branch) or branch.startswith(place):
                del self.struck[name]

    def _limit_steps(self) -> None:
        """Warn of a run that has almost as many steps as it may, and end one that has more."""
        if self.asked > limits.STEPS_MAX:
            raise LimitError("steps", f"more than {limits.STEPS_MAX} in one run; give parts of the work to children")
        if self.asked == _STEPS_WARNED:
            logger.warning("many_steps run_id=%s steps=%d most=%d", self._run_id, self.asked, limits.STEPS_MAX)

    def ask(self, name: str) -> None:
        """Take down that the code asks for a step."""
        self._unasked.get(branch_of(name), {}).pop(name, None)

    def begin(self, name: str) -> None:
        """Something new is about to be done: refuse if the journal goes on otherwise."""
        for kind in _ASKED:
            if (name, kind) in self._lines:
                told = f"{name} as a {kind.name.lower()}"
                raise ReplayError(self._run_id, code=f"{name} as something else", journal=told)
        self.pause(branch_of(name), name)

    def pause(self, branch: str, name: str | None = None) -> None:
        """The code waits in this branch, or is given something new: refuse if the journal went on otherwise."""
        if unasked := self._unasked.get(branch):
            code = name or self._last.get(branch, "a wait")
            raise ReplayError(self._run_id, code=code, journal=next(iter(unasked)))

    def end(self) -> None:
        """The code is through: refuse if the journal says that there was more."""
        for unasked in self._unasked.values():
            for name in unasked:
                raise ReplayError(self._run_id, code="that it is over", journal=name)

    # lines

    def find(self, name: str, kind: StepKind, fingerprint: bytes = b"") -> Step | None:
        """Return a line; raises ``ReplayError`` if it was recorded for other arguments."""
        step = self._lines.get((name, kind))
        if step is not None and fingerprint and step.fingerprint and step.fingerprint != fingerprint:
            raise ReplayError(self._run_id, code=f"{name} with these arguments", journal=f"{name} with others")
        return step

    def within(self, name: str) -> list[Step]:
        """Return what was recorded inside one step: its effects."""
        inside = f"{name}/"
        return [step for (one, _), step in self._lines.items() if one.startswith(inside)]

    def add(self, steps: Iterable[Step]) -> None:
        """Take in what was recorded."""
        for step in steps:
            self._keep(step)

    def _keep(self, step: Step) -> None:
        if step.kind in _VERDICTS:
            name, replay = _verdict_on(step)
            self._lines[name, step.kind] = step
            self._verdicts[name] = replay
        else:
            self._lines[step.name, step.kind] = step
        if step.kind is StepKind.CHILD:
            self._ends.setdefault(asked_name(step.name), []).append(decode_ended(step.value))

    def went_on(self, line: Step, here: str) -> bool:
        """Whether the run did more after this line, for which the code in the branch ``here`` waits.

        It was through with it then, even if a clock was set back since.
        """
        return any(
            max(unasked.values()) > line.seq
            for branch, unasked in self._unasked.items()
            if unasked and self._comes_after(branch, here)
        )

    def _comes_after(self, other: str, here: str) -> bool:
        """Whether the code asks for what lies in one branch only when it is through with what it awaits in another.

        That is so for the branch itself, for those around it, and for those of any gather that has not begun yet.
        """
        if here.startswith(other):
            return True
        around = f"{shared}/" if (shared := posixpath.commonpath([other, here])) else ""
        number = other[len(around) :].partition("#")[2].partition(".")[0]
        return number.isdigit() and int(number) > self._ordinals.get(f"{around}gather", 0)

    @property
    def has_pending(self) -> bool:
        """Whether anything waits for the next record."""
        return bool(self.pending or self.sends or self.notes)

    def take_pending(self) -> list[Step]:
        """Hand over what is to be written with the next record."""
        pending, self.pending = self.pending, []
        return pending

    def leaving(self) -> Leaving:
        """Hand over everything that waits for the next record, and take it back should that fail."""
        return Leaving(self)

    # what the lines mean

    def tries(self, name: str) -> list[tuple[Step, Retried]]:
        """Return the failed tries of a step since the run was last redriven."""
        found: list[tuple[Step, Retried]] = []
        while (step := self._lines.get((self.try_line(name, len(found)), StepKind.RETRY))) is not None:
            found.append((step, decode_retried(step.value)))
        return found

    def try_line(self, name: str, number: int) -> str:
        """Name the line of a failed try; a redrive begins anew."""
        return f"{name}!{self._replay_count}.{number}"

    def verdict_line(self, name: str) -> str:
        """Name the line of a verdict; a redrive may bring another one."""
        return f"{name}!{self._replay_count}" if self._replay_count else name

    def is_old(self, name: str) -> bool:
        """Whether the verdict on this is from before a redrive."""
        return self._verdicts.get(name, self._replay_count) < self._replay_count

    def reopen(self, names: Iterable[str]) -> list[Step]:
        """Return the lines by which old failures are forgotten, so that the redriven run tries again."""
        failed = ((name, self._lines.get((name, StepKind.FAILED))) for name in names)
        return [
            Step(f"{name}!{self._verdicts[name]}", StepKind.RETRY, encode(Retried(_failure_in(line), 0.0, False)))
            for name, line in failed
        ]

    def sent(self, name: str, fingerprint: bytes) -> Sent | None:
        """Return the message that was sent under this name."""
        step = self.find(name, StepKind.SENT, fingerprint)
        return None if step is None else decode_sent(step.value)

    def ends(self, name: str) -> list[Ended]:
        """Return the ends of the child that was sent under this name, which may have been redriven, oldest first."""
        sent = self._lines.get((name, StepKind.SENT))
        if sent is None:
            return []
        child = decode_sent(sent.value).id
        # One that was sent before a restart may still report, and speaks for nobody.
        return [end for end in self._ends.get(name, ()) if end.id == child]

    def ended(self, name: str) -> Ended | None:
        """Return how the child that was sent under this name ended, the last time it did."""
        found = self.ends(name)
        return found[-1] if found else None

    def take_signal(self, name: str, signal: str) -> Step | None:
        """Return the signal this wait was given, or the oldest that none was; None when there is none."""
        taken = self.find(name, StepKind.TAKEN)
        for step in self._mailbox.get(signal, ()):
            if taken is not None:
                if step.name == decode_text(taken.value):
                    return step
            elif step.name not in self._taken:
                self.pause(branch_of(name), name)
                self._taken.add(step.name)
                self.pending.append(Step(self.verdict_line(name), StepKind.TAKEN, encode(step.name)))
                return step
        return None


class Leaving:
    """What waits for the next record, as long as that is under way."""

    __slots__ = ("_given", "_journal")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._given = (journal.take_pending(), journal.sends, journal.notes)
        journal.sends, journal.notes = [], []

    def __enter__(self) -> tuple[list[Step], list[Envelope], list[Note]]:
        return self._given

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            journal = self._journal
            journal.pending[:0], journal.sends[:0], journal.notes[:0] = self._given


_signal_value = ResultCodec(Any, most=limits.PAYLOAD_BYTES_MAX, field="signal")


async def read_journal(store: Store, lease: Lease) -> list[Step]:
    """Return the lines of a claimed message; asks nobody when there can be none."""
    return await store.steps(lease.id) if lease.has_journal else []


def signal_note(run_id: str, name: str, value: Any, id_: str) -> Note:
    """Return the line that tells a run something; two with the same name and id are one."""
    limits.check_bytes("run_id", run_id, limits.ID_BYTES_MAX)
    limits.check_bytes("id", id_, limits.ID_BYTES_MAX)
    line = f"{limits.check_step_name('signal', name)}/{id_}"
    return Note(run_id, Step(line, StepKind.SIGNAL, _signal_value.encode(value)))


def due_at(timer: Step) -> int | None:
    """Return when a timer's time is over; None when it has no end."""
    seconds = _decode_seconds(timer.value)
    return None if seconds is None else timer.at + round(seconds * MICROSECONDS)


def branch_of(name: str) -> str:
    """Return the branch a step lies in, with its slash; empty for the workflow itself."""
    return name[: name.rfind("/") + 1]


def standing(steps: Iterable[Step]) -> list[Step]:
    """Return the lines of a journal that count, under the names that the code asks with.

    A failure after which a redriven run tried again does not count any more.
    """
    found: dict[tuple[str, StepKind], Step] = {}
    for step in steps:
        if step.kind in _VERDICTS:
            step = msgspec.structs.replace(step, name=_verdict_on(step)[0])
        elif step.kind is StepKind.RETRY and (reopened := _reopened(step)) is not None:
            for kind in _VERDICTS:
                found.pop((reopened, kind), None)
        found[step.name, step.kind] = step
    return list(found.values())


def _verdict_on(step: Step) -> tuple[str, int]:
    """Return what a verdict is about, and in which replay it was given."""
    name, _, replay = step.name.partition("!")
    return name, int(replay or 0)


def _reopened(step: Step) -> str | None:
    """Return whose failure is forgotten by this line, if one is; the other lines of its kind have a dot."""
    name, _, replay = step.name.rpartition("!")
    return name if replay.isdigit() else None


def _failure_in(line: Step | None) -> Failure | None:
    """Return why a step or a child failed, from the line that says so; a signal that did not come has none."""
    if line is None:
        return None
    try:
        return decode_failure(line.value)
    except msgspec.ValidationError:
        return decode_ended(line.value).failure


def _asked_for(step: Step) -> str | None:
    """Return the name of the step for which the code has written this line, if the line tells."""
    if step.kind in _VERDICTS:
        return _verdict_on(step)[0]
    if step.kind in _ASKED or step.kind is StepKind.BEGUN:
        return step.name
    if step.kind is StepKind.RETRY:
        return step.name.rpartition("!")[0]
    if step.kind is StepKind.INTENT:
        return branch_of(step.name)[:-1]
    return None
