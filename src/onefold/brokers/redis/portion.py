"""The number of entries to request at once, so that one pull stays within a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from onefold import limits


class Portion:
    """Expects entries as large as the last ones: after larger ones it shrinks at once, after smaller ones it doubles.

    It begins with one entry: if a process ran out of memory while it read many large ones, the process that replaces
    it must not request all of them again.
    """

    def __init__(self) -> None:
        self._expected = limits.PULL_BYTES_MAX
        self._room = limits.PULL_BYTES_MAX

    def begin(self) -> None:
        """Begin a pull, with the full number of bytes."""
        self._room = limits.PULL_BYTES_MAX

    @property
    def has_room(self) -> bool:
        """Whether this pull may request more entries."""
        return self._room > 0

    @property
    def count(self) -> int:
        """The number of entries to request next."""
        return max(1, limits.PULL_BYTES_MAX // self._expected)

    def learn(self, sizes: Sequence[int]) -> None:
        """Adapt to the sizes of the entries that were received."""
        if sizes:
            self._expected = max(1, self._expected // 2, *sizes)
            self._room -= sum(sizes)
