"""Stage 2, send: many messages in one commit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import give_way
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError
from onefold.store import PutOptions, Store, Stored, Transaction
from onefold.task import Call
from onefold.transaction import Buffer

#: Messages that a server stores while the next are prepared here, and how many of these are prepared in one go.
_PART, _BITE = 250, 50


async def put_all(store: Store, buffer: Buffer, calls: Iterable[Call[Any]], batch_key: str | None) -> list[Stored]:
    """Store all of them, or none; a call that cannot be sent, or whose key is another's, raises."""
    adding = _add_all(buffer, calls, batch_key)
    # SQLite works in this process, so preparing meanwhile gains nothing there; a batch key covers all of them at once.
    overlapping = store.capabilities.shared and batch_key is None
    first = list(islice(adding, _PART if overlapping else None))
    if not first:
        return []
    async with store.transaction() as transaction:
        stored = await _put_parts(transaction, first, adding, PutOptions(batch_key=batch_key))
        buffer.refuse_clashes(stored)
    return stored


def _add_all(buffer: Buffer, calls: Iterable[Call[Any]], batch_key: str | None) -> Iterator[Envelope]:
    for number, call in enumerate(calls):
        if number >= limits.SEND_MANY_MAX:
            raise ConfigurationError(f"more than {limits.SEND_MANY_MAX} messages in one commit; send them in parts")
        if batch_key is not None and call.key is None:
            call = msgspec.structs.replace(call, key=f"{limits.check_bytes('batch_key', batch_key, 400)}#{number}")
        buffer.add(call)
        yield buffer.envelopes[-1]


async def _put_parts(
    transaction: Transaction, part: list[Envelope], adding: Iterator[Envelope], options: PutOptions
) -> list[Stored]:
    stored: list[Stored] = []
    while part:
        putting = asyncio.ensure_future(transaction.put(part, options))
        try:
            part = await _take_part(adding)
        finally:
            # Nothing may be under way in a transaction that is about to be left.
            await asyncio.wait([putting])
        stored += putting.result()
    return stored


async def _take_part(adding: Iterator[Envelope]) -> list[Envelope]:
    """Prepare the next part in small bites, so that what is being sent meanwhile gets on."""
    part: list[Envelope] = []
    while len(part) < _PART and (bite := list(islice(adding, _BITE))):
        part += bite
        await give_way()
    return part
