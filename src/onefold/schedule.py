"""A schedule as it is kept in the register, and the pure decision which of its occurrences are to be put now.

Safety rests on the **watermark**: every fire time up to it is accounted for, put or missed for good.
It is written in the same commit as the messages, compared and set, so whoever is second changes nothing;
and it outlives messages and keys, so nothing fires a second time however late somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, takewhile
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

#: Spans of missed fire times that are remembered, for a clock that is set back; each is a clock that was wrong, or
#: a time when no worker was there.
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
    """Everything about one schedule: what it is, and how far it has come.

    One with a field that this version does not know was written by a newer one, and is left to that.
    """

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
    #: Between which instants fire times were missed, the ends left out; all others up to the watermark have fired.
    #: Should the clock be set back among them, they may fire after all.
    dropped: tuple[Span, ...] = ()
    #: Where the clock was when it was found to be set back, or has got to since; None while it is past the watermark.
    rewound: int | None = None
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
        for start, end in self.dropped if self.rewound is not None else ():
            fire = next(self.timetable.after(max(start, self.cursor)), end)
            if fire < end:
                return fire
        return next(self.timetable.after(self.watermark), None)

    @property
    def cursor(self) -> int:
        """Up to when everything that was due is dealt with."""
        return self.watermark if self.rewound is None else self.rewound

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
    """Let nothing fire that was meant for before now, and nothing that has fired already.

    Now may be wrong, and so may the watermark be that a wrong clock has left behind.  So fire times that are passed
    over are remembered as dropped, and those that were dropped stay so: they fire if the clock is set back among them.
    """
    awaiting = schedule.awaiting if isinstance(schedule.timetable, Delay) else None
    if now < schedule.watermark:
        return msgspec.structs.replace(schedule, rewound=now, awaiting=awaiting)
    dropped = _longest([*schedule.dropped, (schedule.watermark, now + 1)])
    return msgspec.structs.replace(schedule, watermark=now, dropped=dropped, rewound=None, awaiting=awaiting)


def before(now: int) -> tuple[Span, ...]:
    """Return what a new schedule has not fired: everything up to now, which a wrong clock may have told."""
    return ((0, now + 1),)


def _set_back(schedule: ScheduleRecord, now: int) -> Plan | None:
    """The clock was set back: what has fired does not fire again, what was dropped may fire in its time after all.

    So a clock that was wrong by a year for a minute does not silence a schedule for a year.
    What was dropped before now was dealt with then.
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
    #: Everything due up to here is dealt with.
    until: int
    #: How many fire times above the watermark have no message of their own.
    missed: int


def _catch_up(schedule: ScheduleRecord, timetable: Cron | Rate, now: int) -> _Caught | None:
    """Apply the catch-up policy to what has become due and has not fired; None when there is nothing."""
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
    """Return the spans, their beginnings left out, in which every fire time is due and has not fired."""
    cursor = schedule.cursor
    spans = [(max(start, cursor), min(end - 1, now)) for start, end in schedule.dropped]
    spans.append((max(schedule.watermark, cursor), now))
    return [(start, end) for start, end in spans if start < end]


def _still_dropped(schedule: ScheduleRecord, timetable: Cron | Rate, found: _Caught) -> tuple[Span, ...]:
    """Return where there are fire times that were missed, after some have fired."""
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
    """Return as many spans as are remembered: the longest matter most, and what is forgotten is missed for good."""
    return tuple(sorted(sorted(spans, key=lambda one: one[0] - one[1])[:_DROPPED_MAX]))


def _within(timetable: Cron | Rate, start: int, end: int) -> Iterator[int]:
    return takewhile(lambda fire: fire <= end, timetable.after(start))


def _count(timetable: Cron | Rate, start: int, end: int) -> int:
    return timetable.count(start, end, most=limits.MISSED_MAX) if start < end else 0


def _occurrence(schedule: ScheduleRecord, fire: int, missed: int = 0) -> Occurrence:
    return Occurrence(schedule.name, fire, missed, schedule.timetable.timezone)
