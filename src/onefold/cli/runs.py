"""``onefold runs``: showing workflows while they run, and the acts of operators on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from onefold import limits
from onefold.app import App
from onefold.cli.console import (
    Actor,
    AppOrUrl,
    AsJson,
    Reason,
    Url,
    UrlFile,
    actor_name,
    errors,
    find_app,
    output,
    progress,
    read_json,
    run_on,
    say,
    warn_unknown,
)
from onefold.cli.durations import argument, lasting, read_duration, written
from onefold.cli.tree import draw, waits_of
from onefold.clock import MICROSECONDS, to_datetime
from onefold.errors import ConfigurationError
from onefold.operations import runs as operations
from onefold.operations.history import Chronicle
from onefold.store import Record, State

runs = typer.Typer(help="Show workflows, send them signals, cancel, resume or restart them.", no_args_is_help=True)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, which is the id of its message.")]
SignalName = Annotated[str, typer.Option("--signal", help="The signal's name, as runs show lists it in the mailbox.")]
SignalId = Annotated[str, typer.Option("--id", help="The signal's id, as runs show lists it in the mailbox.")]
_NO_SIGNAL = "has no such signal in its mailbox, or it runs or has ended"
States = Annotated[list[str] | None, typer.Option("--state", help="Only this state; may be given several times.")]
Age = Annotated[str | None, typer.Option(help="Such as 90s, 15m, 2h or 3d.")]


@runs.command("list")
def list_(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    state: States = None,
    everything: Annotated[bool, typer.Option("--all", help="Also runs that have ended.")] = False,
    workflow: Annotated[str | None, typer.Option(help="Only runs of this workflow.")] = None,
    older_than: Age = None,
    newer_than: Age = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=limits.PAGE_MAX, help="At most this many.")] = 50,
    after: Annotated[str, typer.Option(help="Continue after this run, the last one of the page before.")] = "",
    as_json: AsJson = False,
) -> None:
    """List runs, the oldest first; without a state, those that have not ended.

    Changes nothing.

    Example: onefold runs list shop.tasks:app --state parked --older-than 2h
    """
    states = _read_states(state) if state else tuple(State) if everything else operations.OPEN
    ages = (read_duration("--older-than", older_than), read_duration("--newer-than", newer_than))

    async def look(opened: App) -> tuple[list[Record], int]:
        now, found = await opened.store.now(), list[Record]()
        with progress("reading runs") as advance:
            created = (_ago(now, ages[1], 0), _ago(now, ages[0], limits.INSTANT_MAX))
            async for record in operations.runs(
                opened.store, states=states, message_type=workflow, created=created, after=after
            ):
                found.append(record)
                advance(1)
                if len(found) > limit:
                    break
        return found, now

    named = find_app(app, url, url_file)
    found, now = run_on(named, look)
    page, more = found[:limit], len(found) > limit
    if as_json:
        following = page[-1].envelope.id if more else None
        output.print_json({"runs": [_as_dict(one) for one in page], "next": following})
    elif not page:
        if workflow is not None and named.tasks:
            warn_unknown("workflow", workflow, named.tasks)
        errors.say("no runs")
    else:
        headings = ("run", "workflow", "state", "age", "next", "subject", "reason")
        output.print_table(headings, [_row(one, now) for one in page])
        if more:
            errors.say(f"there are more; continue with --after {argument(page[-1].envelope.id)}")


@runs.command()
def show(
    run: RunId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    depth: Annotated[int, typer.Option(min=0, max=10, help="Levels of children to show.")] = limits.CHRONICLE_DEPTH,
    everything: Annotated[bool, typer.Option("--all", help="Draw every entry, however many there are.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw a run, or any other message, as a tree: what it did and when, what failed, what it waits for.

    A step counts as begun when the one before it ended.  Times are in UTC.

    Changes nothing.

    Example: onefold runs show RUN shop.tasks:app
    """

    async def look(opened: App) -> tuple[Chronicle, int]:
        found = await opened.chronicle(run, depth=depth)
        if found is None:
            raise ConfigurationError(f"there is no run {run!r}, or it is no longer kept; see onefold runs list")
        return found, await opened.store.now()

    with progress("reading"):
        found, instant = run_on(find_app(app, url, url_file), look)
    now = to_datetime(instant)
    waits = waits_of(found, now)
    if as_json:
        output.print_json({"run": found, "waits_for": waits})
        return
    output.print(draw(found, now, everything=everything))
    for one in waits:
        output.say((f"waits for {one}", "yellow"))


@runs.command()
def signal(
    run: RunId,
    name: Annotated[str, typer.Argument(metavar="SIGNAL", help="The signal's name.")],
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    value: Annotated[str, typer.Option(help="The signal's value, as JSON.")] = "null",
    id: Annotated[str | None, typer.Option(help="Two signals with the same id are one.")] = None,  # noqa: A002
    as_json: AsJson = False,
) -> None:
    """Send a run a signal; the run continues if it waits for it.

    Changes: the signal is stored in the run's mailbox.

    Example: onefold runs signal RUN approved shop.tasks:app --value true
    """
    decoded = read_json("--value", value)
    named = find_app(app, url, url_file)
    if not run_on(named, lambda opened: opened.signal(run, name, decoded, id=id)):
        raise ConfigurationError(f"run {run} has ended or does not exist; nothing was done")
    say({"run": run, "told": True}, as_json, f"{run} has the signal")


