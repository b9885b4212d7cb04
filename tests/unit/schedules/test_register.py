"""Recurring tasks: declaring, firing, catching up, and changes while they run.

E1 to E9, faults 11 and 35.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold import App, ConfigurationError, Context, Envelope, EnvelopeError, Query, Reject, State, Task, limits
from onefold.clock import MICROSECONDS, give_way, to_datetime, to_instant
from onefold.errors import StoreError
from onefold.schedules.plan import (
    Catchup,
    Plan,
    ScheduleRecord,
    before,
    begin_now,
    decode_schedule,
    encode_schedule,
    plan,
)
from onefold.schedules.register import template_of
from onefold.schedules.timetable import Cron, Delay, Interval, Timetable
from onefold.store.open import open_store
from onefold.store.sqlite import SQLiteStore
from onefold.tasks.options import TaskOptions, TaskSettings
from onefold.testing import FakeClock, HastyClock
from onefold.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

START = to_instant(datetime(2030, 1, 1, tzinfo=UTC))
SECOND, MINUTE, HOUR, DAY = (n * MICROSECONDS for n in (1, 60, 3_600, 86_400))
HOURLY = Cron("0 * * * *")


def schedule(timetable: Timetable = HOURLY, catchup: Catchup = "skip", window: int | None = None) -> ScheduleRecord:
    template = Envelope(
        id="-", message_type="t", queue="q", idempotency_key="-", correlation_id="-", causation_id="-", subject="s",
        payload_inline=b"{}",
    )  # fmt: skip
    return ScheduleRecord(
        name="s",
        timetable=timetable,
        template=template,
        catchup=catchup,
        window=window,
        made_at=START,
        watermark=START,
    )


def fires(decided: Plan | None) -> list[int]:
    return [] if decided is None else [one.scheduled_for - START for one in decided.occurrences]


# catching up: pure


def test_nothing_is_due_before_the_first_fire_time() -> None:
    assert plan(schedule(), START) is None
    assert plan(schedule(), START + HOUR - 1) is None
    assert fires(plan(schedule(), START + HOUR)) == [HOUR]


@pytest.mark.parametrize("catchup", ["skip", "last", "all"])
def test_what_is_on_time_fires_alike_whatever_the_policy(catchup: Catchup) -> None:
    """E4."""
    decided = plan(schedule(catchup=catchup), START + HOUR + SECOND)
    assert decided is not None
    assert fires(decided) == [HOUR]
    assert (decided.after.watermark, decided.after.fired, decided.after.missed) == (START + HOUR, 1, 0)
    assert plan(decided.after, START + HOUR + SECOND) is None


@pytest.mark.parametrize(("late", "fired"), [(59 * SECOND, [5 * HOUR]), (MINUTE, []), (HOUR - 1, [])])
def test_skip_drops_what_is_late_by_a_minute(late: int, fired: list[int]) -> None:
    """E4: the grace is for ticks, which are always a little late."""
    decided = plan(schedule(), START + 5 * HOUR + late)
    assert decided is not None
    assert fires(decided) == fired
    assert decided.after.watermark == START + 5 * HOUR
    assert (decided.after.fired, decided.after.missed) == (len(fired), 5 - len(fired))


def test_last_stands_in_for_those_before_it() -> None:
    """E4."""
    decided = plan(schedule(catchup="last"), START + 5 * HOUR + 30 * MINUTE)
    assert decided is not None
    assert [(one.scheduled_for - START, one.missed) for one in decided.occurrences] == [(5 * HOUR, 4)]
    assert (decided.after.fired, decided.after.missed) == (1, 4)


def test_all_fires_each_and_a_thousand_at_once() -> None:
    """E4."""
    now, record, found = START + 2_500 * HOUR, schedule(catchup="all"), list[int]()
    for expected in (limits.CATCH_UP_MAX, limits.CATCH_UP_MAX, 500):
        decided = plan(record, now)
        assert decided is not None
        assert len(decided.occurrences) == expected
        found, record = found + fires(decided), decided.after
    assert plan(record, now) is None
    assert found == [number * HOUR for number in range(1, 2_501)]
    assert (record.fired, record.missed) == (2_500, 0)


@pytest.mark.parametrize(("catchup", "fired"), [("last", [[10 * HOUR, 1]]), ("all", [[9 * HOUR, 0], [10 * HOUR, 0]])])
def test_a_window_bounds_how_far_back_it_goes(catchup: Catchup, fired: list[list[int]]) -> None:
    """E4."""
    decided = plan(schedule(catchup=catchup, window=2 * HOUR), START + 10 * HOUR + 30 * MINUTE)
    assert decided is not None
    assert [[one.scheduled_for - START, one.missed] for one in decided.occurrences] == fired
    assert decided.after.watermark == START + 10 * HOUR
    assert decided.after.fired + decided.after.missed == 10


@pytest.mark.parametrize("catchup", ["last", "all"])
def test_what_is_older_than_the_window_is_only_counted(catchup: Catchup) -> None:
    """E4."""
    decided = plan(schedule(Interval(DAY), catchup=catchup, window=HOUR), START + 3 * DAY + 2 * HOUR)
    assert decided is not None
    assert (fires(decided), decided.after.missed) == ([], 3)
    assert plan(decided.after, START + 3 * DAY + 2 * HOUR) is None


def test_missed_ones_are_counted_only_so_far() -> None:
    """Fault 11: no tick waits while a year of seconds or minutes is counted."""
    for timetable in (Interval(SECOND), Cron("* * * * *")):
        decided = plan(schedule(timetable, catchup="last"), START + 366 * DAY)
        assert decided is not None
        assert decided.occurrences[0].missed == limits.MISSED_MAX - 1
        assert fires(decided) == [366 * DAY]


def test_a_schedule_survives_the_register() -> None:
    for timetable in (Cron("0 3 * * *", "Europe/Berlin"), Interval(5, 7), Delay(9)):
        record = msgspec.structs.replace(schedule(timetable), dropped=((1, 2),), rewound=7, awaiting="m")
        assert decode_schedule(encode_schedule(record)) == record


# clocks that are set: pure


class Machine:
    """One schedule with a clock that is set; it is checked at every tick."""

    def __init__(self, record: ScheduleRecord) -> None:
        self.record = record
        self.time = START
        #: The error of the clock.
        self.wrong = 0
        self.fired: list[int] = []
        self._known: tuple[ScheduleRecord, int | None] = (record, None)

    @property
    def now(self) -> int:
        return self.time + self.wrong

    def tick(self) -> None:
        record, next_at = self._known
        if record is self.record and next_at is not None and record.watermark <= self.now < next_at:
            return
        self._advance()
        self._known = (self.record, self.record.next_at(self.now))

    def _advance(self) -> None:
        while (decided := plan(self.record, self.now)) is not None:
            for one in decided.occurrences:
                assert one.scheduled_for <= self.now
                assert one.scheduled_for not in self.fired, "fired twice"
                self.fired.append(one.scheduled_for)
            assert decided.after.watermark >= self.record.watermark
            self.record = decided.after

    def pass_time(self, length: int, step: int) -> None:
        until = self.time + length
        while self.time < until:
            self.time = min(self.time + step, until)
            self.tick()


errors = st.sampled_from([-366 * DAY, -HOUR, -20 * MINUTE, 0, 20 * MINUTE, HOUR, 366 * DAY])
lengths = st.sampled_from([SECOND, 10 * MINUTE, 3 * HOUR, 2 * DAY])
#: The error of the clock, its duration, the time between ticks, whether the clock is set right in between, and
#: whether an operator pauses and resumes the schedule before or after that.
passing = st.tuples(
    errors, lengths, st.sampled_from([HOUR // 6, DAY]), st.booleans(), st.sampled_from(["", "before", "after"])
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["skip", "last", "all"]), st.lists(passing, max_size=5))
def test_a_clock_that_is_set_fires_nothing_twice_and_silences_nothing(
    catchup: Catchup, history: list[tuple[int, int, int, bool, str]]
) -> None:
    """Fault 11: the clock is wrong by an hour or a year for a while, and is set right again."""
    window = 40 * DAY if catchup == "all" else None
    machine = Machine(schedule(Cron("0 */2 * * *", "Europe/Berlin"), catchup, window))
    machine.tick()
    for wrong, length, step, set_right, resumed in history:
        machine.wrong = wrong
        machine.tick()
        machine.pass_time(length, step)
        if resumed == "before":
            machine.record = begin_now(machine.record, machine.now)
        machine.wrong = 0 if set_right else wrong
        machine.tick()
        if resumed == "after":
            machine.record = begin_now(machine.record, machine.now)
    machine.wrong, began = 0, machine.time
    machine.tick()
    machine.pass_time(DAY, HOUR // 6)
    timetable = machine.record.timetable
    assert set(takewhile(lambda fire: fire <= machine.time, timetable.after(began))) <= set(machine.fired)


@pytest.mark.parametrize("how", ["resumed after", "resumed during", "changed", "made during"])
def test_a_clock_that_was_wrong_for_a_moment_silences_nothing(how: str) -> None:
    """Whatever an operator did meanwhile or afterwards, the schedule continues at once, and not after a year."""
    ahead = 366 * DAY
    machine = Machine(schedule(Cron("0 * * * *", "UTC")))
    machine.pass_time(2 * HOUR, HOUR // 6)
    machine.wrong = ahead
    if how == "resumed during":
        machine.record = begin_now(machine.record, machine.now)
    elif how == "made during":
        now = machine.now
        machine.record = msgspec.structs.replace(machine.record, watermark=now, made_at=now, dropped=before(now))
    else:
        machine.tick()
    machine.wrong = 0
    machine.tick()
    if how == "resumed after":
        machine.record = begin_now(machine.record, machine.now)
    elif how == "changed":
        machine.record = begin_now(
            msgspec.structs.replace(machine.record, timetable=Cron("*/30 * * * *", "UTC")), machine.now
        )
    began = machine.time
    machine.pass_time(DAY, HOUR // 6)
    due = set(takewhile(lambda fire: fire <= machine.time, machine.record.timetable.after(began)))
    assert due <= set(machine.fired)


def test_a_schedule_of_a_newer_version_is_not_changed(bench: Bench) -> None:
    """Fields that this version does not know would be lost; removing the schedule is possible."""

    @bench.app.task
    async def report() -> None: ...

    @bench.app.recurring("0 3 * * *", name="daily")
    async def daily() -> None: ...

    async def scenario() -> None:
        app = bench.app
        async with app.store.transaction() as transaction:
            assert await transaction.register("schedule", "daily", b'{"holidays":"DE"}', version=0)
        await bench.work()  # a worker of this version does not declare its own schedule, and works
        made = await app.schedule(report.call(), "0 3 * * *", name="report")
        entry = await app.store.registered("schedule", "report")
        assert entry is not None
        newer = entry.value[:-1] + b',"holidays":"DE"}'
        async with app.store.transaction() as transaction:
            assert await transaction.register("schedule", "report", newer, version=entry.version)
        for change in (made.pause, lambda: app.schedule(report.call(), "0 4 * * *", name="report")):
            with pytest.raises(StoreError, match="written by another version of onefold"):
                await change()
        assert await app.schedules() == {}
        kept = await app.store.registered("schedule", "report")
        assert kept is not None
        assert kept.value == newer
        assert await app.unschedule("report")
        assert not await app.unschedule("report")

    bench.run(scenario)


def test_a_clock_set_back_within_what_has_fired_waits_for_its_time_to_come_again() -> None:
    """Fault 11."""
    machine = Machine(schedule(catchup="all"))
    machine.pass_time(3 * HOUR, MINUTE)
    machine.wrong = -2 * HOUR
    machine.pass_time(HOUR + 59 * MINUTE, MINUTE)
    assert [fire - START for fire in machine.fired] == [HOUR, 2 * HOUR, 3 * HOUR]
    machine.pass_time(HOUR + MINUTE, MINUTE)
    assert machine.fired[3:] == [START + 4 * HOUR]


def test_a_delay_whose_end_lies_ahead_is_counted_from_now() -> None:
    """Fault 11: the clock was set back after the run had ended."""
    ended = msgspec.structs.replace(schedule(Delay(HOUR)), awaiting="m", watermark=START)
    decided = plan(ended, START + MINUTE, ended_at=START + 366 * DAY)
    assert decided is not None
    assert decided.after.next_at(START + MINUTE) == START + MINUTE + HOUR
    later = plan(msgspec.structs.replace(decided.after, watermark=START + 366 * DAY), START + 2 * MINUTE)
    assert later is not None
    assert later.after.next_at(START + 2 * MINUTE) == START + 2 * MINUTE + HOUR


def test_beginning_now_forgets_the_past_and_keeps_what_has_fired() -> None:
    record = msgspec.structs.replace(schedule(), dropped=((1, 2),), rewound=7, awaiting="m")
    assert begin_now(record, START + HOUR).watermark == START + HOUR
    assert begin_now(record, START - HOUR).watermark == START
    assert begin_now(record, START + HOUR).dropped == ((1, 2), (START, START + HOUR + 1))
    assert begin_now(record, START - HOUR).rewound == START - HOUR
    assert begin_now(record, START).rewound is None
    assert begin_now(record, START).awaiting is None
    assert begin_now(msgspec.structs.replace(record, timetable=Delay(5)), START).awaiting == "m"


# declaring


def declared(**arguments: Any) -> Task[[], None]:
    app = App("sqlite:///never-opened.db")

    @app.recurring(**{"every": 60, "mode": "rate"} | arguments)
    async def tick() -> None: ...

    return tick


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"mode": None}, "mode='rate'"),
        ({"catchup": "some"}, "'skip', 'last' or 'all'"),
        ({"window": 60}, "give one of them with it"),
        ({"catchup": "skip", "window": 60}, "give one of them with it"),
        ({"catchup": "all", "window": -1}, "not negative"),
        ({"mode": "delay", "catchup": "last"}, "no fire time can be missed"),
        ({"mode": "delay", "window": 5}, "no fire time can be missed"),
        ({"queue": "Not A Queue"}, "queue name"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_declaration(arguments: dict[str, Any], told: str) -> None:
    """P3, E5."""
    with pytest.raises(ConfigurationError, match=told):
        declared(**arguments)


def test_a_recurring_task_needs_no_arguments() -> None:
    """P3: a function with arguments is refused, and leaves nothing declared."""
    app = App("sqlite:///never-opened.db")

    async def greet(name: str) -> None: ...

    with pytest.raises(ConfigurationError, match="callable without arguments"):
        app.recurring("0 3 * * *")(greet)
    assert app.tasks == {}


def test_it_takes_every_setting_of_a_task() -> None:
    """P1: the two lists of settings must stay the same."""
    said = {*inspect.signature(App.recurring).parameters, *TaskOptions.__annotations__}
    # A batch cannot recur, as there is only one message.  Only workflows have a limit of steps.
    assert {field.name for field in fields(TaskSettings)} - said == {"batch", "max_steps"}
    task = declared(name="other", queue="nightly", timeout=timedelta(seconds=5), version=3)
    assert (task.name, task.queue, task.timeout_seconds, task.version) == ("other", "nightly", 5.0, 3)


def test_a_users_key_cannot_look_like_a_schedules() -> None:
    """E7: keys of occurrences have a form that users' keys cannot have."""
    app = App("sqlite:///never-opened.db")

    @app.task(key="{name}")
    async def greet(name: str) -> None: ...

    with pytest.raises(EnvelopeError, match="of a schedule"):
        greet.call("(schedule) tick@2030-01-01T00:00:00+00:00")
    with pytest.raises(EnvelopeError, match="of a schedule"):
        greet.options(key="(schedule) tick")


