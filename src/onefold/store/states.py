"""The states of a message and the table of legal moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class State(IntEnum):
    """Where a message is in its life; the numbers are what the stores keep."""

    SCHEDULED = 0
    LEASED = 1
    PARKED = 2
    DONE = 3
    DEAD = 4
    CANCELLED = 5
    DISCARDED = 6

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the message by itself."""
        return self >= State.DONE


#: Every legal move, and its verb.  The stores' SQL and constraints say the same; contract tests compare them.
MOVES: Mapping[tuple[State | None, State], str] = {
    (None, State.SCHEDULED): "put",
    (State.SCHEDULED, State.LEASED): "claim",
    (State.LEASED, State.LEASED): "claim, after the lease ran out",
    (State.LEASED, State.SCHEDULED): "settle (again, hand back)",
    (State.LEASED, State.PARKED): "settle (parked)",
    (State.PARKED, State.SCHEDULED): "record by others, or operator",
    (State.PARKED, State.LEASED): "claim, when its time has come",
    (State.LEASED, State.DONE): "settle",
    (State.LEASED, State.DEAD): "settle",
    (State.SCHEDULED, State.CANCELLED): "operator",
    (State.PARKED, State.CANCELLED): "operator",
    (State.LEASED, State.CANCELLED): "operator, by raising the fence",
    (State.DEAD, State.SCHEDULED): "operator (redrive)",
    (State.DEAD, State.DISCARDED): "operator (discard)",
}
