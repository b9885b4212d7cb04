"""A use of the flow: recurring tasks, fired by every worker and by none in particular.

A schedule is an entry of the register.  Each worker looks when one is due, by the store's clock, and puts the
occurrence's message and the new watermark in one commit; the entry is compared and set, so one of them wins.
There is no leader: a worker that dies in between leaves nothing behind, and the next one to look does its work.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, to_datetime
from onefold.envelope import Envelope, Occurrence
from onefold.errors import ConfigurationError, StoreUnavailableError, seconds
from onefold.registry import Call, Registry
from onefold.schedule import (
    KIND,
    Catchup,
    Fire,
    ScheduleRecord,
    decode_schedule,
    encode_schedule,
    occurrence_key,
    plan,
)
from onefold.store import Query, Registered, Store
from onefold.timetable import Delay, Timetable

logger = logging.getLogger("onefold")

#: When the store cannot be reached, look again after this long.
_BACK_OFF_SECONDS = 5.0
#: Attempts to write an entry that others write too; each is lost only to somebody who won.
_ROUNDS_MAX = 20
#: What would make a message another one than the occurrence it stands for.
_DECIDED = {
    "key",
    "delay",
    "at",
    "deduplicate",
    "deduplicate_for",
    "if_dead",
    "sequence",
    "correlation_id",
    "causation_id",
}

#: Gives a message its id and lets the app's ``on_send`` see it.
Complete = Callable[[Envelope], Envelope]


# declaring


def template_of(call: Call[Any]) -> Envelope:
    """Return the message that a schedule puts again and again, without what differs each time."""
    if wrong := sorted(call.options.keys() & _DECIDED):
        raise ConfigurationError(f"{call.task.name}: a schedule decides about {', '.join(wrong)} by itself")
    return msgspec.structs.replace(
        call.envelope("-"), idempotency_key="-", correlation_id="-", causation_id="-", fingerprint=call.fingerprint
    )


def check_policy(
    timetable: Timetable, catchup: Catchup | None, window: timedelta | float | None
) -> tuple[Catchup, int | None]:
    """Refuse a catch-up policy that does not exist or cannot be meant; return it with the window in microseconds."""
    if catchup not in (None, "skip", "last", "all"):
        raise ConfigurationError(f"catchup is {catchup!r}; it must be 'skip', 'last' or 'all'")
    if isinstance(timetable, Delay) and (catchup is not None or window is not None):
        raise ConfigurationError("with mode='delay' nothing can be missed, so there is no catchup= and no window=")
    if window is None:
        return catchup or "skip", None
    if catchup not in ("last", "all"):
        raise ConfigurationError("window= bounds how far back catchup='last' or 'all' goes; 'skip' goes nowhere")
    return catchup, round(seconds(window) * MICROSECONDS)


def declared_schedules(registry: Registry, now: int) -> list[ScheduleRecord]:
    """Return the schedules that stand in the code."""
    return [
        ScheduleRecord(
            name=name,
            timetable=one.timetable,
            template=template_of(one.task.call()),
            catchup=one.catchup,
            window=one.window,
            declared=True,
            made_at=now,
            watermark=now,
        )
        for name, one in registry.recurring.items()
    ]


# keeping


async def read_schedules(store: Store) -> dict[str, tuple[ScheduleRecord, int]]:
    """Return every schedule that this version can read, with the version of its entry, by name."""
    return dict(_readable(await store.entries(KIND)))


def _readable(entries: Mapping[str, Registered]) -> Iterable[tuple[str, tuple[ScheduleRecord, int]]]:
    for name, entry in entries.items():
        try:
            yield name, (decode_schedule(entry.value), entry.version)
        except (msgspec.DecodeError, ValueError) as error:
            # Written by a newer version, whose workers take care of it.
            logger.warning("schedule_unreadable schedule=%s error=%s", name, error)


async def keep_schedule(store: Store, wanted: ScheduleRecord) -> ScheduleRecord:
    """Make a schedule, or change the one of this name; return it as it is kept.

    Nothing of the past fires.  One that is there and says the same goes on as if nothing had happened.
    """

    def change(found: ScheduleRecord | None) -> ScheduleRecord:
        if found is None:
            return wanted
        if found.declared and not wanted.declared:
            raise ConfigurationError(
                f"schedule {wanted.name!r} is declared in code; change it there, or use another name"
            )
        if found.definition == wanted.definition:
            return found
        changed = msgspec.structs.replace(
            found,
            timetable=wanted.timetable,
            template=wanted.template,
            catchup=wanted.catchup,
            window=wanted.window,
            declared=wanted.declared,
        )
        if found.timetable == wanted.timetable:
            return changed
        return begin_now(changed, wanted.made_at)

    kept = await change_schedule(store, wanted.name, change)
    assert kept is not None
    return kept


def begin_now(schedule: ScheduleRecord, now: int) -> ScheduleRecord:
    """Let nothing before now fire, and nothing that has fired fire again."""
    return msgspec.structs.replace(
        schedule, watermark=max(schedule.watermark, now), dropped=None, rewound=False, awaiting=None
    )


async def change_schedule(
    store: Store, name: str, change: Callable[[ScheduleRecord | None], ScheduleRecord | None]
) -> ScheduleRecord | None:
    """Change one entry whatever others do to it meanwhile; None removes it.  A crash leaves the old one or the new."""
    for _ in range(_ROUNDS_MAX):
        entry = await store.registered(KIND, name)
        found = None if entry is None else decode_schedule(entry.value)
        wanted = change(found)
        if wanted == found:
            return wanted
        value = None if wanted is None else _encoded(wanted)
        async with store.transaction() as transaction:
            written = await transaction.register(KIND, name, value, version=entry.version if entry else 0)
        if written:
            return wanted
    raise StoreUnavailableError(f"schedule {name!r} was changed by others {_ROUNDS_MAX} times in a row; try again")


def _encoded(schedule: ScheduleRecord) -> bytes:
    value = encode_schedule(schedule)
    if len(value) > limits.SCHEDULE_BYTES_MAX:
        raise ConfigurationError(
            f"schedule {schedule.name!r} has {len(value)} bytes; at most {limits.SCHEDULE_BYTES_MAX} are kept: "
            "keep large arguments in a table of your own and let the schedule name them"
        )
    return value


def message_for(schedule: ScheduleRecord, occurrence: Occurrence, key: str, complete: Complete) -> Envelope:
    """Return the message that stands for one occurrence."""
    made = complete(msgspec.structs.replace(schedule.template, occurrence=occurrence))
    causation = f"schedule:{schedule.name}"
    return msgspec.structs.replace(made, idempotency_key=key, correlation_id=made.id, causation_id=causation)


# firing


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
        #: When each schedule fires next, as of one version of its entry.
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
            await self._rest(pause)

    async def _rest(self, pause: float) -> None:
        waits = [asyncio.ensure_future(self._clock.sleep(pause)), asyncio.ensure_future(self._woken.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def tick(self) -> float:
        """Put what is due now and return after how many seconds to look again.

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
        passed = self._clock.steady() - asked_at
        soonest = min((look for look in looks if look is not None), default=limits.INSTANT_MAX)
        pause = max(soonest - now - passed, 0) / MICROSECONDS
        return min(pause + self._chance.uniform(0, limits.TICK_JITTER_SECONDS), limits.SCHEDULE_RELOAD_SECONDS)

    async def _declare(self) -> None:
        """Bring what stands in the code into the register; done once, when the worker starts."""
        if self._registry.recurring:
            now = await self._store.now()
            for wanted in declared_schedules(self._registry, now):
                await keep_schedule(self._store, wanted)
        self._declared = True

    def _is_mine(self, schedule: ScheduleRecord) -> bool:
        """Whether this worker's code can handle it; one that was removed from the code is fired by nobody."""
        if schedule.declared and schedule.name not in self._registry.recurring:
            return False
        return not schedule.paused and schedule.template.message_type in self._registry.tasks

    async def _ended(self, schedules: list[ScheduleRecord]) -> dict[str, int]:
        """Return when the awaited messages ended, by id; those that are no longer kept have ended long ago."""
        awaited = {one.awaiting: one for one in schedules if one.awaiting is not None}
        if not awaited:
            return {}
        found = await self._store.find(Query(ids=tuple(awaited), limit=len(awaited)))
        ended = {id_: one.watermark for id_, one in awaited.items()}
        for record in found:
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
            messages = [message_for(schedule, one, occurrence_key(one), self._complete) for one in decided.occurrences]
            after = _with_last(decided.after, messages, now)
            return _look_at(after, now) if await self._write(schedule, after, version, messages, now) else now
        except StoreUnavailableError:
            raise
        except Exception:
            # One schedule that cannot be fired, for instance because on_send refuses it, must not stop the others.
            logger.exception("schedule_failed schedule=%s", schedule.name)
            return None

    async def _write(
        self, before: ScheduleRecord, after: ScheduleRecord, version: int, messages: list[Envelope], now: int
    ) -> bool:
        """Put the messages and the new watermark in one commit; False when somebody else was quicker."""
        async with self._store.transaction() as transaction:
            # First, because whoever comes second waits here and then has nothing to undo.
            if not await transaction.register(KIND, before.name, _encoded(after), version=version):
                return False
            stored = await transaction.put(messages) if messages else []
        for message, one in zip(messages, stored, strict=True):
            _log_fired(message, now, duplicate=one.duplicate or one.clash)
        if dropped := after.missed - before.missed:
            logger.warning("schedule_missed schedule=%s occurrences=%d", before.name, dropped)
        return True


def _look_at(schedule: ScheduleRecord, now: int) -> int | None:
    """Return when to look at a schedule again; the end of a run is looked for before the next could be due."""
    if schedule.awaiting is not None and isinstance(schedule.timetable, Delay):
        return now + max(schedule.timetable.every // 2, MICROSECONDS)
    return schedule.next_at(now)


def _with_last(after: ScheduleRecord, messages: list[Envelope], now: int) -> ScheduleRecord:
    if not messages or messages[-1].occurrence is None:
        return after
    last = Fire(messages[-1].occurrence.scheduled_for, now, messages[-1].id)
    awaiting = last.message_id if isinstance(after.timetable, Delay) else None
    return msgspec.structs.replace(after, last=last, awaiting=awaiting)


def _log_fired(message: Envelope, now: int, *, duplicate: bool) -> None:
    occurrence = message.occurrence
    assert occurrence is not None
    logger.info(
        "%s schedule=%s scheduled_for=%s drift=%.3f missed=%d message_id=%s",
        "schedule_fired_before" if duplicate else "schedule_fired",
        occurrence.schedule,
        to_datetime(occurrence.scheduled_for).isoformat(),
        (now - occurrence.scheduled_for) / MICROSECONDS,
        occurrence.missed,
        message.id,
    )
