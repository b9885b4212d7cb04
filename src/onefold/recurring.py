"""A use of the flow: recurring tasks, as they are declared, made, changed and looked at.

A schedule is an entry of the register, compared and set by everybody who changes it.
``ticker.py`` fires what is due; nothing here does, except when a person asks for a run now.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, new_id, to_datetime
from onefold.envelope import UNKEYED, Envelope, Occurrence
from onefold.errors import ConfigurationError, StoreError, StoreUnavailableError, seconds
from onefold.registry import Registry
from onefold.schedule import KIND, Catchup, ScheduleRecord, before, begin_now, decode_schedule, encode_schedule
from onefold.store import Registered, Store
from onefold.task import Call
from onefold.timetable import Cron, Delay, Timetable, preview, zone_of

logger = logging.getLogger("onefold")

#: Attempts to write an entry that others write too; each is lost only to somebody who won.
_ROUNDS_MAX = 20
#: Options that would make a message another one than the occurrence it stands for.
_DECIDED = frozenset(
    ("key", "delay", "at", "deduplicate", "deduplicate_for", "if_dead", "sequence", "correlation_id", "causation_id")
)

#: Lets the app's ``on_send`` see a message.
Complete = Callable[[Envelope], Envelope]
Change = Callable[[ScheduleRecord], ScheduleRecord]


# declaring


def template_of(call: Call[Any]) -> Envelope:
    """Return the message that a schedule puts again and again, without what differs each time."""
    if wrong := sorted(call.options.keys() & _DECIDED):
        raise ConfigurationError(f"{call.task.name}: a schedule decides about {', '.join(wrong)} by itself")
    return msgspec.structs.replace(call.envelope("-"), idempotency_key="-", correlation_id="-", causation_id="-")


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
    return catchup, round(seconds(window, "window") * MICROSECONDS)


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
            dropped=before(now),
        )
        for name, one in registry.recurring.items()
    ]


# keeping


async def read_schedules(store: Store) -> dict[str, tuple[ScheduleRecord, int]]:
    """Return every schedule that this version can read, with the version of its entry, by name."""
    return dict(_readable(await store.entries(KIND)))


def _readable(entries: Mapping[str, Registered]) -> Iterable[tuple[str, tuple[ScheduleRecord, int]]]:
    for name, entry in sorted(entries.items()):
        try:
            yield name, (decode_schedule(entry.value), entry.version)
        except msgspec.DecodeError as error:
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
        return changed if found.timetable == wanted.timetable else begin_now(changed, wanted.made_at)

    return await change_schedule(store, wanted.name, change)


async def change_schedule(
    store: Store, name: str, change: Callable[[ScheduleRecord | None], ScheduleRecord]
) -> ScheduleRecord:
    """Change one entry whatever others do to it meanwhile.  A crash leaves the old one or the new.

    Raises ``StoreError`` when another version of onefold wrote it, in a form that this one cannot read in full.
    """
    for _ in range(_ROUNDS_MAX):
        entry = await store.registered(KIND, name)
        found = None if entry is None else _decode_known(name, entry)
        wanted = change(found)
        if wanted == found:
            return wanted
        value = encoded(wanted)
        async with store.transaction() as transaction:
            written = await transaction.register(KIND, name, value, version=entry.version if entry else 0)
        if written:
            return wanted
    raise changed_by_others(name)


def changed_by_others(name: str) -> StoreUnavailableError:
    """Return the error for an entry that others write all the time."""
    return StoreUnavailableError(f"schedule {name!r} was changed by others {_ROUNDS_MAX} times in a row; try again")


def _decode_known(name: str, entry: Registered) -> ScheduleRecord:
    """Return a schedule that is to be changed; one that another version wrote would lose what only that one knows."""
    try:
        return decode_schedule(entry.value)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"schedule {name!r} was written by another version of onefold ({error}); "
            "change it with that version, or remove it with unschedule() and make it anew"
        ) from error


def encoded(schedule: ScheduleRecord) -> bytes:
    """Return a schedule as it is kept, or refuse it for its size."""
    value = encode_schedule(schedule)
    if len(value) > limits.SCHEDULE_BYTES_MAX:
        raise ConfigurationError(
            f"schedule {schedule.name!r} has {len(value)} bytes; at most {limits.SCHEDULE_BYTES_MAX} are kept: "
            "keep large arguments in a table of your own and let the schedule name them"
        )
    return value


def message_for(
    schedule: ScheduleRecord, occurrence: Occurrence, *, id_: str, key: str, complete: Complete
) -> Envelope:
    """Return the message that stands for one occurrence."""
    return complete(
        msgspec.structs.replace(
            schedule.template,
            id=id_,
            idempotency_key=key,
            correlation_id=id_,
            causation_id=f"schedule:{schedule.name}",
            occurrence=occurrence,
        )
    )


# for people


class Keeper:
    """Where schedules are kept, and what is needed to change one and to put its message."""

    def __init__(
        self, store: Store, clock: Clock, chance: random.Random, complete: Complete, changed: Callable[[], None]
    ) -> None:
        self.store = store
        self._clock = clock
        self._chance = chance
        self._complete = complete
        self._changed = changed

    async def add(
        self, name: str, template: Envelope, timetable: Timetable, catchup: Catchup, window: int | None
    ) -> Schedule:
        """Make or change a schedule; durable when it returns."""
        limits.check_name("schedule", name)
        known = await self.store.entries(KIND)
        if name not in known and len(known) >= limits.SCHEDULES_MAX:
            raise ConfigurationError(
                f"there are {len(known)} schedules; at most {limits.SCHEDULES_MAX} are allowed: keep the many in a "
                "table of your own, and let one schedule send what is due"
            )
        now = await self.store.now()
        wanted = ScheduleRecord(
            name=name,
            timetable=timetable,
            template=template,
            catchup=catchup,
            window=window,
            made_at=now,
            watermark=now,
            dropped=before(now),
        )
        kept = await keep_schedule(self.store, wanted)
        self._changed()
        return Schedule(kept, now, self)

    async def all(self) -> dict[str, Schedule]:
        """Return every schedule by its name."""
        found = await read_schedules(self.store)
        now = await self.store.now()
        return {name: Schedule(record, now, self) for name, (record, _) in found.items()}

    async def remove(self, name: str) -> bool:
        """Forget a schedule; True when it was there.  What it has put stays."""
        for _ in range(_ROUNDS_MAX):
            entry = await self.store.registered(KIND, name)
            if entry is None:
                return False
            # Not read: also one that another version wrote can be removed.
            async with self.store.transaction() as transaction:
                removed = await transaction.register(KIND, name, None, version=entry.version)
            if removed:
                self._changed()
                return True
        raise changed_by_others(name)

    async def change(self, name: str, change: Change) -> ScheduleRecord:
        """Change a schedule that must be there."""

        def change_found(found: ScheduleRecord | None) -> ScheduleRecord:
            if found is None:
                raise ConfigurationError(f"there is no schedule {name!r} any more")
            return change(found)

        changed = await change_schedule(self.store, name, change_found)
        self._changed()
        return changed

    async def put(self, schedule: ScheduleRecord) -> str:
        """Put a message for now, out of turn, and return its id."""
        now = await self.store.now()
        id_ = new_id(self._clock.now(), self._chance)
        occurrence = Occurrence(schedule.name, now, timezone=schedule.timetable.timezone)
        message = message_for(schedule, occurrence, id_=id_, key=f"{UNKEYED}{id_}", complete=self._complete)
        await self.store.put([message])
        return id_


class Schedule:
    """A schedule as people see it, at the moment it was asked for, with what can be done to it."""

    def __init__(self, record: ScheduleRecord, now: int, keeper: Keeper) -> None:
        self._keeper = keeper
        self._now = now
        self._take(record)

    def _take(self, record: ScheduleRecord) -> None:
        self.record = record
        self.name = record.name
        #: The task whose messages it puts.
        self.task = record.template.message_type
        #: Its cron expression or interval, in words.
        self.timetable = str(record.timetable)
        self.timezone = record.timetable.timezone
        self.paused = record.paused
        #: Whether it stands in code rather than having been made at run time.
        self.declared = record.declared
        #: How many occurrences have been put, and how many have gone by without.
        self.fired, self.missed = record.fired, record.missed
        self.next_at = self._moment(record.next_at(self._now))
        self.last_at = self._moment(None if record.last is None else record.last.scheduled_for)

    def _moment(self, instant: int | None) -> datetime | None:
        return None if instant is None else to_datetime(instant).astimezone(zone_of(self.timezone))

    @property
    def drift(self) -> timedelta | None:
        """How late the last occurrence was put."""
        last = self.record.last
        return None if last is None else timedelta(microseconds=last.fired_at - last.scheduled_for)

    def preview(self, number: int = 5) -> list[datetime]:
        """Return when it will fire next if it is not paused, changed or behind."""
        return preview(self.record.timetable, max(self._now, self.record.watermark), number)

    async def pause(self) -> bool:
        """Fire nothing until it is resumed; True when it was not paused."""
        return await self._switch(True)

    async def resume(self) -> bool:
        """Fire again from now on; what would have fired meanwhile does not.  True when it was paused."""
        return await self._switch(False)

    async def _switch(self, paused: bool) -> bool:
        self._now = await self._keeper.store.now()
        was: list[bool] = []

        def change(found: ScheduleRecord) -> ScheduleRecord:
            was.append(found.paused)
            changed = msgspec.structs.replace(found, paused=paused)
            return begin_now(changed, self._now) if found.paused and not paused else changed

        self._take(await self._keeper.change(self.name, change))
        return was[-1] is not paused

    async def run_now(self) -> str:
        """Put a message now, out of turn, even when paused; returns its id.  The next occurrences stay as they are."""
        return await self._keeper.put(self.record)

    async def remove(self) -> bool:
        """Forget it; True when it was there.  One that stands in code comes back with the next start of a worker."""
        return await self._keeper.remove(self.name)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON; times are in UTC."""
        record, last = self.record, self.record.last
        return {
            "name": self.name,
            "task": self.task,
            "queue": record.template.queue,
            **_written(record.timetable),
            "timezone": self.timezone,
            "catchup": record.catchup,
            "window_seconds": None if record.window is None else record.window / MICROSECONDS,
            "declared": self.declared,
            "paused": self.paused,
            "made_at": to_datetime(record.made_at).isoformat(),
            "next_at": _utc(record.next_at(self._now)),
            "last_at": _utc(None if last is None else last.scheduled_for),
            "last_fired_at": _utc(None if last is None else last.fired_at),
            "last_message_id": None if last is None else last.message_id,
            "drift_seconds": None if self.drift is None else self.drift.total_seconds(),
            "fired": self.fired,
            "missed": self.missed,
        }

    def __repr__(self) -> str:
        return f"<schedule {self.name} {self.timetable}{' (paused)' if self.paused else ''}>"


def _written(timetable: Timetable) -> dict[str, Any]:
    if isinstance(timetable, Cron):
        return {"cron": timetable.expression, "every_seconds": None, "mode": None}
    mode = "delay" if isinstance(timetable, Delay) else "rate"
    return {"cron": None, "every_seconds": timetable.every / MICROSECONDS, "mode": mode}


def _utc(instant: int | None) -> str | None:
    return None if instant is None else to_datetime(instant).isoformat()
