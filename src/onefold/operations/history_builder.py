"""For operators: makes the chronicle of a message from its record and its journal.

``chronicle`` reads them; the rest is pure.
A journal has the times at which steps ended.  A step counts as begun when the one before it in its branch ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime
from onefold.handlers.effects import LedgerEntry, entries
from onefold.operations.history import Chronicle, Entry, Kind, Letter, Standing, Try, make_head, moment
from onefold.store import Attempt, Failure, Query, Record, State, Store
from onefold.store.journal_lines import UNDO_PREFIX, Line, LineKind, asked_name
from onefold.workflows.journal import (
    branch_of,
    decode_ended,
    decode_failure,
    decode_retried,
    decode_sent,
    decode_text,
    due_at,
    standing,
)

_EFFECTS = (LineKind.INTENT, LineKind.EFFECT, LineKind.VOID)


def make_chronicle(
    record: Record,
    steps: Iterable[Line],
    attempts: Iterable[Attempt] = (),
    sent: Mapping[str, Chronicle] | None = None,
    *,
    now: int,
) -> Chronicle:
    """Return the chronicle of a message; ``sent`` has the chronicles of its sends, by their ids."""
    lines = standing(steps)
    signals, mailbox = _read_mailbox(lines)
    if record.state is State.DONE:
        # The waits of the last activation of a run are not recorded, because its result is.
        signals, mailbox = _assign_rest(lines, signals, mailbox), ()
    builder = _HistoryBuilder(record, signals, sent or {}, now)
    return msgspec.structs.replace(
        make_head(record),
        attempts=tuple(_try(one.at, one.failure, one.delay) for one in attempts),
        entries=builder.build(lines),
        mailbox=mailbox,
        whole=True,
    )


def sent_ids(steps: Iterable[Line]) -> list[str]:
    """Return the ids of the messages that were sent according to a journal, in its order."""
    sent = (decode_sent(step.value) for step in steps if step.kind is LineKind.SENT)
    return list(dict.fromkeys(one.id for one in sent if one.role != "signal"))


def _read_mailbox(lines: Sequence[Line]) -> tuple[dict[str, Line], tuple[Letter, ...]]:
    """Return the signals by the name of their line, and those that no wait has received yet."""
    signals = {step.name: step for step in lines if step.kind is LineKind.SIGNAL}
    taken = {decode_text(step.value) for step in lines if step.kind is LineKind.TAKEN}
    dropped = {step.name for step in lines if step.kind is LineKind.VOID}
    waiting = (step for name, step in signals.items() if name not in taken and name not in dropped)
    return signals, tuple(_letter(step) for step in waiting)


def _assign_rest(lines: Sequence[Line], signals: Mapping[str, Line], mailbox: Iterable[Letter]) -> dict[str, Line]:
    """Add the signals that waits of the last activation must have received, under the names of those waits."""
    received, left = dict(signals), list(mailbox)
    taken = {step.name for step in lines if step.kind is LineKind.TAKEN}
    for step in lines:
        if step.kind is LineKind.TIMER and not step.fingerprint and step.name not in taken:
            name = step.name[len(branch_of(step.name)) :].rpartition("#")[0]
            letter = next((one for one in left if one.name == name), None)
            if letter is not None:
                left.remove(letter)
                received[step.name] = signals[f"{letter.name}/{letter.id}"]
    return received


def _letter(step: Line) -> Letter:
    name, _, id_ = step.name.partition("/")
    return Letter(name, id_, to_datetime(step.at))


class _Group:
    """The contents of one branch, in the order in which the journal first names them."""

    def __init__(self) -> None:
        #: The lines of a step, or the branches of a gather.
        self.members: dict[str, list[Line] | dict[str, _Group]] = {}

    def place(self, name: str, step: Line) -> None:
        """Add a line to its step, in this branch or in a branch of a gather."""
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


class _HistoryBuilder:
    """Makes the entries of one message."""

    def __init__(self, record: Record, signals: Mapping[str, Line], sent: Mapping[str, Chronicle], now: int) -> None:
        self._over = record.state.ended
        self._done = record.state is State.DONE
        self._began = record.envelope.created_at
        self._now = record.ended_at or now
        self._signals = signals
        self._sent = sent
        self._effects: dict[str, list[Entry]] = {}
        #: By the step that is undone.
        self._undos: dict[str, list[Line]] = {}

    def build(self, lines: Sequence[Line]) -> tuple[Entry, ...]:
        outcomes = {step.name: step.at for step in lines if step.kind is LineKind.EFFECT}
        for effect in entries(lines):
            within = self._effects.setdefault(branch_of(effect.name)[:-1], [])
            within.append(_effect(effect, outcomes.get(effect.name)))
        whole = _Group()
        for step in lines:
            # An effect line with the name of a signal records that an operator dropped or replaced the signal.
            name = None if step.kind in _EFFECTS and step.name in self._signals else _owner(step)
            if name is not None and name.startswith(UNDO_PREFIX):
                self._undos.setdefault(name.removeprefix(UNDO_PREFIX), []).append(step)
            elif name is not None:
                whole.place(name, step)
        built, _ = self._group(whole, "", self._began)
        return (*self._effects.get("", ()), *built)

    def _group(self, group: _Group, prefix: str, since: int) -> tuple[tuple[Entry, ...], int]:
        """Return the entries of one branch that began at this time, and the time of its last line."""
        built: list[Entry] = []
        for name, member in group.members.items():
            if isinstance(member, dict):
                entry, since = self._gather(prefix + name, member, since)
            else:
                entry, since = self._entry(prefix + name, member, since)
                entry = self._with_undo(entry)
            built.append(entry)
        return tuple(built), since

    def _with_undo(self, entry: Entry) -> Entry:
        """Add the undo of a step to its entry."""
        if (lines := self._undos.get(entry.name)) is None:
            return entry
        undo, _ = self._entry(f"{UNDO_PREFIX}{entry.name}", lines, lines[0].at)
        undo = msgspec.structs.replace(undo, kind="undo")
        return msgspec.structs.replace(entry, entries=(*entry.entries, undo))

    def _gather(self, name: str, branches: Mapping[str, _Group], since: int) -> tuple[Entry, int]:
        within = {number: self._group(group, f"{name}.{number}/", since) for number, group in branches.items()}
        inner = tuple(_around(f"{name}.{number}", "branch", one, since) for number, (one, _) in within.items())
        return _around(name, "gather", inner, since), max(end for _, end in within.values())

    def _entry(self, name: str, lines: Sequence[Line], since: int) -> tuple[Entry, int]:
        by_kind = {step.kind: step for step in lines}
        timer, taken = by_kind.get(LineKind.TIMER), by_kind.get(LineKind.TAKEN)
        if LineKind.SENT in by_kind:
            return self._message(name, by_kind)
        if timer is not None and timer.fingerprint:
            return self._sleep(name, timer)
        if timer is not None or taken is not None:
            return self._wait(name, timer, taken, since)
        if (restart := by_kind.get(LineKind.RESTART)) is not None:
            return Entry(name=name, kind="restart", state="done", ended_at=to_datetime(restart.at)), restart.at
        if (undo := by_kind.get(LineKind.UNDO)) is not None:
            at, why = to_datetime(undo.at), decode_failure(undo.value)
            return Entry(name=name, kind="undo", state="done", ended_at=at, failure=why), undo.at
        return self._step(name, lines, by_kind, since)

    def _step(
        self, name: str, lines: Sequence[Line], by_kind: Mapping[LineKind, Line], since: int
    ) -> tuple[Entry, int]:
        failed, stuck, begun = (by_kind.get(kind) for kind in (LineKind.FAILED, LineKind.STUCK, LineKind.BEGUN))
        end = by_kind.get(LineKind.RESULT) or failed
        why = failed or (None if end else stuck)
        effects = tuple(self._effects.get(name, ()))
        retries = [(step, decode_retried(step.value)) for step in lines if step.kind is LineKind.RETRY]
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

    def _sleep(self, name: str, timer: Line) -> tuple[Entry, int]:
        due = due_at(timer) or timer.at
        state: Standing = "done" if due <= self._now else "left" if self._over else "waiting"
        began, until = to_datetime(timer.at), to_datetime(due)
        ended = until if state == "done" else None
        return Entry(name=name, kind="sleep", state=state, began_at=began, ended_at=ended, due_at=until), due

    def _wait(self, name: str, timer: Line | None, taken: Line | None, since: int) -> tuple[Entry, int]:
        began = timer.at if timer is not None else since
        due = None if timer is None else due_at(timer)
        state: Standing = "left" if self._over else "waiting"
        end: int | None = None
        if taken is not None or self._done:
            signal = self._signals.get(name if taken is None else decode_text(taken.value) or "")
            state = "timed out" if signal is None else "done"
            end = due if signal is None else max(began, signal.at)
        entry = Entry(
            name=name,
            kind="wait",
            state=state,
            began_at=to_datetime(began),
            ended_at=moment(end),
            due_at=moment(due),
        )
        return entry, end or began

    def _message(self, name: str, by_kind: Mapping[LineKind, Line]) -> tuple[Entry, int]:
        line = by_kind[LineKind.SENT]
        sent, ended = decode_sent(line.value), by_kind.get(LineKind.CHILD)
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


def _owner(step: Line) -> str | None:
    """Return the step that a line is about; None for signals, and for effects of a message without steps."""
    if step.kind is LineKind.SIGNAL:
        return None
    if step.kind in _EFFECTS:
        return branch_of(step.name)[:-1] or None
    if step.kind in (LineKind.RETRY, LineKind.STUCK):
        return step.name.rpartition("!")[0]
    return asked_name(step.name) if step.kind is LineKind.CHILD else step.name


def _effect(effect: LedgerEntry, ended: int | None) -> Entry:
    return Entry(name=effect.name, kind="effect", state=effect.state, began_at=effect.began_at, ended_at=moment(ended))


def _around(name: str, kind: Literal["gather", "branch"], within: tuple[Entry, ...], since: int) -> Entry:
    """Return the entry that encloses others: it has ended when all of them have."""
    states = {entry.state for entry in within}
    open_ = next((state for state in ("uncertain", "waiting", "begun", "left") if state in states), None)
    ends = [entry.ended_at for entry in within if entry.ended_at is not None]
    ended = max(ends, default=None) if open_ is None else None
    state: Standing = open_ or "done"
    return Entry(name=name, kind=kind, state=state, began_at=to_datetime(since), ended_at=ended, entries=within)


def _kind_of(name: str, line: Line) -> Kind:
    if line.kind is LineKind.RESULT and not line.fingerprint:
        for kind in ("now", "checkpoint"):
            if name[len(branch_of(name)) :].startswith(f"{kind}#"):
                return kind
    return "step"


def _try(at: int, failure: Failure | None, delay: float | None) -> Try:
    if failure is None:
        return Try(to_datetime(at), "put off", "", "", delay)
    return Try(to_datetime(at), failure.reason, failure.error_type, failure.error_message, delay)


async def chronicle(store: Store, message_id: str, *, depth: int = limits.CHRONICLE_DEPTH) -> Chronicle | None:
    """Return the history of a message, with its children down to this depth; None when there is no such message.

    The messages are read one after the other while workers go on, so they may show slightly different moments.
    """
    found = await store.find(Query(ids=(message_id,)))
    if not found:
        return None
    return await _Reader(store, await store.now()).read(found[0], depth)


class _Reader:
    """Reads a message and the messages it sent, up to ``limits.CHRONICLE_MESSAGES``."""

    def __init__(self, store: Store, now: int) -> None:
        self._store = store
        self._now = now
        self._left = limits.CHRONICLE_MESSAGES

    async def read(self, record: Record, depth: int) -> Chronicle:
        if depth < 0 or self._left <= 0:
            return make_head(record)
        self._left -= 1
        id_ = record.envelope.id
        steps = await self._store.steps(id_)
        ids, sent = sent_ids(steps), dict[str, Chronicle]()
        for start in range(0, len(ids), limits.PAGE_MAX):
            page = tuple(ids[start : start + limits.PAGE_MAX])
            for one in await self._store.find(Query(ids=page, limit=len(page))):
                sent[one.envelope.id] = await self.read(one, depth - 1)
        return make_chronicle(record, steps, await self._store.attempts(id_), sent, now=self._now)
