"""What people and housekeeping do to messages, and the register of small named values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.step import Step
from onefold.store import Act, Fenced, Purged, Registered, State
from onefold.stores.sqlite.delivering import deliver
from onefold.stores.sqlite.gates import LINE_RETENTION, next_place
from onefold.stores.sqlite.leasing import fences_of, rows_of
from onefold.stores.sqlite.session import Session, as_json
from onefold.stores.sqlite.steps import Steps
from onefold.stores.steps import act_of, check_outside

_MOVABLE = (State.SCHEDULED, State.DISCARDED, State.CANCELLED)
#: After a restore from backup numbers go on this far above: more messages than any backup can have missed.
_SEQUENCE_LEAP = 10**12


def lock(session: Session, ids: Sequence[str]) -> dict[str, State]:
    """Return where messages stand; the open transaction is the only one that may change that."""
    deliver(session)
    return {id_: State(state) for id_, state in session.rows("lock", as_json(list(ids)))}


def move(session: Session, ids: Iterable[str], to: State, act: Act) -> list[str]:
    """Redrive or resume, discard, cancel; returns the ids for which that was legal."""
    if to not in _MOVABLE:
        raise ValueError(f"no operator may move a message to {to.name}")
    deliver(session)
    now, moved = session.clock.now(), list[str]()
    for id_ in ids:
        if (name := _move_one(session, id_, to, now)) is not None:
            note_act(session, id_, name, act)
            moved.append(id_)
            if to is not State.SCHEDULED:
                Steps(session.connection).reply_for(id_, to, now)
    return moved


def _move_one(session: Session, id_: str, to: State, now: int) -> str | None:
    """Return the name of what was done, or None if it was not legal."""
    if to is State.DISCARDED:
        return "discard" if session.rows("move_discard", now, id_) else None
    if to is State.CANCELLED:
        kept_until = now + round(limits.KEY_WINDOW * MICROSECONDS)
        cancelled = session.rows("move_cancel", now, kept_until, id_)
        session.each("gate_cancelled", [(seq, now + LINE_RETENTION) for (seq,) in cancelled])
        session.each("move_cancelled", cancelled)
        return "cancel" if cancelled else None
    if Steps(session.connection).resume(id_, now):
        return "resume"
    reopened = session.rows("move_redrive", now, id_, next_place(session))
    session.each("move_reopened", reopened)
    return "redrive" if reopened else None


def note_act(session: Session, message_id: str, kind: str, act: Act) -> None:
    """Write down what a person did."""
    session.run("move_act", session.clock.now(), message_id, kind, act.actor, act.reason)


def record(session: Session, owner: Fenced | str, steps: Sequence[Step], act: Act | None = None) -> list[Step] | None:
    """Record in a journal for a lease, for somebody else or for a person; None when the lease is lost."""
    if not isinstance(owner, str):
        return record_by_owners(session, [(owner, steps)])[0]
    deliver(session)
    now, journal = session.clock.now(), Steps(session.connection)
    if act is None:
        check_outside(steps)
        return journal.by_others(owner, steps, now)
    if stand := journal.by_hand(owner, steps, now):
        note_act(session, owner, act_of(steps), act)
    return stand


def record_by_owners(session: Session, recordings: Sequence[tuple[Fenced, Sequence[Step]]]) -> list[list[Step] | None]:
    """Record for leases; None for each that is not held any more."""
    now, journal = session.clock.now(), Steps(session.connection)
    numbers = rows_of(session, [owner for owner, _ in recordings])
    fences = fences_of(session, numbers)
    return [
        journal.write(owner.id, steps, now)[0]
        if seq is not None and fences.get(seq, (0, 0))[0] == owner.fence
        else None
        for (owner, steps), seq in zip(recordings, numbers, strict=True)
    ]


def rewind(session: Session, message_id: str, step: str, act: Act) -> list[Step]:
    """Let a run go back to a step."""
    if forgotten := Steps(session.connection).rewind(message_id, step, session.clock.now()):
        note_act(session, message_id, "restart", act)
    return forgotten


def register(
    session: Session, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None
) -> bool:
    """Compare and set one entry; None removes it."""
    now = session.clock.now()
    if value is None:
        return bool(session.rows("register_delete", kind, name, version))
    if version == 0:
        return bool(session.rows("register_insert", kind, name, value, expires_at, now))
    return bool(session.rows("register_update", kind, name, value, expires_at, now, version))


def registered(session: Session, kind: str, name: str) -> Registered | None:
    """Return one entry unless it has expired."""
    for value, version in session.rows("registered", kind, name, session.clock.now()):
        return Registered(value, version)
    return None


def entries(session: Session, kind: str) -> dict[str, Registered]:
    """Return every entry of one kind that has not expired."""
    found = session.rows("entries", kind, session.clock.now())
    return {name: Registered(value, version) for name, value, version in found}


def purge(session: Session, limit: int) -> Purged:
    """Remove what has outlived its time, oldest first, and one kind after the other: messages before their bodies."""
    now = session.clock.now()
    messages = _purge_messages(session, now, limit)
    if messages == limit:
        return Purged(messages=messages)
    bodies = _purge_bodies(session, now, limit)
    if bodies >= limit:
        return Purged(messages=messages, bodies=bodies)
    return Purged(
        messages=messages,
        bodies=bodies,
        keys=session.changes("purge_keys", [(now, limit)]),
        gates=session.changes("purge_gates", [(now, limit)]),
        acts=session.changes("purge_acts", [(now - round(limits.ACT_RETENTION * MICROSECONDS), limit)]),
        register=session.changes("purge_register", [(now, limit)]),
    )


def _purge_messages(session: Session, now: int, limit: int) -> int:
    """Remove messages whose keys are not kept any more, with everything that belongs to them; return how many."""
    number, last, *between = session.rows("purge_gone", now, limit)[0]
    if not number:
        return 0
    session.run("purge_sequence", last)
    has_rows, has_steps = session.rows("purge_any", between[0], last, *between[1:])[0]
    session.each("purge_message_key", session.rows("purge_message_keys", now, limit))
    names = ["purge_attempts", "purge_progress"] if has_rows else []
    names += ["purge_steps", "purge_parts"] if has_steps else []
    for name in (*names, "purge_messages", "purge_outcomes"):
        session.run(name, now, limit)
    return int(number)


def _purge_bodies(session: Session, now: int, limit: int) -> int:
    """Empty messages that are kept only for their keys; return how many."""
    since, upto = session.rows("purge_range", now, limit)[0]
    emptied = session.changes("purge_bodies", [(since, upto)])
    session.run("purge_bodies_done", now, upto, emptied)
    return emptied


def restored(session: Session) -> int:
    """Shut out everybody who holds something from before a restore; return how many leases ended."""
    deliver(session)
    leases: int = session.rows("restored_leases")[0][0]
    session.run("restored_deliveries", limits.FENCE_LEAP)
    session.run("restored_outcomes", limits.FENCE_LEAP)
    session.run("restored_sequence", _SEQUENCE_LEAP)
    return leases


def release_after_boot(session: Session, boot: str) -> None:
    """Leases are dated by the time since the machine started, so they mean nothing after another start."""
    known = registered(session, "boot", "id")
    if known is None or known.value != boot.encode():
        session.run("expire_all")
        register(session, "boot", "id", boot.encode(), version=known.version if known else 0, expires_at=None)
