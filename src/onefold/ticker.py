"""A use of the flow: firing recurring tasks, by every worker and by none in particular.

Each worker looks when a schedule is due, by the store's clock, and puts the occurrence's message and the new watermark
in one commit; the entry is compared and set, so one of them wins and the others have changed nothing.
There is no leader: a worker that dies in between leaves nothing behind, and the next one to look does its work.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, new_id, to_datetime
from onefold.envelope import Envelope, Occurrence
from onefold.errors import StoreError, StoreUnavailableError
from onefold.recurring import Complete, declared_schedules, encoded, keep_schedule, message_for, read_schedules
from onefold.registry import Registry
from onefold.schedule import KIND, Fire, Plan, ScheduleRecord, occurrence_key, plan
from onefold.store import Query, Store
from onefold.timetable import Delay

logger = logging.getLogger("onefold")

#: When the store cannot be reached, look again after this long.
_BACK_OFF_SECONDS = 5.0


class Ticker:
    """Fires what is due, for one worker; any number of them may do so on one store."""

    def __init__(
        self, store: Store, clock: Clock, chance: random.Random, registry: Registry, complete: Complete
    ) -> None:
        self._store = store
        self._clock = clock
        self._chance = chance
        self._registry = registry
        self._complete = complete
        self._declared = False
        self._woken = asyncio.Event()
        #: When each schedule fires next, as of one version of its entry: most looks find that nothing has changed.
        self._next: dict[str, tuple[int, int | None]] = {}

    def wake(self) -> None:
        """Look at once: a schedule was changed in this process."""
        self._woken.set()

    async def run(self) -> None:
        """Fire what is due until cancelled."""
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
        """Fire everything that is due now, for a worker that will not stay."""
        try:
            while not await self.tick():
                pass
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=tick error=%s", error)

    async def tick(self) -> float:
        """Put what is due and return after how many seconds to look again; 0 when more is due already.

        A crash in the middle leaves each schedule either advanced together with its messages, or as it was.
        """
        if not self._declared:
            await self._declare()
        schedules = {name: one for name, one in (await read_schedules(self._store)).items() if self._is_mine(one[0])}
        if not schedules:
            return limits.SCHEDULE_RELOAD_SECONDS
        asked_at, now = self._clock.steady(), await self._store.now()
        ended = await self._ended([one for one, _ in schedules.values()])
        looks = [await self._advance(one, version, now, ended) for one, version in schedules.values()]
        soonest = min((look for look in looks if look is not None), default=limits.INSTANT_MAX)
        pause = (soonest - now - (self._clock.steady() - asked_at)) / MICROSECONDS
        return min(max(pause, 0.0), limits.SCHEDULE_RELOAD_SECONDS)

    async def _declare(self) -> None:
        """Bring what stands in the code into the register; done once, when the worker starts."""
        if self._registry.recurring:
            now = await self._store.now()
            for wanted in declared_schedules(self._registry, now):
                try:
                    await keep_schedule(self._store, wanted)
                except StoreUnavailableError:
                    raise
                except StoreError as error:
                    # Written by a newer version, whose workers take care of it; the others are declared all the same.
                    logger.warning("schedule_unreadable schedule=%s error=%s", wanted.name, error)
        self._declared = True

    def _is_mine(self, schedule: ScheduleRecord) -> bool:
        """Whether this worker's code can handle it; one that was removed from the code is fired by nobody."""
        if schedule.declared and schedule.name not in self._registry.recurring:
            return False
        return not schedule.paused and schedule.template.message_type in self._registry.tasks

    async def _ended(self, schedules: Sequence[ScheduleRecord]) -> dict[str, int]:
        """Return when the awaited messages ended, by id; those that are no longer kept have ended long ago."""
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
        """Bring one schedule up to now and return when to look at it again."""
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
            # One schedule that cannot be fired, for instance because on_send refuses it, must not stop the others.
            logger.exception("schedule_failed schedule=%s", schedule.name)
            return None

    async def _fire(self, schedule: ScheduleRecord, version: int, decided: Plan, now: int) -> int | None:
        """Put the messages and the new watermark in one commit, unless somebody else was quicker."""
        messages = [self._message(schedule, one) for one in decided.occurrences]
        after = _with_last(decided.after, messages, now)
        async with self._store.transaction() as transaction:
            # First, because whoever comes second waits here and then has nothing to undo.
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
    """Return when to look at a schedule again; the end of a run is looked for before the next could be due."""
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
