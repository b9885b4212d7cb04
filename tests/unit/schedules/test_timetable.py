"""Fire times of cron expressions and intervals, compared with a wall clock and with another implementation.

E2, E3, E5, fault 11: every change of the offset of many zones from 1990 to 2040.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onefold import ConfigurationError
from onefold.clock import MICROSECONDS, to_datetime, to_instant
from onefold.schedules.timetable import Cron, Delay, Interval, make_timetable, preview

#: Whole hours, half and quarter hours, changes at midnight and around it, a skipped day, changes of standard time,
#: daylight saving that is interrupted for Ramadan, and zones that abolished it.
ZONES = [
    "Africa/Cairo",
    "Africa/Casablanca",
    "Africa/Juba",
    "America/Argentina/San_Luis",
    "America/Caracas",
    "America/Havana",
    "America/New_York",
    "America/Santiago",
    "America/Sao_Paulo",
    "America/Scoresbysund",
    "America/St_Johns",
    "Antarctica/Casey",
    "Antarctica/Troll",
    "Asia/Amman",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Colombo",
    "Asia/Pyongyang",
    "Asia/Tehran",
    "Australia/Lord_Howe",
    "Europe/Berlin",
    "Europe/Dublin",
    "Europe/Istanbul",
    "Europe/Moscow",
    "Pacific/Apia",
    "Pacific/Chatham",
    "Pacific/Kwajalein",
    "Pacific/Norfolk",
]
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
NAIVE = datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None)


class Change(NamedTuple):
    """A moment at which a zone's offset changes; ``by`` is positive where the clock skips ahead."""

    zone: str
    at: datetime
    by: timedelta

    @property
    def plain(self) -> bool:
        """Whether it is a change by one hour at a whole hour, as most are."""
        return abs(self.by) == HOUR and self.at.astimezone(ZoneInfo(self.zone)).minute == 0


@lru_cache
def changes(zone: str) -> list[Change]:
    """Find every change of a zone's offset from 1990 to 2040."""
    local = ZoneInfo(zone)
    found = []
    day, end = datetime(1990, 1, 1, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)
    before = day.astimezone(local).utcoffset()
    while day < end:
        after = (day + timedelta(days=1)).astimezone(local).utcoffset()
        if before != after:
            early, late = day, day + timedelta(days=1)
            while late - early > MINUTE:
                middle = early + (late - early) // MINUTE // 2 * MINUTE
                early, late = (middle, late) if middle.astimezone(local).utcoffset() == before else (early, middle)
            assert before is not None
            assert after is not None
            found.append(Change(zone, late, after - before))
        day, before = day + timedelta(days=1), after
    return found


def between(cron: Cron, start: datetime, end: datetime) -> list[datetime]:
    found = takewhile(lambda one: one <= to_instant(end), cron.after(to_instant(start)))
    return [to_datetime(one) for one in found]


# expressions that the tests evaluate themselves


