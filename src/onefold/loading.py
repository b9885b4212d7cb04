"""Entry: what every process of a worker does first: find the app that a person named, and set up its log."""

from __future__ import annotations

import importlib
import logging
import os
import sys

from onefold.app import App
from onefold.errors import ConfigurationError
from onefold.sync import SyncApp


def working_directory() -> str:
    """Return the directory this process works in."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigurationError("the working directory was removed; start again in one that exists") from error


def load_app(where: str) -> App:
    """Import the app a person named on the command line."""
    if "://" in where or "@" in where:  # which is not repeated: it may hold a password
        raise ConfigurationError("a URL stands in the place of MODULE:APP; give it with --url, or write shop:app")
    module_name, _, name = where.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name or "app")):
        raise ConfigurationError(f"{where!r} names no app; write MODULE:APP, such as shop:app or shop.tasks:app")
    if (here := working_directory()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise
        raise ConfigurationError(
            f"there is no module {module_name!r} here; write MODULE:APP, such as shop:app"
        ) from error
    try:
        found = getattr(module, name or "app")
    except AttributeError as error:
        raise ConfigurationError(f"module {module_name!r} has no {name or 'app'!r}") from error
    if isinstance(found, SyncApp):
        found = found.app
    if not isinstance(found, App):
        raise ConfigurationError(f"{where} is a {type(found).__name__}, not an App")
    return found


def set_up_logging(*, verbose: bool) -> None:
    """Log to standard error, one event per line, unless the app has set up something else."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
