"""When nobody could write, so that nobody loses a lease for want of a chance to renew it.

A file has one writer.
Somebody who keeps the lock, because it hangs or was stopped in the middle of a transaction, keeps every owner from
renewing; when it lets go at last, those who claim and those who renew come at the same moment, and the first must not
take over what the others are about to renew.
"""

from __future__ import annotations

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, SystemClock

#: Shorter ones keep nobody from renewing: a third of the shortest lease, which is how often leases are renewed.
_STANDSTILL_MICROS = 300_000
#: Who has not tried to write for longer than this does not know whether others could, because it was idle or hung.
_UNWATCHED_MICROS = 500_000
#: Others have their chance when the lock was not ours for so long: who waits for it asks every few milliseconds.
CHANCE_SECONDS = _STANDSTILL_MICROS / MICROSECONDS

#: Whether this process hung is a matter of real time: a test that moves its clock has not hung.
_machine = SystemClock()


class Standstill:
    """The last time for which one process could not write, or kept all others from it."""

    __slots__ = ("_began", "_clock", "_ended", "_refused_at", "_tried_at", "_watching_since")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._ended = -limits.INTEGER_MAX
        self._refused_at: int | None = None
        self._tried_at = _machine.steady()
        self._watching_since = self._tried_at - _STANDSTILL_MICROS

    def refused(self) -> None:
        """Take down that another process has the lock."""
        self._watch()
        if self._refused_at is None:
            self._refused_at = self._clock.steady()

    def admitted(self) -> None:
        """Take down that the lock is ours, after others had it perhaps."""
        self._watch()
        if self._refused_at is not None:
            self.note(self._refused_at)
            self._refused_at = None

    def _watch(self) -> None:
        now = _machine.steady()
        if now - self._tried_at > _UNWATCHED_MICROS:
            self._watching_since = now
        self._tried_at = now

    @property
    def is_known(self) -> bool:
        """Whether this process would know of a standstill, having tried to write for long enough without a break."""
        return self._tried_at - self._watching_since >= _STANDSTILL_MICROS

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
