"""What the commands share: where they print, and how a person names an app or a store."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from onefold.app import App
from onefold.errors import ConfigurationError
from onefold.loading import load_app

errors = Console(stderr=True, highlight=False)
output = Console(highlight=False)

AppArgument = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, such as shop.tasks:app.")]
AppOrUrl = Annotated[
    str | None, typer.Argument(metavar="[MODULE:APP]", help="The app, or leave it out and give --url.")
]
Url = Annotated[str | None, typer.Option(envvar="ONEFOLD_URL", help="The store's URL, instead of an app.")]


def find_app(app: str | None, url: str | None) -> App:
    """Return the app a person named, or an app without tasks on the store they named."""
    if app is None and url is None:
        raise ConfigurationError("say which store: MODULE:APP, or --url, or the variable ONEFOLD_URL")
    return load_app(app) if app is not None else App(url)
