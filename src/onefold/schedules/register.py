"""A use of the flow: the schedules of recurring tasks: declared, made, changed and listed.

A schedule is an entry of the register, and every change of it is a compare-and-set.
``ticker.py`` fires due schedules; here a message is put only when an operator asks for a run now.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, new_id, to_datetime, zone_of
from onefold.errors import ConfigurationError, EnvelopeError, StoreError, StoreUnavailableError, seconds
from onefold.message.envelope import UNKEYED, Envelope, Occurrence
from onefold.schedules.plan import KIND, Catchup, ScheduleRecord, before, begin_now, decode_schedule, encode_schedule
from onefold.schedules.timetable import Cron, Delay, Timetable, preview
from onefold.store import Registered, Store
from onefold.tasks.task import Call, Task

logger = logging.getLogger("onefold")

#: Attempts to write an entry; each fails only because another process has written it in between.
_ATTEMPTS_MAX = 20
#: Options that a schedule sets itself, or that would give its messages another identity than their fire time.
_SET_BY_SCHEDULE = frozenset(
    ("key", "delay", "at", "deduplicate", "deduplicate_for", "if_dead", "sequence", "correlation_id", "causation_id")
)

#: Applies the app's ``on_send`` functions to a message.
Complete = Callable[[Envelope], Envelope]
Change = Callable[[ScheduleRecord], ScheduleRecord]


# declaring


def template_of(call: Call[Any]) -> Envelope:
    """Return the message that a schedule puts at each fire time, without the fields that differ each time."""
    if wrong := sorted(call.options.keys() & _SET_BY_SCHEDULE):
        raise ConfigurationError(
            f"{call.task.name}: leave out the options {', '.join(wrong)}; a schedule sets them by itself"
        )
    return msgspec.structs.replace(call.envelope("-"), idempotency_key="-", correlation_id="-", causation_id="-")


def check_policy(
    timetable: Timetable, catchup: Catchup | None, window: timedelta | float | None
) -> tuple[Catchup, int | None]:
    """Refuse a catch-up policy that does not exist or has no effect; return it with the window in microseconds."""
    if catchup not in (None, "skip", "last", "all"):
        raise ConfigurationError(f"catchup is {catchup!r}; it must be 'skip', 'last' or 'all'")
    if isinstance(timetable, Delay) and (catchup is not None or window is not None):
        raise ConfigurationError("with mode='delay' no fire time can be missed; leave out catchup= and window=")
    if window is None:
        return catchup or "skip", None
    if catchup not in ("last", "all"):
        raise ConfigurationError("window= limits how far catchup='last' or 'all' goes back; give one of them with it")
    return catchup, round(seconds(window, "window") * MICROSECONDS)


def declared_schedules(recurring: Mapping[str, Recurring], now: int) -> list[ScheduleRecord]:
    """Return the schedules that are declared in code."""
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
        for name, one in recurring.items()
    ]


# reading and writing


async def read_schedules(store: Store) -> dict[str, tuple[ScheduleRecord, int]]:
    """Return every schedule that this version can read, with the version of its entry, by name."""
    return dict(_readable(await store.entries(KIND)))


def _readable(entries: Mapping[str, Registered]) -> Iterable[tuple[str, tuple[ScheduleRecord, int]]]:
    for name, entry in sorted(entries.items()):
        try:
            yield name, (decode_schedule(entry.value), entry.version)
        except msgspec.DecodeError as error:
            # Written by a newer version of onefold, whose workers fire it.
            logger.warning("schedule_unreadable schedule=%s error=%s", name, error)


async def keep_schedule(store: Store, wanted: ScheduleRecord) -> ScheduleRecord:
    """Make a schedule, or change the one of this name; return it as it is stored.

    No past fire time fires.  A schedule with the same definition is left as it is.
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
    """Change one entry, again if another process has changed it meanwhile.  A crash leaves the old one or the new.

    Raises ``StoreError`` when a newer version of onefold wrote it with fields that this one does not have.
    """
    for _ in range(_ATTEMPTS_MAX):
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
    raise _too_many_changes(name)


def _too_many_changes(name: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"schedule {name!r} was changed by other processes {_ATTEMPTS_MAX} times in a row; try again"
    )


def _decode_known(name: str, entry: Registered) -> ScheduleRecord:
    """Decode a schedule that is to be written; refuse one with unknown fields, because writing it would drop them."""
    try:
        return decode_schedule(entry.value)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"schedule {name!r} was written by another version of onefold ({error}); "
            "change it with that version, or remove it with unschedule() and make it again"
        ) from error


def encoded(schedule: ScheduleRecord) -> bytes:
    """Return a schedule as bytes, or refuse it for its size."""
    value = encode_schedule(schedule)
    if len(value) > limits.SCHEDULE_BYTES_MAX:
        raise ConfigurationError(
            f"schedule {schedule.name!r} has {len(value)} bytes; at most {limits.SCHEDULE_BYTES_MAX} are kept; "
            "keep large arguments in a table of yours and give the schedule their id"
        )
    return value


def message_for(
    schedule: ScheduleRecord, occurrence: Occurrence, *, id_: str, key: str, complete: Complete
) -> Envelope:
    """Return the message of one occurrence."""
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


# for operators


