"""A use of the flow: firing recurring tasks, without a leader.

Every worker looks for due schedules by the store's clock, and puts the occurrence's message and the new watermark in
one commit with a compare-and-set, so one worker wins and the others have changed nothing.
A worker that dies in between has committed nothing, and the next one that looks fires the occurrence.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Container, Mapping, Sequence

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, new_id, to_datetime
from onefold.errors import StoreError, StoreUnavailableError
from onefold.message.envelope import Envelope, Occurrence
from onefold.schedules.plan import KIND, Fire, Plan, ScheduleRecord, occurrence_key, plan
from onefold.schedules.register import (
    Complete,
    Recurring,
    declared_schedules,
    encoded,
    keep_schedule,
    message_for,
    read_schedules,
)
from onefold.schedules.timetable import Delay
from onefold.store import Query, Store

logger = logging.getLogger("onefold")

#: Pause after a tick in which the store could not be reached.
_BACK_OFF_SECONDS = 5.0


class Ticker:
    """Fires due schedules in one worker; any number of workers may do so on one store."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chance: random.Random,
        recurring: Mapping[str, Recurring],
        types: Container[str],
        complete: Complete,
    ) -> None:
        self._store = store
        self._clock = clock
        self._chance = chance
        self._recurring = recurring
        self._types = types
        self._complete = complete
        self._declared = False
        self._woken = asyncio.Event()
        #: The version of each schedule's entry and its next fire time, computed again only when the entry changes.
        self._next: dict[str, tuple[int, int | None]] = {}

    def wake(self) -> None:
        """Tick now, because a schedule was changed in this process."""
        self._woken.set()

    async def run(self) -> None:
        """Fire due schedules until cancelled."""
        while True:
            self._woken.clear()
            try:
                pause = await self.tick()
            except StoreUnavailableError as error:
                logger.warning("store_unavailable doing=tick error=%s", error)
                pause = _BACK_OFF_SECONDS
            await self._rest(pause + self._chance.uniform(0, limits.TICK_JITTER_SECONDS))

    async def _rest(self, pause: float) -> None:
        waits = [asyncio.ensure_future(self._clock.sleep(pause)), asyncio.ensure_future(self._woken.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def catch_up(self) -> None:
        """Fire everything that is due now, for a worker that returns when it is idle."""
        try:
            while not await self.tick():
                pass
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=tick error=%s", error)

    async def tick(self) -> float:
        """Fire due schedules and return the seconds until the next tick; 0 when more is due already.

        A crash in the middle leaves each schedule as it was, or advanced together with its messages.
        """
        if not self._declared:
            await self._declare()
        schedules = {name: one for name, one in (await read_schedules(self._store)).items() if self._is_mine(one[0])}
        if not schedules:
            return limits.SCHEDULE_RELOAD_SECONDS
        asked_at, now = self._clock.steady(), await self._store.now()
        ended = await self._ended([one for one, _ in schedules.values()])
        instants = [await self._advance(one, version, now, ended) for one, version in schedules.values()]
        soonest = min((instant for instant in instants if instant is not None), default=limits.INSTANT_MAX)
        pause = (soonest - now - (self._clock.steady() - asked_at)) / MICROSECONDS
        return min(max(pause, 0.0), limits.SCHEDULE_RELOAD_SECONDS)

    async def _declare(self) -> None:
        """Write the schedules that are declared in code into the register; once, when the worker starts."""
        if self._recurring:
            now = await self._store.now()
            for wanted in declared_schedules(self._recurring, now):
                try:
                    await keep_schedule(self._store, wanted)
                except StoreUnavailableError:
                    raise
                except StoreError as error:
                    # Written by a newer version of onefold, whose workers fire it; the other schedules are declared.
                    logger.warning("schedule_unreadable schedule=%s error=%s", wanted.name, error)
        self._declared = True

    def _is_mine(self, schedule: ScheduleRecord) -> bool:
        """Whether this worker fires it: its code has the task, and the schedule if that is one declared in code."""
        if schedule.declared and schedule.name not in self._recurring:
            return False
        return not schedule.paused and schedule.template.message_type in self._types

    async def _ended(self, schedules: Sequence[ScheduleRecord]) -> dict[str, int]:
        """Return when the awaited messages ended, by id; one that was purged counts as ended at its fire time."""
        awaited = {one.awaiting: one for one in schedules if one.awaiting is not None}
        if not awaited:
            return {}
        ended = {id_: one.watermark for id_, one in awaited.items()}
        for record in await self._store.find(Query(ids=tuple(awaited), limit=len(awaited))):
            del ended[record.envelope.id]
            if record.state.ended and record.ended_at is not None:
                ended[record.envelope.id] = record.ended_at
        return ended

    async def _advance(self, schedule: ScheduleRecord, version: int, now: int, ended: Mapping[str, int]) -> int | None:
        """Advance one schedule up to now and return when to look at it again."""
        known_version, known_next = self._next.get(schedule.name, (0, None))
        if known_version == version and known_next is not None and schedule.watermark <= now < known_next:
            return known_next
        try:
            decided = plan(schedule, now, ended.get(schedule.awaiting or ""))
            if decided is None:
                self._next[schedule.name] = (version, schedule.next_at(now))
                return _look_at(schedule, now)
            return await self._fire(schedule, version, decided, now)
        except StoreUnavailableError:
            raise
        except Exception:
            # A schedule that cannot be fired, for instance because on_send refuses its message, must not stop the rest.
            logger.exception("schedule_failed schedule=%s", schedule.name)
            return None

    async def _fire(self, schedule: ScheduleRecord, version: int, decided: Plan, now: int) -> int | None:
        """Put the messages and the new watermark in one commit, unless another worker has advanced the schedule."""
        messages = [self._message(schedule, one) for one in decided.occurrences]
        after = _with_last(decided.after, messages, now)
        async with self._store.transaction() as transaction:
            # First, because a worker that loses waits for the row lock here, and has no messages to roll back.
            if not await transaction.register(KIND, schedule.name, encoded(after), version=version):
                return now
            stored = await transaction.put(messages) if messages else []
        for message, one in zip(messages, stored, strict=True):
            _log_fired(message, now, again=one.duplicate or one.clash)
        if dropped := max(after.missed - schedule.missed, 0):
            logger.warning("schedule_missed schedule=%s occurrences=%d", schedule.name, dropped)
        return _look_at(after, now)

    def _message(self, schedule: ScheduleRecord, occurrence: Occurrence) -> Envelope:
        id_ = new_id(self._clock.now(), self._chance)
        return message_for(schedule, occurrence, id_=id_, key=occurrence_key(occurrence), complete=self._complete)


def _look_at(schedule: ScheduleRecord, now: int) -> int | None:
    """Return when to look at a schedule again; with a delay after half of it, to see when the awaited run ended."""
    if schedule.awaiting is not None and isinstance(schedule.timetable, Delay):
        return now + max(schedule.timetable.every // 2, MICROSECONDS)
    return schedule.next_at(now)


def _with_last(after: ScheduleRecord, messages: Sequence[Envelope], now: int) -> ScheduleRecord:
    if not messages or messages[-1].occurrence is None:
        return after
    last = Fire(messages[-1].occurrence.scheduled_for, now, messages[-1].id)
    awaiting = last.message_id if isinstance(after.timetable, Delay) else None
    return msgspec.structs.replace(after, last=last, awaiting=awaiting)


def _log_fired(message: Envelope, now: int, *, again: bool) -> None:
    occurrence = message.occurrence
    if occurrence is None:
        return
    logger.info(
        "%s schedule=%s scheduled_for=%s drift=%.3f missed=%d message_id=%s",
        "schedule_fired_before" if again else "schedule_fired",
        occurrence.schedule,
        to_datetime(occurrence.scheduled_for).isoformat(),
        (now - occurrence.scheduled_for) / MICROSECONDS,
        occurrence.missed,
        message.id,
    )
