"""Stage 7, handle: what a handler says about itself while it runs.

A handler says it as often as it likes; the worker collects the last word and writes it about once a second.
"""

from __future__ import annotations

from typing import Protocol

from onefold import limits
from onefold.store import Said


class Pulse:
    """Signs of life of one run: left by the handler, in whichever thread, and taken by the worker."""

    __slots__ = ("_mark", "_said", "_taken", "_told", "beat_seen_at", "stalled")

    def __init__(self, now: int = 0) -> None:
        self._said: Said | None = None
        self._told: Said | None = None
        # Each sign leaves a new mark: one assignment, which no other thread can see half-done.
        self._mark: object | None = None
        self._taken: object | None = None
        #: When the worker last found a sign, on the steady clock.
        self.beat_seen_at = now
        #: The worker has told that there is none.
        self.stalled = False

    def beat(self) -> None:
        """Leave a sign of life."""
        self._mark = object()

    def say(self, said: Said) -> None:
        """Leave word of how far it is; the last one counts.  Without a percentage it is only a beat."""
        if said.percent is not None:
            self._said = said
        self.beat()

    def take(self) -> Said | None:
        """Return what is new since the last time, if anything."""
        mark = self._mark  # read before the word, which is left before the mark: a later one is found next time
        if mark is self._taken:
            return None
        said = Said() if self._said is None or self._said is self._told else self._said
        self._taken, self._told = mark, self._said
        return said

    def untake(self) -> None:
        """What was taken did not arrive; it is to be taken again."""
        self._taken = self._told = None


class Bearer(Protocol):
    """Who carries the pulse of a run; it is made when it is first needed, because most runs have none."""

    pulse: Pulse | None


def pulse_of(bearer: Bearer) -> Pulse:
    """Return the pulse of a run."""
    pulse = bearer.pulse
    if pulse is None:
        pulse = bearer.pulse = Pulse()
    return pulse


def make_said(percent: float, message: str) -> Said:
    """Bring what a handler said into its limits: nothing it says about itself is a reason to fail."""
    text = str(message)[: limits.PROGRESS_MESSAGE_MAX].encode(errors="replace").decode().replace("\0", "")
    # In this order, so that what is not a number becomes 0.
    return Said(max(0.0, min(float(percent), 100.0)), text)
