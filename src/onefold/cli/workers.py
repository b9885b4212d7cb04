"""``onefold workers``: the workers of all machines, and the messages that each has leased."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from onefold.app import App
from onefold.cli.console import AppOrUrl, AsJson, Url, UrlFile, errors, find_app, output, run_on
from onefold.cli.durations import lasting
from onefold.cli.screen import Cell, line
from onefold.clock import MICROSECONDS, to_datetime
from onefold.operations.runs import held_by
from onefold.store import Record
from onefold.worker import worker_list
from onefold.worker.worker_list import WorkerRecord


def workers(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    held: Annotated[bool, typer.Option("--held", help="List the messages that each has leased, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the running workers and the messages that they have leased.

    A worker writes its entry every few seconds; the entry is removed a minute after the last write.

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
    # The leases are read now, and the other figures were written a few seconds ago, so the headings give the times.
    headings = ("worker", "pid", "parent", "lane", "queues", "up", *(("holds now",) if held else ()))
    rows = [_row(record, now, len(messages) if held else None) for record, messages in fleet]
    output.print_table((*headings, "ran when seen", "settled", "seen"), rows)
    for record, messages in fleet if held else ():
        if messages:
            _print_held(record, messages, now)
        else:
            output.say(f"{record.name} holds nothing")


async def _look(app: App, held: bool) -> list[tuple[WorkerRecord, list[Record]]]:
    records = await worker_list.workers(app.store)
    return [(one, await held_by(app.store, one.name) if held else []) for one in records]


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
