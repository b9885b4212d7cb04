"""Stage 6, lease: the messages that a process has begun, in memory that its supervisor can read after it died.

A board is memory shared by a worker process and its supervisor.
The worker writes a slot for each message before it calls the handler; the supervisor only reads.
There is no lock: the field that makes a slot valid is written last and cleared first, so a slot that is read halfway is
an empty one.  The supervisor names the fence of a slot in what it does with it, so an outdated slot changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Slot(NamedTuple):
    """A message that a process has begun."""

    id: str
    fence: int
    started_at: int
    #: When its process is to be killed, on the steady clock; 0 means never.
    deadline: int
    #: Whether its handler is over, and only its outcome is not in the store yet.
    finished: bool


class Slots(Protocol):
    """The board, as the worker writes it."""

    def start(self, message_id: str, fence: int, *, at: int, deadline: int) -> int:
        """Record that a handler is about to run; return the number of its slot."""
        ...

    def finish(self, number: int) -> None:
        """Record that the handler is over."""
        ...

    def clear(self, number: int) -> None:
        """Clear the slot of a message that is settled or lost."""
        ...

    def renewed(self, at: int) -> None:
        """Record that the leases were renewed at this time of the steady clock."""
        ...

    def count(self, settled: int) -> None:
        """Record how many messages were settled."""
        ...
