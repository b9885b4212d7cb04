"""For operators: after a restore from backup: leases from before it are ended, and the act is recorded."""

from __future__ import annotations

import random

import msgspec

from onefold.clock import to_datetime
from onefold.operations.acts import make_act
from onefold.store import Store
from onefold.store.identity import renew_identity


async def restored(store: Store, *, actor: str, reason: str, at: int, renew: random.Random | None = None) -> int:
    """End all leases from before a restore, so that no older worker can commit; return how many there were.

    With ``renew`` the database is a copy beside its original, and gets a new identity from this source of randomness.
    A crash in the middle may leave the act recorded and the leases not ended; calling it again is harmless.
    """
    act = make_act(actor, reason)
    note = {"actor": act.actor, "reason": act.reason, **({} if renew is None else {"new_identity": True})}
    async with store.transaction() as transaction:
        await transaction.register("restored", to_datetime(at).isoformat(), msgspec.json.encode(note), version=0)
    if renew is not None:
        await renew_identity(store, renew)
    return await store.restored()
