"""Status lines of processes that run for long; that one cannot be printed never stops the process."""

from __future__ import annotations

from contextlib import suppress

from onefold.cli.screen import errors


def print_status(text: str) -> None:
    """Print a line on standard error; ignore a full disk, a closed pipe and a closed stream."""
    # The console itself ignores a full disk and a closed pipe.
    with suppress(ValueError):
        errors.say(text)
