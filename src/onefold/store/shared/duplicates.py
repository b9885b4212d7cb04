"""Duplicates: the meaning of a second send with the same key, one pure decision for every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum

import msgspec

from onefold.errors import KeyReuseError
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import Envelope
from onefold.store import State, Stored

#: The kinds of key rows; the stores keep the numbers.
IDEMPOTENCY, DEDUPLICATION, BATCH = 0, 1, 2
#: Batch keys belong to no consumer, so they have a scope that no task can be named.
BATCH_SCOPE = "(batch)"


class Holder(msgspec.Struct, frozen=True):
    """The message that holds a key, as the store found it."""

    message_id: str
    fingerprint: bytes
    schema_version: int
    #: End of a deduplication window; None for keys that live with their message.
    expires_at: int | None
    state: State | None
    #: End of the idempotency window; None while the message lives.
    kept_until: int | None


class Verdict(Enum):
    """The decision about a message whose key is already there."""

    FREE = "the holder's time is over: the new message takes the key"
    MINE = "this very message was stored before: the answer to that was lost"
    DUPLICATE = "report the holder"
    CLASH = "the holder has another payload: refuse"


def judge(holder: Holder, envelope: Envelope, now: int) -> Verdict:
    """Decide, for an idempotency key."""
    if holder.message_id == envelope.id:
        return Verdict.MINE
    if holder.state is None or (holder.kept_until is not None and holder.kept_until <= now):
        return Verdict.FREE
    # A new schema version may write the same work differently, so fingerprints are not compared across versions.
    if holder.schema_version == envelope.schema_version and holder.fingerprint != envelope.fingerprint:
        return Verdict.CLASH
    return Verdict.DUPLICATE


def judge_deduplication(holder: Holder, envelope: Envelope, now: int) -> Verdict:
    """Decide, for a deduplication key: only its window matters, and the payload may differ."""
    if holder.message_id == envelope.id:
        return Verdict.MINE
    if holder.state is None or holder.expires_at is None or holder.expires_at <= now:
        return Verdict.FREE
    # A trigger that was taken back must not swallow the next one.
    if holder.state in (State.CANCELLED, State.DISCARDED):
        return Verdict.FREE
    return Verdict.DUPLICATE


def in_turn(envelopes: Collection[Envelope]) -> set[str]:
    """Return the ids of those messages of one put that must be judged one after the other, in their order.

    These are the ones with a deduplication key, and those that share their idempotency key with another of the put.
    All others are in no other's way, so that their keys may be taken in one statement, and before these are judged.
    """
    windowed = {e.id for e in envelopes if e.deduplication_key is not None}
    if len(envelopes) == 1 or (not windowed and len({e.idempotency_key for e in envelopes}) == len(envelopes)):
        return windowed
    times = Counter((e.scope, e.idempotency_key) for e in envelopes)
    return windowed | {e.id for e in envelopes if times[e.scope, e.idempotency_key] > 1}


def judge_batch(
    batch_key: str, fingerprint: bytes, holder: Holder | None, answers: Sequence[Stored], now: int
) -> Verdict:
    """Decide for a batch whose messages got these answers: all of them are new, or all were there before.

    Raises ``KeyReuseError`` for anything in between, and for a batch key that belongs to other content.
    """
    if holder is not None and (holder.state is None or (holder.expires_at is not None and holder.expires_at <= now)):
        holder = None
    same = holder is None or holder.fingerprint == fingerprint
    known = [one for one in answers if one.duplicate or one.clash]
    if same and not known:
        return Verdict.FREE
    if same and len(known) == len(answers) and not any(one.clash for one in known):
        return Verdict.DUPLICATE
    raise KeyReuseError("batch", batch_key, known[0].id if known else holder.message_id if holder else "")


def batch_fingerprint(envelopes: Sequence[Envelope]) -> bytes:
    """Return a digest of a whole batch: what its messages are, by which keys, and in which order."""
    return fingerprint_of(
        b"".join(f"{e.message_type}\0{e.idempotency_key}\0".encode() + e.fingerprint for e in envelopes)
    )
