"""Stage 2, send: many messages in one commit."""

from __future__ import annotations

import asyncio
from collections import deque
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

#: Messages that a server stores while the next are prepared here.  The first are few, so that it begins early; the next
#: are half as many again, which is about what can be prepared meanwhile, and the fewer parts the less they cost.
_PART_FIRST, _PART_MAX = 100, 500
#: Messages that are prepared in one go.
_BITE = 50


async def put_all(store: Store, buffer: Buffer, calls: Iterable[Call[Any]], batch_key: str | None) -> list[Stored]:
    """Store all of them, or none; a call that cannot be sent, or whose key is another's, raises."""
    adding = _add_all(buffer, calls, batch_key)
    # SQLite works in this process, so preparing meanwhile gains nothing there; a batch key covers all of them at once.
    overlapping = store.capabilities.shared and batch_key is None
    first = list(islice(adding, _PART_FIRST if overlapping else None))
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
    """Put part after part; the server has the next before it is done with the last."""
    stored: list[Stored] = []
    under_way: deque[asyncio.Future[list[Stored]]] = deque()
    try:
        while part or under_way:
            if part:
                under_way.append(asyncio.ensure_future(transaction.put(part, options)))
            part = await _take_part(adding, min(len(part) * 3 // 2, _PART_MAX))
            # A connection that turns out to be lost is replaced while nothing but the first part was sent on it,
            # and in a line nobody may overtake those whose keys take longer to judge.
            ahead = 1 if part and stored and not any(e.ordering_key is not None for e in part) else 0
            while len(under_way) > ahead:
                await asyncio.wait([under_way[0]])
                stored += under_way.popleft().result()
    finally:
        # Nothing may be under way in a transaction that is about to be left.
        await asyncio.gather(*under_way, return_exceptions=True)
    return stored


async def _take_part(adding: Iterator[Envelope], most: int) -> list[Envelope]:
    """Prepare the next part in small bites, so that what is being sent meanwhile gets on."""
    part: list[Envelope] = []
    while len(part) < most:
        await give_way()
        bite = list(islice(adding, min(_BITE, most - len(part))))
        if not bite:
            break
        part += bite
    return part
