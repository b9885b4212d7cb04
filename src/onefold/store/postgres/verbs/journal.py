"""Journals on one PostgreSQL connection, inside one transaction or as one statement of their own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Act, Fenced, Lease, Parked, State
from onefold.store.journal_lines import Line, LineKind, Note
from onefold.store.postgres.wire.arrays import bigints, blobs, ids, texts
from onefold.store.postgres.wire.wire import Speaker
from onefold.store.shared import journal as lines
from onefold.store.shared.rows import encode_failure, read_failure, read_reply_to

#: An owner, known by its lease, and the lines it records.
Recording = tuple[Fenced, Sequence[Line]]
#: By which a line is known: message, name and kind.
_Line = tuple[str, str, int]

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

#: The kind under which a statement returns the messages that may be written to.
_WHO = -1


class JournalTable:
    """The verbs on journals; ``woken`` collects the queues in which something became due."""

    def __init__(self, wire: Speaker, now: int | None, woken: set[str]) -> None:
        self._wire = wire
        self._now = now
        self._woken = woken

    # recording

    async def record(self, owner: Fenced | str, steps: Sequence[Line], act: Act | None = None) -> list[Line] | None:
        """Record for a lease, for another message's journal or for an operator; None when the lease is lost."""
        if not isinstance(owner, str):
            return (await self.by_owners([(owner, steps)]))[0]
        if act is None:
            lines.check_outside(steps)
        if not is_id(owner):
            lines.refuse_unknown(owner, steps)
            return []
        if act is None:
            return await self._by_others(owner, steps)
        if stand := await self._by_hand(owner, steps):
            await self._note_act(owner, lines.act_of(steps), act)
        return stand

    async def by_owners(self, recordings: Sequence[Recording]) -> list[list[Line] | None]:
        """Record for leases, in one statement; None for each that is not held any more."""
        flat = [(owner.id, step) for owner, steps in recordings for step in steps]
        fences = [owner.fence for owner, steps in recordings for _ in steps]
        rows = await self._wire.rows("record_by_owner", {**self._columns(flat), "fences": bigints(fences)})
        held = {(row[0], row[3]) for row in rows if row[2] == _WHO}
        stand = await self._stand([one for one, f in zip(flat, fences, strict=True) if (one[0], f) in held], rows)
        return [
            [stand[owner.id, step.name, step.kind] for step in steps] if (owner.id, owner.fence) in held else None
            for owner, steps in recordings
        ]

    async def _by_others(self, message_id: str, steps: Sequence[Line]) -> list[Line]:
        """Record in the journal of a message of another owner, and wake it; returns nothing when it does not listen."""
        stand = await self._tell([(message_id, step) for step in steps])
        return [stand[message_id, step.name, step.kind] for step in steps] if stand else []

    async def tell(self, notes: Sequence[Note]) -> None:
        """Write into the journals of others."""
        given = sorted(notes, key=lambda note: note.message_id)
        for note in given:
            if not is_id(note.message_id):  # it cannot be in the table
                lines.refuse_unknown(note.message_id, [note.step])
        flat = [(note.message_id, note.step) for note in given if is_id(note.message_id)]
        told = await self._tell(flat) if flat else {}
        lines.refuse_unheard(given, {message_id for message_id, _, _ in told})

    async def _tell(self, flat: Sequence[tuple[str, Line]]) -> dict[_Line, Line]:
        rows = await self._wire.rows("record_by_others", self._columns(flat))
        listens = {row[0] for row in rows if row[2] == _WHO}
        if missed := [one for one in flat if one[0] not in listens]:
            # Redriven while the statement waited: it saw the dead letter go, and not yet the message that came.
            rows += await self._wire.rows("record_by_others", self._columns(missed))
            listens = {row[0] for row in rows if row[2] == _WHO}
        if missed := [one for one in flat if one[0] not in listens and one[1].kind is LineKind.SIGNAL]:
            await self._refuse_unknown(missed)
        told = [one for one in flat if one[0] in listens]
        new = Counter(row[0] for row in rows if row[2] != _WHO)
        if new:
            given = {"ids": ids(list(new)), "counts": bigints(list(new.values())), "now": self._now}
            for message_id, queue, wake in await self._wire.rows("record_wake", given):
                lines.check_mailbox(message_id, wake, [step for id_, step in told if id_ == message_id])
                self._woken.add(queue)
        return await self._stand(told, rows)

    async def _refuse_unknown(self, missed: Sequence[tuple[str, Line]]) -> None:
        """Refuse signals to messages that do not exist; a signal to one that has ended is dropped."""
        given = {"ids": ids([message_id for message_id, _ in missed])}
        known = {message_id for (message_id,) in await self._wire.rows("record_known", given)}
        for message_id, step in missed:
            if message_id not in known:
                lines.refuse_unknown(message_id, [step])

    async def _by_hand(self, message_id: str, steps: Sequence[Line]) -> list[Line]:
        """Record as an operator, for a message that waits or is dead; returns nothing for any other.

        A line that takes a message over is recorded for any that is alive.
        """
        statement = "rewind" if lines.takes_over(steps) else "record_by_hand"
        released = await self._wire.rows(statement, {"id": message_id, "now": self._now})
        if not released:
            return []
        self._woken.update(queue for (queue,) in released if queue is not None)
        return await self.write([(message_id, step) for step in steps])

    async def write(self, flat: Sequence[tuple[str, Line]]) -> list[Line]:
        """Record for a writer whose right to it has been checked."""
        rows = await self._wire.rows("record_lines", self._columns(flat))
        stand = await self._stand(flat, rows)
        return [stand[id_, step.name, step.kind] for id_, step in flat]

    def _columns(self, flat: Sequence[tuple[str, Line]]) -> dict[str, Any]:
        return {
            "now": self._now,
            "ids": ids([id_ for id_, _ in flat]),
            "names": texts([step.name for _, step in flat]),
            "kinds": bigints([step.kind for _, step in flat]),
            "fingerprints": blobs([step.fingerprint for _, step in flat]),
            "values": blobs([None if lines.is_large(step) else step.value for _, step in flat]),
        }

    async def _stand(self, flat: Sequence[tuple[str, Line]], rows: Sequence[tuple[Any, ...]]) -> dict[_Line, Line]:
        """Return the lines that stand: those that are new, and for the others those that were there before."""
        new = {(id_, name, kind): (at, seq) for id_, name, kind, at, seq in rows}
        stand: dict[_Line, Line] = {}
        old: list[tuple[str, Line]] = []
        for id_, step in flat:
            known = new.get((id_, step.name, step.kind))
            if known is None or (id_, step.name, step.kind) in stand:
                old.append((id_, step))
                continue
            stand[id_, step.name, step.kind] = Line(step.name, step.kind, step.value, step.fingerprint, *known)
            if lines.is_large(step):
                await self._write_parts(id_, step)
        return {**await self._read_old(old), **stand} if old else stand

    async def _write_parts(self, message_id: str, step: Line) -> None:
        """Set a large value aside; one by one, because each part is as much as a statement should carry."""
        for number, part in enumerate(lines.parts_of(step.value)):
            given: dict[str, Any] = {
                "id": message_id,
                "name": lines.blob_name(step),
                "part": number,
                "data": part,
            }
            await self._wire.rows("record_part", given)

    async def _read_old(self, old: Sequence[tuple[str, Line]]) -> dict[_Line, Line]:
        given = {
            "ids": ids([id_ for id_, _ in old]),
            "names": texts([step.name for _, step in old]),
            "kinds": bigints([step.kind for _, step in old]),
        }
        found: dict[_Line, Line] = {}
        for id_, *row in await self._wire.rows("record_stands", given):
            step = lines.step_of(row)
            found[id_, step.name, step.kind] = (await self._whole(id_, [step]))[0]
        return found

    # operators

    async def rewind(self, message_id: str, name: str, act: Act) -> list[Line]:
        """Forget a step and what came after it, and schedule the message; a dead one is left as it is."""
        given = {"id": message_id, "now": self._now}
        if not lines.later_than((await self.read([message_id]))[0], name):
            return []
        released = await self._wire.rows("rewind", given)
        if not released and not await self._wire.rows("rewind_dead", {"id": message_id}):
            return []
        self._woken.update(queue for (queue,) in released)
        # Read again: until the fence rose its owner may have gone on.
        steps = (await self.read([message_id]))[0]
        forgotten = lines.later_than(steps, name)
        await self._wire.rows("rewind_steps", {"id": message_id, "seqs": bigints([step.seq for step in forgotten])})
        names = texts([lines.blob_name(step) for step in forgotten])
        await self._wire.rows("rewind_parts", {"id": message_id, "names": names})
        await self.write([(message_id, lines.restart_line(steps, forgotten))])
        await self._note_act(message_id, "restart", act)
        return forgotten

    async def _note_act(self, message_id: str, kind: str, act: Act) -> None:
        """Record the act of an operator."""
        given = {"now": self._now, "id": message_id, "kind": kind, "actor": act.actor, "reason": act.reason}
        await self._wire.rows("record_act", given)

    async def reply_for(self, message_ids: Sequence[str], state: State) -> None:
        """Record in the journals of parents that an operator has ended their children."""
        notes: list[Note] = []
        for id_, headers, replay_count, failure in await self._wire.rows("move_reply", {"ids": ids(message_ids)}):
            if (reply_to := read_reply_to(headers)) is not None:
                known = None if failure is None else read_failure(failure)
                notes.append(lines.reply(reply_to, replay_count, lines.ended_by_hand(id_, state, known)))
        if notes:
            await self.tell(notes)

    # reading

    async def read(self, message_ids: Sequence[str]) -> list[list[Line]]:
        """Return journals, each in the order in which it was written."""
        found: dict[str, list[Line]] = {message_id: [] for message_id in message_ids}
        for row in await self._wire.rows("steps", {"ids": ids([one for one in found if is_id(one)])}):
            found[row[0]].append(lines.step_of(row[1:]))
        whole = {message_id: await self._whole(message_id, steps) for message_id, steps in found.items()}
        return [whole[message_id] for message_id in message_ids]

    async def read_claimed(self, leases: Sequence[Lease]) -> None:
        """Give runs just claimed their journals, as far as those are short."""
        if runs := lines.journaled(leases):
            given = {
                "ids": ids([lease.id for lease in runs]),
                "bytes": limits.CLAIMED_VALUE_BYTES_MAX,
                "lines": limits.CLAIMED_LINES_MAX,
            }
            lines.give_journals(runs, await self._wire.rows("claim_journals", given))

    async def _whole(self, message_id: str, steps: list[Line]) -> list[Line]:
        """Put the values of large lines together."""
        if all(step.value is not None for step in steps):
            return steps
        parts: dict[str, list[bytes]] = {}
        for name, data in await self._wire.rows("parts", {"id": message_id}):
            parts.setdefault(name, []).append(data)
        return [
            msgspec.structs.replace(step, value=b"".join(parts[lines.blob_name(step)])) if step.value is None else step
            for step in steps
        ]

    async def was_recorded(self, message_id: str, step: Line) -> bool:
        """After a lost answer: whether its owner's line was written, once the lost session cannot write it any more."""
        await self._wire.rows("record_lock", {"id": message_id})
        return bool(await self._read_old([(message_id, step)]))


