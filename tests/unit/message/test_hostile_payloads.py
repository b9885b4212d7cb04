"""Hostile values at both borders: as foreign bytes and as arguments of a send.  Always one typed error."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onefold import App, limits
from onefold.errors import EnvelopeError
from onefold.message.codec import check_json
from onefold.message.envelope import Envelope, from_json, to_json

VALID = to_json(
    Envelope(
        id="1",
        message_type="shop.charge",
        queue="default",
        idempotency_key="k",
        correlation_id="c",
        causation_id="c",
        subject="s",
        payload_inline=b'{"a":1}',
        tags={"tenant": "t"},
    )
)
app = App("sqlite:///:memory:")


@dataclasses.dataclass
class Record:
    value: Any = None
    number: float = 0.0


class Struct(msgspec.Struct):
    value: Any = None


class Model(pydantic.BaseModel):
    value: Any = None
    number: float = 0.0


@app.task
async def take_any(a: Any) -> None: ...
@app.task
async def take_text(a: str) -> None: ...
@app.task
async def take_number(a: int) -> None: ...
@app.task
async def take_real(a: float) -> None: ...
@app.task
async def take_dict(a: dict[str, Any]) -> None: ...
@app.task
async def take_record(a: Record) -> None: ...
@app.task
async def take_struct(a: Struct) -> None: ...
@app.task
async def take_model(a: Model) -> None: ...


def nested(levels: int, make: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = make(value)
    return value


def payload(text: bytes) -> bytes:
    """Return a valid envelope that carries this text as its payload."""
    return VALID.replace(b'{"a":1}', text)


DEPTH = limits.JSON_DEPTH_MAX
BYTES: dict[str, bytes] = {
    "nothing": b"",
    "invalid UTF-8": payload(b'"\xff\xfe"'),
    "overlong UTF-8": payload(b'"\xc0\xaf"'),
    "surrogate in UTF-8": payload(b'"\xed\xa0\x80"'),
    "UTF-16": VALID.decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + VALID,
    "truncated": VALID[:-1],
    "truncated in a text": VALID[:20],
    "truncated in an escape": payload(b'"\\u00')[:200],
    "trailing text": VALID + b"{}",
    "array": b"[" + VALID + b"]",
    "deep array": payload(b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1)),
    "deep object": payload(b'{"a":' * (DEPTH + 1) + b"1" + b"}" * (DEPTH + 1)),
    "very deep": b"[" * 100_000,
    "very deep, unbalanced": b"]" * 50_000 + b"[" * 60_000,
    "deep behind quotes": payload(b'["\\"",' * (DEPTH + 1) + b"1" + b"]" * (DEPTH + 1)),
    "long integer": payload(b"1" + b"0" * 5_000),
    "long negative integer": payload(b"-1" + b"0" * 5_000),
    "long fraction": payload(b"0." + b"1" * 5_000),
    "overflowing exponent": payload(b"1e999"),
    "negative overflowing exponent": payload(b"-1e999"),
    "NaN": payload(b"NaN"),
    "Infinity": payload(b"Infinity"),
    "-Infinity": payload(b'{"a":[-Infinity]}'),
    "duplicate keys": payload(b'{"a":1,"a":2}'),
    "duplicate keys, one escaped": payload(b'{"a":1,"\\u0061":2}'),
    "duplicate keys deep inside": payload(b'[[{"x":{"a":1,"a":2}}]]'),
    "duplicate field": VALID.replace(b'"subject":"s"', b'"subject":"s","subject":"t"'),
    "lone surrogate": payload(b'"\\ud800"'),
    "lone surrogate as key": payload(b'{"\\udc00":1}'),
    "swapped surrogates": payload(b'["\\udc00\\ud800"]'),
    "NUL": payload(b'"a\\u0000b"'),
    "NUL as key": payload(b'{"\\u0000":1}'),
    "raw NUL": payload(b'"a\0b"'),
    "raw control character": payload(b'"a\nb"'),
    "non-string key": payload(b"{1:2}"),
    "single quotes": payload(b"{'a':1}"),
    "trailing comma": payload(b"[1,]"),
    "comment": payload(b"/* */1"),
    "leading zero": payload(b"007"),
    "hexadecimal": payload(b"0x7"),
    "huge": payload(b'"' + b"x" * limits.ENVELOPE_BYTES_MAX + b'"'),
    "unterminated text of quotes": b'"' + b'\\"' * 59_000,
    "many opening quotes": b'"\\' * 59_000,
}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES.keys())
def test_hostile_bytes_are_one_typed_error(data: bytes) -> None:
    """Faults 24 and 26: refused at the border, with the field."""
    with pytest.raises(EnvelopeError) as refused:
        from_json(data)
    assert refused.value.field


@pytest.mark.parametrize(
    "text",
    [
        b"[" * (DEPTH - 1) + b"]" * (DEPTH - 1),
        b'"' + b"[{" * 500 + b'"',
        b'"\\"' + b"[{" * 500 + b'"',
        b"1" * limits.JSON_DIGITS_MAX,
        b"[" + b"[]," * 1_000 + b"[]]",
        b"1e308",
        b'{"A":1,"a":2}',
        b'"\\ud83d\\ude42"',
        b'"\\\\u0000"',
    ],
    ids=[
        "deepest",
        "brackets in a text",
        "brackets behind a quote",
        "longest",
        "wide",
        "large",
        "case",
        "pair",
        "escaped",
    ],
)
def test_the_border_lets_through_what_only_looks_hostile(text: bytes) -> None:
    """Fault 26: at the limit, not past it."""
    assert from_json(payload(text)).payload_inline == text


def test_the_depth_of_bytes_is_checked_before_they_are_read() -> None:
    """Fault 26: a recursive reader must not get them."""
    with pytest.raises(EnvelopeError, match="nested deeper"):
        check_json("envelope", b"[" * 100_000)


INF, NAN = math.inf, math.nan
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "deep list": (take_any, nested(DEPTH + 1, lambda inner: [inner])),
    "deep dict": (take_dict, {"a": nested(DEPTH + 1, lambda inner: {"a": inner})}),
    "deep dataclass": (take_record, nested(DEPTH + 1, Record)),
    "very deep list": (take_any, nested(100_000, lambda inner: [inner])),
    "very deep in a model": (take_model, Model(value=nested(1_000, lambda inner: [inner]))),
    "5,000 digits": (take_number, 10**5_000),
    "5,000 digits in Any": (take_any, [10**5_000]),
    "400 digits": (take_number, 10**400),
    "400 digits in Any": (take_any, {"n": -(10**400)}),
    "NaN": (take_real, NAN),
    "infinity": (take_real, INF),
    "NaN in Any": (take_any, {"x": [1, NAN]}),
    "infinity in a tuple": (take_any, (1, -INF)),
    "infinity in a set": (take_any, {INF}),
    "NaN in a dataclass": (take_record, Record(number=NAN)),
    "NaN in a dataclass's Any": (take_record, Record(value={"deep": NAN})),
    "NaN in a Struct's Any": (take_struct, Struct(value=[NAN])),
    "NaN in a model": (take_model, Model(number=NAN)),
    "NaN in a model's Any": (take_model, Model(value=NAN)),
    "NaN in a model in Any": (take_any, [Model(value=[INF])]),
    "lone surrogate": (take_text, "\ud800"),
    "lone surrogate in Any": (take_any, {"a": "\udfff"}),
    "lone surrogate as key": (take_dict, {"\ud800": 1}),
    "lone surrogate in a model": (take_model, Model(value="\ud800")),
    "NUL": (take_text, "a\0b"),
    "NUL as key": (take_dict, {"\0": 1}),
    "NUL in a dataclass": (take_record, Record(value=["\0"])),
    "integer key": (take_any, {1: 2}),
    "keys that become one": (take_any, {1: "a", "1": "b"}),
    "None key": (take_any, {None: 2}),
    "NaN key": (take_any, {NAN: 2}),
    "tuple key": (take_any, {(1, 2): 3}),
    "bytes key": (take_any, {b"a": 3}),
    "function": (take_any, len),
    "object": (take_any, object()),
    "unserialisable in a model": (take_model, Model(value=object())),
    "model class instead of a model": (take_any, Model),
    "huge text": (take_text, "x" * limits.PAYLOAD_BYTES_MAX),
}


@pytest.mark.parametrize(("task", "value"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_a_hostile_argument_is_one_typed_error_at_send(task: Any, value: Any) -> None:
    """Faults 22, 23 and 26: raised to the caller, naming the field, before anything is stored."""
    with pytest.raises(EnvelopeError) as refused:
        task.call(value).envelope("0192-id")
    assert refused.value.field.startswith(("a", "payload_inline"))


def test_a_hostile_argument_does_not_crash_the_interpreter() -> None:
    """Fault 26: recursion in C would end the process instead of raising; a new process must survive all values."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_hostile_payloads as t\n"
        "refused = 0\n"
        "for data in t.BYTES.values():\n"
        "    try: t.from_json(data)\n"
        "    except t.EnvelopeError: refused += 1\n"
        "print(refused)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__)], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == len(BYTES)


