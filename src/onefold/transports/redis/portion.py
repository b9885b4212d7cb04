"""How many entries to ask a server for at once, so that one pull stays within a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from onefold import limits


class Portion:
    """Expects entries as large as the last ones, so it grows step by step and shrinks at once.

    It begins with one entry: a process that was started because its predecessor died of what it read must not read
    all of that again.  Each answer with smaller entries doubles it.
    """

    def __init__(self) -> None:
        self._expected = limits.PULL_BYTES_MAX
        self._room = limits.PULL_BYTES_MAX

    def begin(self) -> None:
        """Begin a pull, which has all the room there is."""
        self._room = limits.PULL_BYTES_MAX

    @property
    def has_room(self) -> bool:
        """Whether this pull may ask for more."""
        return self._room > 0

    @property
    def count(self) -> int:
        """How many entries to ask for next."""
        return max(1, limits.PULL_BYTES_MAX // self._expected)

    def learn(self, sizes: Sequence[int]) -> None:
        """Take note of the sizes of the entries that came."""
        if sizes:
            self._expected = max(1, self._expected // 2, *sizes)
            self._room -= sum(sizes)
