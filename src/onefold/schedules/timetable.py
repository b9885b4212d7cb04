"""Fire times of recurring tasks: pure arithmetic, without a store and without a clock.

Cron expressions are parsed with ``cronsim``, in the dialect of Debian's cron: five fields, names of days and months,
``L``, ``LW`` and ``#``; when day of month and day of week are both restricted, a date that matches either one fires.
The instants are computed here, date by date in the calendar of the time zone, because zones change their offset by
half hours, around midnight, and once even by a whole day:

- A wall time that is skipped fires once, at the first moment after the gap, if minute and hour are both fixed.
- A wall time that comes twice fires the first time only, if minute and hour are both fixed.
- If minute or hour begins with ``*``, the expression is an interval in elapsed time:
  a skipped wall time does not fire, and one that comes twice fires twice.

Instants are microseconds since 1970 in UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from typing import Literal, NamedTuple

import msgspec
from cronsim import CronSim, CronSimError

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime, to_instant, zone_of
from onefold.errors import ConfigurationError, seconds

_EPOCH = date(1970, 1, 1)
_DAY = timedelta(days=1)
_LAST_MINUTE = time(23, 59, fold=1)
_MICROSECOND = timedelta(microseconds=1)
_MINUTE = 60 * MICROSECONDS
_HOUR = 60 * _MINUTE


class Cron(msgspec.Struct, frozen=True, tag_field="kind", tag="cron"):
    """Fires at the wall times of a cron expression in a time zone."""

    expression: str
    timezone: str = "UTC"

    def __str__(self) -> str:
        return self.expression

    def after(self, instant: int) -> Iterator[int]:
        """Yield the fire times later than an instant, in order."""
        rule, zone = _rule(self.expression), zone_of(self.timezone)
        pending: set[int] = set()
        for day in _dates(rule, _date_of(instant, zone) - _DAY, forward=True):
            pending.update(_moments(rule, zone, day))
            # When a zone sets its clock back over midnight, moments of one date come after the next date has begun.
            tomorrow = _begin(day + _DAY, zone)
            ready = sorted(one for one in pending if one < tomorrow)
            pending.difference_update(ready)
            yield from (one for one in ready if one > instant)
        yield from (one for one in sorted(pending) if one > instant)

    def latest(self, instant: int) -> int | None:
        """Return the last fire time that is not later than an instant."""
        rule, zone = _rule(self.expression), zone_of(self.timezone)
        best: int | None = None
        for day in _dates(rule, _date_of(instant, zone) + _DAY, forward=False):
            if best is not None and day < _date_of(best, zone) - _DAY:
                break
            found = [one for one in _moments(rule, zone, day) if one <= instant]
            best = max(found if best is None else [*found, best], default=None)
        return best

    def count(self, after: int, until: int, *, most: int) -> int:
        """Return how many fire times are later than ``after`` and not later than ``until``, counted up to ``most``."""
        return sum(1 for _ in islice(takewhile(lambda one: one <= until, self.after(after)), most))


class Interval(msgspec.Struct, frozen=True, tag_field="kind", tag="rate"):
    """Fires at a fixed rate: at the anchor, and at multiples of ``every`` before and after it."""

    every: int
    anchor: int = 0

    def __str__(self) -> str:
        return f"every {timedelta(microseconds=self.every)}"

    @property
    def timezone(self) -> str:
        return "UTC"

    def after(self, instant: int) -> Iterator[int]:
        """Yield the fire times later than an instant, in order."""
        fire = self._before(instant) + self.every
        while fire <= limits.INSTANT_MAX:
            yield fire
            fire += self.every

    def latest(self, instant: int) -> int | None:
        """Return the last fire time that is not later than an instant."""
        return self._before(instant)

    def count(self, after: int, until: int, *, most: int) -> int:
        """Return how many fire times are later than ``after`` and not later than ``until``, counted up to ``most``."""
        return min(max((self._before(until) - self._before(after)) // self.every, 0), most)

    def _before(self, instant: int) -> int:
        return instant - (instant - self.anchor) % self.every


class Delay(msgspec.Struct, frozen=True, tag_field="kind", tag="delay"):
    """Fires ``every`` microseconds after the end of the last run."""

    every: int

    def __str__(self) -> str:
        return f"{timedelta(microseconds=self.every)} after the last run"

    @property
    def timezone(self) -> str:
        return "UTC"

    def after(self, instant: int) -> Iterator[int]:
        """Yield the one fire time after a run that ended at an instant; later ones depend on when that run ends."""
        yield instant + self.every


Timetable = Cron | Interval | Delay


def make_timetable(
    expression: str | None,
    *,
    timezone: str = "UTC",
    every: timedelta | float | None = None,
    mode: Literal["rate", "delay"] | None = None,
    anchor: datetime | None = None,
) -> Timetable:
    """Make a timetable from a user's options, and refuse wrong ones."""
    if (expression is None) == (every is None):
        raise ConfigurationError("give either a cron expression or every=, such as every=timedelta(minutes=5)")
    if expression is not None:
        if mode is not None or anchor is not None:
            raise ConfigurationError("mode= and anchor= belong to every=; leave them out with a cron expression")
        return _checked(Cron(expression, timezone))
    if timezone != "UTC":
        raise ConfigurationError("every= counts elapsed time, so it has no timezone=; use a cron expression")
    length = seconds(0.0 if every is None else every, "every")
    limits.check_range("every", length, limits.EVERY_SECONDS_MIN, limits.EVERY_SECONDS_MAX)
    micros = round(length * MICROSECONDS)
    if mode == "delay" and anchor is None:
        return Delay(micros)
    if mode == "rate":
        return Interval(micros, _anchor(anchor))
    if mode == "delay":
        raise ConfigurationError("anchor= belongs to mode='rate'; with mode='delay' each run is counted from the last")
    raise ConfigurationError(
        f"every= needs mode='rate' (at fixed times, however long a run takes) or mode='delay' "
        f"(that long after the last run has ended), not {mode!r}"
    )


