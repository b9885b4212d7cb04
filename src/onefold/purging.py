"""Beside the flow: removing what has outlived its time, every minute, for as long as anything is left to remove."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, give_way
from onefold.errors import StoreError
from onefold.store import Store

logger = logging.getLogger("onefold")


async def keep_purged(store: Store, clock: Clock) -> None:
    """Purge every minute until cancelled; of workers that would purge at the same time one does."""
    while True:
        await clock.sleep(limits.PURGE_SECONDS)
        await _careful(lambda: _purge_all(store, clock))


async def purge_as_much_as(store: Store, settled: int) -> None:
    """Purge at least as many messages as were settled, and a batch more: then the store cannot grow."""
    # Each message comes up twice, first for its body.
    await _careful(lambda: _purge_some(store, 2 * (1 + settled // limits.PURGE_BATCH)))


async def _purge_all(store: Store, clock: Clock) -> None:
    """Purge until a batch is not full; the longer a batch takes, because others want the store, the longer the rest."""
    while True:
        began = clock.steady()
        if not await _purge_batch(store):
            return
        took = (clock.steady() - began) / MICROSECONDS
        # A clock that stands still, as in tests, would never end a rest of no length.
        await (clock.sleep(took * (1 / limits.PURGE_SHARE_MAX - 1)) if took > 0 else give_way())


async def _purge_some(store: Store, batches: int) -> None:
    for _ in range(batches):
        if not await _purge_batch(store):
            return


async def _purge_batch(store: Store) -> bool:
    """Purge one batch, and say whether it was full."""
    async with store.transaction() as transaction:
        return (await transaction.purge()).is_full(limits.PURGE_BATCH)


async def _careful(purge: Callable[[], Awaitable[None]]) -> None:
    """Purge, and only log when the store cannot be reached: the next time is as good."""
    try:
        await purge()
    except StoreError as error:
        logger.warning("store_failed doing=purge error=%s", error)