class Expression(NamedTuple):
    """Minutes and hours as numbers and as text."""

    minutes: frozenset[int]
    hours: frozenset[int]
    written: str

    @property
    def fixed(self) -> bool:
        """Whether it names times of the day instead of a rhythm."""
        return not any(field.startswith("*") for field in self.written.split()[:2])

    def names(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours


def fields(size: int, steps: list[int]) -> st.SearchStrategy[tuple[frozenset[int], str]]:
    several = st.sets(st.integers(0, size - 1), min_size=1, max_size=4).map(
        lambda chosen: (frozenset(chosen), ",".join(map(str, sorted(chosen))))
    )
    every = st.sampled_from(steps).map(lambda step: (frozenset(range(0, size, step)), f"*/{step}"))
    return several | every


expressions = st.builds(
    lambda minute, hour: Expression(minute[0], hour[0], f"{minute[1]} {hour[1]} * * *"),
    fields(60, [10, 15, 20, 30, 45]),
    fields(24, [1, 2, 3, 5]),
)
any_change = st.sampled_from(ZONES).flatmap(lambda zone: st.sampled_from(changes(zone)))


def as_read_from_the_wall(expression: Expression, zone: str, start: datetime, end: datetime) -> list[datetime]:
    """Return the fire times by looking at a wall clock every minute, as the cron daemon does."""
    fires, seen = [], set[datetime]()
    moment = start - timedelta(days=1)
    local = ZoneInfo(zone)
    before = moment.astimezone(local).replace(tzinfo=None, fold=0) - MINUTE
    while moment <= end:
        wall = moment.astimezone(local).replace(tzinfo=None, fold=0)
        skipped = (before + number * MINUTE for number in range(1, (wall - before) // MINUTE))
        if expression.names(wall):
            fires += [moment] * (not expression.fixed or wall not in seen)
            seen.add(wall)
        elif expression.fixed and any(expression.names(one) for one in skipped):
            fires.append(moment)
        before, moment = wall, moment + MINUTE
    return [fire for fire in fires if fire > start]


EVEN_HOURS = Expression(frozenset([5]), frozenset(range(0, 24, 2)), "5 */2 * * *")
AROUND_MIDNIGHT = Expression(frozenset(range(0, 60, 10)), frozenset([23, 0]), "*/10 0,23 * * *")
LORD_HOWE = Change("Australia/Lord_Howe", datetime(2025, 4, 5, 15, tzinfo=UTC), timedelta(minutes=-30))
ST_JOHNS = Change("America/St_Johns", datetime(1990, 10, 28, 2, 31, tzinfo=UTC), timedelta(hours=-1))


@settings(max_examples=60, deadline=None)
@given(any_change, expressions)
@example(LORD_HOWE, EVEN_HOURS)
@example(ST_JOHNS, EVEN_HOURS)
@example(ST_JOHNS, AROUND_MIDNIGHT)
def test_it_fires_when_a_clock_on_the_wall_says_so(change: Change, expression: Expression) -> None:
    """E3, fault 11.

    On the first two examples ``cronsim`` itself skips a fire time, and never returns it.
    On the third the clock goes back over midnight, so that the two dates alternate.
    """
    cron = Cron(expression.written, change.zone)
    start, end = change.at - timedelta(hours=27), change.at + timedelta(hours=27)
    expected = as_read_from_the_wall(expression, change.zone, start, end)
    assert between(cron, start, end) == expected
    assert backwards(cron, start, end) == expected[::-1]


def backwards(cron: Cron, start: datetime, end: datetime) -> list[datetime]:
    found, fire = [], cron.latest(to_instant(end))
    while fire is not None and fire > to_instant(start):
        found.append(to_datetime(fire))
        fire = cron.latest(fire - 1)
    return found


@settings(max_examples=60, deadline=None)
@given(any_change.filter(lambda change: change.plain), expressions, st.integers(-60, 60))
def test_it_fires_when_croniter_does(change: Change, expression: Expression, hours: int) -> None:
    """E3, fault 11: an independent implementation agrees, except for two rules of Debian's that it does not have.

    A fixed time that comes twice fires once, because ``30 2 * * *`` means one run a day.
    A rhythm does not fire at the end of a gap: at ``5 */2`` a run at 3:00 would be unexpected.
    Changes by other amounts than an hour, and those past a whole hour, are compared only with the wall clock above:
    there croniter 6.2 loses fire times, in Caracas in 2007, San Luis in 1990 and St John's until 2011.
    """
    start = change.at + timedelta(hours=hours) - timedelta(hours=24)
    end = start + timedelta(hours=48)
    expected = []
    walls = set[datetime]()
    for fire in by_croniter(expression.written, change.zone, start - timedelta(days=2), end):
        wall = fire.astimezone(ZoneInfo(change.zone)).replace(tzinfo=None, fold=0)
        twice = expression.fixed and wall in walls
        carried = not expression.fixed and not expression.names(wall)
        walls.add(wall)
        if fire > start and not twice and not carried:
            expected.append(fire)
    assert between(Cron(expression.written, change.zone), start, end) == expected


def by_croniter(expression: str, zone: str, start: datetime, end: datetime) -> Iterator[datetime]:
    fires = croniter(expression, start.astimezone(ZoneInfo(zone)))
    while (fire := fires.get_next(datetime).astimezone(UTC)) <= end:
        yield fire


@pytest.mark.parametrize("zone", ZONES)
def test_the_rules_hold_at_every_change_of_a_zone(zone: str) -> None:
    """E3, fault 11: every change, with an expression made for it."""
    assert changes(zone)
    # The computation for a whole date at once relies on this.
    assert all(later.at - change.at > timedelta(days=6) for change, later in pairwise(changes(zone)))
    for change in changes(zone):
        local = ZoneInfo(zone)
        ahead = change.by > timedelta()
        # A wall time in the middle of the skipped or repeated time.
        wall = change.at.astimezone(local).replace(tzinfo=None, fold=0) - change.by / 2
        fixed = Cron(f"{wall.minute} {wall.hour} {wall.day} {wall.month} *", zone)
        rhythm = Cron(f"*/1 {wall.hour} {wall.day} {wall.month} *", zone)
        around = (change.at - timedelta(hours=26), change.at + timedelta(hours=26))
        beats = between(rhythm, *around)
        assert all(fire.astimezone(local).hour == wall.hour for fire in beats)
        named = [fire for fire in beats if fire.astimezone(local).minute == wall.minute]
        if ahead:
            assert between(fixed, *around) == [change.at]
            assert named == []
        else:
            first = change.at - abs(change.by) / 2
            assert between(fixed, *around) == [first]
            assert named == [first, first + abs(change.by)]


@given(
    st.sampled_from(ZONES),
    st.sampled_from(["0 3 * * *", "*/7 */2 * * *", "30 0 1 * *", "0 12 * * MON", "15 6 L * *", "59 23 29 2 *"]),
    st.integers(to_instant(datetime(1990, 1, 1, tzinfo=UTC)), to_instant(datetime(2040, 1, 1, tzinfo=UTC))),
)
@settings(max_examples=60, deadline=None)
def test_after_and_latest_are_each_others_inverse(zone: str, expression: str, instant: int) -> None:
    cron = Cron(expression, zone)
    fires = list(islice(cron.after(instant), 3))
    assert fires == sorted(set(fires))
    assert fires[0] > instant
    assert [cron.latest(fire) for fire in fires] == fires
    assert [cron.latest(fire - 1) for fire in fires[1:]] == fires[:-1]
    assert cron.count(instant, fires[2], most=10) == 3
    assert cron.count(instant, fires[2] - 1, most=10) == 2
    assert cron.count(instant, fires[2], most=2) == 2


def test_a_leap_day_comes_every_four_years_and_not_in_2100() -> None:
    """Fault 11."""
    cron = Cron("0 0 29 2 *", "Europe/Berlin")
    start = to_instant(datetime(2092, 1, 1, tzinfo=UTC))
    assert [one.year for one in preview(cron, start, 3)] == [2092, 2096, 2104]


def test_day_of_month_and_day_of_week_are_either_unless_one_is_a_star() -> None:
    start = to_instant(datetime(2030, 1, 1, tzinfo=UTC))  # a Tuesday
    either = preview(Cron("0 0 13 * FRI"), start, 3)
    assert [(one.day, one.isoweekday()) for one in either] == [(4, 5), (11, 5), (13, 7)]
    both = preview(Cron("0 0 */13 * FRI"), start, 3)
    assert all(one.isoweekday() == 5 and one.day in (1, 14, 27) for one in both)


def test_a_preview_is_in_the_zone_of_the_schedule() -> None:
    start = to_instant(datetime(2030, 3, 30, 12, tzinfo=UTC))
    told = preview(make_timetable("30 2 * * *", timezone="Europe/Berlin"), start, 3)
    assert [one.isoformat() for one in told] == [
        "2030-03-31T03:00:00+02:00",  # 2:30 was skipped
        "2030-04-01T02:30:00+02:00",
        "2030-04-02T02:30:00+02:00",
    ]


def test_a_year_of_minutes_is_not_walked_to_find_the_last() -> None:
    """Fault 11: a clock that jumps must not keep the event loop busy."""
    cron = Cron("* * * * *", "Europe/Berlin")
    start, end = (to_instant(datetime(year, 1, 1, tzinfo=UTC)) for year in (2030, 2031))
    assert cron.latest(end) == end
    assert cron.count(start, end, most=500) == 500


# intervals


@given(
    st.integers(MICROSECONDS, 10**12), st.integers(0, 10**15), st.integers(0, 4 * 10**15), st.integers(0, 4 * 10**13)
)
def test_a_rate_is_a_ladder_through_its_anchor(every: int, anchor: int, instant: int, length: int) -> None:
    """E2, E5: fire times depend only on the anchor and the interval."""
    rate = Interval(every, anchor)
    first, second = islice(rate.after(instant), 2)
    assert instant < first <= instant + every
    assert (first - anchor) % every == 0
    assert second - first == every
    latest = rate.latest(instant)
    assert latest == first - every
    within = list(takewhile(lambda fire: fire <= instant + length, islice(rate.after(instant), 50)))
    assert rate.count(instant, instant + length, most=50) == len(within)


def test_a_delay_is_counted_from_the_end_of_the_last_run() -> None:
    """E5."""
    assert list(Delay(5).after(100)) == [105]


# refused arguments


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"expression": None}, "either a cron expression or every="),
        ({"expression": "* * * * *", "every": 5, "mode": "rate"}, "either a cron expression or every="),
        ({"expression": "* * * *"}, "five fields"),
        ({"expression": "0 * * * * *"}, "five fields"),
        ({"expression": ""}, "five fields"),
        ({"expression": "61 * * * *"}, "Bad minute"),
        ({"expression": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"expression": "0 0 * 2 MON#6"}, "Bad day-of-week"),
        ({"expression": "0 0 */8 2 MON#5"}, "never fires"),
        ({"expression": "0 0 * * *", "timezone": "Europe/Atlantis"}, "not known here"),
        ({"expression": "0 0 * * *", "timezone": "../../etc/passwd"}, "not known here"),
        ({"expression": "0 0 * * *", "timezone": ""}, "not known here"),
        ({"expression": "0 0 * * *", "mode": "rate"}, "belong to every="),
        ({"expression": None, "every": 5}, "mode='rate'"),
        ({"expression": None, "every": 5, "mode": "sometimes"}, "mode='rate'"),
        ({"expression": None, "every": 0.5, "mode": "rate"}, "every is 0.5"),
        ({"expression": None, "every": timedelta(days=4_000), "mode": "rate"}, "every is"),
        ({"expression": None, "every": 5, "mode": "rate", "timezone": "Europe/Berlin"}, "has no timezone="),
        ({"expression": None, "every": 5, "mode": "delay", "anchor": datetime(2030, 1, 1, tzinfo=UTC)}, "anchor="),
        ({"expression": None, "every": 5, "mode": "rate", "anchor": NAIVE}, "has no time zone"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, object], told: str) -> None:
    """P3, E5: at the declaration, with the remedy."""
    with pytest.raises(ConfigurationError, match=told):
        make_timetable(**arguments)  # type: ignore[arg-type]
