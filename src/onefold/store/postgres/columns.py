"""The columns of a put: those of ``message``, and the values that its key and its delivery need beside them.

The columns of ``message`` are those of the one list of envelope fields: a new one needs its type here and nothing else,
because the statements that put are filled in from this mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from onefold.message.envelope import COLUMNS, Envelope, pack_headers
from onefold.store.postgres.wire.arrays import Column, bigints, blobs, flags, ids, texts
from onefold.store.shared.rows import MESSAGE_COLUMNS


class _Given(NamedTuple):
    """A column of a put: its type on the server, and how an envelope tells its value."""

    type: str
    value: Callable[[Envelope], Any]


#: The type of each column of ``message``; the server fills in when it was created.
_MESSAGE_TYPES: Mapping[str, str] = {
    "id": "uuid",
    "message_type": "text",
    "schema_version": "bigint",
    "queue": "text",
    "idempotency_key": "text",
    "correlation_id": "text",
    "causation_id": "text",
    "subject": "text",
    "retention": "bigint",
    "payload": "bytea",
    "headers": "bytea",
}
_FILLED_IN = "created_at"
#: The time, which only tests give.
NOW = "coalesce(%(now)s::bigint, onefold.clock())"
if {*_MESSAGE_TYPES, _FILLED_IN} != {*MESSAGE_COLUMNS}:
    raise TypeError(f"columns without a type: {({*_MESSAGE_TYPES, _FILLED_IN}) ^ {*MESSAGE_COLUMNS}}")

_FIELDS = dict(zip(MESSAGE_COLUMNS, COLUMNS, strict=False))
_GIVEN: Mapping[str, _Given] = {
    **{
        column: _Given(type_, attrgetter(_FIELDS[column]) if column in _FIELDS else pack_headers)
        for column, type_ in _MESSAGE_TYPES.items()
    },
    "fingerprint": _Given("bytea", attrgetter("fingerprint")),
    "takes_key": _Given("boolean", attrgetter("keyed")),
    "delay": _Given("bigint", attrgetter("delay")),
    "due_at": _Given("bigint", attrgetter("due_at")),
    "claimed_as": _Given("text", attrgetter("claimed_as")),
    "gate": _Given("text", attrgetter("gated_by")),
    "priority": _Given("bigint", attrgetter("priority")),
    "ordered": _Given("boolean", lambda e: e.ordering_key is not None),
    "sequence": _Given("bigint", attrgetter("sequence")),
}

_ARRAYS: Mapping[str, Callable[[Sequence[Any]], Column]] = {
    "uuid": ids,
    "text": texts,
    "bigint": bigints,
    "bytea": blobs,
    "boolean": flags,
}

#: Names for the statements that put: the arrays and their columns, and the columns of ``message`` read from those, or
#: for a single message from its parameters.
NAMES: Mapping[str, str] = {
    "put_arrays": ", ".join(f"%({column})s::{given.type}[]" for column, given in _GIVEN.items()),
    "put_columns": ", ".join(_GIVEN),
    "message_given": ", ".join("(SELECT now FROM clock)" if c == _FILLED_IN else c for c in MESSAGE_COLUMNS),
    "message_values": ", ".join(
        NOW if column == _FILLED_IN else f"%({column})s::{_GIVEN[column].type}" for column in MESSAGE_COLUMNS
    ),
}


def columns_of(envelopes: Sequence[Envelope]) -> dict[str, Column]:
    """Return the parameters of ``put``."""
    return {name: _ARRAYS[given.type](list(map(given.value, envelopes))) for name, given in _GIVEN.items()}


def values_of(e: Envelope) -> dict[str, Any]:
    """Return the parameters of ``put_one``."""
    return {name: given.value(e) for name, given in _GIVEN.items()}