def test_options_that_a_schedule_decides_are_refused() -> None:
    """P3."""
    app = App("sqlite:///never-opened.db")

    @app.task
    async def greet(name: str) -> None: ...

    with pytest.raises(ConfigurationError, match="leave out the options at, key"):
        template_of(greet.options(key="k", at=datetime(2030, 1, 1, tzinfo=UTC)).call("ada"))
    template = template_of(greet.options(queue="slow", subject="ada", tags={"tenant": "t"}, expires=60).call("ada"))
    assert (template.queue, template.subject, template.tags, template.retention) == (
        "slow",
        "ada",
        {"tenant": "t"},
        MINUTE,
    )


# firing, on every store


class Seen:
    """The occurrences that handlers got."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, timedelta | None, int]] = []

    def note(self, ctx: Context) -> None:
        for_ = ctx.scheduled_for
        self.runs.append((ctx.message.message_type, None if for_ is None else for_ - to_datetime(START), ctx.missed))


def declare_hourly(app: App, seen: Seen, **policy: Any) -> Task[[], None]:
    @app.recurring("0 * * * *", **policy)
    async def hourly(ctx: Context) -> None:
        seen.note(ctx)

    return hourly


async def pass_time(bench: Bench, duration: timedelta, steps: int = 1) -> None:
    for _ in range(steps):
        bench.clock.advance(duration)
        await bench.work()


def test_a_handler_is_told_which_fire_time_it_is_for(bench: Bench) -> None:
    """E2, E3, E4: in the time zone of the schedule."""
    seen = list[tuple[datetime | None, int, str]]()

    @bench.app.recurring("30 9 * * *", timezone="America/New_York", catchup="last")
    async def report(ctx: Context) -> None:
        seen.append((ctx.scheduled_for, ctx.missed, ctx.message.causation_id))

    async def scenario() -> None:
        await bench.work()
        assert seen == []
        await pass_time(bench, timedelta(days=3))
        ((when, missed, cause),) = seen
        assert when is not None
        assert when.isoformat() == "2030-01-03T09:30:00-05:00"
        assert (missed, cause) == (2, "schedule:report")
        (message,) = await bench.messages()
        assert message.envelope.idempotency_key == "(schedule) report@2030-01-03T14:30:00+00:00"
        assert message.envelope.correlation_id == message.envelope.id

    bench.run(scenario)


def test_it_can_be_sent_by_hand_too(bench: Bench) -> None:
    seen = Seen()
    hourly = declare_hourly(bench.app, seen)

    async def scenario() -> None:
        await hourly.send()
        await bench.work()
        await pass_time(bench, timedelta(hours=1))
        assert seen.runs == [("hourly", None, 0), ("hourly", timedelta(hours=1), 0)]

    bench.run(scenario)


@pytest.mark.parametrize(
    ("catchup", "expected"),
    [
        ("skip", []),
        ("last", [(timedelta(hours=5), 4)]),
        ("all", [(timedelta(hours=hour), 0) for hour in range(1, 6)]),
    ],
)
def test_occurrences_without_a_running_worker_are_caught_up_as_declared(
    bench: Bench, catchup: Catchup, expected: list[tuple[timedelta, int]]
) -> None:
    """E4."""
    seen = Seen()
    declare_hourly(bench.app, seen, catchup=catchup)

    async def scenario() -> None:
        await bench.work()
        await pass_time(bench, timedelta(hours=5, minutes=20))
        assert sorted((when, missed) for _, when, missed in seen.runs if when is not None) == expected
        await pass_time(bench, timedelta(minutes=40))
        assert seen.runs[-1] == ("hourly", timedelta(hours=6), 0)
        found = (await bench.app.schedules())["hourly"]
        assert found.fired == len(expected) + 1
        assert found.fired + found.missed == 6

    bench.run(scenario)


def test_more_than_a_thousand_are_caught_up_in_several_commits(bench: Bench) -> None:
    """E4: one tick puts a bounded number, the next one the rest."""
    seen = Seen()
    declare_hourly(bench.app, seen, catchup="all", queue="elsewhere")

    async def scenario() -> None:
        await bench.work()
        bench.clock.advance(timedelta(hours=limits.CATCH_UP_MAX + 5))
        await bench.app.work(queues=["nothing"], until_idle=True)
        assert (await bench.app.count())["elsewhere"].scheduled == limits.CATCH_UP_MAX + 5

    bench.run(scenario)


def test_how_late_each_fire_was_is_kept_and_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """E6."""
    seen = Seen()
    declare_hourly(bench.app, seen)

    async def scenario() -> None:
        await bench.work()
        bench.clock.advance(timedelta(hours=1, seconds=7))
        with caplog.at_level(logging.INFO, logger="onefold"):
            await bench.work()
        found = (await bench.app.schedules())["hourly"]
        assert found.drift == timedelta(seconds=7)
        assert found.last_at == to_datetime(START + HOUR)
        assert found.next_at == to_datetime(START + 2 * HOUR)
        told = next(record.message for record in caplog.records if "schedule_fired" in record.message)
        assert "schedule=hourly scheduled_for=2030-01-01T01:00:00+00:00 drift=7.000 missed=0" in told
        written = found.as_dict()
        assert (written["drift_seconds"], written["cron"], written["fired"]) == (7.0, "0 * * * *", 1)
        assert (await bench.app.find(Query(ids=(written["last_message_id"],))))[0].state is State.DONE

    bench.run(scenario)


def test_a_rate_keeps_its_times_however_late_it_is_looked_at(bench: Bench) -> None:
    """E5."""
    seen = Seen()

    @bench.app.recurring(every=timedelta(minutes=10), mode="rate", anchor=to_datetime(START + 3 * MINUTE))
    async def poll(ctx: Context) -> None:
        seen.note(ctx)

    async def scenario() -> None:
        await bench.work()
        await pass_time(bench, timedelta(minutes=13, seconds=40))
        await pass_time(bench, timedelta(minutes=10))
        assert [when for _, when, _ in seen.runs] == [timedelta(minutes=13), timedelta(minutes=23)]

    bench.run(scenario)


def test_a_delay_begins_when_the_last_run_has_ended(bench: Bench) -> None:
    """E5: never two at once, and a dead run ends too."""
    seen = Seen()

    @bench.app.recurring(every=timedelta(minutes=10), mode="delay", queue="slow")
    async def poll(ctx: Context) -> None:
        seen.note(ctx)
        if len(seen.runs) == 2:
            raise Reject("it cannot be done")

    async def scenario() -> None:
        elsewhere = {"queues": ["nothing"], "until_idle": True}
        await bench.app.work(**elsewhere)
        bench.clock.advance(timedelta(minutes=10))
        await bench.app.work(**elsewhere)
        assert (await bench.app.schedules())["poll"].next_at is None
        # The run waits for half an hour, so the next one waits too.
        for _ in range(3):
            bench.clock.advance(timedelta(minutes=10))
            await bench.app.work(**elsewhere)
        assert (await bench.app.count())["slow"].scheduled == 1
        await bench.work()
        await pass_time(bench, timedelta(minutes=9))
        assert len(seen.runs) == 1
        await pass_time(bench, timedelta(minutes=1))
        assert [when for _, when, _ in seen.runs] == [timedelta(minutes=10), timedelta(minutes=50)]
        await pass_time(bench, timedelta(minutes=5), steps=2)
        assert len(seen.runs) == 3
        assert (await bench.app.schedules())["poll"].fired == 3

    bench.run(scenario)


def test_a_delay_goes_on_when_its_last_run_is_no_longer_kept(bench: Bench) -> None:
    """E5: a worker that starts weeks later finds neither message nor key."""
    seen = Seen()

    @bench.app.recurring(every=timedelta(minutes=10), mode="delay")
    async def poll(ctx: Context) -> None:
        seen.note(ctx)

    async def scenario() -> None:
        await bench.work()
        await pass_time(bench, timedelta(minutes=10))
        bench.clock.advance(timedelta(days=60))
        await bench.purge()
        assert await bench.messages() == []
        await bench.work()
        assert len(seen.runs) == 2

    bench.run(scenario)


def test_one_that_cannot_be_fired_does_not_stop_the_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """An ``on_send`` that refuses a message sees its occurrence."""
    seen, told = Seen(), list[str]()
    declare_hourly(bench.app, seen)

    @bench.app.recurring("0 * * * *")
    async def broken(ctx: Context) -> None:
        seen.note(ctx)

    @bench.app.on_send
    def refuse(envelope: Envelope) -> Envelope:
        assert envelope.occurrence is not None
        told.append(envelope.occurrence.schedule)
        if envelope.message_type == "broken":
            raise ValueError("not today")
        return msgspec.structs.replace(envelope, tags={"tenant": "t"})

    async def scenario() -> None:
        await bench.work()
        await pass_time(bench, timedelta(hours=1))
        assert seen.runs == [("hourly", timedelta(hours=1), 0)]
        assert sorted(told) == ["broken", "hourly"]
        assert "schedule_failed schedule=broken" in caplog.text
        assert (await bench.messages())[0].envelope.tags == {"tenant": "t"}
        assert (await bench.app.schedules())["broken"].fired == 0

    bench.run(scenario)


# changed code


def restarted(bench: Bench) -> App:
    """Return another version of the program on the same store."""
    return App(store=bench.app.store, clock=bench.clock)


def test_a_changed_expression_takes_effect_without_firing_the_past(bench: Bench) -> None:
    seen = Seen()
    declare_hourly(bench.app, seen, catchup="all")

    async def scenario() -> None:
        await bench.work()
        await pass_time(bench, timedelta(hours=1))
        newer = restarted(bench)

        @newer.recurring("30 * * * *", catchup="all")
        async def hourly(ctx: Context) -> None:
            seen.note(ctx)

        await newer.open()
        bench.clock.advance(timedelta(hours=5, minutes=10))
        await newer.work(until_idle=True)
        assert len(seen.runs) == 1
        bench.clock.advance(timedelta(minutes=20))
        await newer.work(until_idle=True)
        assert seen.runs[1:] == [("hourly", timedelta(hours=6, minutes=30), 0)]

    bench.run(scenario)


def test_a_changed_policy_keeps_what_is_still_to_be_caught_up(bench: Bench) -> None:
    seen = Seen()
    declare_hourly(bench.app, seen)

    async def scenario() -> None:
        await bench.work()
        newer = restarted(bench)
        declare_hourly(newer, seen, catchup="all")
        await newer.open()
        bench.clock.advance(timedelta(hours=3))
        await newer.work(until_idle=True)
        assert len(seen.runs) == 3
        assert (await newer.schedules())["hourly"].record.catchup == "all"

    bench.run(scenario)


def test_one_removed_from_the_code_stays_listed_and_fires_no_more(bench: Bench) -> None:
    """Only a command removes it: no worker can know that no other worker has it."""
    seen = Seen()
    declare_hourly(bench.app, seen)

    async def scenario() -> None:
        await bench.work()
        newer = restarted(bench)

        @newer.task
        async def hourly(ctx: Context) -> None:
            seen.note(ctx)

        await newer.open()
        bench.clock.advance(timedelta(hours=1))
        await newer.work(until_idle=True)
        assert seen.runs == []
        assert (await newer.schedules())["hourly"].declared
        with pytest.raises(ConfigurationError, match="declared in code"):
            await newer.schedule(hourly.call(), "0 * * * *", name="hourly")
        assert await newer.unschedule("hourly")
        assert not await newer.unschedule("hourly")
        assert await newer.schedules() == {}

    bench.run(scenario)


# made at run time


def declare_greet(app: App) -> tuple[Task[[str], None], list[str]]:
    greeted: list[str] = []

    @app.task(key="{name}")
    async def greet(ctx: Context, name: str) -> None:
        greeted.append(name)

    return greet, greeted


def test_a_schedule_made_at_run_time_fires_like_any_other(bench: Bench) -> None:
    """E9: with its own arguments, on the queue of its declaration."""
    greet, greeted = declare_greet(bench.app)

    async def scenario() -> None:
        made = await bench.app.schedule(greet.options(queue="slow").call("ada"), "*/5 * * * *", name="greet-ada")
        await bench.app.schedule(greet.call("bob"), name="greet-bob", every=timedelta(minutes=10), mode="rate")
        assert (made.name, made.task, made.timetable, made.declared) == ("greet-ada", "greet", "*/5 * * * *", False)
        assert made.next_at == to_datetime(START + 5 * MINUTE)
        assert made.preview(2) == [to_datetime(START + 5 * MINUTE), to_datetime(START + 10 * MINUTE)]
        for _ in range(2):
            bench.clock.advance(timedelta(minutes=5))
            await bench.app.work(queues=["default", "slow"], until_idle=True)
        assert sorted(greeted) == ["ada", "ada", "bob"]
        found = await bench.app.schedules()
        assert list(found) == ["greet-ada", "greet-bob"]
        assert (found["greet-ada"].fired, found["greet-bob"].fired) == (2, 1)

    bench.run(scenario)


def test_saying_the_same_again_changes_nothing(bench: Bench) -> None:
    """E9: a program may declare its schedules at every start."""
    greet, greeted = declare_greet(bench.app)

    async def scenario() -> None:
        for _ in range(2):
            await bench.app.schedule(greet.call("ada"), "*/5 * * * *", name="g", catchup="all")
            bench.clock.advance(timedelta(minutes=4))
        await bench.work()
        assert greeted == ["ada"]
        # Another call replaces the old one, including occurrences not fired yet.
        bench.clock.advance(timedelta(minutes=5))
        await bench.app.schedule(greet.call("eve"), "*/5 * * * *", name="g", catchup="all")
        await bench.work()
        assert greeted == ["ada", "eve"]
        # Another time starts counting now.
        bench.clock.advance(timedelta(minutes=30))
        await bench.app.schedule(greet.call("eve"), "*/6 * * * *", name="g", catchup="all")
        await bench.work()
        assert greeted == ["ada", "eve"]

    bench.run(scenario)


def test_a_paused_schedule_fires_nothing_and_catches_nothing_up(bench: Bench) -> None:
    """E9."""
    greet, greeted = declare_greet(bench.app)

    async def scenario() -> None:
        await bench.app.schedule(greet.call("ada"), "*/5 * * * *", name="g", catchup="all")
        made = (await bench.app.schedules())["g"]
        assert [await made.pause(), await made.pause(), made.paused, made.next_at] == [True, False, True, None]
        await pass_time(bench, timedelta(minutes=11))
        assert greeted == []
        again = (await bench.app.schedules())["g"]
        assert again.paused
        assert [await again.resume(), await again.resume(), again.paused] == [True, False, False]
        assert again.next_at == to_datetime(START + 15 * MINUTE)
        await bench.work()
        assert greeted == []
        await pass_time(bench, timedelta(minutes=4))
        assert greeted == ["ada"]

    bench.run(scenario)


def test_a_run_now_is_out_of_turn(bench: Bench) -> None:
    """E9: it works while paused, any number of times, and does not change the next fire time."""
    greet, greeted = declare_greet(bench.app)

    async def scenario() -> None:
        made = await bench.app.schedule(greet.call("ada"), "*/5 * * * *", name="g")
        await made.pause()
        first, second = await made.run_now(), await made.run_now()
        assert first != second
        await bench.work()
        assert greeted == ["ada", "ada"]
        (record,) = await bench.app.find(Query(ids=(first,)))
        assert record.envelope.occurrence is not None
        assert record.envelope.occurrence.scheduled_for == START
        assert (await bench.app.schedules())["g"].fired == 0

    bench.run(scenario)


def test_what_was_removed_meanwhile_cannot_be_changed(bench: Bench) -> None:
    """E9."""
    greet, _ = declare_greet(bench.app)

    async def scenario() -> None:
        made = await bench.app.schedule(greet.call("ada"), "*/5 * * * *", name="g")
        assert await made.remove()
        with pytest.raises(ConfigurationError, match="no schedule 'g' any more"):
            await made.pause()

    bench.run(scenario)


def test_limits_are_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3, E9."""
    greet, _ = declare_greet(bench.app)
    foreign, _ = declare_greet(App("sqlite:///never-opened.db"))

    @bench.app.task
    async def note(text: str) -> None: ...

    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="schedule name"):
            await bench.app.schedule(greet.call("ada"), "* * * * *", name="Not A Name")
        with pytest.raises(ConfigurationError, match="belongs to another app"):
            await bench.app.schedule(foreign.call("ada"), "* * * * *", name="g")
        with pytest.raises(ConfigurationError, match="at most 16384 are kept"):
            await bench.app.schedule(note.call("a" * 20_000), "* * * * *", name="g")
        await bench.app.schedule(greet.call("ada"), "* * * * *", name="g")
        monkeypatch.setattr(limits, "SCHEDULES_MAX", 1)
        with pytest.raises(ConfigurationError, match="at most 1 are allowed"):
            await bench.app.schedule(greet.call("ada"), "* * * * *", name="h")
        await bench.app.schedule(greet.call("bob"), "* * * * *", name="g")

    bench.run(scenario)


