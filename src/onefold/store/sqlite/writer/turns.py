"""Turns at the write lock: a process that writes without a pause lets waiting processes write in between.

SQLite has no queue for its lock.  A process that has just committed is the first to ask for it again, because the
others sleep between two tries; so of several busy processes one could write for seconds while the others waited.
Whether there are others is seen from the database, which is counted on by every commit of another connection, and from
having had to wait.
"""

from __future__ import annotations

from onefold.clock import MICROSECONDS

#: So many transactions in a row, or so much time in them, as long as other processes write too.
IN_A_ROW = 4
HELD_MICROS = 5_000
#: For so long the lock is left alone then: about as long as the others sleep between two tries.
PAUSE_SECONDS = 0.001
#: A process that wrote within this time may be waiting.
REMEMBERED_MICROS = MICROSECONDS // 5


class Turns:
    """Whose turn it is, as one process sees it."""

    __slots__ = ("_begun_at", "_held", "_in_a_row", "_others_at", "_version")

    def __init__(self) -> None:
        self._in_a_row = self._held = self._begun_at = 0
        #: When another process was last known to write; 0 if none is.
        self._others_at = 0
        self._version: int | None = None

    def begun(self, steady: int, version: int) -> None:
        """Record that a transaction has begun, and the number that commits of other connections change."""
        if self._version not in (None, version):
            self.had_to_wait(steady)
        self._version = version
        self._begun_at = steady
        self._in_a_row += 1

    def ended(self, steady: int) -> None:
        """Record that it has ended."""
        self._held += steady - self._begun_at

    def had_to_wait(self, steady: int) -> None:
        """Record that another process has or had the lock."""
        self._others_at = steady
        self._in_a_row = self._held = 0

    def is_over(self, steady: int) -> bool:
        """Whether to leave the lock alone for a moment; the next transaction begins a new turn."""
        if self._in_a_row < IN_A_ROW and self._held < HELD_MICROS:
            return False
        if not self._others_at or steady - self._others_at > REMEMBERED_MICROS:
            return False
        self._in_a_row = self._held = 0
        return True
