"""Stage 7, handle: the journal of one run, with the lines that are not recorded yet.

A workflow's code is run again from its beginning whenever its run is claimed, and must not repeat what it did before.
So every step has a name, made of its kind and how often that was asked for, under which the journal has its result.
If the code asks for a new step while the journal has others that it has not asked for, the code has changed.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.errors import LimitError, ReplayError
from onefold.message.envelope import Envelope
from onefold.store import Ended, Failure, Stored
from onefold.store.journal_lines import UNDONE, Line, LineKind, Note, asked_name, encode

#: Kinds of lines that are recorded for a step under the step's own name.
_ASKED = (LineKind.RESULT, LineKind.FAILED, LineKind.TIMER, LineKind.SENT, LineKind.TAKEN)
#: Those of them that a redrive may replace: the failure of a step or child, the signal that a wait was given.
_VERDICTS = (LineKind.FAILED, LineKind.TAKEN)
#: Those of them whose name is only the step's name.
_PLAIN = frozenset(_ASKED) - set(_VERDICTS)

decode_failure = msgspec.json.Decoder(Failure).decode
decode_ended = msgspec.json.Decoder(Ended).decode
decode_text = msgspec.json.Decoder(str | None).decode
_decode_seconds = msgspec.json.Decoder(float | None).decode


class Retried(msgspec.Struct, frozen=True):
    """One failed try of a step that will be tried again."""

    failure: Failure | None
    delay: float
    #: Whether it used up one of the step's attempts.
    counted: bool


class Sent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message or signal that the run sent."""

    id: str
    #: The message was there before, sent by another caller under the same key, so it does not report to this run.
    foreign: bool = False
    #: The run waits for the end of a "child"; for a "signal" the id is that of the run that it was sent to.
    role: Literal["send", "child", "signal"] = "send"


