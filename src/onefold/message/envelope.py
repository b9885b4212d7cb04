"""Stage 3, envelope: the immutable message contract.

An envelope holds the type, queue and subject of a message, its keys, its cause, and the payload as JSON bytes.
It is checked against the limits when it is made, and never changed afterwards.
The store fills in the times, because only the store's clock is shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from operator import attrgetter
from typing import Any, Literal

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime, to_instant
from onefold.errors import DecodeError, EnvelopeError, LimitError
from onefold.message.codec import check_json, fingerprint_of

#: The version of the envelope itself; ``schema_version`` is that of the payload.
ENVELOPE_VERSION = 1

#: Prefix of the key of a message that was sent without one; the rest is its id, so no other send has the same key.
UNKEYED = "unkeyed:"
#: Prefix of the key of a message that a schedule put, so that no user's key can be the same.
SCHEDULED = "(schedule) "
#: Prefix of keys, and ids of signals, that are made from those of another message.  A sender that could use one first
#: would suppress that message or signal, or make it fail.
DERIVED = "derived:"

#: The prefixes that keys of senders cannot have, and the messages that have them.
_RESERVED = {
    UNKEYED: "messages without a key",
    SCHEDULED: "messages of a schedule",
    DERIVED: "messages and signals that others have caused",
}
_PREFIXES = tuple(_RESERVED)

_TYPE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_TYPE_REMEDY = "use 1 to 63 characters of a-z, 0-9, '.', '_', '-', beginning with a letter or digit"


def derived_key(kind: Literal["child", "event", "dead", "batch", "debounce", "refused", "signal"], name: str) -> str:
    """Return the key of a message made from another: the same each time, and different from all keys of senders."""
    return f"{DERIVED}{kind}/{name}"


def is_reserved(key: str) -> bool:
    """Whether a key was made by onefold, and not by a sender."""
    return key.startswith(_PREFIXES)


def refuse_reserved(field: str, key: str) -> str:
    """Refuse a sender's key, or id of a signal, with a prefix of onefold's own; return it otherwise."""
    if key.startswith(_PREFIXES):
        prefix = next(prefix for prefix in _PREFIXES if key.startswith(prefix))
        raise EnvelopeError(field, f"begins with {prefix!r}, which marks {_RESERVED[prefix]}; let it begin otherwise")
    return key


class Occurrence(msgspec.Struct, frozen=True, gc=False):
    """The schedule and fire time that a message is for."""

    schedule: str
    #: The fire time, in microseconds since 1970.
    scheduled_for: int
    #: The number of earlier fire times for which no message was put, and for which this one counts too.
    missed: int = 0
    timezone: str = "UTC"


class Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message, as sent and as delivered.

    With ``gc=False`` the garbage collector skips it, as it cannot be part of a cycle and exists in thousands.
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
    #: The journal in which its end is recorded: the id of a message and the name of a step, with a slash between them.
    reply_to: str | None = None
    #: Only a worker that has exactly this version of the handler takes it.
    pinned: bool = False
    #: The gate at which it waits: name and key, with a colon between them; see ``gated_by``.
    gate: str | None = None
    #: From 0 to 9; a message with a higher one is claimed as if it had waited longer.
    priority: int = 0
    #: Whether it is a saga, whose steps must be undone before it ends as dead or cancelled.
    saga: bool = False

    def __repr__(self) -> str:
        # Without the payload, which may hold secrets and must not get into logs.
        return f"<message {self.id} {self.message_type} key={self.idempotency_key!r}>"

    @property
    def keyed(self) -> bool:
        """Whether a second send with the same key is a duplicate of this one."""
        return not self.idempotency_key.startswith(UNKEYED)

    @property
    def scope(self) -> str:
        """The scope in which the key is unique: the consumer, which for a task is its type."""
        return self.message_type

    @property
    def gated_by(self) -> str | None:
        """The gate it waits at; with only an ordering key, one of its type and that key."""
        if self.gate is None and self.ordering_key is not None:
            return f"{self.message_type}:{self.ordering_key}"
        return self.gate

    @property
    def claimed_as(self) -> str:
        """The name by which workers claim it: its type, and for a pinned message the version too."""
        return f"{self.message_type}@{self.schema_version}" if self.pinned else self.message_type


#: The fields with a column of their own in the stores' table ``message``, in the order of its columns.
#: This list and the two below it give the place of each field; one that is in none of them is a header.
COLUMNS = (
    "id", "message_type", "schema_version", "queue", "idempotency_key", "correlation_id", "causation_id", "subject",
    "created_at", "retention", "payload_inline",
)  # fmt: skip
#: Fields kept in other tables, because they change or end before the message does: in ``delivery`` and in ``key``.
OTHER_TABLES = ("due_at", "expires_at", "delay", "fingerprint", "deduplicate_for")
#: Fields with a meaning only in this store; they are not sent to other programs, nor accepted from them.
STORE_ONLY = (*OTHER_TABLES, "retention", "reply_to", "pinned", "gate", "priority", "saga")

_FIELDS = {field.name: field for field in msgspec.structs.fields(Envelope)}
#: All other fields are seldom used and are kept together in the column ``headers``, so that most rows stay small.
HEADERS = tuple(name for name in _FIELDS if name not in COLUMNS + OTHER_TABLES)
_DEFAULTS = tuple(_FIELDS[name].default for name in HEADERS)

Headers = msgspec.defstruct(
    "Headers", [(name, _FIELDS[name].type, _FIELDS[name].default) for name in HEADERS], frozen=True, omit_defaults=True
)
headers_of = attrgetter(*HEADERS)
_encode_headers = msgspec.json.Encoder(order="deterministic").encode
_decode_headers = msgspec.json.Decoder(Headers).decode


def pack_headers(envelope: Envelope) -> bytes | None:
    """Return the seldom-used fields as bytes, or None when all have their defaults."""
    values = headers_of(envelope)
    # Most messages have none, and a comparison is cheaper than to make and encode an empty record.
    return None if values == _DEFAULTS else _encode_headers(Headers(*values))


def unpack_headers(data: bytes | None) -> dict[str, Any]:
    """Return the fields that ``pack_headers`` packed, by name; those with their defaults may be missing."""
    return {} if data is None else msgspec.structs.asdict(_decode_headers(data))


#: The headers of a run that has no others.
PINNED = _encode_headers(Headers(pinned=True))

_DURATION_MAX = round(limits.DURATION_SECONDS_MAX * MICROSECONDS)


def check(envelope: Envelope) -> Envelope:
    """Refuse an envelope that breaks the contract or a limit, naming the field; return it otherwise."""
    e = envelope
    if not _TYPE.fullmatch(e.message_type):
        raise EnvelopeError("message_type", f"{e.message_type!r} is not a name; {_TYPE_REMEDY}")
    if not _TYPE.fullmatch(e.queue):
        raise EnvelopeError("queue", f"{e.queue!r} is not a name; {_TYPE_REMEDY}")
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
        raise LimitError("due_at", "is outside of the years 1970 to 9000; give a time between them")
    for field in ("delay", "retention", "deduplicate_for"):
        if not 0 <= getattr(e, field) <= _DURATION_MAX:
            raise LimitError(
                field, f"is {getattr(e, field)} µs; 0 to {_DURATION_MAX} are allowed, which is a hundred years"
            )
    _check_seldom(e)
    if e.payload_inline is not None and len(e.payload_inline) > SURELY_FITS:
        _check_whole(e)
    return e


def check_sequence(sequence: int) -> None:
    """Refuse a sequence number that is not an integer, or too large for readers of JSON to keep exactly."""
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
            raise LimitError(
                "tags", f"has {len(e.tags)} entries; at most {limits.TAGS_MAX} are allowed; put data into the payload"
            )
        for name, value in e.tags.items():
            limits.check_bytes("tags", name, limits.TAG_BYTES_MAX)
            limits.check_bytes(f"tags.{name}", value, limits.TAG_BYTES_MAX)


def _check_occurrence(occurrence: Occurrence) -> None:
    limits.check_bytes("occurrence.schedule", occurrence.schedule, limits.ID_BYTES_MAX)
    limits.check_bytes("occurrence.timezone", occurrence.timezone, limits.ID_BYTES_MAX)
    if not 0 <= occurrence.scheduled_for <= limits.INSTANT_MAX:
        raise LimitError("occurrence.scheduled_for", "is outside of the years 1970 to 9999; give a time between them")
    if not 0 <= occurrence.missed <= limits.INTEGER_MAX:
        raise LimitError("occurrence.missed", f"is {occurrence.missed}; 0 to {limits.INTEGER_MAX} are allowed")


#: A payload up to this size fits for certain: all other fields together take less than the rest, even fully escaped.
SURELY_FITS = limits.ENVELOPE_BYTES_MAX - 24_000


def _check_whole(e: Envelope) -> None:
    size = len(to_json(e))
    if size > limits.ENVELOPE_BYTES_MAX:
        raise LimitError("envelope", _too_large(size))


def _too_large(size: int) -> str:
    return f"has {size} bytes; at most {limits.ENVELOPE_BYTES_MAX} are allowed; send a reference to large data"


#: Fields with another form for other programs: a time as text, a payload as JSON.
_REWRITTEN: Mapping[str, tuple[Any, Any]] = {
    "created_at": (datetime, msgspec.NODEFAULT),
    "payload_inline": (msgspec.Raw, msgspec.Raw(b"null")),
}
#: Fields that other programs must give although they have a default here, and one that they need not give.
_REQUIRED = ("schema_version",)
_OPTIONAL: Mapping[str, Any] = {"queue": "default"}


def _wire_field(name: str) -> tuple[str, Any, Any]:
    field = _FIELDS[name]
    if name in _REWRITTEN:
        return (name, *_REWRITTEN[name])
    return name, field.type, msgspec.NODEFAULT if name in _REQUIRED else _OPTIONAL.get(name, field.default)


#: The envelope as other programs see it: one JSON object with the contract's field names.
_Wire = msgspec.defstruct(
    "Wire",
    [("envelope_version", int, ENVELOPE_VERSION), *(_wire_field(name) for name in _FIELDS if name not in STORE_ONLY)],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)
_encode_wire = msgspec.json.Encoder(order="deterministic").encode
_decode_wire: Callable[[bytes], Any] = msgspec.json.Decoder(_Wire).decode
_SHARED = tuple(name for name in _FIELDS if name not in STORE_ONLY and name not in _REWRITTEN)


def carried(envelope: Envelope) -> dict[str, Any]:
    """Return the fields that a message keeps from the envelope it is made from; its store fills in the times."""
    return {**{name: getattr(envelope, name) for name in _SHARED}, "payload_inline": envelope.payload_inline}


def to_json(envelope: Envelope) -> bytes:
    """Encode the envelope as one JSON object; every field of the contract is present."""
    fields: dict[str, Any] = {name: getattr(envelope, name) for name in _SHARED}
    inline = msgspec.Raw(b"null" if envelope.payload_inline is None else envelope.payload_inline)
    return _encode_wire(_Wire(**fields, created_at=to_datetime(envelope.created_at), payload_inline=inline))


def from_json(data: bytes) -> Envelope:
    """Decode and check an envelope from another program.

    For any bytes that are not a valid envelope it raises ``EnvelopeError``, which names the field.
    """
    if len(data) > limits.ENVELOPE_BYTES_MAX:
        raise LimitError("envelope", _too_large(len(data)))
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
        raise LimitError("created_at", "is outside of the years 1970 to 9999; give a time between them")
    if wire.envelope_version != ENVELOPE_VERSION:
        raise EnvelopeError("envelope_version", f"is {wire.envelope_version}; {ENVELOPE_VERSION} is allowed")
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
    """Return the field in an error of msgspec: ``… - at `$.subject``` or ``missing required field `subject```."""
    found = re.search(r"`\$\.?([^`]*)`", problem) or re.search(r"field `([^`]*)`", problem)
    return (found.group(1) if found else "") or "envelope"