class ScheduleRegister:
    """The schedules of one store, with the verbs on them that operators have."""

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
                f"there are {len(known)} schedules; at most {limits.SCHEDULES_MAX} are allowed; keep them in a table "
                "of yours, and let one schedule send those that are due"
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
        """Remove a schedule; True when it was there.  Messages that it has put stay."""
        for _ in range(_ATTEMPTS_MAX):
            entry = await self.store.registered(KIND, name)
            if entry is None:
                return False
            # Not decoded, so that a schedule written by a newer version can be removed too.
            async with self.store.transaction() as transaction:
                removed = await transaction.register(KIND, name, None, version=entry.version)
            if removed:
                self._changed()
                return True
        raise _too_many_changes(name)

    async def change(self, name: str, change: Change) -> ScheduleRecord:
        """Change a schedule, or raise ``ConfigurationError`` if there is none of this name."""

        def change_found(found: ScheduleRecord | None) -> ScheduleRecord:
            if found is None:
                raise ConfigurationError(f"there is no schedule {name!r} any more; make it again with schedule()")
            return change(found)

        changed = await change_schedule(self.store, name, change_found)
        self._changed()
        return changed

    async def put(self, schedule: ScheduleRecord) -> str:
        """Put a message now, outside of the timetable, and return its id."""
        now = await self.store.now()
        id_ = new_id(self._clock.now(), self._chance)
        occurrence = Occurrence(schedule.name, now, timezone=schedule.timetable.timezone)
        message = message_for(schedule, occurrence, id_=id_, key=f"{UNKEYED}{id_}", complete=self._complete)
        await self.store.put([message])
        return id_


class Schedule:
    """A schedule as it was when it was read, with the verbs that change it."""

    def __init__(self, record: ScheduleRecord, now: int, register: ScheduleRegister) -> None:
        self._register = register
        self._now = now
        self._set_record(record)

    def _set_record(self, record: ScheduleRecord) -> None:
        self.record = record
        self.name = record.name
        #: The task whose messages it puts.
        self.task = record.template.message_type
        #: Its cron expression, or its interval as text.
        self.timetable = str(record.timetable)
        self.timezone = record.timetable.timezone
        self.paused = record.paused
        #: True when it is declared in code, False when it was made at run time.
        self.declared = record.declared
        #: The number of fire times for which a message was put, and of those that were missed.
        self.fired, self.missed = record.fired, record.missed
        self.next_at = self._moment(record.next_at(self._now))
        self.last_at = self._moment(None if record.last is None else record.last.scheduled_for)

    def _moment(self, instant: int | None) -> datetime | None:
        return None if instant is None else to_datetime(instant).astimezone(zone_of(self.timezone))

    @property
    def drift(self) -> timedelta | None:
        """The time between the last fire time and its message."""
        last = self.record.last
        return None if last is None else timedelta(microseconds=last.fired_at - last.scheduled_for)

    def preview(self, number: int = 5) -> list[datetime]:
        """Return the next fire times, as if it were not paused and had no fire times to catch up on."""
        return preview(self.record.timetable, max(self._now, self.record.watermark), number)

    async def pause(self) -> bool:
        """Stop firing until it is resumed; True when it was not paused."""
        return await self._switch(True)

    async def resume(self) -> bool:
        """Fire again from now on; fire times during the pause are dropped.  True when it was paused."""
        return await self._switch(False)

    async def _switch(self, paused: bool) -> bool:
        self._now = await self._register.store.now()
        was: list[bool] = []

        def change(found: ScheduleRecord) -> ScheduleRecord:
            was.append(found.paused)
            changed = msgspec.structs.replace(found, paused=paused)
            return begin_now(changed, self._now) if found.paused and not paused else changed

        self._set_record(await self._register.change(self.name, change))
        return was[-1] is not paused

    async def run_now(self) -> str:
        """Put a message now, even when paused, and return its id.  The timetable is not changed."""
        return await self._register.put(self.record)

    async def remove(self) -> bool:
        """Remove it; True when it was there.  One that is declared in code comes back when the next worker starts."""
        return await self._register.remove(self.name)

    def as_dict(self) -> dict[str, Any]:
        """Return its fields, ready for JSON; times are in UTC."""
        record, last = self.record, self.record.last
        return {
            "name": self.name,
            "task": self.task,
            "queue": record.template.queue,
            **_timetable_fields(record.timetable),
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


def _timetable_fields(timetable: Timetable) -> dict[str, Any]:
    if isinstance(timetable, Cron):
        return {"cron": timetable.expression, "every_seconds": None, "mode": None}
    mode = "delay" if isinstance(timetable, Delay) else "rate"
    return {"cron": None, "every_seconds": timetable.every / MICROSECONDS, "mode": mode}


def _utc(instant: int | None) -> str | None:
    return None if instant is None else to_datetime(instant).isoformat()


@dataclass(frozen=True, slots=True)
class Recurring:
    """A task that workers send by a timetable, as its code declares."""

    task: Task[Any, Any]
    timetable: Timetable
    catchup: Catchup
    #: In microseconds.
    window: int | None

    def __post_init__(self) -> None:
        try:
            self.task.call()
        except (TypeError, EnvelopeError) as error:
            raise ConfigurationError(
                f"{self.task.name} recurs, so it must be callable without arguments ({error}); give each a default, "
                "or schedule a call with arguments with app.schedule()"
            ) from error