class Begun(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step of a saga that may have had an effect."""

    #: The name of its undo; None if it has none.
    undo: str | None
    #: Why it has none.
    never: str | None = None
    timeout: float | None = None


decode_begun = msgspec.json.Decoder(Begun).decode
decode_retried = msgspec.json.Decoder(Retried).decode
decode_sent = msgspec.json.Decoder(Sent).decode


class Journal:
    """The lines of one run, recorded and pending."""

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
        "old_failures",
        "on_stored",
        "pending",
        "restarts",
        "rounds",
        "sends",
    )

    def __init__(self, run_id: str, steps: Iterable[Line] = (), *, replay_count: int = 0) -> None:
        self._run_id = run_id
        self._replay_count = replay_count
        self._lines: dict[tuple[str, LineKind], Line] = {}
        #: The steps the code has not asked for yet, by branch and name, each with the number of its line.
        self._unasked: dict[str, dict[str, int]] = {}
        self._mailbox: dict[str, list[Line]] = {}
        #: How children ended, by the names under which they were sent; a redriven child ends more than once.
        self._ends: dict[str, list[Ended]] = {}
        self._taken: set[str] = set()
        self._ordinals: dict[str, int] = {}
        #: The number of redrives before the verdict on a name was recorded.
        self._verdicts: dict[str, int] = {}
        #: Failures from before a redrive that were raised in the code, each with the branch; until the code handled it.
        self.old_failures: dict[str, str] = {}
        #: The name that the code asked for last, by branch.
        self._last: dict[str, str] = {}
        #: How many steps the code has asked for.
        self.asked = 0
        #: How often an operator restarted the run from an earlier step.
        self.restarts = 0
        #: How often that was after steps had been undone, whose effects are then made anew.
        self.rounds = 0
        #: Decisions, and what they send, that are written with the next record, which comes before any step is called.
        self.pending: list[Line] = []
        self.sends: list[Envelope] = []
        self.notes: list[Note] = []
        #: Called when a message with a key is stored, maybe as a duplicate of another; by the id the run gave it.
        self.on_stored: dict[str, Callable[[Stored], None]] = {}
        for step in steps:
            self._read(step)

    def _read(self, step: Line) -> None:
        # A short cut for most lines: every claim of a run reads its whole journal.
        if step.kind in _PLAIN:
            self._lines[step.name, step.kind] = step
            name: str | None = step.name
        else:
            name = self._read_special(step)
        if name is not None:
            self._unasked.setdefault(branch_of(name), {}).setdefault(name, step.seq)

    def _read_special(self, step: Line) -> str | None:
        """Read a line of another kind, and return the name of the step it belongs to; None if it belongs to none."""
        if step.kind is LineKind.SIGNAL:
            self._mailbox.setdefault(step.name.partition("/")[0], []).append(step)
            return None
        self._add_one(step)
        if step.kind is LineKind.RESTART:
            self.restarts += 1
            self.rounds += step.value == UNDONE
        elif step.kind is LineKind.TAKEN and (taken := decode_text(step.value)) is not None:
            self._taken.add(taken)
        elif step.kind is LineKind.RETRY and (reopened := _reopened(step)) is not None:
            self._verdicts.pop(reopened, None)
            for kind in _VERDICTS:
                self._lines.pop((reopened, kind), None)
        return _asked_for(step)

    # names

    def ordinal(self, kind: str) -> int:
        """Count one more step of this kind, and return its number."""
        number = self._ordinals[kind] = self._ordinals.get(kind, 0) + 1
        return number

    def name(self, branch: str, kind: str) -> str:
        """Return the name of the next step of this kind that the code asks for in this branch."""
        name = f"{branch}{kind}#{self.ordinal(branch + kind)}"
        if len(name) > limits.STEP_NAME_BYTES_MAX:
            raise LimitError(
                "step",
                f"{name!r} has {len(name)} bytes; at most {limits.STEP_NAME_BYTES_MAX} are allowed: "
                "nest gathers less deeply, or shorten the names",
            )
        self.asked += 1
        if unasked := self._unasked.get(branch):
            unasked.pop(name, None)
        if self.old_failures:
            self._forget_handled_failures(branch)
        self._last[branch] = name
        return name

    def _forget_handled_failures(self, branch: str) -> None:
        """Forget the old failures raised in this branch, around it or inside it: the code goes on after them."""
        for name, place in list(self.old_failures.items()):
            if place.startswith(branch) or branch.startswith(place):
                del self.old_failures[name]

    def mark_asked(self, name: str) -> None:
        """Note that the code asks for a step."""
        self._unasked.get(branch_of(name), {}).pop(name, None)

    def check_new(self, name: str) -> None:
        """Raise ``ReplayError`` if the code asks for a new step where the journal has another."""
        for kind in _ASKED:
            if (name, kind) in self._lines:
                journal = f"{name} as a {kind.name.lower()}"
                raise ReplayError(self._run_id, code=f"{name} as something else", journal=journal)
        self.check_order(branch_of(name), name)

    def check_order(self, branch: str, name: str | None = None) -> None:
        """Raise ``ReplayError`` if the journal has steps of this branch that the code has not asked for by now."""
        if unasked := self._unasked.get(branch):
            code = name or self._last.get(branch, "a wait")
            raise ReplayError(self._run_id, code=code, journal=next(iter(unasked)))

    def check_end(self) -> None:
        """Raise ``ReplayError`` if the journal has steps that the code, which has returned, did not ask for."""
        for unasked in self._unasked.values():
            for name in unasked:
                raise ReplayError(self._run_id, code="that it is over", journal=name)

    # lines

    def find(self, name: str, kind: LineKind, fingerprint: bytes = b"") -> Line | None:
        """Return a line; raises ``ReplayError`` if it was recorded for other arguments."""
        step = self._lines.get((name, kind))
        if step is not None and fingerprint and step.fingerprint and step.fingerprint != fingerprint:
            raise ReplayError(self._run_id, code=f"{name} with these arguments", journal=f"{name} with others")
        return step

    def effects_of(self, name: str) -> list[Line]:
        """Return the lines of the effects of one step."""
        prefix = f"{name}/"
        return [step for (one, _), step in self._lines.items() if one.startswith(prefix)]

    def add(self, steps: Iterable[Line]) -> None:
        """Add lines that were recorded."""
        for step in steps:
            self._add_one(step)

    def _add_one(self, step: Line) -> None:
        if step.kind in _VERDICTS:
            name, replay = _verdict_on(step)
            self._lines[name, step.kind] = step
            self._verdicts[name] = replay
        else:
            self._lines[step.name, step.kind] = step
        if step.kind is LineKind.CHILD:
            self._ends.setdefault(asked_name(step.name), []).append(decode_ended(step.value))

    def went_on(self, line: Line, here: str) -> bool:
        """Whether the run went on after this line, for which the code in the branch ``here`` waits.

        Then the wait was over, even if a clock was set back since.
        """
        return any(
            max(unasked.values()) > line.seq
            for branch, unasked in self._unasked.items()
            if unasked and self._comes_after(branch, here)
        )

    def _comes_after(self, other: str, here: str) -> bool:
        """Whether the code asks for steps of the branch ``other`` only after the step it awaits in ``here``.

        That is so for the branch itself, for those around it, and for those of a gather that has not begun yet.
        """
        if here.startswith(other):
            return True
        around = f"{shared}/" if (shared := posixpath.commonpath([other, here])) else ""
        number = other[len(around) :].partition("#")[2].partition(".")[0]
        return number.isdigit() and int(number) > self._ordinals.get(f"{around}gather", 0)

    @property
    def has_pending(self) -> bool:
        """Whether anything is to be written with the next record."""
        return bool(self.pending or self.sends or self.notes)

    def take_pending(self) -> list[Line]:
        """Remove and return the pending lines."""
        pending, self.pending = self.pending, []
        return pending

    def confirm(self, sends: Sequence[Envelope], stored: Sequence[Stored]) -> None:
        """Complete, after the commit, the receipts of messages with keys."""
        for envelope, one in zip(sends, stored, strict=True):
            if (complete := self.on_stored.pop(envelope.id, None)) is not None:
                complete(one)

    def taking_pending(self) -> TakenPending:
        """Remove everything pending, for a commit in the block; it is pending again if that raises."""
        return TakenPending(self)

    # steps, children and signals

    def tries(self, name: str) -> list[tuple[Line, Retried]]:
        """Return the failed tries of a step since the run was last redriven."""
        found: list[tuple[Line, Retried]] = []
        while (step := self._lines.get((self.try_line(name, len(found)), LineKind.RETRY))) is not None:
            found.append((step, decode_retried(step.value)))
        return found

    def try_line(self, name: str, number: int) -> str:
        """Return the name of the line of a failed try; they are numbered anew after a redrive."""
        return f"{name}!{self._replay_count}.{number}"

    def verdict_line(self, name: str) -> str:
        """Return the name of the line of a verdict; each redrive may record another."""
        return f"{name}!{self._replay_count}" if self._replay_count else name

    def is_old(self, name: str) -> bool:
        """Whether the verdict on this step is from before a redrive."""
        return self._verdicts.get(name, self._replay_count) < self._replay_count

    def reopen(self, names: Iterable[str]) -> list[Line]:
        """Return the lines that make old failures void, so that the redriven run tries those steps again."""
        failed = ((name, self._lines.get((name, LineKind.FAILED))) for name in names)
        return [
            Line(f"{name}!{self._verdicts[name]}", LineKind.RETRY, encode(Retried(_failure_in(line), 0.0, False)))
            for name, line in failed
        ]

    def sent(self, name: str, fingerprint: bytes) -> Sent | None:
        """Return the message that was sent under this name."""
        step = self.find(name, LineKind.SENT, fingerprint)
        return None if step is None else decode_sent(step.value)

    def knows(self, name: str) -> bool:
        """Whether the journal has a line for the step of this name."""
        return any((name, kind) in self._lines for kind in _ASKED)

    def ends(self, name: str) -> list[Ended]:
        """Return the ends of the child that was sent under this name, which may have been redriven, oldest first."""
        sent = self._lines.get((name, LineKind.SENT))
        if sent is None:
            return []
        child = decode_sent(sent.value).id
        # A child that was sent before a restart may still report; its end is not that of the child sent now.
        return [end for end in self._ends.get(name, ()) if end.id == child]

    def ended(self, name: str) -> Ended | None:
        """Return the last end of the child that was sent under this name."""
        found = self.ends(name)
        return found[-1] if found else None

    def take_signal(self, name: str, signal: str) -> Line | None:
        """Return the signal that this wait was given, or give it the oldest that is left; None if there is none."""
        taken = self.find(name, LineKind.TAKEN)
        for step in self._mailbox.get(signal, ()):
            if taken is not None:
                if step.name == decode_text(taken.value):
                    return self._as_replaced(step, taken.seq)
            elif step.name not in self._taken and (step.name, LineKind.VOID) not in self._lines:
                self.check_order(branch_of(name), name)
                self._taken.add(step.name)
                self.pending.append(Line(self.verdict_line(name), LineKind.TAKEN, encode(step.name)))
                return self._as_replaced(step, limits.INTEGER_MAX)
        return None

    def _as_replaced(self, signal: Line, taken: int) -> Line:
        """Return a signal with the value that an operator gave it, if that was before it was taken."""
        replacement = self._lines.get((signal.name, LineKind.EFFECT))
        if replacement is None or replacement.seq > taken:
            return signal
        return msgspec.structs.replace(signal, value=replacement.value)


class TakenPending:
    """Everything that was pending in a journal, while a commit with it is under way."""

    __slots__ = ("_journal", "_taken")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._taken = (journal.take_pending(), journal.sends, journal.notes)
        journal.sends, journal.notes = [], []

    def __enter__(self) -> tuple[list[Line], list[Envelope], list[Note]]:
        return self._taken

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            journal = self._journal
            journal.pending[:0], journal.sends[:0], journal.notes[:0] = self._taken


def open_signals(lines: Iterable[Line]) -> set[str]:
    """Return the lines of the signals that no wait was given and no operator dropped or replaced."""
    found = list(lines)
    signals = {line.name for line in found if line.kind is LineKind.SIGNAL}
    taken = {decode_text(line.value) for line in found if line.kind is LineKind.TAKEN}
    return signals - taken - {line.name for line in found if line.kind in (LineKind.VOID, LineKind.EFFECT)}


def due_at(timer: Line) -> int | None:
    """Return when a timer runs out; None if it has no end."""
    seconds = _decode_seconds(timer.value)
    return None if seconds is None else timer.at + round(seconds * MICROSECONDS)


def branch_of(name: str) -> str:
    """Return the branch that a step is in, with its slash; empty for the workflow itself."""
    return name[: name.rfind("/") + 1]


def standing(steps: Iterable[Line]) -> list[Line]:
    """Return the lines of a journal that are valid, under the names of their steps.

    A failure after which a redriven run tried again is not valid any more.
    """
    found: dict[tuple[str, LineKind], Line] = {}
    for step in steps:
        if step.kind in _VERDICTS:
            step = msgspec.structs.replace(step, name=_verdict_on(step)[0])
        elif step.kind is LineKind.RETRY and (reopened := _reopened(step)) is not None:
            for kind in _VERDICTS:
                found.pop((reopened, kind), None)
        found[step.name, step.kind] = step
    return list(found.values())


def _verdict_on(step: Line) -> tuple[str, int]:
    """Return the step that a verdict is about, and the number of redrives before it."""
    name, _, replay = step.name.partition("!")
    return name, int(replay or 0)


def _reopened(step: Line) -> str | None:
    """Return the step whose failure this line makes void; None for a failed try, which has a dot in its number."""
    name, _, replay = step.name.rpartition("!")
    return name if replay.isdigit() else None


def _failure_in(line: Line | None) -> Failure | None:
    """Return the failure in the line of a step or child; None if there is no line, as for a signal that timed out."""
    if line is None:
        return None
    try:
        return decode_failure(line.value)
    except msgspec.ValidationError:
        return decode_ended(line.value).failure


def _asked_for(step: Line) -> str | None:
    """Return the name of the step for which this line was recorded; None if it belongs to none."""
    if step.kind in _VERDICTS:
        return _verdict_on(step)[0]
    if step.kind in _ASKED or step.kind is LineKind.BEGUN:
        return step.name
    if step.kind is LineKind.RETRY:
        return step.name.rpartition("!")[0]
    if step.kind is LineKind.INTENT:
        return branch_of(step.name)[:-1]
    return None
