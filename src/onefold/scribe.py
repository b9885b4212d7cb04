"""For people: writes the chronicle of a message from its record and its journal.

Pure: ``inspection`` reads what it is made of.
A journal says when things were over.  A step is taken to have begun when what came before it in its branch was over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from onefold.chronicle import Chronicle, Entry, Kind, Letter, Standing, Try, make_head, moment
from onefold.clock import MICROSECONDS, to_datetime
from onefold.effects import LedgerEntry, entries
from onefold.journal import (
    branch_of,
    decode_ended,
    decode_failure,
    decode_retried,
    decode_sent,
    decode_text,
    due_at,
    standing,
)
from onefold.step import UNDO_PREFIX, Step, StepKind, asked_name
from onefold.store import Attempt, Failure, Record, State

_EFFECTS = (StepKind.INTENT, StepKind.EFFECT, StepKind.VOID)


def make_chronicle(
    record: Record,
    steps: Iterable[Step],
    attempts: Iterable[Attempt] = (),
    sent: Mapping[str, Chronicle] | None = None,
    *,
    now: int,
) -> Chronicle:
    """Return the chronicle of a message; ``sent`` has, by their ids, those that it sent."""
    lines = standing(steps)
    told, mailbox = _read_mailbox(lines)
    if record.state is State.DONE:
        # What its last stretch was given is not written down any more, and nothing else will be.
        told, mailbox = _give_rest(lines, told, mailbox), ()
    scribe = _Scribe(record, told, sent or {}, now)
    return msgspec.structs.replace(
        make_head(record),
        attempts=tuple(_try(one.at, one.failure, one.delay) for one in attempts),
        entries=scribe.write(lines),
        mailbox=mailbox,
        whole=True,
    )


def sent_ids(steps: Iterable[Step]) -> list[str]:
    """Return the ids of the messages that a journal says were sent, in its order."""
    sent = (decode_sent(step.value) for step in steps if step.kind is StepKind.SENT)
    return list(dict.fromkeys(one.id for one in sent if one.role != "signal"))


def _read_mailbox(lines: Sequence[Step]) -> tuple[dict[str, Step], tuple[Letter, ...]]:
    """Return the signals by the name of their line, and those that were given to no wait yet."""
    told = {step.name: step for step in lines if step.kind is StepKind.SIGNAL}
    taken = {decode_text(step.value) for step in lines if step.kind is StepKind.TAKEN}
    waiting = (step for name, step in told.items() if name not in taken)
    return told, tuple(_letter(step) for step in waiting)


def _give_rest(lines: Sequence[Step], told: Mapping[str, Step], mailbox: Iterable[Letter]) -> dict[str, Step]:
    """Add to the signals, under the names of their waits, those that waits of the last stretch must have been given."""
    given, left = dict(told), list(mailbox)
    taken = {step.name for step in lines if step.kind is StepKind.TAKEN}
    for step in lines:
        if step.kind is StepKind.TIMER and not step.fingerprint and step.name not in taken:
            name = step.name[len(branch_of(step.name)) :].rpartition("#")[0]
            letter = next((one for one in left if one.name == name), None)
            if letter is not None:
                left.remove(letter)
                given[step.name] = told[f"{letter.name}/{letter.id}"]
    return given


def _letter(step: Step) -> Letter:
    name, _, id_ = step.name.partition("/")
    return Letter(name, id_, to_datetime(step.at))


class _Group:
    """What lies in one branch, in the order in which the journal first speaks of it."""

    def __init__(self) -> None:
        #: The lines of a step, or the branches of a gather.
        self.members: dict[str, list[Step] | dict[str, _Group]] = {}

    def place(self, name: str, step: Step) -> None:
        """Put a line where it belongs: at a step, in this branch or in one of a gather."""
        around, slash, rest = name.partition("/")
        if slash:
            gather, _, number = around.rpartition(".")
            branches = self.members.setdefault(gather, {})
            assert isinstance(branches, dict)
            branches.setdefault(number, _Group()).place(rest, step)
        else:
            lines = self.members.setdefault(name, [])
            assert isinstance(lines, list)
            lines.append(step)


class _Scribe:
    """Writes the entries of one message."""

    def __init__(self, record: Record, told: Mapping[str, Step], sent: Mapping[str, Chronicle], now: int) -> None:
        self._over = record.state.ended
        self._done = record.state is State.DONE
        self._began = record.envelope.created_at
        self._now = record.ended_at or now
        self._told = told
        self._sent = sent
        self._effects: dict[str, list[Entry]] = {}
        #: By the step that is undone.
        self._undos: dict[str, list[Step]] = {}

    def write(self, lines: Sequence[Step]) -> tuple[Entry, ...]:
        outcomes = {step.name: step.at for step in lines if step.kind is StepKind.EFFECT}
        for effect in entries(lines):
            within = self._effects.setdefault(branch_of(effect.name)[:-1], [])
            within.append(_effect(effect, outcomes.get(effect.name)))
        whole = _Group()
        for step in lines:
            name = _owner(step)
            if name is not None and name.startswith(UNDO_PREFIX):
                self._undos.setdefault(name.removeprefix(UNDO_PREFIX), []).append(step)
            elif name is not None:
                whole.place(name, step)
        written, _ = self._group(whole, "", self._began)
        return (*self._effects.get("", ()), *written)

    def _group(self, group: _Group, prefix: str, since: int) -> tuple[tuple[Entry, ...], int]:
        """Write one branch that began at this time; returns when it was last heard of, too."""
        written: list[Entry] = []
        for name, member in group.members.items():
            if isinstance(member, dict):
                entry, since = self._gather(prefix + name, member, since)
            else:
                entry, since = self._entry(prefix + name, member, since)
                entry = self._with_undo(entry)
            written.append(entry)
        return tuple(written), since

    def _with_undo(self, entry: Entry) -> Entry:
        """Put beside what a step did what took it back."""
        if (lines := self._undos.get(entry.name)) is None:
            return entry
        undo, _ = self._entry(f"{UNDO_PREFIX}{entry.name}", lines, lines[0].at)
        undo = msgspec.structs.replace(undo, kind="undo")
        return msgspec.structs.replace(entry, entries=(*entry.entries, undo))

    def _gather(self, name: str, branches: Mapping[str, _Group], since: int) -> tuple[Entry, int]:
        within = {number: self._group(group, f"{name}.{number}/", since) for number, group in branches.items()}
        inner = tuple(_around(f"{name}.{number}", "branch", one, since) for number, (one, _) in within.items())
        return _around(name, "gather", inner, since), max(end for _, end in within.values())

    def _entry(self, name: str, lines: Sequence[Step], since: int) -> tuple[Entry, int]:
        by_kind = {step.kind: step for step in lines}
        timer, taken = by_kind.get(StepKind.TIMER), by_kind.get(StepKind.TAKEN)
        if StepKind.SENT in by_kind:
            return self._message(name, by_kind)
        if timer is not None and timer.fingerprint:
            return self._sleep(name, timer)
        if timer is not None or taken is not None:
            return self._wait(name, timer, taken, since)
        if (restart := by_kind.get(StepKind.RESTART)) is not None:
            return Entry(name=name, kind="restart", state="done", ended_at=to_datetime(restart.at)), restart.at
        if (undo := by_kind.get(StepKind.UNDO)) is not None:
            at, why = to_datetime(undo.at), decode_failure(undo.value)
            return Entry(name=name, kind="undo", state="done", ended_at=at, failure=why), undo.at
        return self._step(name, lines, by_kind, since)

    def _step(
        self, name: str, lines: Sequence[Step], by_kind: Mapping[StepKind, Step], since: int
    ) -> tuple[Entry, int]:
        failed, stuck, begun = (by_kind.get(kind) for kind in (StepKind.FAILED, StepKind.STUCK, StepKind.BEGUN))
        end = by_kind.get(StepKind.RESULT) or failed
        why = failed or (None if end else stuck)
        effects = tuple(self._effects.get(name, ()))
        retries = [(step, decode_retried(step.value)) for step in lines if step.kind is StepKind.RETRY]
        state: Standing = "failed" if failed else "done" if end else "left" if self._over else "begun"
        due: int | None = None
        if state == "begun" and any(effect.state == "uncertain" for effect in effects):
            state = "uncertain"
        elif state == "begun" and stuck is not None:
            state = "stuck"
        elif state == "begun" and retries:
            step, retried = retries[-1]
            state, due = "waiting", step.at + round(retried.delay * MICROSECONDS)
        entry = Entry(
            name=name,
            kind=_kind_of(name, lines[0]),
            state=state,
            began_at=to_datetime(since if begun is None else begun.at),
            ended_at=None if end is None else to_datetime(end.at),
            due_at=moment(due),
            tries=tuple(_try(step.at, retried.failure, retried.delay) for step, retried in retries),
            failure=None if why is None else decode_failure(why.value),
            entries=effects,
        )
        return entry, lines[-1].at

    def _sleep(self, name: str, timer: Step) -> tuple[Entry, int]:
        due = due_at(timer) or timer.at
        state: Standing = "done" if due <= self._now else "left" if self._over else "waiting"
        began, until = to_datetime(timer.at), to_datetime(due)
        ended = until if state == "done" else None
        return Entry(name=name, kind="sleep", state=state, began_at=began, ended_at=ended, due_at=until), due

    def _wait(self, name: str, timer: Step | None, taken: Step | None, since: int) -> tuple[Entry, int]:
        began = timer.at if timer is not None else since
        due = None if timer is None else due_at(timer)
        state: Standing = "left" if self._over else "waiting"
        end: int | None = None
        if taken is not None or self._done:
            letter = self._told.get(name if taken is None else decode_text(taken.value) or "")
            state = "timed out" if letter is None else "done"
            end = due if letter is None else max(began, letter.at)
        entry = Entry(
            name=name,
            kind="wait",
            state=state,
            began_at=to_datetime(began),
            ended_at=moment(end),
            due_at=moment(due),
        )
        return entry, end or began

    def _message(self, name: str, by_kind: Mapping[StepKind, Step]) -> tuple[Entry, int]:
        line = by_kind[StepKind.SENT]
        sent, ended = decode_sent(line.value), by_kind.get(StepKind.CHILD)
        state: Standing = "done"
        failure: Failure | None = None
        if sent.role == "child":
            end = None if ended is None else decode_ended(ended.value)
            if end is None or end.id != sent.id:
                state = "left" if self._over else "waiting"
            elif end.state is not State.DONE:
                state, failure = "failed", end.failure
        entry = Entry(
            name=name,
            kind=sent.role,
            state=state,
            began_at=to_datetime(line.at),
            ended_at=None if ended is None else to_datetime(ended.at),
            failure=failure,
            message_id=sent.id,
            message=self._sent.get(sent.id),
        )
        return entry, line.at if ended is None else ended.at


def _owner(step: Step) -> str | None:
    """Return the step that a line is about; None for signals, and for effects of a message without steps."""
    if step.kind is StepKind.SIGNAL:
        return None
    if step.kind in _EFFECTS:
        return branch_of(step.name)[:-1] or None
    if step.kind in (StepKind.RETRY, StepKind.STUCK):
        return step.name.rpartition("!")[0]
    return asked_name(step.name) if step.kind is StepKind.CHILD else step.name


def _effect(effect: LedgerEntry, ended: int | None) -> Entry:
    return Entry(name=effect.name, kind="effect", state=effect.state, began_at=effect.began_at, ended_at=moment(ended))


def _around(name: str, kind: Literal["gather", "branch"], within: tuple[Entry, ...], since: int) -> Entry:
    """Write what encloses others: it is over when all of them are, as far as the journal tells."""
    states = {entry.state for entry in within}
    open_ = next((state for state in ("uncertain", "waiting", "begun", "left") if state in states), None)
    ends = [entry.ended_at for entry in within if entry.ended_at is not None]
    ended = max(ends, default=None) if open_ is None else None
    state: Standing = open_ or "done"
    return Entry(name=name, kind=kind, state=state, began_at=to_datetime(since), ended_at=ended, entries=within)


def _kind_of(name: str, line: Step) -> Kind:
    if line.kind is StepKind.RESULT and not line.fingerprint:
        for kind in ("now", "checkpoint"):
            if name[len(branch_of(name)) :].startswith(f"{kind}#"):
                return kind
    return "step"


def _try(at: int, failure: Failure | None, delay: float | None) -> Try:
    if failure is None:
        return Try(to_datetime(at), "put off", "", "", delay)
    return Try(to_datetime(at), failure.reason, failure.error_type, failure.error_message, delay)