def reads_or_refuses(data: bytes) -> None:
    try:
        envelope = from_json(data)
    except EnvelopeError:
        return
    assert from_json(to_json(envelope)) == envelope


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_the_typed_error(data: bytes) -> None:
    """Fault 24: random input."""
    reads_or_refuses(data)


@given(st.text(max_size=300))
def test_random_text_raises_nothing_but_the_typed_error(text: str) -> None:
    """Fault 24: random input."""
    reads_or_refuses(text.encode("utf-8", "surrogatepass"))


@given(
    st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=4)
)
@example([(VALID.index(b'"s"'), 3, b"null")])
def test_mutated_envelopes_raise_nothing_but_the_typed_error(changes: list[tuple[int, int, bytes]]) -> None:
    """Fault 24: random changes of valid envelopes."""
    data = VALID
    for position, removed, inserted in changes:
        data = data[:position] + inserted + data[position + removed :]
    reads_or_refuses(data)


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.datetimes().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = sorted(json.loads(VALID))


@given(st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=6), _anything, max_size=3))
def test_fields_of_any_value_raise_nothing_but_the_typed_error(changes: dict[str, Any]) -> None:
    """Faults 24 and 26: every field, with every kind of JSON value, including NaN as Python writes it."""
    reads_or_refuses(json.dumps({**json.loads(VALID), **changes}).encode())


@given(_anything)
def test_any_argument_arrives_as_sent_or_is_refused(value: Any) -> None:
    """Fault 26: no value is changed silently on the way."""
    try:
        call = take_any.call(value)
    except EnvelopeError:
        return
    assert take_any.signature.decode(call.payload)["a"] == value
