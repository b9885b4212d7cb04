"""Stage 3, envelope: the immutable message contract.

An envelope is what travels: who it is for, what it is about, what caused it, and the payload as JSON bytes.
It is bounded and checked when it is made, and never changed afterwards.
Times are filled in by the store that keeps it, because only the store's clock is shared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime, to_instant
from onefold.codec import check_json, fingerprint_of
from onefold.errors import DecodeError, EnvelopeError, LimitError

#: The version of the envelope itself, as opposed to ``schema_version``, which is the payload's.
ENVELOPE_VERSION = 1

#: Marks a message sent without a key: it has an identity for tracing, but no second send can ever match it.
UNKEYED = "unkeyed:"
#: Begins the key of a message that a schedule put, so that no user's key can stand in its way.
SCHEDULED = "(schedule) "
#: Begins keys and ids of signals that are made from those of another message: a sender that took one first would
#: suppress what they stand for, or have it fail.
DERIVED = "derived:"

#: What the key of a sender cannot begin with, and what each of these marks.
_RESERVED = {
    UNKEYED: "messages without a key",
    SCHEDULED: "messages of a schedule",
    DERIVED: "messages and signals that others have caused",
}
_PREFIXES = tuple(_RESERVED)

_TYPE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def derived_key(kind: Literal["child", "event", "dead", "batch", "debounce", "refused", "signal"], name: str) -> str:
    """Return the key of what is made from another message: the same whenever it is made again, and no sender's."""
    return f"{DERIVED}{kind}/{name}"


def is_reserved(key: str) -> bool:
    """Whether a key was given by onefold, and not by a sender."""
    return key.startswith(_PREFIXES)


def refuse_reserved(field: str, key: str) -> str:
    """Refuse a sender's key, or id of a signal, that only onefold gives; return it otherwise."""
    if key.startswith(_PREFIXES):
        prefix = next(prefix for prefix in _PREFIXES if key.startswith(prefix))
        raise EnvelopeError(field, f"begins with {prefix!r}, which marks {_RESERVED[prefix]}; let it begin otherwise")
    return key


class Occurrence(msgspec.Struct, frozen=True, gc=False):
    """Which fire time of which schedule a message stands for."""

    schedule: str
    #: The time at which it was meant to fire, in microseconds since 1970.
    scheduled_for: int
    #: Earlier fire times that had no message of their own and for which this one stands in.
    missed: int = 0
    timezone: str = "UTC"


class Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message, as sent and as delivered.

    Like the other records that exist by the thousand it cannot be part of a cycle, so the collector skips it.
    """

    id: str
    message_type: str
    queue: str
    idempotency_key: str
    correlation_id: str
    causation_id: str
    subject: str
    payload_inline: bytes | None = None
    payload_ref: str | None = None
    schema_version: int = 1
    fingerprint: bytes = b""
    deduplication_key: str | None = None
    deduplicate_for: int = 0
    ordering_key: str | None = None
    sequence: int | None = None
    trace: str | None = None
    tags: dict[str, str] | None = None
    occurrence: Occurrence | None = None
    delay: int = 0
    due_at: int = 0
    retention: int = 0
    created_at: int = 0
    expires_at: int = 0
    #: Whose journal is told how this ended: a message and a step of it, with a slash between them.
    reply_to: str | None = None
    #: Only a worker that has exactly this version of the handler takes it.
    pinned: bool = False
    #: At which gate it waits, as its name and key with a colon between them; see ``gated_by``.
    gate: str | None = None
    #: From 0 to 9; who has more is claimed as if it had waited longer.
    priority: int = 0
    #: It is not ended before what it did is undone.
    saga: bool = False

    def __repr__(self) -> str:
        # Without the payload: what is printed or logged is no place for it.
        return f"<message {self.id} {self.message_type} key={self.idempotency_key!r}>"

    @property
    def keyed(self) -> bool:
        """Whether a second send with the same key is a duplicate of this one."""
        return not self.idempotency_key.startswith(UNKEYED)

    @property
    def scope(self) -> str:
        """Where the key is unique: the consumer, which for a task is its type."""
        return self.message_type

    @property
    def gated_by(self) -> str | None:
        """The gate it waits at; with an ordering key alone, its type's."""
        if self.gate is None and self.ordering_key is not None:
            return f"{self.message_type}:{self.ordering_key}"
        return self.gate

    @property
    def claimed_as(self) -> str:
        """What workers ask for: its type, and for a pinned message the version too."""
        return f"{self.message_type}@{self.schema_version}" if self.pinned else self.message_type


