"""Beside the flow: removing what has outlived its time, a little every minute."""

from __future__ import annotations

import logging

from onefold import limits
from onefold.clock import Clock
from onefold.errors import StoreError
from onefold.store import Store

logger = logging.getLogger("onefold")


async def keep_purged(store: Store, clock: Clock) -> None:
    """Purge now and then until cancelled; several who do it at once only do it sooner."""
    while True:
        await clock.sleep(limits.PURGE_SECONDS)
        try:
            async with store.transaction() as transaction:
                await transaction.purge()
        except StoreError as error:
            logger.warning("store_failed doing=purge error=%s", error)
