"""``onefold restored``: after a restore from backup, end the leases of workers from before it."""

from __future__ import annotations

from typing import Annotated

import typer

from onefold.app import App
from onefold.cli.console import AppOrUrl, Url, UrlFile, find_app, output, run_on
from onefold.clock import SystemClock, system_random
from onefold.operations import restored as operations


def restored(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    actor: Annotated[str, typer.Option(help="Your name; kept for ever.")],
    reason: Annotated[str, typer.Option(help="The reason, such as 'backup of Monday'; kept for ever.")],
    new_identity: Annotated[
        bool, typer.Option("--new-identity", help="The original stays in use, as with a copy for staging.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """End all leases after a restore from backup; run it before any worker is started on the database.

    A worker from before the restore may still run, with leases that the restored database does not know.  Every lease
    ends and every fence is raised, so that it can no longer write; its messages run again.
    The keys for outside providers stay the same, so that they recognise earlier calls.  If the original database stays
    in use, the copy needs other keys, because a provider would take its calls for those of the original: give
    --new-identity.

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
    return await operations.restored(app.store, actor=actor, reason=reason, at=SystemClock().now(), renew=renew)
