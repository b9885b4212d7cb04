"""Extend: leases are renewed for as long as their owner still has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.clock import MICROSECONDS
from onefold.store import Fenced
from onefold.store.postgres.session import Session
from onefold.store.postgres.verbs.journal import is_id
from onefold.store.postgres.verbs.settle import fenced


async def extend(session: Session, leases: Sequence[Fenced], lease: float, starting: bool) -> list[bool | None]:
    """Extend leases; False for each that is lost, None for each that is held while its row is locked."""
    # An id that is not a UUID cannot be in the table.
    given = [one for one in leases if is_id(one.id)]
    parameters: dict[str, Any] = {
        **fenced(given),
        "now": session.now,
        "lease": round(lease * MICROSECONDS),
        "starting": int(starting),
    }
    answers: dict[tuple[str, int], bool | None] = {(one.id, one.fence): True for one in given}
    for id_, fence, is_held in await session.wire.rows("extend", parameters):
        answers[id_, fence] = None if is_held else False
    return [answers.get((one.id, one.fence), False) for one in leases]
