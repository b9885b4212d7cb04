"""For people: reading what became of messages, and the operator's verbs.

The command line, the dashboard and user code all go through here, so every act is checked and recorded once.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from onefold import limits
from onefold.cancelling import take_back
from onefold.chronicle import Chronicle, make_head
from onefold.clock import MICROSECONDS, first_id, to_datetime
from onefold.envelope import to_json
from onefold.errors import ConfigurationError, RetentionOverError, StoreError
from onefold.fleet import workers
from onefold.origin import renew_identity
from onefold.receipt import COMPENSATED
from onefold.scribe import make_chronicle, sent_ids
from onefold.store import Act, Attempt, Failure, Query, Record, State, Store

__all__ = [
    "OPEN",
    "DeadGroup",
    "DeadLetter",
    "cancel",
    "chronicle",
    "dead_groups",
    "dead_letters",
    "discard",
    "held_by",
    "make_act",
    "redrive",
    "restored",
    "runs",
    "workers",
]


#: The states of what is not over.
OPEN = (State.SCHEDULED, State.LEASED, State.PARKED)
#: Clocks of senders may differ from the store's by this much; an hour is far more than clocks that are looked after do.
_CLOCKS_DIFFER = 3_600 * MICROSECONDS


class DeadLetter:
    """A message that will not run again by itself, with everything known about why."""

    def __init__(self, record: Record, store: Store) -> None:
        if record.failure is None:
            raise StoreError(f"message {record.envelope.id} is not a dead letter")
        self.id = record.envelope.id
        self.message = record.envelope
        self.failure: Failure = record.failure
        self.replay_count = record.replay_count
        self.crashes = record.crashes
        self.failed_at = None if record.ended_at is None else to_datetime(record.ended_at)
        #: Until when it can be redriven; None when it cannot any more.
        self.redrive_until = None if record.redrive_until is None else to_datetime(record.redrive_until)
        #: Until when its key is taken: a send with it is a duplicate of this letter.
        self.kept_until = None if record.kept_until is None else to_datetime(record.kept_until)
        self._record = record
        self._store = store

    async def attempts(self) -> list[Attempt]:
        """Return every failed run, oldest first."""
        return await self._store.attempts(self.id)

    async def redrive(self, *, actor: str, reason: str) -> bool:
        """Let it run again with the same key and a full set of attempts.

        True when this call reopened it; False when another call had.  Raises ``RetentionOverError`` after
        ``redrive_until``, whether or not a purge has come by.
        A crash before it returns leaves it either dead or reopened, never both.
        """
        return bool(await redrive(self._store, [self.id], actor=actor, reason=reason))

    async def discard(self, *, actor: str, reason: str) -> bool:
        """Close it for good; its key is free again."""
        return bool(await discard(self._store, [self.id], actor=actor, reason=reason))

    async def as_dict(self) -> dict[str, Any]:
        """Return the letter with all that is known about its failure, ready for JSON."""
        record, message = self._record, self.message
        return {
            "original_message": msgspec.json.decode(to_json(message)) if message.payload_inline is not None else None,
            "error_type": self.failure.error_type,
            "error_message": self.failure.error_message,
            "stack_trace": self.failure.stack,
            "upstream_status": self.failure.status_code,
            "reason": self.failure.reason,
            "attempts": [
                {
                    "attempt": one.attempt,
                    "at": to_datetime(one.at).isoformat(),
                    "worker": one.worker,
                    "fence": one.fence,
                    "error_type": one.failure.error_type,
                    "error_message": one.failure.error_message,
                    "delay": one.delay,
                }
                for one in await self.attempts()
            ],
            "retry_count": max(record.attempt - 1, 0),
            "crashes": record.crashes,
            "replay_count": record.replay_count,
            "failed_at": None if self.failed_at is None else self.failed_at.isoformat(),
            "redrive_until": _written(record.redrive_until),
            "kept_until": _written(record.kept_until),
            "source_queue": message.queue,
            "consumer": message.scope,
            "original_timestamp": to_datetime(message.created_at).isoformat(),
            "fence": record.fence,
        }

    def __repr__(self) -> str:
        return f"<dead letter {self.id} {self.message.message_type} ({self.failure.reason})>"


def _written(instant: int | None) -> str | None:
    return None if instant is None else to_datetime(instant).isoformat()


async def dead_letters(
    store: Store, *, queue: str | None = None, message_type: str | None = None
) -> AsyncIterator[DeadLetter]:
    """Go through the dead letters, oldest first, a page at a time; letters redriven meanwhile are not met twice."""
    after = ""
    while True:
        page = await store.find(Query(states=(State.DEAD,), queue=queue, message_type=message_type, after=after))
        for record in page:
            yield DeadLetter(record, store)
        if len(page) < limits.PAGE:
            return
        after = page[-1].envelope.id


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead letters of one queue and type that died of the same kind of error."""

    queue: str
    message_type: str
    reason: str
    error_type: str
    count: int
    #: When the first of them became a dead letter.
    oldest_at: datetime


async def dead_groups(store: Store, *, queue: str | None = None) -> list[DeadGroup]:
    """Count the dead letters by queue, type and error, the largest group first; reads every one of them."""
    found: dict[tuple[str, str, str, str], list[datetime]] = {}
    async for letter in dead_letters(store, queue=queue):
        message, failure = letter.message, letter.failure
        group = (message.queue, message.message_type, failure.reason, failure.error_type)
        if letter.failed_at is not None:
            found.setdefault(group, []).append(letter.failed_at)
    groups = [DeadGroup(*group, len(times), min(times)) for group, times in found.items()]
    return sorted(groups, key=lambda one: (-one.count, one.oldest_at))


