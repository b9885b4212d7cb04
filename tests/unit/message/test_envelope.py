"""The message contract: required fields, refused values, and that nothing changes on the way."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold import limits
from onefold.clock import MICROSECONDS, to_instant
from onefold.errors import DecodeError, EnvelopeError, LimitError
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import Envelope, check, from_json, pack_headers, to_json, unpack_headers

#: The nine fields of every message; of payload and reference it has exactly one.
NINE = {
    "schema_version",
    "message_type",
    "correlation_id",
    "causation_id",
    "idempotency_key",
    "subject",
    "created_at",
    "payload_ref",
    "payload_inline",
}
CREATED = to_instant(datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC))


def envelope(**changes: Any) -> Envelope:
    fields: dict[str, Any] = {
        "id": "0192-abcd",
        "message_type": "shop.charge",
        "queue": "default",
        "idempotency_key": "order-7:charge",
        "correlation_id": "request-1",
        "causation_id": "request-1",
        "subject": "order:7",
        "payload_inline": b'{"order_id":7}',
        "created_at": CREATED,
    }
    return Envelope(**{**fields, **changes})


def wire(**changes: Any) -> bytes:
    return json.dumps({**json.loads(to_json(envelope())), **changes}).encode()


def refused_field(call: Any, *args: Any) -> str:
    with pytest.raises(EnvelopeError) as refused:
        call(*args)
    assert str(refused.value).startswith(f"{refused.value.field}: ")
    return refused.value.field


def test_all_nine_fields_are_always_written() -> None:
    """A2: including the empty ones."""
    assert json.loads(to_json(envelope())).keys() >= NINE
    by_reference = json.loads(to_json(envelope(payload_inline=None, payload_ref="blob:1")))
    assert by_reference.keys() >= NINE
    assert by_reference["payload_inline"] is None


@pytest.mark.parametrize("field", sorted(NINE - {"payload_ref", "payload_inline"}))
def test_a_message_that_lacks_a_field_is_refused_by_name(field: str) -> None:
    """A2, A14: each of the fields is required on the wire."""
    fields = json.loads(wire())
    del fields[field]
    assert refused_field(from_json, json.dumps(fields).encode()) == field


@pytest.mark.parametrize("field", sorted((NINE | {"id", "queue"}) - {"payload_inline"}))
def test_a_field_of_the_wrong_type_is_refused_by_name(field: str) -> None:
    """A14: no value is converted silently."""
    assert refused_field(from_json, wire(**{field: ["wrong"]})) == field


def test_an_unknown_field_is_refused_by_name() -> None:
    """A14: a misspelt field is not dropped."""
    assert refused_field(from_json, wire(subjekt="order:7")) == "subjekt"


def test_another_envelope_version_is_refused() -> None:
    """A3: the contract's own version is checked apart from the payload's."""
    assert refused_field(from_json, wire(envelope_version=2)) == "envelope_version"


def test_the_inline_payload_travels_as_json_and_not_as_text() -> None:
    """A10: a foreign reader finds the value itself."""
    assert json.loads(to_json(envelope()))["payload_inline"] == {"order_id": 7}
    assert from_json(to_json(envelope())).payload_inline == b'{"order_id":7}'


@pytest.mark.parametrize("created", ["2030-01-02T03:04:05.678901Z", "2030-01-02T05:04:05.678901+02:00"])
def test_created_at_is_rfc_3339_and_means_one_instant(created: str) -> None:
    """A9: written in UTC, read in any offset."""
    assert re.fullmatch(r"2030-01-02T03:04:05\.678901Z", json.loads(to_json(envelope()))["created_at"])
    assert from_json(wire(created_at=created)).created_at == CREATED


@pytest.mark.parametrize(
    "created",
    ["2030-01-02T03:04:05", "yesterday", "2030-13-01T00:00:00Z", 1893553445, None, "0001-01-01T00:00:00+14:00"],
)
def test_a_created_at_that_is_no_instant_is_refused(created: Any) -> None:
    """A9: a time without a zone means nothing on another machine."""
    assert refused_field(from_json, wire(created_at=created)) == "created_at"


@pytest.mark.parametrize("version", [0, -1, limits.SCHEMA_VERSION_MAX + 1, 2**70])
def test_a_schema_version_outside_its_range_is_refused(version: int) -> None:
    """A3: versions count from 1."""
    assert refused_field(check, envelope(schema_version=version)) == "schema_version"
    assert check(envelope(schema_version=limits.SCHEMA_VERSION_MAX)).schema_version == limits.SCHEMA_VERSION_MAX


@pytest.mark.parametrize("name", ["", "Shop.Charge", ".shop", "shop charge", "shop\n", "shöp", "a" * 64, "a;b"])
def test_a_type_or_queue_that_is_no_dotted_lower_case_name_is_refused(name: str) -> None:
    """A4: the name routes the message, so every engine must read it alike."""
    assert refused_field(check, envelope(message_type=name)) == "message_type"
    assert refused_field(check, envelope(queue=name)) == "queue"


@pytest.mark.parametrize("name", ["a", "shop.charge", "0-9_x", "a" * 63])
def test_a_dotted_lower_case_name_is_accepted(name: str) -> None:
    """A4."""
    assert check(envelope(message_type=name, queue=name)).message_type == name


@pytest.mark.parametrize(("inline", "reference"), [(None, None), (b"{}", "blob:1")], ids=["neither", "both"])
def test_exactly_one_of_payload_and_reference_is_required(inline: bytes | None, reference: str | None) -> None:
    """A11."""
    assert refused_field(check, envelope(payload_inline=inline, payload_ref=reference)) == "payload_inline"


TEXTS = {
    "id": limits.ID_BYTES_MAX,
    "idempotency_key": limits.KEY_BYTES_MAX,
    "subject": limits.SUBJECT_BYTES_MAX,
    "correlation_id": limits.ID_BYTES_MAX,
    "causation_id": limits.ID_BYTES_MAX,
    "deduplication_key": limits.KEY_BYTES_MAX,
    "ordering_key": limits.KEY_BYTES_MAX,
    "trace": limits.ID_BYTES_MAX,
}


@pytest.mark.parametrize(("field", "most"), TEXTS.items())
def test_texts_are_bounded_in_bytes_to_the_last_one(field: str, most: int) -> None:
    """A5, A7, A8, A13: the limit itself fits, one byte more does not, and characters are not bytes."""
    check(envelope(**{field: "x" * most}))
    check(envelope(**{field: "é" * (most // 2)}))
    for text in ("x" * (most + 1), "é" * (most // 2 + 1), "", "new\nline", "nul\0", "\ud800", "\x1b[31m"):
        assert refused_field(check, envelope(**{field: text})) == field


def test_the_payload_is_bounded_to_the_last_byte() -> None:
    """A13, fault 23: counted in encoded bytes; the error names the remedy."""
    quotes = 2
    check(envelope(payload_inline=b'"' + b"x" * (limits.PAYLOAD_BYTES_MAX - quotes) + b'"'))
    with pytest.raises(LimitError, match="send a reference") as refused:
        check(envelope(payload_inline=b'"' + b"x" * (limits.PAYLOAD_BYTES_MAX - quotes + 1) + b'"'))
    assert refused.value.field == "payload_inline"


def test_the_whole_envelope_is_bounded_to_the_last_byte() -> None:
    """A13, fault 23: an envelope that passes the check at send is short enough to be read again."""
    padded = wire() + b" " * (limits.ENVELOPE_BYTES_MAX - len(wire()))
    assert from_json(padded).id == envelope().id
    assert refused_field(from_json, padded + b" ") == "envelope"


def test_fields_that_grow_when_written_are_measured_as_written() -> None:
    """A13: a quote is written as two bytes, so a message with many quotes must have a smaller payload."""
    tags = {'"' * 250 + f"{n:02}": '"' * limits.TAG_BYTES_MAX for n in range(limits.TAGS_MAX)}
    most: dict[str, Any] = {field: '"' * size for field, size in TEXTS.items()}
    large = b'"' + b"x" * (limits.PAYLOAD_BYTES_MAX - 2) + b'"'
    assert refused_field(check, envelope(tags=tags, payload_inline=large, **most)) == "envelope"
    smaller = check(envelope(tags=tags, payload_inline=b'"' + b"x" * 90_000 + b'"', **most))
    assert from_json(to_json(smaller)).tags == tags


def test_tags_are_bounded_in_number_and_size() -> None:
    """A13: tags are for filtering."""
    check(envelope(tags={f"t{n}": "v" * limits.TAG_BYTES_MAX for n in range(limits.TAGS_MAX)}))
    assert refused_field(check, envelope(tags={f"t{n}": "v" for n in range(limits.TAGS_MAX + 1)})) == "tags"
    assert refused_field(check, envelope(tags={"t": "v" * (limits.TAG_BYTES_MAX + 1)})) == "tags.t"
    assert refused_field(check, envelope(tags={"": "v"})) == "tags"


@pytest.mark.parametrize("sequence", [-1, 2**63])
def test_a_sequence_number_outside_its_range_is_refused(sequence: int) -> None:
    """A12."""
    assert refused_field(check, envelope(sequence=sequence)) == "sequence"
    assert check(envelope(sequence=0)).sequence == 0


@pytest.mark.parametrize("field", ["delay", "due_at", "retention"])
def test_times_that_no_store_can_keep_are_refused(field: str) -> None:
    """A13: an overflow would show only at the store."""
    assert refused_field(check, envelope(**{field: 2**63})) == field
    assert refused_field(check, envelope(**{field: -1})) == field


def test_an_envelope_cannot_be_changed() -> None:
    """A2: the checked message is the one that is stored."""
    with pytest.raises(AttributeError):
        envelope().subject = "order:8"  # type: ignore[misc]


def test_bytes_that_are_not_an_object_are_a_decode_error() -> None:
    """A14: a retry would not help, and the type of the error says so."""
    for data in (b"", b"[]", b"7", b"{", b"\xff"):
        with pytest.raises(DecodeError):
            from_json(data)


_text = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20)
_name = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    inline = msgspec.json.encode(draw(_json.filter(lambda value: value is not None)))
    by_reference = draw(st.booleans())
    return check(
        Envelope(
            id=draw(_text),
            message_type=draw(_name),
            queue=draw(_name),
            schema_version=draw(st.integers(1, limits.SCHEMA_VERSION_MAX)),
            idempotency_key=draw(_text),
            correlation_id=draw(_text),
            causation_id=draw(_text),
            subject=draw(_text),
            payload_inline=None if by_reference else inline,
            payload_ref=draw(_text) if by_reference else None,
            fingerprint=fingerprint_of(b"" if by_reference else inline),
            deduplication_key=draw(st.none() | _text),
            ordering_key=draw(st.none() | _text),
            sequence=draw(st.none() | st.integers(0, limits.SEQUENCE_MAX)),
            trace=draw(st.none() | _text),
            tags=draw(st.none() | st.dictionaries(_text, _text, min_size=1, max_size=3)),
            created_at=draw(st.integers(0, 4_000_000_000 * MICROSECONDS)),
        )
    )


@given(envelopes())
def test_every_envelope_reads_back_as_it_was_written(one: Envelope) -> None:
    """A2: for all legal fields; the bytes are the same each time it is written."""
    assert from_json(to_json(one)) == one
    assert to_json(from_json(to_json(one))) == to_json(one)


@given(envelopes())
def test_seldom_used_fields_read_back_from_the_store_as_they_were_packed(one: Envelope) -> None:
    """A12: sequence, tags and the other optional fields are kept."""
    headers = unpack_headers(pack_headers(one))
    for field, value in headers.items():
        assert value == getattr(one, field)
