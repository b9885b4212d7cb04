"""Journals as both stores keep them: what an end tells others, what a restart forgets, how large values lie.

All of it is pure: the stores read and write the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from onefold import limits
from onefold.errors import LeaseLostError, LimitError, SignalError
from onefold.store import Dead, Done, Ended, Failure, Fenced, Lease, Outcome, Parked, State
from onefold.store.journal_lines import OUTSIDE, UNDONE, Line, LineKind, Note, asked_name, child_line, signal_of

_encode = msgspec.json.Encoder().encode

_by_seq = attrgetter("seq")

#: A wake that no number of records reaches.
NEVER = limits.INTEGER_MAX


def notes_of(settlements: Iterable[tuple[Lease, Outcome]]) -> list[Note]:
    """Return what these settlements tell others: signals, and to their parents how children ended."""
    notes: list[Note] = []
    for lease, outcome in settlements:
        if isinstance(outcome, Done | Parked):
            notes += outcome.notes
        if lease.envelope.reply_to is not None and isinstance(outcome, Done | Dead):
            done = isinstance(outcome, Done)
            ended = Ended(
                lease.id,
                State.DONE if done else State.DEAD,
                msgspec.Raw(outcome.result if isinstance(outcome, Done) else b"null"),
                None if isinstance(outcome, Done) else outcome.failure,
            )
            notes.append(reply(lease.envelope.reply_to, lease.replay_count, ended))
    return notes


def reply(reply_to: str, replay_count: int, ended: Ended) -> Note:
    """Return the line by which a child tells its parent how it ended."""
    parent, _, name = reply_to.partition("/")
    return Note(parent, Line(child_line(name, replay_count), LineKind.CHILD, _encode(ended)))


def addressed(notes: Iterable[Note], kept: Mapping[str, str]) -> list[Note]:
    """Return the notes with the ids under which the messages that were put with them are kept."""
    return [replace(note, message_id=kept[note.message_id]) if note.started else note for note in notes]


def refuse_unheard(notes: Iterable[Note], heard: Collection[str]) -> None:
    """Refuse a signal to the run that holds a key, when that run has ended: nothing was started instead."""
    for note in notes:
        if note.started and note.message_id not in heard:
            raise SignalError.ended(note.message_id, signal_of(note.step))


def refuse_unknown(message_id: str, steps: Iterable[Line]) -> None:
    """Refuse a signal to a message that is not in the store; the end of a child may come later than its parent's."""
    for step in steps:
        if step.kind is LineKind.SIGNAL:
            raise SignalError.unknown(message_id, signal_of(step))


def by_message(notes: Iterable[Note]) -> dict[str, list[Line]]:
    """Return the lines for each message, in the order of the ids, in which no two transactions wait for each other."""
    found: dict[str, list[Line]] = {}
    for note in sorted(notes, key=lambda note: note.message_id):
        found.setdefault(note.message_id, []).append(note.step)
    return found


def check_outside(steps: Iterable[Line]) -> None:
    """Refuse what only the owner of a message may record."""
    for step in steps:
        if step.kind not in OUTSIDE:
            raise ValueError(f"only the owner of a message may record a {step.kind.name.lower()}")


def takes_over(steps: Iterable[Line]) -> bool:
    """Whether what an operator records is to be acted upon at once, though a worker may run the message."""
    return any(step.kind is LineKind.UNDO for step in steps)


def act_of(steps: Iterable[Line]) -> str:
    """Name the act of an operator that records this."""
    return "cancel" if takes_over(steps) else "resolve"


def check_mailbox(message_id: str, wake: int, steps: Iterable[Line]) -> None:
    """Refuse signals to a run that has far too many already."""
    if wake > limits.SIGNALS_MAX and any(step.kind is LineKind.SIGNAL for step in steps):
        raise LimitError(
            "signal", f"run {message_id} was told {wake} things; at most {limits.SIGNALS_MAX}: send messages instead"
        )


