"""``onefold schedules``: showing schedules, and changing them at run time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
import typer

from onefold.app import App
from onefold.cli.console import (
    Answer,
    AppArgument,
    AppOrUrl,
    AsJson,
    Url,
    UrlFile,
    errors,
    find_app,
    output,
    run_on,
    say,
)
from onefold.cli.screen import Cell, lines
from onefold.clock import SystemClock
from onefold.errors import ConfigurationError
from onefold.processes.load_app import load_app
from onefold.schedules.register import Schedule
from onefold.schedules.timetable import make_timetable
from onefold.schedules.timetable import preview as preview_timetable

schedules = typer.Typer(help="Show and change the schedules of recurring tasks.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
Timezone = Annotated[str, typer.Option(help="An IANA time zone for the cron expression.")]
Every = Annotated[float | None, typer.Option(help="Seconds between two fire times, instead of a cron expression.")]
Mode = Annotated[str | None, typer.Option(help="With --every: rate, at fixed times; or delay, after the last run.")]


@schedules.command("list")
def list_(app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False) -> None:
    """List every schedule, with its next fire time and how late it fired last time.

    Changes nothing.

    Example: onefold schedules list shop.tasks:app
    """
    found = list(run_on(find_app(app, url, url_file), App.schedules).values())
    if as_json:
        output.print_json([one.as_dict() for one in found])
    elif not found:
        errors.say("no schedules")
    else:
        output.print_table(("schedule", "when", "next", "late by", "", ""), map(_row, found))


@schedules.command()
def show(name: Name, app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False) -> None:
    """Show all fields of one schedule, and its next fire times.

    Changes nothing.

    Example: onefold schedules show nightly shop.tasks:app
    """
    found = run_on(find_app(app, url, url_file), lambda opened: _one(opened, name))
    coming = [] if found.paused or found.next_at is None else found.preview()
    if as_json:
        output.print_json({**found.as_dict(), "preview": [one.astimezone(UTC).isoformat() for one in coming]})
        return
    output.print_fields(found.as_dict())
    _print_preview(coming)


@schedules.command()
def add(
    name: Name,
    app: AppArgument,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task it sends.")],
    cron: Annotated[str | None, typer.Option(help="A cron expression, such as '*/5 * * * *'.")] = None,
    timezone: Timezone = "UTC",
    every: Every = None,
    mode: Mode = None,
    catchup: Annotated[str | None, typer.Option(help="Missed fire times to catch up on: skip, last or all.")] = None,
    window: Annotated[float | None, typer.Option(help="Catch up on fire times of this many seconds only.")] = None,
    arguments: Annotated[str, typer.Option(help="The task's arguments, as a JSON object.")] = "{}",
    as_json: AsJson = False,
) -> None:
    """Make a schedule, or change the one of this name.  Giving the same again changes nothing.

    Changes: the schedule is stored, and workers fire it.

    Example: onefold schedules add nightly shop.tasks:app report --cron '0 3 * * *' --timezone Europe/Berlin
    """

    async def make(opened: App) -> Schedule:
        found = opened.tasks.get(task)
        if found is None:
            raise ConfigurationError(f"the app has no task {task!r}; it has: {', '.join(opened.tasks) or 'none'}")
        try:
            call = found.call(**_read_arguments(arguments))
        except TypeError as error:
            raise ConfigurationError(f"{task}: {error}; write them as --arguments '{{\"name\": …}}'") from error
        options: dict[str, Any] = {"timezone": timezone, "every": every, "mode": mode}
        return await opened.schedule(call, cron, name=name, catchup=catchup, window=window, **options)  # type: ignore[arg-type]

    made = run_on(load_app(app), make)
    say(made.as_dict(), as_json, f"{made.name} fires {made.timetable}, next at {_in_words(made.next_at)}")


@schedules.command()
def pause(name: Name, app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False) -> None:
    """Stop a schedule from firing until it is resumed.

    Changes: the schedule is stored as paused.

    Example: onefold schedules pause nightly shop.tasks:app
    """
    found, changed = run_on(find_app(app, url, url_file), lambda opened: _changed(opened, name, Schedule.pause))
    say(found.as_dict(), as_json, f"{name} is paused" if changed else f"{name} was paused already")


@schedules.command()
def resume(
    name: Name, app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False
) -> None:
    """Let a schedule fire again from now on; fire times during the pause are dropped.

    Changes: the schedule is stored with its next fire time.

    Example: onefold schedules resume nightly shop.tasks:app
    """
    found, changed = run_on(find_app(app, url, url_file), lambda opened: _changed(opened, name, Schedule.resume))
    words = f"{name} is resumed, next at {_in_words(found.next_at)}" if changed else f"{name} was not paused"
    say(found.as_dict(), as_json, words)


@schedules.command()
def run(name: Name, app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False) -> None:
    """Send the schedule's message now; its fire times stay as they are.

    Changes: one message is sent.

    Example: onefold schedules run nightly shop.tasks:app
    """
    _, id_ = run_on(find_app(app, url, url_file), lambda opened: _changed(opened, name, Schedule.run_now))
    say({"message_id": id_}, as_json, f"sent {id_}")


@schedules.command()
def remove(
    name: Name, app: AppOrUrl = None, url: Url = None, url_file: UrlFile = None, as_json: AsJson = False
) -> None:
    """Remove a schedule.  One that is declared in code comes back when a worker with that code starts.

    Changes: the schedule is removed; messages that it has sent stay.

    Example: onefold schedules remove nightly shop.tasks:app
    """
    found, _ = run_on(find_app(app, url, url_file), lambda opened: _changed(opened, name, Schedule.remove))
    say({"name": name, "removed": True}, as_json, f"{found.name} is removed")


@schedules.command()
def preview(
    expression: Annotated[str | None, typer.Argument(metavar="CRON", help="Such as '30 2 * * *'.")] = None,
    timezone: Timezone = "UTC",
    every: Every = None,
    mode: Mode = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=1_000, help="How many fire times.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Show when an expression would fire, without making a schedule.

    Changes nothing, and needs no store.

    Example: onefold schedules preview '30 2 * * *' --timezone Europe/Berlin
    """
    timetable = make_timetable(expression, timezone=timezone, every=every, mode=mode)  # type: ignore[arg-type]
    coming = preview_timetable(timetable, SystemClock().now(), number)
    if as_json:
        output.print_json([{"local": one.isoformat(), "utc": one.astimezone(UTC).isoformat()} for one in coming])
    else:
        _print_preview(coming)


