"""Move: what operators do to messages: redrive, resume, discard, cancel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Act, State
from onefold.store.sqlite.numbers import numbers_of
from onefold.store.sqlite.session import Session, as_json
from onefold.store.sqlite.verbs.gates import LINE_RETENTION
from onefold.store.sqlite.verbs.journal import JournalTable, note_act

_MOVABLE = (State.SCHEDULED, State.DISCARDED, State.CANCELLED)


def lock(session: Session, ids: Sequence[str]) -> dict[str, State]:
    """Return where messages stand; the open transaction is the only one that may change that."""
    numbers = as_json(list(numbers_of(session, ids).values()))
    return {id_: State(state) for id_, state in session.rows("states", numbers)}


def move(session: Session, ids: Iterable[str], to: State, act: Act) -> list[str]:
    """Redrive or resume, discard, cancel; returns the ids for which that was legal."""
    if to not in _MOVABLE:
        raise ValueError(f"no operator may move a message to {to.name}")
    now, moved, ids = session.clock.now(), list[str](), list(ids)
    numbers = numbers_of(session, ids)
    for id_ in ids:
        if (seq := numbers.get(id_)) is not None and (name := _move_one(session, seq, to, now)) is not None:
            note_act(session, id_, name, act)
            moved.append(id_)
            if to is not State.SCHEDULED:
                JournalTable(session).reply_for(id_, seq, to, now)
    return moved


def _move_one(session: Session, seq: int, to: State, now: int) -> str | None:
    """Return the name of what was done, or None if it was not legal."""
    if to is State.DISCARDED:
        return "discard" if session.rows("move_discard", now, seq) else None
    if to is State.CANCELLED:
        kept_until = now + round(limits.KEY_WINDOW * MICROSECONDS)
        cancelled = session.rows("move_cancel", now, kept_until, seq)
        session.each("gate_cancelled", [(seq, now + LINE_RETENTION) for (seq,) in cancelled])
        session.each("move_cancelled", cancelled)
        return "cancel" if cancelled else None
    if JournalTable(session).resume(seq, now):
        return "resume"
    reopened = session.rows("move_redrive", now, seq)
    session.each("move_reopened", reopened)
    return "redrive" if reopened else None
