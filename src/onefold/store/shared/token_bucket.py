"""The limits of a gate, computed: tokens that come with time, and the turn of the first in a line.  Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from onefold.clock import MICROSECONDS
from onefold.store.gates import Gating, Rate

#: Below zero a place is the order of sends, beginning here; from zero on it is the message's own number.
FIRST_PLACE = -(2**62)


class TokenBucket(NamedTuple):
    """How many tokens are left, and when that was so."""

    tokens: float
    at: int

    def refilled(self, rate: Rate, now: int) -> TokenBucket:
        """Return it with the tokens that have come since; a clock that was set back brings none and takes none."""
        come = max(0, now - self.at) / (rate.token_seconds * MICROSECONDS)
        return TokenBucket(min(float(rate.saved), self.tokens + come), now)

    def next_at(self, rate: Rate) -> int:
        """When there is a whole token."""
        return self.at + math.ceil(max(0.0, 1.0 - self.tokens) * rate.token_seconds * MICROSECONDS)

    def full_at(self, rate: Rate) -> int:
        """When it is as if it had never been used."""
        return self.at + round((rate.saved - self.tokens) * rate.token_seconds * MICROSECONDS)


class Head(NamedTuple):
    """A message in front of its line."""

    seq: int
    due_at: int
    message_type: str
    crashes: int
    attempt: int
    is_parked: bool
    place: int

    def backs_off(self, now: int) -> bool:
        """Whether it failed and waits for its next attempt."""
        return self.attempt > 0 and not self.is_parked and self.due_at > now


def has_gap(head: Head, gating: Gating, last: int | None, passed: int | None, now: int) -> bool | None:
    """Whether one before it is missing, so that it must be told so; None when it is to wait for that one.

    ``last`` is the last number that ended, ``passed`` that of a message that was passed over and so is not missing.
    """
    if head.place < 0 or head.place <= max(last or 0, passed or 0) + 1 or gating.gap == "skip":
        return False
    if gating.gap == "retry" or head.due_at + round(gating.gap_seconds * MICROSECONDS) <= now:
        return True
    return None
