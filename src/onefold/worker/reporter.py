"""Stage 6, lease: progress and beats of handlers are written, and handlers of cancelled messages are cancelled.

Leases are renewed a few times a minute; this asks every second, but only about runs that have lasted for longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, SystemClock
from onefold.errors import StoreUnavailableError
from onefold.handlers.lease import Held
from onefold.handlers.progress import Pulse
from onefold.registry import Registry
from onefold.store import Said, Store

logger = logging.getLogger("onefold")

#: Messages in one statement.
_TOGETHER_MAX = 1_000

#: Looks are paced by real time: a test that advances its clock must not cause one.
_machine = SystemClock()


class Reporter:
    """Reports every run in ``held``, by message id; one that another claim or an operator has taken is cancelled."""

    def __init__(self, store: Store, clock: Clock, held: Mapping[str, Held], registry: Registry) -> None:
        self._store = store
        self._clock = clock
        self._held = held
        self._registry = registry
        self._busy = asyncio.Event()
        self._looking = asyncio.Lock()
        #: Runs at the last look; only those that still run are asked about.
        self._ran: set[Held] = set()
        #: Runs that are over, with a last report that is not written yet.
        self._over: list[Held] = []

    def wake(self) -> None:
        """Begin to look, because there are runs."""
        self._busy.set()

    def hear_last(self, held: Held) -> None:
        """Write the last report of a run that is over, with the next look."""
        self._over.append(held)
        self._busy.set()

    async def run(self) -> None:
        """Look every second while there are runs, until cancelled."""
        while True:
            await self._busy.wait()
            await _machine.sleep(limits.REPORT_SECONDS)
            await self.look()
            if not self._held and not self._over:
                self._busy.clear()

    async def look(self) -> None:
        """Write new reports, and cancel runs that were taken; when the store is unavailable, the next look does it."""
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        running = [held for held in self._held.values() if held.runner is not None and not held.lost]
        over, self._over = self._over, []
        reports = [(held, _report_of(held)) for held in running]
        self._watch(reports)
        asked = [(held, said) for held, said in reports if said is not None or held in self._ran]
        asked += [(held, said) for held in over if (said := _report_of(held)) is not None]
        self._ran = set(running)
        for start in range(0, len(asked), _TOGETHER_MAX):
            await self._report(asked[start : start + _TOGETHER_MAX], over)

    async def _report(self, together: list[tuple[Held, Said | None]], over: list[Held]) -> None:
        try:
            owned = await self._store.report([(held.lease, said) for held, said in together])
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=report messages=%d error=%s", len(together), error)
            for held, said in together:
                if said is not None and held.pulse is not None:
                    held.pulse.untake()
            ended = {held for held, said in together if said is not None and held in over}
            self._over += [held for held in over if held in ended]
            return
        for (held, _), mine in zip(together, owned, strict=True):
            if not mine and held.runner is not None and self._held.get(held.lease.id) is held:
                held.taken_over = True
                held.lose()

    def _watch(self, reports: list[tuple[Held, Said | None]]) -> None:
        """Log once when a handler is silent for longer than its task allows; its lease is not touched."""
        now = self._clock.steady()
        for held, said in reports:
            pulse = held.pulse
            if pulse is None:
                continue
            if said is not None:
                pulse.beat_seen_at, pulse.stalled = now, False
            elif not pulse.stalled and self._is_overdue(held, pulse, now):
                pulse.stalled = True
                envelope = held.lease.envelope
                logger.warning("stalled message_id=%s message_type=%s", envelope.id, envelope.message_type)

    def _is_overdue(self, held: Held, pulse: Pulse, now: int) -> bool:
        within = self._registry.handler(held.lease.envelope).beat_seconds
        return within is not None and now - pulse.beat_seen_at > within * MICROSECONDS


def _report_of(held: Held) -> Said | None:
    return None if held.pulse is None else held.pulse.take()
