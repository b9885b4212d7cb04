"""Extend: leases are renewed for as long as their owner still has them."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.clock import MICROSECONDS
from onefold.store import Fenced
from onefold.store.sqlite.numbers import held_rows
from onefold.store.sqlite.session import Session, as_json


def extend_once(session: Session, grace_micros: int) -> bool:
    """Extend leases that ran out, each once, for owners that could not renew them; return whether there were any."""
    steady = session.clock.steady()
    return session.changes("claim_grace", [(steady, steady + grace_micros)]) > 0


def extend(session: Session, leases: Sequence[Fenced], lease: float, starting: bool) -> list[bool]:
    """Keep leases for ``lease`` seconds from now; False for each that was taken over or has run out."""
    held = held_rows(session, leases, leased=True)
    if mine := [seq for seq in held if seq is not None]:
        until = session.clock.steady() + round(lease * MICROSECONDS)
        session.run("extend", until, int(starting), as_json(mine))
    return [seq is not None for seq in held]