@runs.command()
def cancel(
    run: RunId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Cancel a run; its steps are not undone unless it is a saga, and its children go on.

    Changes: the run ends as cancelled, or, if it is a saga, is undone.

    Example: onefold runs cancel RUN shop.tasks:app --reason 'ordered twice'
    """
    _act(
        find_app(app, url, url_file),
        lambda opened: opened.cancel(run, actor=actor_name(actor), reason=reason),
        run,
        as_json,
        "cancelled",
        "has ended or does not exist",
    )


@runs.command()
def resume(
    run: RunId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Let a parked run run now, for instance after the right code was deployed.

    Changes: the run is scheduled now.

    Example: onefold runs resume RUN shop.tasks:app --reason 'version 2 is deployed'
    """
    _act(
        find_app(app, url, url_file),
        lambda opened: opened.resume(run, actor=actor_name(actor), reason=reason),
        run,
        as_json,
        "resumed",
        "is not parked",
    )


@runs.command()
def restart(
    run: RunId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    from_step: Annotated[str, typer.Option("--from", help="The first step to run again, such as charge#1.")],
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Restart a run from a step: that step and all later ones run again.

    Effects of those steps on other systems are not undone.

    Changes: the steps are removed from the journal, and the run is scheduled.

    Example: onefold runs restart RUN shop.tasks:app --from charge#1 --reason 'wrong account'
    """
    forgotten = run_on(
        find_app(app, url, url_file),
        lambda opened: opened.restart(run, from_step=from_step, actor=actor_name(actor), reason=reason),
    )
    names = list(dict.fromkeys(step.name for step in forgotten))
    if not names:
        raise ConfigurationError(f"run {run} has ended or has no step {from_step!r}; see onefold runs show {run}")
    words = f"{run} restarts from {from_step}; steps that run again: {', '.join(names)}"
    say({"run": run, "forgotten": names}, as_json, words)


@runs.command("drop-signal")
def drop_signal(
    run: RunId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    signal: SignalName,
    signal_id: SignalId,
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Remove a signal from a run's mailbox, for instance one that the run cannot read.

    Changes: the signal is removed, and the run is scheduled to read what is left.

    Example: onefold runs drop-signal RUN shop.tasks:app --signal paid --id payment-2 --reason 'typed by hand'
    """
    _act(
        find_app(app, url, url_file),
        lambda opened: opened.drop_signal(run, signal, signal_id, actor=actor_name(actor), reason=reason),
        run,
        as_json,
        "freed of the signal",
        _NO_SIGNAL,
    )


@runs.command("replace-signal")
def replace_signal(
    run: RunId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    signal: SignalName,
    signal_id: SignalId,
    value: Annotated[str, typer.Option(help="The new value, as JSON.")],
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Change the value of a signal in a run's mailbox, for instance to one that the run can read.

    Changes: the signal has the new value, and the run is scheduled.

    Example: onefold runs replace-signal RUN shop.tasks:app --signal paid --id payment-2 --value 500 --reason 'a typo'
    """
    decoded = read_json("--value", value)
    _act(
        find_app(app, url, url_file),
        lambda opened: opened.replace_signal(run, signal, signal_id, decoded, actor=actor_name(actor), reason=reason),
        run,
        as_json,
        "given the signal",
        _NO_SIGNAL,
    )


# store and output


def _act(
    app: App,
    act: Callable[[App], Awaitable[bool]],
    run: str,
    as_json: bool,
    done: str,
    refusal: str,
) -> None:
    """Run an act on a run and print that it was done; raise with the refusal if the act returned False."""
    if not run_on(app, act):
        raise ConfigurationError(f"run {run} {refusal}; nothing was done")
    say({"run": run, done: True}, as_json, f"{run} was {done}")


def _read_states(names: list[str]) -> tuple[State, ...]:
    known = {state.name.lower(): state for state in State}
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--state {name!r} is not a state; there are: {', '.join(known)}")
    return tuple(known[name] for name in names)


def _ago(now: int, age: timedelta | None, otherwise: int) -> int:
    return otherwise if age is None else now - round(age.total_seconds() * MICROSECONDS)


def _as_dict(record: Record) -> dict[str, Any]:
    envelope = record.envelope
    return {
        "id": envelope.id,
        "workflow": envelope.message_type,
        "version": envelope.schema_version,
        "queue": envelope.queue,
        "subject": envelope.subject,
        "state": record.state.name.lower(),
        "created_at": to_datetime(envelope.created_at),
        "ended_at": None if record.ended_at is None else to_datetime(record.ended_at),
        "due_at": _due_at(record),
        "failure": record.failure,
    }


def _due_at(record: Record) -> datetime | None:
    due = record.envelope.due_at
    if record.state not in (State.SCHEDULED, State.PARKED) or due >= limits.INSTANT_MAX:
        return None
    return to_datetime(due)


def _row(record: Record, now: int) -> tuple[str, ...]:
    envelope = record.envelope
    return (
        envelope.id,
        f"{envelope.message_type} v{envelope.schema_version}",
        record.state.name.lower(),
        lasting(max(0, now - envelope.created_at) / MICROSECONDS),
        written(_due_at(record)),
        envelope.subject or "-",
        "" if record.failure is None else record.failure.reason,
    )
