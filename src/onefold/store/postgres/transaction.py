"""One open transaction, as handlers and producers see it: the store's own, or a caller's that was joined."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection

from onefold import limits
from onefold.clock import MICROSECONDS, SystemClock
from onefold.errors import (
    CommitUnknownError,
    LeaseLostError,
    StoreError,
    StoreUnavailableError,
    TransactionEndedError,
)
from onefold.message.envelope import Envelope
from onefold.store import KEEP, Act, Again, Done, Fenced, HandBack, Lease, Outcome, Purged, PutOptions, State, Stored
from onefold.store.journal_lines import Line
from onefold.store.postgres.session import Session
from onefold.store.postgres.verbs.claimer import NEAR_SECONDS
from onefold.store.postgres.verbs.move import lock, move
from onefold.store.postgres.verbs.purge import purge
from onefold.store.postgres.verbs.put import put
from onefold.store.postgres.verbs.register import register
from onefold.store.postgres.verbs.settle import Settlement, brings_more, concluding, sends_of, settle
from onefold.store.postgres.wire.connect import refuse_lost
from onefold.store.postgres.wire.errors import has_ended, is_adrift, is_lost, is_stale, translated
from onefold.store.postgres.wire.handler_wire import ENDED, HandlerWire, refuse_endings
from onefold.store.postgres.wire.wire import FAILED_BEFORE, JoinedWire, Named
from onefold.store.shared.journal import or_lost

#: Messages put this long before their commit may lie before the place where claims begin to look.
_LATE = round(NEAR_SECONDS * MICROSECONDS / 2)

_machine = SystemClock()


class PostgresTransaction:
    """Everything in it commits together, or nothing does; this one was joined, so its caller commits it.

    It remembers what it stored and settled: by that a lost COMMIT is resolved, and workers are woken after it.
    """

    def __init__(self, session: Session, wire: JoinedWire | HandlerWire) -> None:
        self.session = session
        self._wire = wire
        self.stored: list[str] = []
        self.settled: list[Settlement] = []
        #: A line that an owner wrote, if there is one.
        self.recorded: tuple[str, Line] | None = None
        self.queues: set[str] = set()
        self._put_at: int | None = None
        #: The connection goes on to serve others: a statement that comes too late would be committed with theirs.
        self.over = False

    @property
    def connection(self) -> AsyncConnection[Any]:
        self._refuse_late()
        return self._wire.connection

    @property
    def came_back(self) -> bool:
        """Whether it leaves something to claim that was due some time ago: handed back, or put long before the end."""
        late = self._put_at is not None and _machine.steady() - self._put_at > _LATE
        return late or came_back(self.settled)

    def _refuse_late(self) -> None:
        if self.over:
            raise StoreError("the transaction is over; this statement came too late and was not run")

    async def execute(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        self._refuse_late()
        refuse_endings(statement)
        try:
            return await self._wire.execute(statement, parameters)
        except psycopg.Error as error:
            # Ended meanwhile, as by its limit, which cancelled the statement.
            self._refuse_late()
            refuse_lost(error, self._wire.connection)
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
            answers = await put(self.session, envelopes, options)
        self._put_at = self._put_at or _machine.steady()
        self.stored += [e.id for e, answer in zip(envelopes, answers, strict=True) if answer.id == e.id]
        self.queues |= queues_to_ring(envelopes)
        return answers

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        with self._seam():
            won = await settle(self.session, settlements)
        held = [settlement for settlement, is_held in zip(settlements, won, strict=True) if is_held]
        self.settled += held
        self.queues |= settled_queues(held) | self.session.woken
        return won

    async def record(self, owner: Fenced | str, steps: Sequence[Line], *, act: Act | None = None) -> list[Line]:
        with self._seam():
            recorded = or_lost(owner, await self.session.journals.record(owner, steps, act))
        self.queues |= self.session.woken
        if recorded and not isinstance(owner, str):
            self.recorded = owner.id, recorded[-1]
        return recorded

    async def rewind(self, message_id: str, step: str, act: Act) -> list[Line]:
        with self._seam():
            forgotten = await self.session.journals.rewind(message_id, step, act)
        self.queues |= self.session.woken
        return forgotten

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        raise StoreError("this transaction was joined, so its caller commits it: use settle() here")

    async def lock(self, ids: Sequence[str]) -> dict[str, State]:
        with self._seam():
            return await lock(self.session, ids)

    async def move(self, ids: Iterable[str], to: State, act: Act) -> list[str]:
        with self._seam():
            moved = await move(self.session, ids, to, act)
        self.queues |= self.session.woken
        if to is State.SCHEDULED:
            self.queues |= set(moved.values())
        return list(moved)

    async def register(
        self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None = None
    ) -> bool:
        with self._seam():
            return await register(self.session, kind, name, value, version=version, expires_at=expires_at)

    async def purge(self, *, limit: int = limits.PURGE_BATCH) -> Purged:
        with self._seam():
            return await purge(self.session, limit)


class OwnTransaction(PostgresTransaction):
    """A transaction of the store's own, on a connection of the pool."""

    def __init__(self, session: Session, wire: HandlerWire, was_committed: WasCommitted) -> None:
        super().__init__(session, wire)
        self._handler = wire
        self._was_committed = was_committed

    @property
    def connection(self) -> AsyncConnection[Any]:
        self._refuse_late()
        return self._handler.share()

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        self._refuse_late()
        lease, outcome = settlements[0] if len(settlements) == 1 else (None, None)
        if lease is None or not isinstance(outcome, Done) or brings_more(settlements):
            await self._settle_all(settlements)
            await self.commit()
        else:
            self.settled += settlements
            await self.commit(*concluding(self.session, lease, outcome))

    async def _settle_all(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        for (lease, _), held in zip(settlements, await self.settle(settlements), strict=True):
            if not held:
                await self.roll_back()
                raise _lost(lease)

    async def commit(self, *last: Named) -> None:
        """Commit, after ``last``; when the reply was lost, find out what became of it before saying anything."""
        self.over = True
        try:
            await self._handler.commit(*last)
        except psycopg.Error as error:
            lost = is_lost(error, self._handler.connection)
            await self.roll_back()
            if is_stale(error):
                raise _lost(self.settled[-1][0]) from None
            if has_ended(error):
                raise TransactionEndedError(ENDED) from error
            if is_adrift(error):
                raise StoreError(FAILED_BEFORE) from error
            if not lost:
                raise translated(error) from error
            if not await self._resolved():
                raise StoreUnavailableError("the connection was lost before COMMIT; nothing was written") from error

    async def _resolved(self) -> bool:
        """Whether it was committed, as found out from the rows it has written."""
        try:
            return await self._was_committed(self)
        except CommitUnknownError:
            raise
        except StoreUnavailableError as error:
            raise CommitUnknownError(
                "the connection was lost during COMMIT, and the server cannot be asked whether it happened"
            ) from error

    async def roll_back(self) -> None:
        """Undo everything; a caller that still holds the connection, such as a handler past its limit, loses it.

        Raises ``TransactionEndedError`` when the caller had ended the transaction itself.
        """
        self.over = True
        await self._handler.rollback()


#: Finds out what became of a transaction whose COMMIT was not answered.
WasCommitted = Callable[[OwnTransaction], Awaitable[bool]]


def _lost(lease: Lease) -> LeaseLostError:
    return LeaseLostError(f"message {lease.id} was taken over; everything in the transaction was rolled back")


def queues_to_ring(envelopes: Iterable[Envelope]) -> set[str]:
    """Return the queues in which there may be something to claim now."""
    return {e.queue for e in envelopes if not e.delay}


def came_back(settlements: Iterable[Settlement]) -> bool:
    """Whether a message is to be claimed again that was due before: it keeps its due time when it is handed back."""
    return any(isinstance(outcome, HandBack) for _, outcome in settlements)


def settled_queues(settlements: Iterable[Settlement]) -> set[str]:
    """Return the queues in which settling these has left something to claim now."""
    settlements = list(settlements)
    back = {
        lease.envelope.queue
        for lease, outcome in settlements
        if isinstance(outcome, HandBack) or (isinstance(outcome, Again) and not outcome.delay)
    }
    return back | queues_to_ring(sends_of(settlements))


def opened_queues(settlements: Iterable[Settlement]) -> set[str]:
    """Return the queues in which a gate may let the next message through; the worker that has settled claims it."""
    return {lease.envelope.queue for lease, _ in settlements if lease.gate is not None}
