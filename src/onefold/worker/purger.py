"""Beside the flow: removing rows that have outlived their retention, every minute."""

from __future__ import annotations

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, give_way
from onefold.store import Store
from onefold.worker.upkeep import Upkeep


async def keep_purged(store: Store, clock: Clock) -> None:
    """Purge every minute until cancelled; when several workers purge at the same time, the store lets one of them."""
    await Upkeep(clock, "purge", limits.PURGE_SECONDS, lambda: _purge_all(store, clock)).run()


async def purge_as_much_as(store: Store, clock: Clock, settled: int) -> None:
    """Purge one batch more than were settled, so that a store on which only such workers run does not grow."""
    # Each message is purged twice: its body first, the rest when its key window is over.
    batches = 2 * (1 + settled // limits.PURGE_BATCH)
    await Upkeep(clock, "purge", limits.PURGE_SECONDS, lambda: _purge_some(store, batches)).do()


async def _purge_all(store: Store, clock: Clock) -> None:
    """Purge until a batch is not full, and pause between batches in proportion to the time that the last one took."""
    while True:
        began = clock.steady()
        if not await _purge_batch(store):
            return
        took = (clock.steady() - began) / MICROSECONDS
        # On a clock that stands still, as in tests, a pause of no length would never end.
        await (clock.sleep(took * (1 / limits.PURGE_SHARE_MAX - 1)) if took > 0 else give_way())


async def _purge_some(store: Store, batches: int) -> None:
    for _ in range(batches):
        if not await _purge_batch(store):
            return


async def _purge_batch(store: Store) -> bool:
    """Purge one batch; return whether it was full."""
    async with store.transaction() as transaction:
        return (await transaction.purge()).is_full(limits.PURGE_BATCH)
