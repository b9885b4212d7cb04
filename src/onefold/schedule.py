"""A schedule as it is kept in the register, and the pure decision which of its occurrences are to be put now.

Safety rests on the **watermark**: every fire time up to it is accounted for, put or missed for good.
It is written in the same commit as the messages, compared and set, so whoever is second changes nothing;
and it outlives messages and keys, so nothing fires a second time however late somebody looks.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import Literal, NamedTuple

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime
from onefold.envelope import SCHEDULED, Envelope, Occurrence
from onefold.timetable import Cron, Delay, Rate, Timetable

#: The kind of the entries in the register.
KIND = "schedule"

#: What becomes of occurrences that nobody was there to fire.
Catchup = Literal["skip", "last", "all"]

_GRACE = round(limits.CATCH_UP_GRACE_SECONDS * MICROSECONDS)


class Fire(msgspec.Struct, frozen=True):
    """One occurrence that was put as a message."""

    scheduled_for: int
    fired_at: int
    message_id: str


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything about one schedule: what it is, and how far it has come."""

    name: str
    timetable: Timetable
    #: What is put at each occurrence; id, key and occurrence are filled in then.
    template: Envelope
    catchup: Catchup = "skip"
    #: Missed occurrences older than this many microseconds are not caught up; None sets no bound.
    window: int | None = None
    #: Whether it stands in code: then only workers whose code has it fire it.
    declared: bool = False
    paused: bool = False
    made_at: int
    watermark: int
    #: The fire times after the first and before the second were missed, so they may still fire should the clock be set
    #: back among them; all others below the watermark have fired.
    dropped: tuple[int, int] | None = None
    #: Whether the clock was found to be set back to a time within ``dropped``.
    rewound: bool = False
    #: With a delay: the message whose end the next fire time is counted from.
    awaiting: str | None = None
    fired: int = 0
    missed: int = 0
    last: Fire | None = None

    @property
    def definition(self) -> tuple[object, ...]:
        """What a person said about it, as opposed to what has happened since."""
        return (self.timetable, self.template, self.catchup, self.window, self.declared)

    def next_at(self, now: int) -> int | None:
        """Return when it fires next; None while it is paused or its last run has not ended."""
        if self.paused or self.awaiting is not None:
            return None
        if isinstance(self.timetable, Delay):
            return min(self.watermark, now) + self.timetable.every
        if self.rewound and self.dropped is not None and now < self.watermark:
            again = next(self.timetable.after(self.dropped[0]), self.dropped[1])
            if again < self.dropped[1]:
                return again
        return next(self.timetable.after(self.watermark), None)

    def __repr__(self) -> str:
        # Without the payload: what is printed or logged is no place for it.
        return f"<schedule {self.name} {self.timetable}>"


encode_schedule = msgspec.json.Encoder(order="deterministic").encode
decode_schedule = msgspec.json.Decoder(ScheduleRecord).decode


class Plan(NamedTuple):
    """What is to be put, and the schedule as it stands when that is done."""

    occurrences: list[Occurrence]
    after: ScheduleRecord


def occurrence_key(occurrence: Occurrence) -> str:
    """Name one occurrence: the same for everybody who would put it."""
    return f"{SCHEDULED}{occurrence.schedule}@{to_datetime(occurrence.scheduled_for).isoformat()}"


def plan(schedule: ScheduleRecord, now: int, ended_at: int | None = None) -> Plan | None:
    """Decide what to put now; None when there is nothing to write down.

    ``ended_at`` says when the awaited run ended, for schedules with a delay; None while it has not.
    """
    if schedule.paused:
        return None
    if isinstance(schedule.timetable, Delay):
        return _plan_delay(schedule, schedule.timetable, now, ended_at)
    if now < schedule.watermark:
        return _plan_behind(schedule, schedule.timetable, now)
    found = _catch_up(schedule, schedule.timetable, schedule.watermark, now, now)
    if found is None:
        return None
    dropped = None
    if found.missed:
        first = found.occurrences[0].scheduled_for if found.occurrences else found.until + 1
        dropped = (schedule.watermark, first)
    return Plan(
        found.occurrences,
        msgspec.structs.replace(
            schedule,
            watermark=found.until,
            dropped=_longer(schedule.dropped, dropped, found.until),
            rewound=False,
            fired=schedule.fired + len(found.occurrences),
            missed=schedule.missed + found.missed,
        ),
    )


