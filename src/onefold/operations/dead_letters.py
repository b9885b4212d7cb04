"""For operators: dead letters: reading, redriving and discarding them.

The command line and user code both call these functions, so every act is checked and recorded in one place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import to_datetime
from onefold.errors import ConfigurationError, RetentionOverError, StoreError
from onefold.message.envelope import Envelope, to_json
from onefold.operations.acts import make_act
from onefold.store import Attempt, Failure, Query, Record, State, Store
from onefold.tasks.receipt import COMPENSATED


class DeadLetter:
    """A message that does not run again unless it is redriven, with its failure."""

    def __init__(self, record: Record, store: Store) -> None:
        if record.failure is None:
            raise StoreError(f"message {record.envelope.id} is not a dead letter")
        self.id = record.envelope.id
        self.message = record.envelope
        self.failure: Failure = record.failure
        self.replay_count = record.replay_count
        self.crashes = record.crashes
        self.failed_at = None if record.ended_at is None else to_datetime(record.ended_at)
        #: The time until which it can be redriven; None when it cannot be any more.
        self.redrive_until = None if record.redrive_until is None else to_datetime(record.redrive_until)
        #: The time until which it keeps its key: a send with that key is a duplicate of this dead letter.
        self.kept_until = None if record.kept_until is None else to_datetime(record.kept_until)
        self._record = record
        self._store = store

    async def attempts(self) -> list[Attempt]:
        """Return every failed run, oldest first."""
        return await self._store.attempts(self.id)

    async def redrive(self, *, actor: str, reason: str) -> bool:
        """Let it run again with the same key and all of its attempts.

        True when this call reopened it; False when another call had done so.  Raises ``RetentionOverError`` after
        ``redrive_until``, even if it was not purged yet.
        A crash before it returns leaves it either dead or reopened.
        """
        return bool(await redrive(self._store, [self.id], actor=actor, reason=reason))

    async def discard(self, *, actor: str, reason: str) -> bool:
        """Close it for good; its key is free again."""
        return bool(await discard(self._store, [self.id], actor=actor, reason=reason))

    async def as_dict(self) -> dict[str, Any]:
        """Return the dead letter with its failure and attempts, ready for JSON."""
        record, message = self._record, self.message
        return {
            "original_message": _decoded(message),
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
            "redrive_until": _iso(record.redrive_until),
            "kept_until": _iso(record.kept_until),
            "source_queue": message.queue,
            "consumer": message.scope,
            "original_timestamp": to_datetime(message.created_at).isoformat(),
            "fence": record.fence,
        }

    def __repr__(self) -> str:
        return f"<dead letter {self.id} {self.message.message_type} ({self.failure.reason})>"


def _iso(instant: int | None) -> str | None:
    return None if instant is None else to_datetime(instant).isoformat()


async def dead_letters(
    store: Store, *, queue: str | None = None, message_type: str | None = None
) -> AsyncIterator[DeadLetter]:
    """Iterate over the dead letters, oldest first, page by page; one that is redriven meanwhile does not come twice."""
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
    """Dead letters of one queue, type, reason and kind of error."""

    queue: str
    message_type: str
    reason: str
    error_type: str
    count: int
    #: When the first of them became a dead letter.
    oldest_at: datetime


async def dead_groups(store: Store, *, queue: str | None = None) -> list[DeadGroup]:
    """Count the dead letters by queue, type and error, the largest group first; it reads each of them."""
    found: dict[tuple[str, str, str, str], list[datetime]] = {}
    async for letter in dead_letters(store, queue=queue):
        message, failure = letter.message, letter.failure
        group = (message.queue, message.message_type, failure.reason, failure.error_type)
        if letter.failed_at is not None:
            found.setdefault(group, []).append(letter.failed_at)
    groups = [DeadGroup(*group, len(times), min(times)) for group, times in found.items()]
    return sorted(groups, key=lambda one: (-one.count, one.oldest_at))


async def redrive(store: Store, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
    """Reopen dead letters in one commit; returns the ids that this call reopened.

    A saga that was undone is not reopened: restart it from a step, or discard it and send it again.
    Raises ``RetentionOverError`` when none was reopened and the time of one is over.
    """
    ids = _as_list(ids)
    letters = await _letters(store, ids)
    # If it ran again, a saga would find in its journal that it was undone.
    undone = {one.envelope.id for one in letters if one.failure is not None and one.failure.reason == COMPENSATED}
    open_ids = [id_ for id_ in ids if id_ not in undone]
    moved = await _move(store, open_ids, State.SCHEDULED, actor=actor, reason=reason)
    if not moved:
        _refuse_overdue([one for one in await _letters(store, open_ids) if one in letters])
    return moved


async def _letters(store: Store, ids: Sequence[str]) -> list[Record]:
    return await store.find(Query(ids=tuple(ids), states=(State.DEAD,), limit=limits.REDRIVE_MAX)) if ids else []


def _refuse_overdue(letters: Sequence[Record]) -> None:
    """Raise for the first letter that was dead before and after the redrive: its time is over."""
    for one in letters:
        raise RetentionOverError(one.envelope.id, _iso(one.redrive_until))


async def discard(store: Store, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
    """Close dead letters for good in one commit; returns the ids that this call closed."""
    ids = _as_list(ids)
    return await _move(store, ids, State.DISCARDED, actor=actor, reason=reason)


def _as_list(ids: str | Sequence[str]) -> list[str]:
    """Return one or several ids as a list."""
    ids = [ids] if isinstance(ids, str) else list(ids)
    if len(ids) > limits.REDRIVE_MAX:
        raise ConfigurationError(
            f"{len(ids)} dead letters in one call; at most {limits.REDRIVE_MAX} are allowed; divide the ids"
        )
    return ids


async def _move(store: Store, ids: Sequence[str], to: State, *, actor: str, reason: str) -> list[str]:
    act = make_act(actor, reason)
    for id_ in ids:
        limits.check_bytes("id", id_, limits.ID_BYTES_MAX)
    async with store.transaction() as transaction:
        return await transaction.move(ids, to, act)


def _decoded(message: Envelope) -> Any:
    """Return a message as JSON values; None for one whose payload is gone, or damaged in a damaged file."""
    if message.payload_inline is None:
        return None
    try:
        return msgspec.json.decode(to_json(message))
    except msgspec.DecodeError:
        return None
