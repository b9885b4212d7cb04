"""What a second send with the same key means: one pure decision for every store."""

from __future__ import annotations

from enum import Enum

import msgspec

from onefold.codec import fingerprint_of
from onefold.envelope import Envelope
from onefold.store import State

#: What a key row is for; the numbers are what the stores keep.
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
    """What to do with a message whose key is already there."""

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


def batch_fingerprint(envelopes: list[Envelope]) -> bytes:
    """Return a digest of a whole batch: what its messages are and in which order."""
    return fingerprint_of(b"".join(e.message_type.encode() + e.fingerprint for e in envelopes))