def test_a_schedule_of_a_task_unknown_here_is_left_to_others(bench: Bench) -> None:
    greet, greeted = declare_greet(bench.app)

    async def scenario() -> None:
        await bench.app.schedule(greet.call("ada"), "*/5 * * * *", name="g")
        stranger = restarted(bench)
        await stranger.open()
        bench.clock.advance(timedelta(minutes=5))
        await stranger.work(until_idle=True)
        assert await bench.messages() == []
        await bench.work()
        assert greeted == ["ada"]

    bench.run(scenario)


def test_an_entry_of_a_newer_version_is_left_to_its_workers(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    greet, greeted = declare_greet(bench.app)

    async def scenario() -> None:
        async with bench.app.store.transaction() as transaction:
            await transaction.register("schedule", "newer", b'{"timetable": {"kind": "moon"}}', version=0)
        await bench.app.schedule(greet.call("ada"), "*/5 * * * *", name="g")
        await pass_time(bench, timedelta(minutes=5))
        assert greeted == ["ada"]
        assert "schedule_unreadable schedule=newer" in caplog.text

    bench.run(scenario)


# a worker that keeps running, and a store that fails


async def pass_second(clock: FakeClock) -> None:
    """Let a second pass, and let all tasks run."""
    clock.advance(1)
    for _ in range(50):
        await give_way()


def test_a_worker_fires_at_its_time_and_when_a_schedule_is_made_beside_it(tmp_path: Path) -> None:
    """E9: the worker sleeps until the next fire time, or until a change in its own process wakes it."""
    clock = FakeClock()
    app = App(store=SQLiteStore(str(tmp_path / "inline.db"), clock=clock, inline=True), clock=clock)
    greet, greeted = declare_greet(app)

    async def scenario() -> None:
        async with app:
            working = asyncio.create_task(app.work())
            await pass_second(clock)
            await app.schedule(greet.call("ada"), "* * * * *", name="g")
            for _ in range(182):
                await pass_second(clock)
            assert greeted == ["ada"] * 3
            found = (await app.schedules())["g"]
            assert found.last_at == to_datetime(START + 3 * MINUTE)
            assert found.drift is not None
            assert found.drift <= timedelta(seconds=1)
            app.stop_working()
            while not working.done():
                await pass_second(clock)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["refuse", "lose"])
@pytest.mark.parametrize("verb", ["entries", "now", "begin", "transaction.register", "transaction.put", "commit"])
def test_a_store_that_is_away_delays_a_tick_and_loses_nothing(
    sqlite_url: str, verb: str, kind: Literal["refuse", "lose"]
) -> None:
    """C18, fault 35: for every refused call, and every lost answer."""
    clock = HastyClock()
    store = FaultyStore(open_store(sqlite_url, clock=clock), [Fault(kind, at=3, verb=verb)], clock=clock)
    app = App(store=store, clock=clock)
    seen = Seen()
    declare_hourly(app, seen, catchup="all")

    async def scenario() -> None:
        async with app:
            await app.work(until_idle=True)
            for _ in range(12):
                clock.advance(timedelta(minutes=30))
                await app.work(until_idle=True)
        assert len(store.fired) == 1
        assert [when for _, when, _ in seen.runs] == [timedelta(hours=hour) for hour in range(1, 7)]

    asyncio.run(scenario())
