"""Stage 6, lease: gates, behind which messages wait for each other.

A gate is a name that messages share: a task with a cap, one key of it, an account whose messages keep their order.
Messages without one take the claim's fast path; what waits behind a gate is taken only as far as its rule lets it.
A rule is counted from live leases, never from a counter, so nothing leaks when a worker dies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Literal

from onefold import limits
from onefold.errors import ConfigurationError, seconds

_PERIODS = {"second": 1.0, "minute": 60.0, "hour": 3_600.0, "day": limits.DAY}
_RATE = re.compile(r"([0-9]+)\s*/\s*([a-z]+)")


@dataclass(frozen=True, slots=True)
class Rate:
    """At most ``count`` starts per ``per``, as a bucket that fills evenly and holds ``count``."""

    count: int
    per: timedelta | float = 1.0

    def __post_init__(self) -> None:
        limits.check_range("rate", self.count, 1, limits.RATE_MAX)
        limits.check_range("rate per", self.seconds, limits.RATE_PERIOD_MIN, limits.RATE_PERIOD_MAX)

    @property
    def seconds(self) -> float:
        """The length of the period."""
        return seconds(self.per)

    @property
    def per_second(self) -> float:
        """How many places are added to the bucket in a second."""
        return self.count / self.seconds


def rate_of(rate: Rate | str) -> Rate:
    """Read ``"100/minute"``; a ``Rate`` is returned as it is."""
    if isinstance(rate, Rate):
        return rate
    found = _RATE.fullmatch(rate.strip().lower())
    if found is None or found.group(2).removesuffix("s") not in _PERIODS:
        raise ConfigurationError(f"rate {rate!r} is not understood; write '100/minute' or Rate(100, per=timedelta(…))")
    return Rate(int(found.group(1)), _PERIODS[found.group(2).removesuffix("s")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What holds for the messages of one type behind gates; every worker that knows the type says the same."""

    #: How many of the type may be leased at once in the whole fleet, and how many of them behind one gate.
    max_running: int | None = None
    max_running_per_key: int | None = None
    #: How many of the type may start in a while, and how many of them behind one gate.
    rate: Rate | None = None
    rate_per_key: Rate | None = None
    #: In the order in which they were sent, one at a time behind each gate.
    #: ``hold``: one that waits for its next attempt holds the gate; ``skip``: the others go on meanwhile.
    order: Literal["hold", "skip"] | None = None
    #: What is done when a message's ``sequence`` is not the one after the last that was done.
    on_gap: Literal["wait", "retry", "skip"] = "wait"


def cap_gate(message_type: str, key: str | None = None) -> str:
    """Name the gate of a task with a cap or a rate, or of one key of it."""
    return f"cap:{message_type}" if key is None else _bounded(f"cap:{message_type}/", key)


def fair_gate(message_type: str, key: str) -> str:
    """Name the gate of one of those that a task serves in turn."""
    return _bounded(f"fair:{message_type}/", key)


def order_gate(queue: str, key: str) -> str:
    """Name the gate of messages that keep their order, whatever their type, in one queue."""
    return _bounded(f"order:{queue}/", key)


def _bounded(prefix: str, key: str) -> str:
    """Keep a gate's name short enough for an index; a long key goes by its digest."""
    if len(key.encode()) <= limits.GATE_KEY_BYTES_MAX:
        return prefix + key
    return f"{prefix}#{blake2b(key.encode(), digest_size=16).hexdigest()}"
