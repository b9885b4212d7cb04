"""When nobody could write, so that nobody loses a lease for want of a chance to renew it.

A file has one writer.
Somebody who keeps the lock, because it hangs or was stopped in the middle of a transaction, keeps every owner from
renewing; when it lets go at last, those who claim and those who renew come at the same moment, and the first must not
take over what the others are about to renew.
"""

from __future__ import annotations

from onefold import limits
from onefold.clock import MICROSECONDS, Clock

#: Shorter ones keep nobody from renewing: a third of the shortest lease, which is how often leases are renewed.
_STANDSTILL_MICROS = 300_000


class Standstill:
    """The last time for which one process could not write, or kept all others from it."""

    __slots__ = ("_began", "_clock", "_ended", "_refused_at")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._ended = -limits.INTEGER_MAX
        self._refused_at: int | None = None

    def refused(self) -> None:
        """Take down that another process has the lock."""
        if self._refused_at is None:
            self._refused_at = self._clock.steady()

    def admitted(self) -> None:
        """Take down that the lock is ours, after others had it perhaps."""
        if self._refused_at is not None:
            self.note(self._refused_at)
            self._refused_at = None

    def note(self, began: int) -> None:
        """Take down that since then only one transaction was possible, ours or somebody else's."""
        ended = self._clock.steady()
        if ended - began < _STANDSTILL_MICROS:
            return
        # A short one must not make a long one forgotten that has only just ended.
        if ended - began >= self._ended - self._began or ended - self._ended > limits.LEASE * MICROSECONDS:
            self._began, self._ended = began, ended

    def ran_out_before(self, lease: float) -> int:
        """Return the moment before which a lease must have run out, now, to be anybody's.

        For one ``lease`` after a standstill these are only those that had run out long before it, because it may have
        gone on for as long before it was noticed.
        """
        now, micros = self._clock.steady(), round(lease * MICROSECONDS)
        return now if now - self._ended > micros else self._began - micros
