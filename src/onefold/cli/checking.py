"""``onefold preflight``: what of that which is open would break under the code at hand."""

from __future__ import annotations

import typer
from rich.table import Table

from onefold.app import App
from onefold.cli.console import AppArgument, AsJson, errors, output, print_json, progress, run_on
from onefold.loading import load_app
from onefold.preflight import Problem
from onefold.preflight import preflight as check


def preflight(app: AppArgument, as_json: AsJson = False) -> None:
    """Check every open run, every pending message and every schedule against the code at hand.

    Run it with the code that is about to be deployed, against the store it is to work on.  Nothing is called, sent or
    written.  The exit code is 1 when something would break.
    """
    checked = 0

    async def look(opened: App) -> list[Problem]:
        total = sum(one.scheduled + one.leased + one.parked for one in (await opened.count()).values())
        with progress("checking", total) as advance:

            def looked(number: int) -> None:
                nonlocal checked
                checked += number
                advance(number)

            return await check(opened, looked)

    problems = run_on(load_app(app), look)
    if as_json:
        print_json({"checked": checked, "problems": problems})
    elif problems:
        output.print(_table(problems))
    if not as_json:
        errors.print(f"{checked:,} messages checked, {len(problems):,} would break")
    if problems:
        raise typer.Exit(1)


def _table(problems: list[Problem]) -> Table:
    table = Table("message", "type", "what", "why", box=None, padding=(0, 2, 0, 0))
    for one in problems:
        message = one.message_id if one.schedule is None else f"schedule {one.schedule}"
        table.add_row(message, f"{one.message_type} v{one.version}", one.kind, one.detail)
    return table
