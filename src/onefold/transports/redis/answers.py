"""Turning the answers of a Redis server into deliveries; an answer of any other shape is refused as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import InvalidResponse

from onefold import limits
from onefold.transport import Delivery, read
from onefold.transports.redis.parser import DROPPED, Cut

#: The field of an entry that holds the envelope, as canonical JSON.
FIELD = b"envelope"

_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream as the server sent it, or what was kept of it."""

    id: str
    fields: Mapping[bytes, bytes]

    @property
    def is_whole(self) -> bool:
        """Whether every value of it was kept, or the beginning of it."""
        # By identity: an empty value is equal to it.
        return not any(one is DROPPED for both in self.fields.items() for one in both)

    @property
    def size(self) -> int:
        """How many bytes it has; of one that is not whole, more than one answer may have."""
        if not self.is_whole:
            return limits.PULL_BYTES_MAX + 1
        return sum(_size(name) + _size(value) for name, value in self.fields.items())


def entries_of(found: Any) -> list[Entry]:
    """Return the entries of an answer, without those that are not in their stream any more."""
    entries: list[Entry] = []
    for id_, fields in found:
        if id_ is None:
            continue
        if not isinstance(fields, dict) or not fields:
            raise InvalidResponse("an entry without fields")
        if not all(isinstance(one, bytes) for both in fields.items() for one in both):
            raise InvalidResponse("an entry with a value that is no text")
        entries.append(Entry(_id_of(id_), fields))
    return entries


def new_entries_of(found: Any) -> list[Entry]:
    """Return the entries that a read of one stream answered with."""
    return [entry for _, entries in found or () for entry in entries_of(entries)]


def pending_of(found: Any) -> dict[str, int]:
    """Return of each pending entry that was told of how often it has been delivered."""
    return {_id_of(one["message_id"]): int(one["times_delivered"]) for one in found}


def _id_of(id_: Any) -> str:
    if not isinstance(id_, bytes) or not _ID.fullmatch(id_):
        raise InvalidResponse("something that is no id of an entry")
    return id_.decode()


def deliverable(entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Tell entries that can be delivered from those that found no room in their answer behind others.

    The first of an answer had all the room there is, so if some of it is missing it is too large for anybody.
    """
    fit: list[Entry] = []
    starved: list[Entry] = []
    for place, entry in enumerate(entries):
        (fit if place == 0 or entry.is_whole else starved).append(entry)
    return fit, starved


def delivery_of(source: str, entry: Entry, times: int) -> Delivery:
    """Return what the receiver is given: the envelope, or the bytes that are none, or the beginning of too many."""
    body, size = entry.fields.get(FIELD), entry.size
    if body is not None and entry.is_whole:
        size = _size(body)
    if size <= limits.ENVELOPE_BYTES_MAX:
        return Delivery(source, entry.id, read(_object(entry.fields) if body is None else body), times)
    beginning = _object(_first(entry.fields)) if body is None else body
    return Delivery(source, entry.id, bytes(beginning[: limits.REFUSED_BYTES_MAX]), times, whole_size=size)


def _object(fields: Mapping[bytes, bytes]) -> bytes:
    """Write an entry that is not from onefold as JSON, all of it, for a reader of the user's own."""
    return msgspec.json.encode({_text(name): _text(value) for name, value in fields.items()})


def _first(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return as many fields as are kept of an entry that is too large."""
    found: dict[bytes, bytes] = {}
    left = limits.REFUSED_BYTES_MAX
    for name, value in fields.items():
        if left <= 0:
            break
        found[name] = value[:left]
        left -= len(name) + len(value)
    return found


def _size(value: bytes) -> int:
    return value.size if isinstance(value, Cut) else len(value)


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")
