"""Stage 7, handle: progress and signs of life of a running handler.

A handler reports as often as it likes; the worker collects the latest report and writes it about once a second.
"""

from __future__ import annotations

from onefold import limits
from onefold.store import Said


class Pulse:
    """Progress and beats of one run: written by the handler, in any thread, and taken by the worker."""

    __slots__ = ("_mark", "_said", "_taken_mark", "_taken_said", "beat_seen_at", "stalled")

    def __init__(self, now: int = 0) -> None:
        self._said: Said | None = None
        # Each beat is a new object: one assignment, which no other thread can see half-done.
        self._mark: object | None = None
        self._taken_said: Said | None = None
        self._taken_mark: object | None = None
        #: When the worker last found a new beat, on the steady clock.
        self.beat_seen_at = now
        #: The worker has reported that beats are missing.
        self.stalled = False

    def beat(self) -> None:
        """Leave a sign of life."""
        self._mark = object()

    def say(self, said: Said) -> None:
        """Leave a report; the last one counts.  Without a percentage it is only a beat."""
        if said.percent is not None:
            self._said = said
        self.beat()

    def take(self) -> Said | None:
        """Return the latest report since the last call; a bare beat without a percentage; None if nothing is new."""
        # Read before the report, which is written before its mark: a report that comes in between is taken next time.
        mark = self._mark
        if mark is self._taken_mark:
            return None
        said = Said() if self._said is None or self._said is self._taken_said else self._said
        self._taken_mark, self._taken_said = mark, self._said
        return said

    def untake(self) -> None:
        """Let the next ``take`` return the latest report again, because it was not written."""
        self._taken_mark = self._taken_said = None


def make_said(percent: float, message: str) -> Said:
    """Make a report, clamped and cut to its limits: a bad percentage or message is no reason to fail a handler."""
    text = str(message)[: limits.PROGRESS_MESSAGE_MAX].encode(errors="replace").decode().replace("\0", "")
    # The order of the arguments turns NaN into 0: min(nan, 100) is nan, and max(0.0, nan) is 0.0.
    return Said(max(0.0, min(float(percent), 100.0)), text)