class Headers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The seldom-used fields, kept together so that the common message stays narrow in the store."""

    payload_ref: str | None = None
    deduplication_key: str | None = None
    ordering_key: str | None = None
    sequence: int | None = None
    trace: str | None = None
    tags: dict[str, str] | None = None
    occurrence: Occurrence | None = None
    reply_to: str | None = None
    gate: str | None = None
    pinned: bool = False
    priority: int = 0
    saga: bool = False


_encode_headers = msgspec.json.Encoder(order="deterministic").encode
_decode_headers = msgspec.json.Decoder(Headers).decode
_NO_HEADERS = Headers()
#: The headers of a run that has no others.
PINNED = _encode_headers(Headers(pinned=True))
_NO_TEXTS, _NO_MARKS = (None,) * 8, (None, _NO_HEADERS.pinned, _NO_HEADERS.priority, _NO_HEADERS.saga)


def pack_headers(envelope: Envelope) -> bytes | None:
    """Return the seldom-used fields as bytes, or None when there are none."""
    e = envelope
    texts = (e.payload_ref, e.deduplication_key, e.ordering_key, e.sequence, e.trace, e.tags, e.occurrence, e.reply_to)
    marks = (e.gate, e.pinned, e.priority, e.saga)
    # Most messages have none of them, and comparing is cheaper than making a record to compare.
    if texts == _NO_TEXTS and marks == _NO_MARKS:
        return None
    return _encode_headers(Headers(*texts, *marks))


def unpack_headers(data: bytes | None) -> Headers:
    """Return what ``pack_headers`` packed."""
    return _NO_HEADERS if data is None else _decode_headers(data)


_DURATION_MAX = round(limits.DURATION_SECONDS_MAX * MICROSECONDS)


def check(envelope: Envelope) -> Envelope:
    """Refuse an envelope that breaks the contract or a limit, naming the field; return it otherwise."""
    e = envelope
    if not _TYPE.fullmatch(e.message_type):
        raise EnvelopeError("message_type", f"{e.message_type!r} is not a dotted lower-case name")
    if not _TYPE.fullmatch(e.queue):
        raise EnvelopeError("queue", f"{e.queue!r} is not a queue's name")
    if not 1 <= e.schema_version <= limits.SCHEMA_VERSION_MAX:
        raise EnvelopeError("schema_version", f"is {e.schema_version}; 1 to {limits.SCHEMA_VERSION_MAX} are allowed")
    if (e.payload_inline is None) == (e.payload_ref is None):
        raise EnvelopeError("payload_inline", "exactly one of payload_inline and payload_ref must be given")
    limits.check_bytes("id", e.id, limits.ID_BYTES_MAX)
    limits.check_bytes("idempotency_key", e.idempotency_key, limits.KEY_BYTES_MAX)
    limits.check_bytes("subject", e.subject, limits.SUBJECT_BYTES_MAX)
    limits.check_bytes("correlation_id", e.correlation_id, limits.ID_BYTES_MAX)
    limits.check_bytes("causation_id", e.causation_id, limits.ID_BYTES_MAX)
    if e.payload_inline is not None and len(e.payload_inline) > limits.PAYLOAD_BYTES_MAX:
        raise LimitError(
            "payload_inline",
            f"has {len(e.payload_inline)} bytes; at most {limits.PAYLOAD_BYTES_MAX} fit into a message; "
            "store the data elsewhere and send a reference to it",
        )
    if not 0 <= e.due_at <= limits.DUE_AT_MAX:
        raise LimitError("due_at", "lies outside the years 1970 to 9000; name a moment between them")
    for field in ("delay", "retention", "deduplicate_for"):
        if not 0 <= getattr(e, field) <= _DURATION_MAX:
            raise LimitError(
                field, f"is {getattr(e, field)} µs; from 0 to {_DURATION_MAX} are allowed, a hundred years"
            )
    _check_seldom(e)
    if e.payload_inline is not None and len(e.payload_inline) > SURELY_FITS:
        _check_whole(e)
    return e


def check_sequence(sequence: int) -> None:
    """Refuse a number in a line that some reader could not keep exactly, or a store not compare with the next."""
    if type(sequence) is not int or not 0 <= sequence <= limits.SEQUENCE_MAX:
        raise EnvelopeError("sequence", f"is {sequence!r}; whole numbers from 0 to {limits.SEQUENCE_MAX} are allowed")


def _check_seldom(e: Envelope) -> None:
    for field, text, most in (
        ("deduplication_key", e.deduplication_key, limits.KEY_BYTES_MAX),
        ("ordering_key", e.ordering_key, limits.KEY_BYTES_MAX),
        ("gate", e.gate, limits.GATE_BYTES_MAX),
        ("payload_ref", e.payload_ref, limits.KEY_BYTES_MAX),
        ("trace", e.trace, limits.ID_BYTES_MAX),
        ("reply_to", e.reply_to, limits.KEY_BYTES_MAX),
    ):
        if text is not None:
            limits.check_bytes(field, text, most)
    if e.sequence is not None:
        check_sequence(e.sequence)
    if not 0 <= e.priority <= limits.PRIORITY_MAX:
        raise EnvelopeError("priority", f"is {e.priority}; 0 to {limits.PRIORITY_MAX} are allowed")
    if e.occurrence is not None:
        _check_occurrence(e.occurrence)
    if e.tags:
        if len(e.tags) > limits.TAGS_MAX:
            raise LimitError("tags", f"has {len(e.tags)} entries; at most {limits.TAGS_MAX} are allowed")
        for name, value in e.tags.items():
            limits.check_bytes("tags", name, limits.TAG_BYTES_MAX)
            limits.check_bytes(f"tags.{name}", value, limits.TAG_BYTES_MAX)


def _check_occurrence(occurrence: Occurrence) -> None:
    limits.check_bytes("occurrence.schedule", occurrence.schedule, limits.ID_BYTES_MAX)
    limits.check_bytes("occurrence.timezone", occurrence.timezone, limits.ID_BYTES_MAX)
    if not 0 <= occurrence.scheduled_for <= limits.INSTANT_MAX:
        raise LimitError("occurrence.scheduled_for", "lies outside the years 1970 to 9999")
    if not 0 <= occurrence.missed <= limits.INTEGER_MAX:
        raise LimitError("occurrence.missed", f"is {occurrence.missed}; 0 to {limits.INTEGER_MAX} are allowed")


#: Everything but the payload is shorter than this, even when each of its characters must be escaped.
SURELY_FITS = limits.ENVELOPE_BYTES_MAX - 24_000


def _check_whole(e: Envelope) -> None:
    size = len(to_json(e))
    if size > limits.ENVELOPE_BYTES_MAX:
        raise LimitError("envelope", f"has {size} bytes; at most {limits.ENVELOPE_BYTES_MAX} are allowed")


class _Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The envelope as other programs see it: one JSON object with the contract's field names."""

    envelope_version: int = ENVELOPE_VERSION
    id: str
    message_type: str
    schema_version: int
    correlation_id: str
    causation_id: str
    idempotency_key: str
    subject: str
    created_at: datetime
    queue: str = "default"
    payload_inline: msgspec.Raw = msgspec.Raw(b"null")
    payload_ref: str | None = None
    deduplication_key: str | None = None
    ordering_key: str | None = None
    sequence: int | None = None
    trace: str | None = None
    tags: dict[str, str] | None = None
    occurrence: Occurrence | None = None


