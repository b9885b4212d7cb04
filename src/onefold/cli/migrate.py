"""``onefold migrate``: bring a database's schema to this version."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from onefold.app import App
from onefold.cli.console import AppOrUrl, Url, UrlFile, find_app, output
from onefold.store.identity import Origin
from onefold.store.open import schema_text


def migrate(
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL instead of running it.")] = False,
) -> None:
    """Bring a database's schema to this version.  Safe to run twice, and on several machines at once.

    Changes the schema, and creates a SQLite file that does not exist; with --print, changes nothing.

    Example: onefold migrate --url sqlite:///shop.db
    """
    if print_:
        named = find_app(app, url, url_file, creates=True).url if app or url or url_file else None
        output.print_lines(schema_text(named or "sqlite:///"))
        return
    applied, origin = asyncio.run(_migrate(find_app(app, url, url_file, creates=True)))
    for name in applied:
        output.say(f"applied {name}")
    if not applied:
        output.say("nothing to do: the schema is up to date")
    output.say(f"database {origin.identity} of app {origin.name}")


async def _migrate(app: App) -> tuple[list[str], Origin]:
    applied = await app.migrate()
    async with app:
        return applied, app.origin
