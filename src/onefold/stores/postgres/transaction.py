"""One open transaction, as handlers and producers see it: the store's own, or a caller's that was joined."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection

from onefold import limits
from onefold.envelope import Envelope
from onefold.errors import LeaseLostError, StoreError, StoreUnavailableError
from onefold.store import Act, Again, Done, HandBack, Lease, Outcome, Purged, PutOptions, State, Stored
from onefold.stores.postgres.connection import Wire, refuse_lost
from onefold.stores.postgres.faults import is_lost, is_stale, translated
from onefold.stores.postgres.session import Session, Settlement, sends_of

KEEP = PutOptions()


WasCommitted = Callable[["PostgresTransaction"], Awaitable[bool]]


class PostgresTransaction:
    """Everything in it commits together, or nothing does.

    It remembers what it stored and settled: by that a lost COMMIT is resolved, and workers are woken after it.
    """

    def __init__(self, session: Session, was_committed: WasCommitted | None) -> None:
        self.session = session
        #: Finds out after a lost COMMIT; None when the transaction is the caller's, who commits it.
        self._was_committed = was_committed
        self.stored: list[str] = []
        self.settled: list[Settlement] = []
        self.queues: set[str] = set()
        #: The connection goes on to serve others: a statement that comes too late would be committed with theirs.
        self.over = False
        #: Whether the caller has the driver's connection in its hands, where no statement can be refused any more.
        self.lent = False

    @property
    def connection(self) -> AsyncConnection[Any]:
        self.lent = True
        return self._wire.connection

    @property
    def _wire(self) -> Wire:
        self._refuse_late()
        return self.session.wire

    def _refuse_late(self) -> None:
        if self.over:
            raise StoreError("the transaction is over; this statement came too late and was not run")

    async def execute(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        try:
            return await self._wire.execute(statement, parameters)
        except psycopg.Error as error:
            refuse_lost(error, self.session.wire.connection)
            raise

    @contextmanager
    def _seam(self) -> Iterator[None]:
        """No error of the driver leaves the store, except those of the caller's own SQL."""
        self._refuse_late()
        try:
            yield
        except psycopg.Error as error:
            raise translated(error) from error

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        with self._seam():
            answers = await self.session.put(envelopes, options)
        self.stored += [e.id for e, answer in zip(envelopes, answers, strict=True) if answer.id == e.id]
        self.queues |= queues_to_ring(envelopes)
        return answers

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        with self._seam():
            won = await self.session.settle(settlements)
        held = [settlement for settlement, is_held in zip(settlements, won, strict=True) if is_held]
        self.settled += held
        self.queues |= settled_queues(held)
        return won

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        if self._was_committed is None:
            raise StoreError("this transaction was joined; whoever began it commits it: use settle() here")
        only = settlements[0][1] if len(settlements) == 1 else None
        if not isinstance(only, Done) or only.sends:
            await self._settle_all(settlements)
            await self.commit()
            return
        self._refuse_late()
        lease = settlements[0][0]
        self.settled += settlements
        await self.commit(lambda: self.session.conclude(lease, only))

    async def _settle_all(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        for (lease, _), held in zip(settlements, await self.settle(settlements), strict=True):
            if not held:
                await self._roll_back()
                raise _lost(lease)

    async def commit(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Commit, with ``last`` as the way to do it; when the reply was lost, find out before saying anything."""
        self.over = True
        wire = self.session.wire
        try:
            await (last or wire.commit)()
        except psycopg.Error as error:
            if is_stale(error):
                await self._roll_back()
                raise _lost(self.settled[-1][0]) from None
            if not is_lost(error, wire.connection):
                await self._roll_back()
                raise translated(error) from error
            await wire.connection.close()
            if self._was_committed is None or not await self._was_committed(self):
                raise StoreUnavailableError("the connection was lost before COMMIT; nothing was written") from error

    async def _roll_back(self) -> None:
        self.over = True
        await self.session.wire.rollback()

    async def move(self, ids: Iterable[str], to: State, act: Act) -> list[str]:
        with self._seam():
            moved = await self.session.move(ids, to, act)
        if to is State.SCHEDULED:
            self.queues |= set(moved.values())
        return list(moved)

    async def register(
        self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None = None
    ) -> bool:
        with self._seam():
            return await self.session.register(kind, name, value, version=version, expires_at=expires_at)

    async def purge(self, *, limit: int = limits.PURGE_BATCH) -> Purged:
        with self._seam():
            return await self.session.purge(limit)


def _lost(lease: Lease) -> LeaseLostError:
    return LeaseLostError(f"message {lease.id} was taken over; everything in the transaction was rolled back")


def queues_to_ring(envelopes: Iterable[Envelope]) -> set[str]:
    """Return the queues in which there may be something to claim now."""
    return {e.queue for e in envelopes if not e.delay}


def settled_queues(settlements: Iterable[Settlement]) -> set[str]:
    """Return the queues in which settling these has left something to claim now."""
    settlements = list(settlements)
    back = {
        lease.envelope.queue
        for lease, outcome in settlements
        if isinstance(outcome, HandBack) or (isinstance(outcome, Again) and not outcome.delay)
    }
    return back | queues_to_ring(sends_of(settlements))
