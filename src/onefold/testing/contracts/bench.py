"""The bench on which the contract's scenarios run: a store, a clock of its own, and short calls for common steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec

from onefold.clock import Clock, Ids
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import UNKEYED, Envelope
from onefold.store import (
    Act,
    Again,
    Dead,
    Done,
    Failure,
    Lane,
    Lease,
    Outcome,
    Parked,
    PutOptions,
    Query,
    Record,
    State,
    Store,
    Stored,
)
from onefold.store.gates import Gating
from onefold.testing.faults import HastyClock

ACT = Act(actor="ada", reason="a test")
FAILURE = Failure(
    reason="failed", error_type="ValueError", error_message="no such order", stack="line 7", status_code=502
)
DONE = Done(b'"paid"')
AGAIN = Again(5.0, FAILURE)
DEAD = Dead(FAILURE)
#: How long the bench's leases last, in seconds.
LEASE = 30.0
PARKED = Parked(LEASE, seen=0)


class Bench:
    """An open store on an empty database; ``another()`` opens more stores on the same database."""

    def __init__(self, make_store: Callable[[Clock], Store], stack: AsyncExitStack) -> None:
        self.clock = HastyClock()
        self._make_store = make_store
        self._stack = stack
        self._ids = Ids(self.clock, random.Random(7))
        self.store: Store

    async def another(self) -> Store:
        """Open one more store on the same database."""
        store = self._make_store(self.clock)
        self._stack.push_async_callback(store.close)
        await store.migrate()
        await store.open()
        return store

    def message(self, key: str | None = None, *, payload: bytes = b"[1]", **fields: Any) -> Envelope:
        """Make an envelope as the app would, with a fresh id."""
        id_ = self._ids.make()
        plain = Envelope(
            id=id_,
            message_type="task",
            queue="default",
            idempotency_key=key or f"{UNKEYED}{id_}",
            correlation_id=id_,
            causation_id=id_,
            subject="order:7",
            payload_inline=payload,
            fingerprint=fingerprint_of(payload),
            deduplicate_for=3_600_000_000,
        )
        return msgspec.structs.replace(plain, **fields)

    async def put(self, key: str | None = None, *, options: PutOptions | None = None, **fields: Any) -> Stored:
        """Send one message in a commit of its own."""
        return (await self.store.put([self.message(key, **fields)], options or PutOptions()))[0]

    async def claim(
        self,
        limit: int = 100,
        *,
        store: Store | None = None,
        queues: Sequence[str] = ("default",),
        types: Sequence[str] = ("task",),
        lease: float = LEASE,
        worker: str = "grace",
        lane: Lane = Lane.ANY,
        gatings: Sequence[Gating] = (),
        at_once: int | None = None,
    ) -> list[Lease]:
        """Claim due messages."""
        asked, by_name = store or self.store, {one.name: one for one in gatings}
        return await asked.claim(
            queues,
            types=types,
            limit=limit,
            lease=lease,
            worker=worker,
            lane=lane,
            gatings=by_name,
            at_once=at_once,
        )

    async def leased(self, key: str | None = None, **fields: Any) -> Lease:
        """Send one message and claim it; nothing else may be due."""
        stored = await self.put(key, **fields)
        lease = await self.claim_only()
        assert lease.id == stored.id
        return lease

    async def claim_only(self) -> Lease:
        """Claim the one message that is due, and check that there is no other."""
        leases = await self.claim()
        assert len(leases) == 1
        return leases[0]

    async def crashed(self, key: str | None = None, times: int = 1, **fields: Any) -> str:
        """Send a message that ``times`` workers die with, and return its id; it is due then, and no other may be."""
        lease = await self.leased(key, **fields)
        for _ in range(times - 1):
            await self.store.settle([(lease, Again(0.0, None, counted=False, crashed=True))])
            lease = await self.claim_only()
        await self.store.settle([(lease, Again(0.0, None, counted=False, crashed=True))])
        return lease.id

    async def settled(self, key: str | None, outcome: Outcome, **fields: Any) -> Lease:
        """Send one message, claim it and settle it; nothing else may be due."""
        lease = await self.leased(key, **fields)
        assert await self.store.settle([(lease, outcome)]) == [True]
        return lease

    async def move(self, id_: str, to: State, *, store: Store | None = None) -> bool:
        """Move one message as an operator; return whether the move was legal."""
        async with (store or self.store).transaction() as transaction:
            return await transaction.move([id_], to, ACT) == [id_]

    async def find(self, id_: str) -> Record | None:
        """Look up one message."""
        found = await self.store.find(Query(ids=(id_,)))
        return found[0] if found else None

    async def record(self, id_: str) -> Record:
        """Look up one message, which must exist."""
        found = await self.find(id_)
        assert found is not None
        return found

    async def state(self, id_: str) -> State:
        """Return the state of one message."""
        return (await self.record(id_)).state

    async def all_ids(self) -> set[str]:
        """Return the ids of all stored messages."""
        return {record.envelope.id for record in await self.store.find(Query(limit=1_000))}


class Contract:
    """Base of every part of the contract."""

    def make_store(self, clock: Clock) -> Store:
        """Return a store on this test's database, not yet open; called twice, two stores on the same one."""
        raise NotImplementedError


Part = TypeVar("Part", bound=Contract)


def scenario(test: Callable[[Part, Bench], Coroutine[Any, Any, None]]) -> Callable[[Part], None]:
    """Turn an asynchronous scenario into a test that runs it on its own bench."""

    def run(self: Part) -> None:
        async def on_a_bench() -> None:
            async with AsyncExitStack() as stack:
                bench = Bench(self.make_store, stack)
                bench.store = await bench.another()
                await test(self, bench)

        asyncio.run(on_a_bench())

    # functools.wraps would show pytest the scenario's own parameters, which pytest would take for fixtures.
    run.__name__, run.__qualname__, run.__doc__ = test.__name__, test.__qualname__, test.__doc__
    return run
