"""A schedule as it is kept in the register, and the pure decision which of its occurrences are to be put now.

Safety rests on the **watermark**: each fire time up to it has a message, or was missed for good.
It is written in the same commit as the messages, with a compare-and-set, so a second worker changes nothing;
and it outlives messages and keys, so no fire time fires twice however late a worker looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, takewhile
from typing import Literal, NamedTuple

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime
from onefold.message.envelope import SCHEDULED, Envelope, Occurrence
from onefold.schedules.timetable import Cron, Delay, Interval, Timetable

#: The kind of the entries in the register.
KIND = "schedule"

#: Which fire times are caught up on after no worker has run: none, the last, or all.
Catchup = Literal["skip", "last", "all"]

#: Spans of missed fire times that are remembered, in case the clock is set back into one; each comes from a clock that
#: was wrong, or from a time when no worker ran.
_DROPPED_MAX = 8
_GRACE = round(limits.CATCH_UP_GRACE_SECONDS * MICROSECONDS)

#: Two instants, a beginning and an end.
Span = tuple[int, int]


class Fire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One occurrence that was put as a message."""

    scheduled_for: int
    fired_at: int
    message_id: str


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One schedule: its definition, and how far it has fired.

    A record with an unknown field was written by a newer version of onefold and is left to that version's workers.
    """

    name: str
    timetable: Timetable
    #: The message that is put at each fire time; id, key and occurrence are filled in then.
    template: Envelope
    catchup: Catchup = "skip"
    #: Missed occurrences older than this many microseconds are not caught up; None sets no bound.
    window: int | None = None
    #: Whether it is declared in code: then only workers with that code fire it.
    declared: bool = False
    paused: bool = False
    made_at: int
    watermark: int
    #: Spans in which fire times were missed, without their ends; all others up to the watermark have fired.
    #: The missed ones may still fire if the clock is set back into such a span.
    dropped: tuple[Span, ...] = ()
    #: After the clock was set back: up to where fire times have been decided since; None when past the watermark.
    rewound: int | None = None
    #: With a delay: the id of the message from whose end the next fire time is counted.
    awaiting: str | None = None
    fired: int = 0
    missed: int = 0
    last: Fire | None = None

    @property
    def definition(self) -> tuple[object, ...]:
        """The fields that a user sets, without those that firing changes."""
        return (self.timetable, self.template, self.catchup, self.window, self.declared)

    def next_at(self, now: int) -> int | None:
        """Return the next fire time; None while it is paused or its last run has not ended."""
        if self.paused or self.awaiting is not None:
            return None
        if isinstance(self.timetable, Delay):
            return min(self.watermark, now) + self.timetable.every
        for start, end in self.dropped if self.rewound is not None else ():
            fire = next(self.timetable.after(max(start, self.cursor)), end)
            if fire < end:
                return fire
        return next(self.timetable.after(self.watermark), None)

    @property
    def cursor(self) -> int:
        """The instant up to which all due fire times have been decided, by the present clock."""
        return self.watermark if self.rewound is None else self.rewound

    def __repr__(self) -> str:
        # Without the payload, which may hold secrets and must not get into logs.
        return f"<schedule {self.name} {self.timetable}>"


encode_schedule = msgspec.json.Encoder(order="deterministic").encode
decode_schedule = msgspec.json.Decoder(ScheduleRecord).decode


class Plan(NamedTuple):
    """The occurrences to put now, and the schedule to write with them."""

    occurrences: list[Occurrence]
    after: ScheduleRecord


def occurrence_key(occurrence: Occurrence) -> str:
    """Return the key of one occurrence: the same in every worker, so that it is put once."""
    return f"{SCHEDULED}{occurrence.schedule}@{to_datetime(occurrence.scheduled_for).isoformat()}"


def plan(schedule: ScheduleRecord, now: int, ended_at: int | None = None) -> Plan | None:
    """Decide which occurrences to put now; None when there is nothing to write.

    ``ended_at`` is when the awaited run ended, for schedules with a delay; None while it has not.
    """
    if schedule.paused:
        return None
    if isinstance(schedule.timetable, Delay):
        return _plan_delay(schedule, schedule.timetable, now, ended_at)
    if now < schedule.cursor:
        return _set_back(schedule, now)
    found = _catch_up(schedule, schedule.timetable, now)
    if found is None:
        return None
    caught = found.until > schedule.watermark
    again = sum(1 for one in found.occurrences if one.scheduled_for <= schedule.watermark)
    return Plan(
        found.occurrences,
        msgspec.structs.replace(
            schedule,
            watermark=max(schedule.watermark, found.until),
            dropped=_still_dropped(schedule, schedule.timetable, found),
            rewound=None if caught or schedule.rewound is None else found.until,
            fired=schedule.fired + len(found.occurrences),
            missed=max(schedule.missed + found.missed - again, 0),
        ),
    )


def begin_now(schedule: ScheduleRecord, now: int) -> ScheduleRecord:
    """Advance the watermark to now without firing: earlier fire times are dropped.

    The clock may be wrong now, or may have been when the watermark was written.  So the dropped fire times are
    remembered, together with those dropped before: they fire if the clock is set back before them.
    """
    awaiting = schedule.awaiting if isinstance(schedule.timetable, Delay) else None
    if now < schedule.watermark:
        return msgspec.structs.replace(schedule, rewound=now, awaiting=awaiting)
    dropped = _longest([*schedule.dropped, (schedule.watermark, now + 1)])
    return msgspec.structs.replace(schedule, watermark=now, dropped=dropped, rewound=None, awaiting=awaiting)


def before(now: int) -> tuple[Span, ...]:
    """Return the dropped spans of a new schedule: all time up to now, in case the clock is wrong and is set back."""
    return ((0, now + 1),)


def _set_back(schedule: ScheduleRecord, now: int) -> Plan | None:
    """Decide after the clock was set back: fire times that have fired do not fire again, dropped ones still may.

    So a clock that was a year ahead for a minute does not stop a schedule for a year.
    Spans that were dropped before now stay dropped.
    """
    if any(end - 1 > now for _, end in schedule.dropped):
        return Plan([], msgspec.structs.replace(schedule, rewound=now))
    return None


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
    #: All fire times up to here are decided.
    until: int
    #: Fire times above the watermark that get no message.
    missed: int


def _catch_up(schedule: ScheduleRecord, timetable: Cron | Interval, now: int) -> _Caught | None:
    """Apply the catch-up policy to the fire times that are due and have not fired; None when there are none."""
    due = _due(schedule, now)
    latest = max(
        (fire for start, end in due if (fire := timetable.latest(end)) is not None and fire > start), default=0
    )
    if not latest:
        return None
    horizon = 0 if schedule.window is None else now - schedule.window
    recent = [(max(start, horizon), end) for start, end in due if end > horizon]
    if schedule.catchup == "all":
        each = chain.from_iterable(_within(timetable, *one) for one in recent)
        fires = [_occurrence(schedule, fire) for fire in islice(each, limits.CATCH_UP_MAX)]
    elif schedule.catchup == "skip":
        fires = [_occurrence(schedule, latest)] if now - latest < _GRACE else []
    else:
        stands_for = min(sum(_count(timetable, *one) for one in recent), limits.MISSED_MAX)
        fires = [_occurrence(schedule, latest, missed=stands_for - 1)] if latest > horizon else []
    until = fires[-1].scheduled_for if fires else latest
    fresh = sum(1 for one in fires if one.scheduled_for > schedule.watermark)
    return _Caught(fires, until, max(_count(timetable, schedule.watermark, until) - fresh, 0))


def _due(schedule: ScheduleRecord, now: int) -> list[Span]:
    """Return the spans, without their beginnings, in which every fire time is due and has not fired."""
    cursor = schedule.cursor
    spans = [(max(start, cursor), min(end - 1, now)) for start, end in schedule.dropped]
    spans.append((max(schedule.watermark, cursor), now))
    return [(start, end) for start, end in spans if start < end]


def _still_dropped(schedule: ScheduleRecord, timetable: Cron | Interval, found: _Caught) -> tuple[Span, ...]:
    """Return the spans of missed fire times that are left after the found ones fire."""
    spans = list(schedule.dropped)
    if found.missed:
        spans.append((schedule.watermark, found.until + 1))
    left: list[Span] = []
    for start, end in spans:
        inside = [one.scheduled_for for one in found.occurrences if start < one.scheduled_for < end]
        parts = [(start, inside[0]), (inside[-1], end)] if inside else [(start, end)]
        left += [part for part in parts if next(timetable.after(part[0]), part[1]) < part[1]]
    return _longest(left)


def _longest(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the longest spans, as many as are remembered; fire times in the others are missed for good."""
    return tuple(sorted(sorted(spans, key=lambda one: one[0] - one[1])[:_DROPPED_MAX]))


def _within(timetable: Cron | Interval, start: int, end: int) -> Iterator[int]:
    return takewhile(lambda fire: fire <= end, timetable.after(start))


def _count(timetable: Cron | Interval, start: int, end: int) -> int:
    return timetable.count(start, end, most=limits.MISSED_MAX) if start < end else 0


def _occurrence(schedule: ScheduleRecord, fire: int, missed: int = 0) -> Occurrence:
    return Occurrence(schedule.name, fire, missed, schedule.timetable.timezone)