def awaited(outcome: Parked) -> int:
    """Return at which ``wake`` a parked message is due."""
    return outcome.seen + outcome.awaits if outcome.awaits else NEVER


def later_than(steps: Sequence[Line], name: str) -> list[Line]:
    """Return what is forgotten when a run goes back to a step: its lines and all that the owner wrote after them.

    Lines of others stay, except the end of a child that will be sent again.
    """
    own = [step.seq for step in steps if step.name == name or step.name.startswith((f"{name}!", f"{name}/"))]
    if not own:
        return []
    kept = (LineKind.SIGNAL, LineKind.CHILD, LineKind.RESTART)
    forgotten = [step for step in steps if step.seq >= min(own) and step.kind not in kept]
    sent = {step.name for step in forgotten if step.kind is LineKind.SENT}
    ended = (step for step in steps if step.kind is LineKind.CHILD and asked_name(step.name) in sent)
    return [*forgotten, *ended]


def restart_line(steps: Iterable[Line], forgotten: Iterable[Line]) -> Line:
    """Return the line that says how often a run went back, and whether behind undos."""
    undone = any(step.kind is LineKind.UNDO for step in forgotten)
    number = 1 + sum(step.kind is LineKind.RESTART for step in steps)
    return Line(f"restart#{number}", LineKind.RESTART, UNDONE if undone else b"null")


#: By their numbers, which are those of the stores: looking one up costs less than the enumeration does.
_KINDS = tuple(LineKind)


def step_of(row: Sequence[Any]) -> Line:
    """Return a line from its row: name, kind, value, fingerprint, at, seq."""
    name, kind, value, fingerprint, at, seq = row
    return Line(name, _KINDS[kind], value, fingerprint, at, seq)


def journaled(leases: Iterable[Lease]) -> list[Lease]:
    """Return the runs among those just claimed that may have a journal."""
    return [lease for lease in leases if lease.envelope.pinned and lease.has_journal]


def give_journals(leases: Sequence[Lease], rows: Sequence[Sequence[Any]]) -> None:
    """Give runs just claimed their journals, from rows that begin with the number of the lease, in that order.

    A line without a value is too large to be read by a claim, and where there are as many rows as a claim reads, more
    may follow: such a journal is left to be read when it is needed.
    """
    journals: list[list[Line]] = [[] for _ in leases]
    partial = set() if len(rows) < limits.CLAIMED_LINES_MAX else set(range(rows[-1][0], len(leases)))
    for number, name, kind, value, fingerprint, at, seq in rows:
        if value is None:
            partial.add(number)
        journals[number].append(Line(name, _KINDS[kind], value, fingerprint, at, seq))
    for number, (lease, journal) in enumerate(zip(leases, journals, strict=True)):
        if number not in partial:
            if len(journal) > 1:
                journal.sort(key=_by_seq)
            # The lease has not been given out yet, so it may still be completed.
            msgspec.structs.force_setattr(lease, "journal", tuple(journal))


def blob_name(step: Line) -> str:
    """Name the parts of a line's value."""
    return f"{int(step.kind)}/{step.name}"


def parts_of(value: bytes) -> list[bytes]:
    """Divide a value that is too large for its line."""
    return [value[at : at + limits.STEP_BYTES_INLINE] for at in range(0, len(value), limits.STEP_BYTES_INLINE)]


def is_large(step: Line) -> bool:
    """Whether a line's value is kept in parts."""
    return len(step.value) > limits.STEP_BYTES_INLINE


def ended_by_hand(id_: str, state: State, failure: Failure | None) -> Ended:
    """Return how a message ended that a person took back or closed."""
    return Ended(id_, state, msgspec.Raw(b"null"), failure)


def or_lost(owner: Fenced | str, recorded: list[Line] | None) -> list[Line]:
    """Return what was recorded, or raise if the lease was not held any more."""
    if recorded is None:
        raise LeaseLostError(f"message {owner if isinstance(owner, str) else owner.id} was taken over")
    return recorded