def is_id(text: str) -> bool:
    """Whether a text can be a message's id."""
    return _ID.fullmatch(text) is not None


def parking(settlements: Sequence[tuple[Lease, Any]]) -> dict[str, Any]:
    """Return what ``settle_park`` needs."""
    failures = [outcome.failure for _, outcome in settlements]
    return {
        "ids": ids([lease.id for lease, _ in settlements]),
        "fences": bigints([lease.fence for lease, _ in settlements]),
        "attempts": bigints([lease.attempt for lease, _ in settlements]),
        "targets": bigints([lines.awaited(outcome) for _, outcome in settlements]),
        "delays": bigints([_microseconds(outcome) for _, outcome in settlements]),
        "never": limits.INSTANT_MAX,
        "failures": blobs([None if failure is None else encode_failure(failure) for failure in failures]),
        "workers": texts([lease.worker for lease, _ in settlements]),
    }


def _microseconds(outcome: Parked) -> int:
    return limits.INSTANT_MAX if outcome.delay is None else round(outcome.delay * MICROSECONDS)


def lines_of(settlements: Iterable[tuple[Lease, Any]]) -> list[tuple[str, Line]]:
    """Return what those that parked have to write down."""
    return [(lease.id, step) for lease, outcome in settlements if type(outcome) is Parked for step in outcome.steps]
