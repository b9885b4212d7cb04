"""Messages as parameters: which statement stores them, and what is said to it about each, or once about all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from onefold.envelope import UNKEYED, Envelope, pack_headers
from onefold.stores.postgres.arrays import Column, bigints, blobs, flags, ids, numbers, texts
from onefold.stores.postgres.wire import Named


def putting(envelopes: Sequence[Envelope], keyed: bool) -> list[Named]:
    """Return what stores messages, but for the time; with ``keyed`` false their keys have been taken already."""
    if keyed and (alike := _alike(envelopes)) is not None:
        return [("put_alike", alike)]
    return [("put" if keyed and by_key else "put_unkeyed", _columns(those)) for by_key, those in _by_kind(envelopes)]


def putting_one(e: Envelope, now: int | None, keyed: bool) -> Named:
    """Return what stores a single message."""
    plain = {
        "now": now,
        "id": e.id,
        "type": e.message_type,
        "version": e.schema_version,
        "queue": e.queue,
        "key": e.idempotency_key,
        "correlation": e.correlation_id,
        "causation": e.causation_id,
        "subject": e.subject,
        "retention": e.retention,
        "payload": e.payload_inline,
        "headers": pack_headers(e),
        "fingerprint": e.fingerprint,
    }
    if keyed and not (e.delay or e.due_at or e.pinned or _is_special(e)):
        return "put_plain", plain
    return "put_one", {
        **plain,
        "keyed": keyed,
        "delay": e.delay,
        "due": e.due_at,
        "claimed_as": e.claimed_as,
        "gate": e.gated_by,
        "priority": e.priority,
        "ordered": e.ordering_key is not None,
        "sequence": e.sequence,
    }


def _is_special(e: Envelope) -> bool:
    """Whether a message waits at a gate or has a priority."""
    return e.gate is not None or e.ordering_key is not None or e.priority != 0


def _alike(envelopes: Sequence[Envelope]) -> dict[str, Any] | None:
    """Return what messages differ in, and once what they have in common; None for those that differ in more.

    Each comparison goes through all of them at the speed of C, which costs less than to write one column out.
    """
    first, number = envelopes[0], len(envelopes)
    common = [
        (e.message_type, e.schema_version, e.queue, e.retention, e.delay, e.due_at, e.pinned, e.saga, e.gate,
            e.ordering_key, e.priority, e.sequence, e.payload_ref, e.deduplication_key, e.trace, e.tags, e.occurrence,
            e.reply_to)
        for e in envelopes
    ]  # fmt: skip
    if common.count(common[0]) != number or _is_special(first):
        return None
    keys = [e.idempotency_key for e in envelopes]
    if any(key.startswith(UNKEYED) for key in keys):
        return None
    own = [e.id for e in envelopes]
    correlations, causations = [e.correlation_id for e in envelopes], [e.causation_id for e in envelopes]
    if not all(those == own or those.count(those[0]) == number for those in (correlations, causations)):
        return None
    subjects = [e.subject for e in envelopes]
    subject = subjects[0] if subjects.count(subjects[0]) == number else None
    return {
        "type": first.message_type,
        "version": first.schema_version,
        "queue": first.queue,
        "claimed_as": first.claimed_as,
        "retention": first.retention,
        "delay": first.delay,
        "due": first.due_at,
        "headers": pack_headers(first),
        "correlation": None if correlations == own else correlations[0],
        "causation": None if causations == own else causations[0],
        "subject": subject,
        "ids": ids(own),
        "keys": texts(keys),
        "subjects": texts([] if subject is not None or subjects == keys else subjects),
        "payloads": blobs([e.payload_inline for e in envelopes]),
        "fingerprints": blobs([e.fingerprint for e in envelopes]),
    }


def _by_kind(envelopes: Sequence[Envelope]) -> list[tuple[bool, Sequence[Envelope]]]:
    """Put together what has a key, and what has none; in a line nobody may overtake another by that."""
    if any(e.ordering_key is not None for e in envelopes):
        return [(by_key, list(those)) for by_key, those in groupby(envelopes, key=lambda e: e.keyed)]
    kinds = {True: [e for e in envelopes if e.keyed], False: [e for e in envelopes if not e.keyed]}
    return [(by_key, those) for by_key, those in kinds.items() if those]


def _columns(envelopes: Sequence[Envelope]) -> dict[str, Column]:
    return {
        "ids": ids([e.id for e in envelopes]),
        "types": texts([e.message_type for e in envelopes]),
        "versions": bigints([e.schema_version for e in envelopes]),
        "queues": texts([e.queue for e in envelopes]),
        "keys": texts([e.idempotency_key for e in envelopes]),
        "correlations": texts([e.correlation_id for e in envelopes]),
        "causations": texts([e.causation_id for e in envelopes]),
        "subjects": texts([e.subject for e in envelopes]),
        "retentions": bigints([e.retention for e in envelopes]),
        "payloads": blobs([e.payload_inline for e in envelopes]),
        "headers": blobs([pack_headers(e) for e in envelopes]),
        "fingerprints": blobs([e.fingerprint for e in envelopes]),
        "delays": bigints([e.delay for e in envelopes]),
        "dues": bigints([e.due_at for e in envelopes]),
        "claimed_as": texts([e.claimed_as for e in envelopes]),
        **_gates(envelopes),
    }


_NO_GATES = {"gates": texts([]), "priorities": numbers([]), "ordered": flags([]), "sequences": numbers([])}


def _gates(envelopes: Sequence[Envelope]) -> dict[str, Column]:
    """Return what is to be said about gates; most messages know none, and cost nothing here."""
    if not any(_is_special(e) for e in envelopes):
        return _NO_GATES
    return {
        "gates": texts([e.gated_by for e in envelopes]),
        "priorities": numbers([e.priority for e in envelopes]),
        "ordered": flags([e.ordering_key is not None for e in envelopes]),
        "sequences": numbers([e.sequence for e in envelopes]),
    }