def _plan_behind(schedule: ScheduleRecord, timetable: Cron | Rate, now: int) -> Plan | None:
    """The clock was set back: what has fired does not fire again, what was dropped may fire in its time after all.

    So a clock that was wrong by a year for a minute does not silence a schedule for a year.
    """
    if schedule.dropped is None or not schedule.dropped[0] <= now < schedule.dropped[1]:
        return None
    start, end = schedule.dropped
    if not schedule.rewound:
        # What lies before now was dealt with when it was dropped.
        return Plan([], msgspec.structs.replace(schedule, dropped=(now, end), rewound=True))
    found = _catch_up(schedule, timetable, start, min(now, end - 1), now)
    if found is None:
        return None
    # They were counted as missed when they were dropped.
    fired = len(found.occurrences)
    return Plan(
        found.occurrences,
        msgspec.structs.replace(
            schedule, dropped=(found.until, end), fired=schedule.fired + fired, missed=max(schedule.missed - fired, 0)
        ),
    )


def _plan_delay(schedule: ScheduleRecord, timetable: Delay, now: int, ended_at: int | None) -> Plan | None:
    changed = schedule
    if schedule.awaiting is not None:
        if ended_at is None:
            return None
        changed = msgspec.structs.replace(changed, awaiting=None, watermark=max(changed.watermark, ended_at))
    if changed.watermark > now:  # the clock was set back
        changed = msgspec.structs.replace(changed, watermark=now)
    fire = changed.watermark + timetable.every
    if fire > now:
        return None if changed is schedule else Plan([], changed)
    return Plan(
        [Occurrence(schedule.name, fire)], msgspec.structs.replace(changed, watermark=fire, fired=changed.fired + 1)
    )


class _Caught(NamedTuple):
    occurrences: list[Occurrence]
    #: Everything up to here is accounted for.
    until: int
    #: How many of them have no message of their own.
    missed: int


def _catch_up(schedule: ScheduleRecord, timetable: Cron | Rate, after: int, until: int, now: int) -> _Caught | None:
    """Apply the catch-up policy to the occurrences later than ``after`` and not later than ``until``."""
    latest = timetable.latest(until)
    if latest is None or latest <= after:
        return None
    horizon = after if schedule.window is None else max(after, now - schedule.window)
    if schedule.catchup == "all":
        due = takewhile(lambda fire: fire <= until, timetable.after(horizon))
        fires = [_occurrence(schedule, fire) for fire in islice(due, limits.CATCH_UP_MAX)]
        missed = timetable.count(after, horizon, most=limits.MISSED_MAX) if horizon > after else 0
        return _Caught(fires, fires[-1].scheduled_for if fires else latest, missed)
    total = timetable.count(after, latest, most=limits.MISSED_MAX)
    if schedule.catchup == "skip":
        fires = [_occurrence(schedule, latest)] if now - latest < _GRACE else []
    else:
        stands_for = timetable.count(horizon, latest, most=limits.MISSED_MAX)
        fires = [_occurrence(schedule, latest, missed=stands_for - 1)] if latest > horizon else []
    return _Caught(fires, latest, total - len(fires))


def _occurrence(schedule: ScheduleRecord, fire: int, missed: int = 0) -> Occurrence:
    return Occurrence(schedule.name, fire, missed, schedule.timetable.timezone)


def _longer(old: tuple[int, int] | None, new: tuple[int, int] | None, watermark: int) -> tuple[int, int] | None:
    """Choose which stretch of missed fire times to remember: the longer, unless it is long over."""
    if old is None or new is None:
        return new or old
    length = old[1] - old[0]
    return old if length > new[1] - new[0] and watermark - old[1] < length else new
