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
from onefold.envelope import Envelope, derived_key
from onefold.errors import ConfigurationError, StoreConflictError
from onefold.store import PutOptions, Store, Stored, Transaction
from onefold.task import Call
from onefold.transaction import Buffer

#: Messages that a server stores while the next are prepared here.  The first are few, so that it begins early; the next
#: are half as many again, which is about what can be prepared meanwhile, and the fewer parts the less they cost.
_PART_FIRST, _PART_MAX = 100, 500
#: Messages that are prepared in one go.
_BITE = 50
#: Conflicts with other senders of the same keys before it is given up, and the longest pause before each next try.
_CONFLICTS_MAX, _CONFLICT_SECONDS = 5, 0.1

_machine = SystemClock()
_chance = system_random()


async def put_all(store: Store, buffer: Buffer, calls: Iterable[Call[Any]], batch_key: str | None) -> list[Stored]:
    """Store all of them, or none; a call that cannot be sent, or whose key is another's, raises."""
    adding = _add_all(buffer, calls, batch_key)
    # SQLite works in this process, so preparing meanwhile gains nothing there; a batch key covers all of them at once.
    overlapping = store.capabilities.shared and batch_key is None
    first = list(islice(adding, _PART_FIRST if overlapping else None))
    if not first:
        return []
    options = PutOptions(batch_key=batch_key)
    try:
        async with store.transaction() as transaction:
            stored = await _put_parts(transaction, first, adding, options)
            buffer.refuse_clashes(stored)
    except StoreConflictError:
        # Another sender has the same keys, in another order.
        await _take_part(adding, limits.SEND_MANY_MAX + 1)
        stored = await _put_again(store, buffer, options)
    return stored


async def _put_again(store: Store, buffer: Buffer, options: PutOptions) -> list[Stored]:
    """Put all of them once more, in the order of their keys where they may be: so two senders cannot get entangled."""
    envelopes: Sequence[Envelope] = buffer.envelopes
    if _may_be_overtaken(envelopes):
        envelopes = sorted(envelopes, key=lambda e: (e.message_type, e.idempotency_key))
    for _ in range(_CONFLICTS_MAX):
        await _machine.sleep(_chance.uniform(0, _CONFLICT_SECONDS))
        with suppress(StoreConflictError):
            return await _put_once(store, buffer, envelopes, options)
    return await _put_once(store, buffer, envelopes, options)


async def _put_once(store: Store, buffer: Buffer, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
    async with store.transaction() as transaction:
        stored = {e.id: one for e, one in zip(envelopes, await transaction.put(envelopes, options), strict=True)}
        answers = [stored[e.id] for e in buffer.envelopes]
        buffer.refuse_clashes(answers)
    return answers


def _add_all(buffer: Buffer, calls: Iterable[Call[Any]], batch_key: str | None) -> Iterator[Envelope]:
    for number, call in enumerate(calls):
        if number >= limits.SEND_MANY_MAX:
            raise ConfigurationError(f"more than {limits.SEND_MANY_MAX} messages in one commit; send them in parts")
        if batch_key is not None and call.key is None:
            key = derived_key("batch", f"{limits.check_bytes('batch_key', batch_key, 400)}#{number}")
            call = msgspec.structs.replace(call, key=key)
        buffer.add(call)
        yield buffer.envelopes[-1]


async def _put_parts(
    transaction: Transaction, part: list[Envelope], adding: Iterator[Envelope], options: PutOptions
) -> list[Stored]:
    """Put part after part; the server has the next before it is done with the last."""
    stored: list[Stored] = []
    overtaking = _may_be_overtaken(part)
    under_way: deque[asyncio.Future[list[Stored]]] = deque()
    try:
        while part or under_way:
            if part:
                under_way.append(asyncio.ensure_future(transaction.put(part, options)))
            part = await _take_part(adding, min(len(part) * 3 // 2, _PART_MAX))
            overtaking = overtaking and _may_be_overtaken(part)
            # Nothing follows the first part before it tells whether its keys were free.
            ahead = 1 if part and stored and overtaking else 0
            while len(under_way) > ahead:
                await asyncio.wait([under_way[0]])
                stored += under_way.popleft().result()
    finally:
        # Nothing may be under way in a transaction that is about to be left.
        await asyncio.gather(*under_way, return_exceptions=True)
    return stored


def _may_be_overtaken(part: Sequence[Envelope]) -> bool:
    """Whether no order is at stake: messages are in no line, and their keys are judged in one statement."""
    return all(e.ordering_key is None and e.deduplication_key is None for e in part)


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