# store


async def _one(app: App, name: str) -> Schedule:
    found = await app.schedules()
    if name not in found:
        raise ConfigurationError(f"there is no schedule {name!r}; there are: {', '.join(found) or 'none'}")
    return found[name]


async def _changed(app: App, name: str, change: Callable[[Schedule], Awaitable[Answer]]) -> tuple[Schedule, Answer]:
    found = await _one(app, name)
    return found, await change(found)


def _read_arguments(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"--arguments is not a JSON object: {error}") from error


# output


def _row(one: Schedule) -> list[Cell]:
    local, utc = _in_words(one.next_at), _in_words(one.next_at and one.next_at.astimezone(UTC))
    return [
        one.name if one.name == one.task else lines(one.name, one.task),
        one.timetable if one.timezone == "UTC" else lines(one.timetable, one.timezone),
        local if local == utc else lines(local, utc),
        "-" if one.drift is None else _late(one.drift),
        lines(f"{one.fired:,} fired", f"{one.missed:,} missed"),
        lines(*["paused"] * one.paused, *["in code"] * one.declared),
    ]


def _print_preview(coming: list[datetime]) -> None:
    rows = [
        (one.strftime("%a %Y-%m-%d %H:%M:%S %Z"), one.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")) for one in coming
    ]
    output.print_table(("local", "UTC"), rows)


def _late(drift: timedelta) -> str:
    return f"{drift.total_seconds():.3f} s" if drift < timedelta(minutes=1) else str(drift).partition(".")[0]


def _in_words(moment: datetime | None) -> str:
    return "-" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S %Z")
