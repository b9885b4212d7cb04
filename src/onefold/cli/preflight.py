"""``onefold preflight``: the open messages that the code could not handle, before it is deployed."""

from __future__ import annotations

import typer

from onefold.app import App
from onefold.cli.console import AppArgument, AsJson, errors, output, progress, run_on
from onefold.operations.preflight import Problem
from onefold.processes.load_app import load_app


def preflight(app: AppArgument, as_json: AsJson = False) -> None:
    """Check every open run, every pending message and every schedule against this code.

    Run it with the code that will be deployed, on the store that it will use.  Nothing is called, sent or written.
    The exit code is 1 when the code could not handle one of them.

    Changes nothing.

    Example: onefold preflight shop.tasks:app
    """
    checked = 0

    async def look(opened: App) -> list[Problem]:
        total = sum(one.scheduled + one.leased + one.parked for one in (await opened.count()).values())
        with progress("checking", total) as advance:

            def count(number: int) -> None:
                nonlocal checked
                checked += number
                advance(number)

            return await opened.preflight(count)

    problems = run_on(load_app(app), look)
    if as_json:
        output.print_json({"checked": checked, "problems": problems})
    elif problems:
        rows = [(_place(one), f"{one.message_type} v{one.version}", one.kind, one.detail) for one in problems]
        output.print_table(("message", "type", "problem", "detail"), rows)
    if not as_json:
        errors.say(f"{checked:,} messages checked, {len(problems):,} would break")
    if problems:
        raise typer.Exit(1)


def _place(problem: Problem) -> str:
    return problem.message_id if problem.schedule is None else f"schedule {problem.schedule}"
