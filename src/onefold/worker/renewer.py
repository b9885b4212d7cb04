"""Stage 6, lease: a worker's leases are renewed, and the handlers of those that were lost are cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, give_way
from onefold.errors import StoreUnavailableError
from onefold.handlers.lease import Held
from onefold.store import Store

logger = logging.getLogger("onefold")

#: Leases renewed by one statement: a larger one would hold the store for longer than senders should wait.
_TOGETHER_MAX = 1_000
#: Leases renewed one by one at the same time: so many blocked rows do not hold up the rest, and no more calls wait for
#: a store that does not answer.
_APART_MAX = 16
#: A lease that could not be renewed is tried again after this part of its length, so several times before it ends.
_AGAIN_AFTER = 0.1


class Renewer:
    """Renews every lease in ``held``, by message id; marks a lost one, and cancels its handler.

    Leases are renewed together.  One row that another transaction has locked blocks the whole statement.  So when there
    is no answer until the next renewal is due, these leases are renewed one by one, beside the renewals of the others.
    ``renewed`` is called with the time of each renewal of the leases together that was answered.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        held: Mapping[str, Held],
        lease_seconds: float,
        renewed: Callable[[int], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._held = held
        self._lease_seconds = lease_seconds
        self._interval = lease_seconds / limits.RENEWALS_PER_LEASE
        self._renewed = renewed
        #: Leases that are renewed one by one, and the tasks that do so.
        self._apart: set[Held] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Renew until cancelled."""
        try:
            while True:
                began = self._clock.steady()
                await self._renew_all(began)
                await self._clock.sleep(self._pause(began))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _renew_all(self, began: int) -> None:
        # A lease that was given up when it ran out is still held until its message is handed back.
        held = [one for one in self._held.values() if not one.lost or one.until > began]
        together = [one for one in held if one not in self._apart]
        unanswered = await self._renew_together(together)
        if not unanswered and (overdue := self._overdue(together)):
            # The answer took longer than the lease: ask once more before they are given up.
            await self._renew_together(overdue)
        if left := [one for one in unanswered if self._is_ours(one)]:
            self._apart.update(left)
            task = asyncio.create_task(self._renew_apart(left), name="onefold-renewer-apart")
            self._tasks.add(task)
            task.add_done_callback(self._end_apart)
        for one in self._overdue(held):
            one.lose()
        if not unanswered and (together or not self._apart):
            self._renewed(began)

    def _end_apart(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieved, so that asyncio does not report it; the next renewal together raises the same error.
            task.exception()

    def _pause(self, began: int) -> float:
        """Return the seconds until the next renewal, or until the first lease ends that could not be renewed."""
        ends = [one.until for one in self._held.values() if not one.lost]
        next_at = min([began + round(self._interval * MICROSECONDS), *ends])
        return max(0.0, (next_at - self._clock.steady()) / MICROSECONDS)

    def _is_ours(self, one: Held) -> bool:
        return not one.lost and self._held.get(one.lease.id) is one

    def _overdue(self, held: list[Held]) -> list[Held]:
        now = self._clock.steady()
        return [one for one in held if one.until <= now and self._is_ours(one)]

    async def _renew_together(self, held: list[Held]) -> list[Held]:
        """Renew these; return those for which the store was unavailable or did not answer in time."""
        parts = [held[start : start + _TOGETHER_MAX] for start in range(0, len(held), _TOGETHER_MAX)]
        errors = await asyncio.gather(*(self._renew(part) for part in parts))
        unanswered: list[Held] = []
        for part, error in zip(parts, errors, strict=True):
            if error is not None:
                logger.warning("store_unavailable doing=extend messages=%d error=%s", len(part), error)
                unanswered += part
        return unanswered

    async def _renew_apart(self, held: list[Held]) -> None:
        """Renew these one by one until each was renewed or is no longer held."""
        try:
            held, error = await self._renew_singly(held)
            if held:
                logger.warning("store_unavailable doing=extend messages=%d error=%s", len(held), error)
            while held:
                await self._clock.sleep(self._lease_seconds * _AGAIN_AFTER)
                held, _ = await self._renew_singly(held)
        finally:
            self._apart.difference_update(held)

    async def _renew_singly(self, held: list[Held]) -> tuple[list[Held], StoreUnavailableError | None]:
        """Try to renew each of these once; return those that were not renewed, and the last error."""
        waiting = deque(held)
        left: list[Held] = []
        last: StoreUnavailableError | None = None

        async def renew_some() -> None:
            nonlocal last
            while waiting:
                one = waiting.popleft()
                if self._is_ours(one) and (error := await self._renew([one])) is not None:
                    left.append(one)
                    last = error
                else:
                    self._apart.discard(one)

        await asyncio.gather(*(renew_some() for _ in range(min(len(held), _APART_MAX))))
        return left, last

    async def _renew(self, held: list[Held]) -> StoreUnavailableError | None:
        """Renew these by one statement; return the error if the store is unavailable or does not answer in time."""
        asked_at = self._clock.steady()
        try:
            kept = await self._answer_in_time(held)
        except StoreUnavailableError as error:
            return error
        until = asked_at + round(self._lease_seconds * MICROSECONDS)
        for one, mine in zip(held, kept, strict=True):
            if mine:
                one.until = max(one.until, until)
            elif self._held.get(one.lease.id) is one:
                one.taken_over = True
                one.lose()
        return None

    async def _answer_in_time(self, held: list[Held]) -> list[bool]:
        """Extend these; wait for the answer until the next renewal is due, or the first of these leases ends.

        Its handler must be cancelled by then.
        """
        extending = asyncio.ensure_future(self._store.extend([one.lease for one in held], lease=self._lease_seconds))
        left = (min(one.until for one in held) - self._clock.steady()) / MICROSECONDS
        # A lease that has already ended is asked about once more, and the answer may take as long as any other.
        giving_up = asyncio.ensure_future(self._clock.sleep(min(left, self._interval) if left > 0 else self._interval))
        try:
            await asyncio.wait({extending, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if not extending.done():
                # After the process was stopped for a while, the answer and the end of the wait come in one turn.
                await give_way()
                await give_way()
            if extending.done():
                return extending.result()
            raise StoreUnavailableError("no answer in time to renew the leases")
        finally:
            giving_up.cancel()
            extending.cancel()