async def redrive(store: Store, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
    """Reopen dead letters, all in one commit; returns those that were reopened by this call.

    A saga that was undone is not reopened: restart it from a step, or discard it and send it anew.
    Raises ``RetentionOverError`` when none was reopened and some were dead for too long.
    """
    ids = _as_list(ids)
    letters = await _letters(store, ids)
    # Run again, a saga of which nothing is left would find itself undone.
    undone = {one.envelope.id for one in letters if one.failure is not None and one.failure.reason == COMPENSATED}
    open_ids = [id_ for id_ in ids if id_ not in undone]
    moved = await _move(store, open_ids, State.SCHEDULED, actor=actor, reason=reason)
    if not moved:
        _refuse_late([one for one in await _letters(store, open_ids) if one in letters])
    return moved


async def _letters(store: Store, ids: Sequence[str]) -> list[Record]:
    return await store.find(Query(ids=tuple(ids), states=(State.DEAD,), limit=limits.REDRIVE_MAX)) if ids else []


def _refuse_late(letters: Sequence[Record]) -> None:
    """Say why letters that are dead before and after could not be reopened."""
    for one in letters:
        raise RetentionOverError(one.envelope.id, _written(one.redrive_until))


async def discard(store: Store, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
    """Close dead letters for good, all in one commit; returns those that were closed by this call."""
    ids = _as_list(ids)
    return await _move(store, ids, State.DISCARDED, actor=actor, reason=reason)


def _as_list(ids: str | Sequence[str]) -> list[str]:
    """Return the ids as a list; a single id is not a sequence of characters."""
    ids = [ids] if isinstance(ids, str) else list(ids)
    if len(ids) > limits.REDRIVE_MAX:
        raise ConfigurationError(
            f"{len(ids)} letters at once; one call moves at most {limits.REDRIVE_MAX}: try a few, then the rest"
        )
    return ids


async def cancel(store: Store, message_id: str, *, actor: str, reason: str) -> bool:
    """Take a message back.  One that runs is shut out by its fence: what its handler does can no longer commit.

    A saga is undone instead; what it has begun is over at once, and it ends when all of that is taken back.
    """
    limits.check_bytes("id", message_id, limits.ID_BYTES_MAX)
    return await take_back(store, message_id, make_act(actor, reason))


async def held_by(store: Store, worker: str) -> list[Record]:
    """Return the messages that a worker has leased."""
    found: list[Record] = []
    while page := await store.find(
        Query(worker=worker, states=(State.LEASED,), after=found[-1].envelope.id if found else "")
    ):
        found += page
    return found


async def runs(
    store: Store,
    *,
    states: Sequence[State] = OPEN,
    message_type: str | None = None,
    created: tuple[int, int] = (0, limits.INSTANT_MAX),
    after: str = "",
) -> AsyncIterator[Record]:
    """Go through the runs of workflows, oldest first, a page at a time; ``created`` gives the first and last moment.

    Other messages are passed over, so among very many of them the next run may take a while to come.
    """
    first, last = created
    # Ids begin with the time at which they were made, by the sender's clock.
    after = max(after, first_id(max(0, first - _CLOCKS_DIFFER)))
    while page := await store.find(
        Query(states=tuple(states), message_type=message_type, after=after, limit=limits.PAGE_MAX)
    ):
        for record in page:
            if record.envelope.pinned and first <= record.envelope.created_at <= last:
                yield record
        after = page[-1].envelope.id
        if after > first_id(last + _CLOCKS_DIFFER):
            return


async def chronicle(store: Store, message_id: str, *, depth: int = limits.CHRONICLE_DEPTH) -> Chronicle | None:
    """Return everything a message did, with its children down to this depth; None when there is no such message.

    It is read line by line while others go on, so parts of it may be a moment older than others.
    """
    found = await store.find(Query(ids=(message_id,)))
    if not found:
        return None
    return await _Reader(store, await store.now()).read(found[0], depth)


class _Reader:
    """Reads a message and those it sent, as many as are worth reading at once."""

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


async def restored(store: Store, *, actor: str, reason: str, at: int, renew: random.Random | None = None) -> int:
    """Shut out every worker from before a restore from backup, and keep who said so; returns how many leases ended.

    With ``renew`` the database is a copy beside its original, and gets an identity of its own, drawn from that.
    A crash in the middle leaves the note and perhaps not the deed; doing it twice is harmless.
    """
    act = make_act(actor, reason)
    note = {"actor": act.actor, "reason": act.reason, **({} if renew is None else {"new_identity": True})}
    async with store.transaction() as transaction:
        await transaction.register("restored", to_datetime(at).isoformat(), msgspec.json.encode(note), version=0)
    if renew is not None:
        await renew_identity(store, renew)
    return await store.restored()


async def _move(store: Store, ids: Sequence[str], to: State, *, actor: str, reason: str) -> list[str]:
    act = make_act(actor, reason)
    for id_ in ids:
        limits.check_bytes("id", id_, limits.ID_BYTES_MAX)
    async with store.transaction() as transaction:
        return await transaction.move(ids, to, act)


def make_act(actor: str, reason: str) -> Act:
    """Check who does something and why."""
    limits.check_bytes("actor", actor, limits.ID_BYTES_MAX)
    limits.check_bytes("reason", reason, limits.ERROR_TEXT_MAX)
    return Act(actor=actor, reason=reason)
