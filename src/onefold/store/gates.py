"""Stage 5, rest: how messages are let through gates, as a worker tells it to the store with every claim.

A gate is known by a text: its name, a colon and a key, such as ``mail:tenant-7``; the limits of its name hold for all
its keys together.  The store counts and decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from onefold import limits
from onefold.errors import seconds

OnFailure = Literal["hold", "skip"]
Gap = Literal["wait", "retry", "skip"]


@dataclass(frozen=True, slots=True)
class Rate:
    """So many starts in so many seconds, kept as a bucket of tokens of which each start takes one.

    A token comes every ``per / count`` seconds, and up to ``burst`` of them are saved, unless said otherwise ``count``.
    So after a quiet while ``burst`` messages may start at once, and in the worst case ``burst + count`` within one
    ``per``: what was saved, and what comes meanwhile.  With ``burst=1`` starts are spread evenly.
    """

    count: int
    per: timedelta | float = 1.0
    burst: int | None = None
    #: How many tokens are saved at most, and after how many seconds another one comes.
    saved: int = field(init=False, repr=False)
    token_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        limits.check_range("count of a rate", self.count, 1, limits.RATE_COUNT_MAX)
        per = seconds(self.per, "per of a rate")
        limits.check_range("per of a rate", per, limits.RATE_SECONDS_MIN, limits.RATE_SECONDS_MAX)
        object.__setattr__(self, "saved", self.count if self.burst is None else self.burst)
        limits.check_range("burst of a rate", self.saved, 1, limits.RATE_COUNT_MAX)
        object.__setattr__(self, "token_seconds", per / self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """How messages are let through the gates of one name."""

    name: str
    #: How many may run at once: of all its gates together, and of each.
    max_running: int | None = None
    max_running_each: int | None = None
    #: How many may start, likewise.
    rate: Rate | None = None
    rate_each: Rate | None = None
    #: Whether an ordered message that waits for its next attempt holds up those behind it.
    on_failure: OnFailure = "hold"
    #: How a message is treated whose ``sequence`` says that one before it is missing, and after how long.
    gap: Gap = "wait"
    gap_seconds: float = limits.GAP_SECONDS
    #: Whether a message that was let through takes a place or a token from others.
    is_limited: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = (self.max_running, self.max_running_each, self.rate, self.rate_each)
        object.__setattr__(self, "is_limited", any(limit is not None for limit in given))


NO_GATINGS: Mapping[str, Gating] = {}


def limited_names(gatings: Mapping[str, Gating]) -> frozenset[str]:
    """Return the names of the gates at which a message that passes takes something from others."""
    return frozenset(name for name, gating in gatings.items() if gating.is_limited)


def soonest_token(gatings: Mapping[str, Gating]) -> float:
    """After how many seconds a token can be there, wherever they are waited for."""
    rates = [rate for gating in gatings.values() for rate in (gating.rate, gating.rate_each) if rate is not None]
    return min((rate.token_seconds for rate in rates), default=limits.POLL_SECONDS)


def name_of(gate: str) -> str:
    """Return the name of a gate, without its key."""
    return gate.partition(":")[0]
