"""``onefold workers`` and ``onefold restored``: looking after a fleet."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from onefold import inspection
from onefold.app import App
from onefold.cli.console import AppOrUrl, AsJson, Url, UrlFile, errors, find_app, output, run_on
from onefold.cli.screen import Cell, line
from onefold.cli.words import lasting
from onefold.clock import MICROSECONDS, SystemClock, system_random, to_datetime
from onefold.fleet import WorkerRecord
from onefold.store import Record


def workers(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    held: Annotated[bool, typer.Option("--held", help="List the messages that each of them holds, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which workers are alive and what they hold.

    Every worker is vouched for every few seconds, and forgotten a minute after the last time.

    Changes nothing.

    Example: onefold workers shop.tasks:app --held
    """
    fleet = run_on(find_app(app, url, url_file), lambda opened: _look(opened, held))
    now = max((record.checked_at for record, _ in fleet), default=0)
    if as_json:
        output.print_json([_as_dict(record, messages if held else None) for record, messages in fleet])
        return
    if not fleet:
        errors.say("no workers")
        return
    # A worker says what it runs only now and then, and what it holds is read now: beside each other they must say so.
    headings = ("worker", "pid", "parent", "lane", "queues", "up", *(("holds now",) if held else ()))
    rows = [_row(record, now, len(messages) if held else None) for record, messages in fleet]
    output.print_table((*headings, "ran when seen", "settled", "seen"), rows)
    for record, messages in fleet if held else ():
        if messages:
            _print_held(record, messages, now)
        else:
            output.say(f"{record.name} holds nothing")


async def _look(app: App, held: bool) -> list[tuple[WorkerRecord, list[Record]]]:
    records = await inspection.workers(app.store)
    return [(one, await inspection.held_by(app.store, one.name) if held else []) for one in records]


def _row(one: WorkerRecord, now: int, held: int | None) -> list[Cell]:
    stalled = f" stalled {lasting(one.stalled_seconds)}" if one.stalled_seconds else ""
    return [
        one.name,
        str(one.pid),
        "-" if one.parent is None else str(one.parent),
        one.lane,
        ", ".join(one.queues),
        lasting((now - one.started_at) / MICROSECONDS),
        *([] if held is None else [f"{held:,}"]),
        line(f"{one.running} of {one.concurrency}", (stalled, "red")),
        f"{one.settled:,}",
        to_datetime(one.checked_at).strftime("%H:%M:%S"),
    ]


def _print_held(record: WorkerRecord, messages: list[Record], now: int) -> None:
    rows = [
        (
            one.envelope.id,
            one.envelope.message_type,
            one.envelope.queue,
            lasting(max(now - one.envelope.created_at, 0) / MICROSECONDS),
            str(one.attempt + 1),
            str(one.crashes),
        )
        for one in messages
    ]
    output.print_table(("message", "type", "queue", "age", "attempt", "crashes"), rows, title=record.name)


def _as_dict(record: WorkerRecord, messages: list[Record] | None) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(record)
    for name in ("started_at", "checked_at"):
        found[name] = to_datetime(found[name]).isoformat()
    if messages is not None:
        found["held"] = [
            {
                "id": one.envelope.id,
                "message_type": one.envelope.message_type,
                "queue": one.envelope.queue,
                "created_at": to_datetime(one.envelope.created_at).isoformat(),
                "attempt": one.attempt + 1,
                "crashes": one.crashes,
                "fence": one.fence,
            }
            for one in messages
        ]
    return found


def restored(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    actor: Annotated[str, typer.Option(help="Who you are; kept for ever.")],
    reason: Annotated[str, typer.Option(help="What happened, such as 'backup of Monday'; kept for ever.")],
    new_identity: Annotated[
        bool, typer.Option("--new-identity", help="It is a copy whose original lives on, such as one for staging.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Tell the store that its database was restored from a backup, before any worker is started on it.

    A worker from before the restore may still be alive, with a right to messages that the database has forgotten.
    Every fence rises out of its reach and every lease ends, so it can no longer write; what it had runs again.
    The keys for outside providers stay the same, so that they recognise what they were asked before.  A copy whose
    original lives on needs other keys, or the two take each other's answers: say --new-identity.

    Changes every lease and every fence of the store, and with --new-identity its keys for outside providers.

    Example: onefold restored shop.tasks:app --actor ada --reason 'backup of Monday'
    """
    target = find_app(app, url, url_file)
    if not yes:
        typer.confirm("This ends every lease in the store. Was it restored from a backup?", abort=True)
    number = run_on(target, lambda opened: _restore(opened, actor, reason, new_identity))
    output.say(f"done: {number} leases ended; workers may start")


async def _restore(app: App, actor: str, reason: str, new_identity: bool) -> int:
    renew = system_random() if new_identity else None
    return await inspection.restored(app.store, actor=actor, reason=reason, at=SystemClock().now(), renew=renew)
