"""Turning the replies of a Redis server into deliveries; a reply of an unexpected shape is refused as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import InvalidResponse

from onefold import limits
from onefold.brokers.redis.parser import DROPPED, Cut
from onefold.brokers.transport import Delivery, read

#: The field of an entry that holds the envelope, as canonical JSON.
FIELD = b"envelope"

_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of a stream as the server sent it; large values are cut, see ``parser.py``."""

    id: str
    fields: Mapping[bytes, bytes]

    @property
    def is_whole(self) -> bool:
        """Whether every value was kept, at least its beginning."""
        # By identity, because DROPPED equals an empty value.
        return not any(one is DROPPED for both in self.fields.items() for one in both)

    @property
    def size(self) -> int:
        """The size in bytes; if values were dropped, it counts as more than one reply may have."""
        if not self.is_whole:
            return limits.PULL_BYTES_MAX + 1
        return sum(_size(name) + _size(value) for name, value in self.fields.items())


def entries_of(found: Any) -> list[StreamEntry]:
    """Return the entries of a reply, without those that were removed from their stream."""
    entries: list[StreamEntry] = []
    for id_, fields in found:
        if id_ is None:
            continue
        if not isinstance(fields, dict) or not fields:
            raise InvalidResponse("an entry without fields")
        if not all(isinstance(one, bytes) for both in fields.items() for one in both):
            raise InvalidResponse("an entry with a value that is not a string")
        entries.append(StreamEntry(_id_of(id_), fields))
    return entries


def new_entries_of(found: Any) -> list[StreamEntry]:
    """Return the entries in the reply to a read of one stream."""
    return [entry for _, entries in found or () for entry in entries_of(entries)]


def pending_of(found: Any) -> dict[str, int]:
    """Return the number of deliveries of each pending entry, by its id."""
    return {_id_of(one["message_id"]): int(one["times_delivered"]) for one in found}


def _id_of(id_: Any) -> str:
    if not isinstance(id_, bytes) or not _ID.fullmatch(id_):
        raise InvalidResponse("not an id of an entry")
    return id_.decode()


def deliverable(entries: Iterable[StreamEntry]) -> tuple[list[StreamEntry], list[StreamEntry]]:
    """Divide entries into those to deliver and those whose values were dropped because others filled the reply.

    The first entry of a reply has the whole limit for itself: if values of it were dropped it is delivered without
    them, because another read could not return more.
    """
    fit: list[StreamEntry] = []
    dropped: list[StreamEntry] = []
    for place, entry in enumerate(entries):
        (fit if place == 0 or entry.is_whole else dropped).append(entry)
    return fit, dropped


def delivery_of(source: str, entry: StreamEntry, times: int) -> Delivery:
    """Return a delivery with the envelope, or the bytes if they are not one, or the beginning of a too large entry."""
    body, size = entry.fields.get(FIELD), entry.size
    if body is not None and entry.is_whole:
        size = _size(body)
    if size <= limits.ENVELOPE_BYTES_MAX:
        return Delivery(source, entry.id, read(_object(entry.fields) if body is None else body), times)
    beginning = _object(_first(entry.fields)) if body is None else body
    return Delivery(source, entry.id, bytes(beginning[: limits.REFUSED_BYTES_MAX]), times, whole_size=size)


def _object(fields: Mapping[bytes, bytes]) -> bytes:
    """Encode all fields of an entry that is not from onefold as JSON, for the user's ``read`` function."""
    return msgspec.json.encode({_text(name): _text(value) for name, value in fields.items()})


def _first(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the first fields of a too large entry, up to the bytes that are kept of it."""
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
