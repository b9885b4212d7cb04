"""How a process that runs for long tells a person what it does: if it can, and never instead of doing it."""

from __future__ import annotations

from contextlib import suppress

from onefold.cli.console import errors


def tell(text: str) -> None:
    """Print a line on standard error; a full disk, a reader that is gone or a closed stream change nothing.

    Whatever is to be done is done before it is told.
    """
    # The console itself passes over a full disk and a reader that is gone.
    with suppress(ValueError):
        errors.say(text)
