"""Entry: the first acts of every process of a worker: import the app that was named, and set up logging."""

from __future__ import annotations

import importlib
import logging
import os
import sys

from onefold.app import App
from onefold.errors import ConfigurationError
from onefold.sync import SyncApp


def working_directory() -> str:
    """Return the working directory; raises ``ConfigurationError`` if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigurationError("the working directory was removed; start again in one that exists") from error


def load_app(where: str) -> App:
    """Import the app that MODULE:APP on the command line names."""
    if "://" in where or "@" in where:  # the error does not repeat it: it may hold a password
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
        raise ConfigurationError(
            f"module {module_name!r} has no {name or 'app'!r}; write MODULE:APP with the name of the app in it"
        ) from error
    if isinstance(found, SyncApp):
        found = found.app
    if not isinstance(found, App):
        raise ConfigurationError(f"{where} is a {type(found).__name__}, not an App; name the App itself")
    return found


def set_up_logging(*, verbose: bool) -> None:
    """Log to standard error, one event per line, unless the app has configured logging."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
