"""Recurring tasks as type checkers see them, checked by mypy and pyright, both strict; see ``test_public_api.py``."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from onefold import App, Call, Context, Debounced, Receipt, RetryPolicy, Schedule, Task

app = App("sqlite:///never-opened.db")


@app.recurring("0 3 * * *", timezone="Europe/Berlin", catchup="last", window=timedelta(days=2), queue="nightly")
async def close_day(ctx: Context) -> int:
    assert_type(ctx.scheduled_for, datetime | None)
    assert_type(ctx.missed, int)
    return ctx.missed


@app.recurring(every=timedelta(minutes=5), mode="rate", anchor=datetime(2030, 1, 1, tzinfo=UTC))
async def poll(page: int = 1) -> str:
    return f"{page}"


@app.recurring(every=30, mode="delay", retry=RetryPolicy(max_attempts=3), timeout=5)
async def sweep() -> None: ...


@app.task
async def digest(user: int, note: str) -> None: ...


quiet = app.debounce(digest, key="{user}", wait=30, at_most=timedelta(minutes=5))


def test_a_recurring_task_is_a_task() -> None:
    """P5: with the signature of its function."""
    as_declared: Task[[], int] = close_day
    assert_type(as_declared.call(), Call[int])
    assert_type(poll.call(2), Call[str])
    debounced: Debounced[[int, str]] = quiet
    assert sorted(app.tasks) == ["close_day", "digest", "digest.debounced", "poll", "sweep"]
    assert debounced.task is digest


async def at_run_time() -> None:
    """E9, P5."""
    assert_type(await app.schedule(digest.call(7, "a"), "*/5 * * * *", name="d", timezone="Asia/Tokyo"), Schedule)
    await app.schedule(poll.options(queue="slow").call(), every=60, mode="rate", name="p", catchup="all")
    assert_type(await app.schedules(), dict[str, Schedule])
    assert_type(await app.unschedule("d"), bool)
    found = (await app.schedules())["p"]
    assert_type(await found.pause(), bool)
    assert_type(await found.resume(), bool)
    assert_type(await found.run_now(), str)
    assert_type(found.next_at, datetime | None)
    assert_type(found.drift, timedelta | None)
    assert_type(found.preview(3), list[datetime])
    assert_type(found.as_dict(), dict[str, Any])
    assert_type(await quiet.trigger(7, note="a"), datetime)
    assert_type(await close_day.send(), Receipt[int])


async def wrong() -> None:
    """P3, P5: a declaration that is refused at run time is a type error too."""
    app.recurring("0 3 * * *", catchup="some")  # type: ignore[arg-type]
    app.recurring(every=5, mode="sometimes")  # type: ignore[arg-type]
    app.recurring("0 3 * * *", qeue="fast")  # type: ignore[call-arg]
    await app.schedule(digest, "* * * * *", name="d")  # type: ignore[arg-type]
    await app.schedule(digest.call(7, "a"), "* * * * *")  # type: ignore[call-arg]
    await quiet.trigger("7", "a")  # type: ignore[arg-type]
    poll.call("2")  # type: ignore[arg-type]