def preview(timetable: Timetable, after: int, number: int) -> list[datetime]:
    """Return the next fire times after an instant, in the timetable's time zone."""
    zone = zone_of(timetable.timezone)
    return [to_datetime(one).astimezone(zone) for one in islice(timetable.after(after), number)]


def _anchor(anchor: datetime | None) -> int:
    try:
        return 0 if anchor is None else to_instant(anchor)
    except ValueError as error:
        raise ConfigurationError(f"anchor: {error}") from error


def _checked(cron: Cron) -> Cron:
    zone_of(cron.timezone)
    if next(cron.after(0), None) is None:
        raise ConfigurationError(f"cron expression {cron.expression!r} never fires; write a date that exists")
    return cron


# instants of a cron expression


class _Rule(NamedTuple):
    """A parsed cron expression."""

    #: The wall times of the day, in microseconds since midnight.
    times: tuple[int, ...]
    months: frozenset[int]
    has_day: Callable[[date], bool]
    #: Whether minute and hour are both fixed, so that it means wall times and not an interval.
    fixed: bool


@lru_cache(maxsize=1_024)
def _rule(expression: str) -> _Rule:
    fields = expression.split() if isinstance(expression, str) else []
    if len(fields) != 5:
        raise ConfigurationError(
            f"cron expression {expression!r} must have five fields: minute, hour, day of month, month, day of week; "
            "for seconds use every="
        )
    try:
        read = CronSim(expression, datetime(2000, 1, 1))  # noqa: DTZ001 - only the parsed fields are used
    except CronSimError as error:
        raise ConfigurationError(f"cron expression {expression!r}: {error}") from error
    fixed = not fields[0].startswith("*") and not fields[1].startswith("*")
    times = tuple(hour * _HOUR + minute * _MINUTE for hour in sorted(read.hours) for minute in sorted(read.minutes))
    return _Rule(times, frozenset(read.months), read.match_day, fixed)


def _dates(rule: _Rule, first: date, *, forward: bool) -> Iterator[date]:
    """Yield the dates on which an expression fires, from ``first`` on, for ``RECURRING_YEARS_MAX`` years."""
    years = limits.RECURRING_YEARS_MAX if forward else -limits.RECURRING_YEARS_MAX
    last = date(min(max(first.year + years, _EPOCH.year), 9998), 12, 31)
    day = first
    while (day <= last) if forward else (day >= max(last, _EPOCH)):
        if day.month not in rule.months:
            day = (day.replace(day=1) + 32 * _DAY).replace(day=1) if forward else day.replace(day=1) - _DAY
            continue
        if rule.has_day(day):
            yield day
        day += _DAY if forward else -_DAY


def _moments(rule: _Rule, zone: tzinfo, day: date) -> list[int]:
    """Return the instants at which an expression fires on one date of a zone."""
    midnight = datetime.combine(day, time(), zone)
    # Since 1970 no zone has changed its offset twice within six days: with the same one at both ends it did not change.
    if midnight.utcoffset() == datetime.combine(day, _LAST_MINUTE, zone).utcoffset():
        begins = _instant(midnight)
        return [begins + passed for passed in rule.times]
    walls = (midnight + timedelta(microseconds=passed) for passed in rule.times)
    return [instant for wall in walls for instant in _around_change(wall, fixed=rule.fixed)]


def _around_change(wall: datetime, *, fixed: bool) -> tuple[int, ...]:
    """Return the instants for one wall time of a date on which the zone's offset changes."""
    first, second = _instant(wall), _instant(wall.replace(fold=1))
    if first == second:
        return (first,)
    if first < second:  # it comes twice
        return (first,) if fixed else (first, second)
    return (_end_of_gap(wall.tzinfo, second, first),) if fixed else ()


def _end_of_gap(zone: tzinfo | None, before: int, after: int) -> int:
    """Return the instant at which the offset changes, which lies after ``before`` and not after ``after``."""
    offset = to_datetime(before).astimezone(zone).utcoffset()
    while after - before > MICROSECONDS:
        middle = (before + after) // 2 // MICROSECONDS * MICROSECONDS
        if to_datetime(middle).astimezone(zone).utcoffset() == offset:
            before = middle
        else:
            after = middle
    return after


def _instant(wall: datetime) -> int:
    """Return the instant of a wall time; ``fold`` chooses one of two, and in a gap the offset before or after it."""
    naive = wall.replace(tzinfo=UTC)
    return ((naive - (wall.utcoffset() or timedelta())) - _UTC_EPOCH) // _MICROSECOND


_UTC_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _begin(day: date, zone: tzinfo) -> int:
    """Return the first instant that belongs to this date or a later one."""
    midnight = datetime.combine(day, time(), zone)
    return min(_instant(midnight), _instant(midnight.replace(fold=1)))


def _date_of(instant: int, zone: tzinfo) -> date:
    return to_datetime(instant).astimezone(zone).date()
