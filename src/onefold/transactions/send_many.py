"""Stage 2, send: many messages in one commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import SystemClock, give_way, system_random
from onefold.errors import ConfigurationError, StoreConflictError
from onefold.message.envelope import Envelope, derived_key
from onefold.store import PutOptions, Store, Stored, Transaction
from onefold.tasks.task import Call
from onefold.transactions.buffer import Buffer

#: Messages of one part, which a server stores while the next part is prepared here.  The first part is small, so that
#: the server begins early.  Each next one is half as large again, which is about what can be prepared meanwhile:
#: every part costs a round trip, so few are better.
_PART_FIRST, _PART_MAX = 100, 500
#: Messages that are prepared before other tasks of the event loop get their turn.
_PREPARED_AT_ONCE = 50
#: How often putting is tried again after a conflict with another sender of the same keys, and the longest pause before.
_CONFLICTS_MAX, _CONFLICT_SECONDS = 5, 0.1

_clock = SystemClock()
_chance = system_random()


async def put_all(store: Store, buffer: Buffer, calls: Iterable[Call[Any]], batch_key: str | None) -> list[Stored]:
    """Store all of them, or none; raises for a call that cannot be sent or with a key of another payload."""
    prepared = _prepare_all(buffer, calls, batch_key)
    # Parts overlap only on a server: SQLite works in this process.  A batch key is judged with all messages at once.
    overlapping = store.capabilities.shared and batch_key is None
    first = list(islice(prepared, _PART_FIRST if overlapping else None))
    if not first:
        return []
    options = PutOptions(batch_key=batch_key)
    try:
        async with store.transaction() as transaction:
            stored = await _put_parts(transaction, first, prepared, options)
            buffer.refuse_clashes(stored)
    except StoreConflictError:
        # Another sender puts the same keys in another order, so both wait for each other.
        await _take_part(prepared, limits.SEND_MANY_MAX + 1)
        stored = await _put_again(store, buffer, options)
    return stored


async def _put_again(store: Store, buffer: Buffer, options: PutOptions) -> list[Stored]:
    """Put all of them once more, in the order of their keys if that is allowed: then two senders cannot deadlock."""
    envelopes: Sequence[Envelope] = buffer.envelopes
    if _may_be_reordered(envelopes):
        envelopes = sorted(envelopes, key=lambda e: (e.message_type, e.idempotency_key))
    for _ in range(_CONFLICTS_MAX):
        await _clock.sleep(_chance.uniform(0, _CONFLICT_SECONDS))
        with suppress(StoreConflictError):
            return await _put_once(store, buffer, envelopes, options)
    return await _put_once(store, buffer, envelopes, options)


async def _put_once(store: Store, buffer: Buffer, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
    async with store.transaction() as transaction:
        stored = {e.id: one for e, one in zip(envelopes, await transaction.put(envelopes, options), strict=True)}
        answers = [stored[e.id] for e in buffer.envelopes]
        buffer.refuse_clashes(answers)
    return answers


def _prepare_all(buffer: Buffer, calls: Iterable[Call[Any]], batch_key: str | None) -> Iterator[Envelope]:
    for number, call in enumerate(calls):
        if number >= limits.SEND_MANY_MAX:
            raise ConfigurationError(
                f"send_many: more than {limits.SEND_MANY_MAX} messages in one commit; send them in parts"
            )
        if batch_key is not None and call.key is None:
            key = derived_key("batch", f"{limits.check_bytes('batch_key', batch_key, 400)}#{number}")
            call = msgspec.structs.replace(call, key=key)
        buffer.add(call)
        yield buffer.envelopes[-1]


async def _put_parts(
    transaction: Transaction, part: list[Envelope], prepared: Iterator[Envelope], options: PutOptions
) -> list[Stored]:
    """Put part after part; where they may be reordered, each is sent before the server has answered the one before."""
    stored: list[Stored] = []
    reorderable = _may_be_reordered(part)
    under_way: deque[asyncio.Future[list[Stored]]] = deque()
    try:
        while part or under_way:
            if part:
                under_way.append(asyncio.ensure_future(transaction.put(part, options)))
            part = await _take_part(prepared, min(len(part) * 3 // 2, _PART_MAX))
            reorderable = reorderable and _may_be_reordered(part)
            # The second part waits for the first one's answer: if keys were taken, the store puts the rest differently.
            ahead = 1 if part and stored and reorderable else 0
            while len(under_way) > ahead:
                await asyncio.wait([under_way[0]])
                stored += under_way.popleft().result()
    finally:
        # The transaction must not end while statements of it are running.
        await asyncio.gather(*under_way, return_exceptions=True)
    return stored


def _may_be_reordered(part: Sequence[Envelope]) -> bool:
    """Whether the order of putting changes nothing: no message has an ordering key or a deduplication key."""
    return all(e.ordering_key is None and e.deduplication_key is None for e in part)


async def _take_part(prepared: Iterator[Envelope], most: int) -> list[Envelope]:
    """Prepare the next part, a few messages at a time, so that the statements under way proceed in between."""
    part: list[Envelope] = []
    while len(part) < most:
        await give_way()
        few = list(islice(prepared, min(_PREPARED_AT_ONCE, most - len(part))))
        if not few:
            break
        part += few
    return part