_encode_wire = msgspec.json.Encoder(order="deterministic").encode
_decode_wire = msgspec.json.Decoder(_Wire).decode
_SHARED = tuple(f for f in _Wire.__struct_fields__ if f not in ("envelope_version", "created_at", "payload_inline"))


def to_json(envelope: Envelope) -> bytes:
    """Write the envelope as one JSON object; every field of the contract is present."""
    fields: dict[str, Any] = {name: getattr(envelope, name) for name in _SHARED}
    inline = msgspec.Raw(b"null" if envelope.payload_inline is None else envelope.payload_inline)
    return _encode_wire(_Wire(**fields, created_at=to_datetime(envelope.created_at), payload_inline=inline))


def from_json(data: bytes) -> Envelope:
    """Read an envelope from foreign bytes, strictly.

    Raises one kind of error, ``EnvelopeError``, which names the field; nothing else escapes, whatever the bytes are.
    """
    if len(data) > limits.ENVELOPE_BYTES_MAX:
        raise LimitError("envelope", f"has {len(data)} bytes; at most {limits.ENVELOPE_BYTES_MAX} are allowed")
    check_json("envelope", data)
    try:
        wire = _decode_wire(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise DecodeError(_field_of(str(error)), str(error)) from error
    try:
        created_at = to_instant(wire.created_at)
    except ValueError as error:
        raise DecodeError("created_at", "has no time zone; write it as RFC 3339 with Z or an offset") from error
    if not 0 <= created_at <= limits.INSTANT_MAX:
        raise LimitError("created_at", "lies outside the years 1970 to 9999")
    if wire.envelope_version != ENVELOPE_VERSION:
        raise EnvelopeError("envelope_version", f"is {wire.envelope_version}; this version reads {ENVELOPE_VERSION}")
    fields: Mapping[str, Any] = {name: getattr(wire, name) for name in _SHARED}
    inline = None if bytes(wire.payload_inline) == b"null" else bytes(wire.payload_inline)
    return check(
        Envelope(
            **fields,
            payload_inline=inline,
            fingerprint=fingerprint_of(inline or b""),
            created_at=created_at,
        )
    )


def _field_of(problem: str) -> str:
    """Find the field in msgspec's words: ``… - at `$.subject``` or ``missing required field `subject```."""
    found = re.search(r"`\$\.?([^`]*)`", problem) or re.search(r"field `([^`]*)`", problem)
    return (found.group(1) if found else "") or "envelope"
