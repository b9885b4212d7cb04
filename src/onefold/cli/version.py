"""``onefold version``: print the version."""

from __future__ import annotations

from onefold.cli.screen import output
from onefold.version import __version__


def version() -> None:
    """Print the version.

    Changes nothing.

    Example: onefold version
    """
    output.say(__version__)
