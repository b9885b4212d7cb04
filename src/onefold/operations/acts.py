"""For operators: the actor and the reason that are recorded with each act."""

from __future__ import annotations

from onefold import limits
from onefold.store import Act


def make_act(actor: str, reason: str) -> Act:
    """Check the actor and the reason, and return them as an act."""
    limits.check_bytes("actor", actor, limits.ID_BYTES_MAX)
    limits.check_bytes("reason", reason, limits.ERROR_TEXT_MAX)
    return Act(actor=actor, reason=reason)
