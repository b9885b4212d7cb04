"""Beside the flow: work that a worker repeats while it runs; a failure of it does not end the worker."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from onefold.clock import Clock
from onefold.errors import StoreError

logger = logging.getLogger("onefold")

#: After an unexpected error the pause doubles up to this: a retry rarely helps, and the log must not fill with it.
_PAUSE_SECONDS_MAX = 900.0


class Upkeep:
    """Does ``work`` every ``seconds``; ``doing`` names it in the log."""

    def __init__(self, clock: Clock, doing: str, seconds: float, work: Callable[[], Awaitable[object]]) -> None:
        self._clock = clock
        self._doing = doing
        self._seconds = seconds
        self._work = work
        self._failed: type[Exception] | None = None
        #: Seconds before the next time.
        self.pause = seconds

    async def run(self) -> None:
        """Pause and do the work, until cancelled."""
        while True:
            await self._clock.sleep(self.pause)
            await self.do()

    async def do(self) -> None:
        """Do the work once and log its error, an unexpected one with its traceback the first time."""
        try:
            await self._work()
        except StoreError as error:
            logger.warning("store_failed doing=%s error=%s", self._doing, error)
        except Exception as error:
            self.pause = min(2 * self.pause, max(_PAUSE_SECONDS_MAX, self._seconds))
            if type(error) is self._failed:
                logger.warning("upkeep_failed doing=%s error=%s", self._doing, error)
            else:
                logger.exception("upkeep_failed doing=%s error=%s", self._doing, error)
            self._failed = type(error)
            return
        self._failed, self.pause = None, self._seconds
