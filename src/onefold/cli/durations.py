"""Formatting times, durations and arguments for the commands, and parsing durations."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta

from onefold.errors import ConfigurationError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

#: Arguments such as ``pay#1/charge``, which need no quotes in any shell although ``shlex`` would add some.
_PLAIN_ARGUMENT = re.compile(r"\w[\w:#/.@+-]*", re.ASCII)


def argument(text: str) -> str:
    """Format a text as one argument of a command, to be copied into a shell."""
    return text if _PLAIN_ARGUMENT.fullmatch(text) else shlex.quote(text)


def lasting(seconds: float) -> str:
    """Format a duration: 340ms, 12s, 3m 04s, 5h 09m, 2d 03h."""
    if 0 < seconds < 1:
        return f"{max(1, round(seconds * 1_000))}ms"
    whole = round(seconds)
    for large, small, size in (("d", "h", 86_400), ("h", "m", 3_600), ("m", "s", 60)):
        if whole >= size:
            inner = {"h": 3_600, "m": 60, "s": 1}[small]
            return f"{whole // size}{large} {whole % size // inner:02}{small}"
    return f"{whole}s"


def written(moment: datetime | None) -> str:
    """Format a time to the second, in UTC."""
    return "-" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def from_now(moment: datetime, now: datetime) -> str:
    """Format the distance of a time from now: in 3m 04s, or 12s ago."""
    seconds = (moment - now).total_seconds()
    return f"in {lasting(seconds)}" if seconds > 0 else f"{lasting(-seconds)} ago"


def read_duration(option: str, text: str | None) -> timedelta | None:
    """Parse a duration as ``lasting`` formats it: numbers with s, m, h, d or w."""
    if text is None:
        return None
    found = _DURATION.findall(text)
    if not found or _DURATION.sub("", text).strip():
        raise ConfigurationError(f"{option} {text!r} is not a duration; write 90s, 15m, 2h, '1d 12h' or 1w")
    return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in found))
