"""The store on PostgreSQL: many machines, one database, the server's clock.

Claim, settle and put each have a connection of their own, so that they overlap and none waits for a handler.
Handlers' transactions come from a pool.  Every statement of the hot path is one round trip for a whole batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import psycopg

from onefold.clock import MICROSECONDS, Clock, SystemClock, system_random
from onefold.errors import ConfigurationError, StoreError, TransactionEndedError
from onefold.message.envelope import Envelope
from onefold.store import (
    KEEP,
    Attempt,
    Capabilities,
    Counts,
    Fenced,
    Lane,
    Lease,
    Outcome,
    Progress,
    PutOptions,
    Query,
    Record,
    Registered,
    Said,
    State,
    Stored,
)
from onefold.store.gates import NO_GATINGS, Gating
from onefold.store.journal_lines import Line
from onefold.store.postgres import schema
from onefold.store.postgres.notify import Notifier
from onefold.store.postgres.restore import restore
from onefold.store.postgres.session import Session
from onefold.store.postgres.transaction import (
    OwnTransaction,
    PostgresTransaction,
    came_back,
    opened_queues,
    queues_to_ring,
    settled_queues,
)
from onefold.store.postgres.verbs.claim import Wanted
from onefold.store.postgres.verbs.claimer import PostgresClaimer
from onefold.store.postgres.verbs.extend import extend
from onefold.store.postgres.verbs.find import attempts, count, find
from onefold.store.postgres.verbs.journal import Recording
from onefold.store.postgres.verbs.put import put, put_contested, store_fresh
from onefold.store.postgres.verbs.register import entries, registered
from onefold.store.postgres.verbs.report import progress, report
from onefold.store.postgres.verbs.settle import Settlement, brings_more, lock_for_settling, settle
from onefold.store.postgres.wire import lost_commit as resolve
from onefold.store.postgres.wire.connect import (
    BE_PATIENT,
    Connector,
    Pooler,
    Role,
    refuse_foreign,
    refuse_lost,
)
from onefold.store.postgres.wire.errors import READ_ONLY, BlockedError, RefusedError, has_ended, is_gone
from onefold.store.postgres.wire.handler_wire import ENDED, refuse_endings
from onefold.store.postgres.wire.pool import Pool
from onefold.store.postgres.wire.reconnect import PersistentWire
from onefold.store.postgres.wire.statements import BEGIN, BEGIN_READING
from onefold.store.postgres.wire.wire import JoinedWire, Speaker, Trace, Wire
from onefold.store.shared.group_commit import GroupCommit
from onefold.store.shared.journal import is_large, or_lost
from onefold.store.shared.ownership import Ownership

#: Messages that share a statement and a commit; more would make the first of them wait.
_TOGETHER_MAX = 1_000
#: Journals that are read together; each may be large.
_JOURNALS_MAX = 100
#: Enough that no two calls of claim that are remembered are known by the same number.
_CALL_BITS = 62

#: Rows are mostly locked for one short transaction: a lease is tried again for this long, at these intervals, before
#: the others that were extended with it are reported.
_LOCKED_SECONDS, _LOCKED_PAUSE_SECONDS = 0.2, 0.05
#: Answers kept for callers that ask again; more than those of a few settles have been given up.
_ANSWERED_MAX = 10_000

#: An answer that is under way when the store closes is waited for this long.
_CLOSE_SECONDS = 5.0

_machine = SystemClock()
_chance = system_random()


class PostgresStore:
    """Messages in the schema ``onefold`` of one database.

    ``clock`` replaces the server's clock, for tests.
    ``pooler="transaction"`` is for a pooler that gives each transaction another session: nothing is prepared and
    nothing set; notifications then need a ``listen_url`` that goes around it.
    ``patience`` is how many seconds an operation tries to reach the server; it tries at least twice.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        pool_size: int = 10,
        pooler: Pooler = "session",
        listen_url: str | None = None,
        patience: float = 10.0,
        trace: Trace | None = None,
    ) -> None:
        self._url = url
        self._pooler = pooler
        self._clock = clock
        self._pool_size = pool_size
        self._patience = patience
        self._connector = Connector(url, pooler=pooler, trace=trace)
        self._listening: Connector | None = None
        if listen_url is not None or pooler == "session":
            self._listening = Connector(listen_url or url, pooler="session", trace=trace)
        self._opened = False
        self._claimer = PostgresClaimer(exact=clock is not None)
        self.capabilities = Capabilities(
            transactional=True, shared=True, notifies=self._listening is not None, durability="process crash"
        )

    @property
    def clock(self) -> Clock | None:
        """The clock that says what is due, if it is not the server's; an app on this store goes by the same."""
        return self._clock

    async def open(self) -> None:
        if self._opened:
            return
        roles: dict[str, Role] = {
            "put": "put",
            "settle": "settle",
            "record": "record",
            "claim": "control",
            "spare": "spare",
        }
        self._links = {
            name: PersistentWire(self._connector, role, patience=self._patience) for name, role in roles.items()
        }
        self._pool = Pool(self._connector, size=self._pool_size, patience=self._patience)
        self._notifier = Notifier(
            self._links["spare"], self._links["put"], self._listening, self._claimer.look_everywhere
        )
        self._puts: GroupCommit[Envelope, Stored | None] = GroupCommit(self._flush_puts, most=_TOGETHER_MAX)
        self._contests: GroupCommit[Envelope, Stored] = GroupCommit(self._flush_contests, most=_TOGETHER_MAX)
        self._settles: GroupCommit[Settlement, bool | None] = GroupCommit(self._flush_settles, most=_TOGETHER_MAX)
        self._records: GroupCommit[Recording, list[Line] | None] = GroupCommit(self._flush_records, most=_TOGETHER_MAX)
        self._journals: GroupCommit[str, list[Line]] = GroupCommit(self._flush_journals, most=_JOURNALS_MAX)
        #: Answers to messages that were settled in a call that failed because of another message's row.
        self._answered: dict[tuple[str, int], bool] = {}
        self._home = Ownership()
        self._opened = True
        try:
            with _admitted():
                durable, read_only = await self._links["claim"].run(self._check)
            durability: Literal["power loss", "process crash"] = "power loss" if durable else "process crash"
            self.capabilities = replace(self.capabilities, durability=durability, read_only=read_only)
        except BaseException:
            await self.close()
            raise

    async def _check(self, wire: Wire, _: bool) -> tuple[bool, bool]:
        await schema.refuse_unfinished(wire)
        ((durable, read_only),) = await wire.rows("durability")
        return bool(durable), bool(read_only)

    async def _refuse_replica(self) -> None:
        """Refuse to write at once where the server took no writes when the store was opened, and still takes none.

        One that stops taking writes later is about to be replaced: then the usual patience is right.
        """
        if self.capabilities.read_only:
            _, read_only = await self._links["claim"].run(self._check)
            self.capabilities = replace(self.capabilities, read_only=read_only)
            if read_only:
                raise ConfigurationError(READ_ONLY)

    async def close(self) -> None:
        # In a forked process the connections are the parent's to close.
        if not self._opened or self._home.abroad:
            return
        self._opened = False
        # A call that waits for its server longer than this, as for a standby that is away, ends with a typed error.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                for coalescer in (self._puts, self._contests, self._settles, self._records, self._journals):
                    await coalescer.close()
                for link in self._links.values():
                    await link.quiet()
        await self._notifier.close()
        await self._pool.close()
        for link in self._links.values():
            await link.close()

    def twin(self) -> PostgresStore | None:
        if self._clock is not None:
            return None
        return PostgresStore(self._url, pool_size=1, pooler=self._pooler, patience=self._patience)

    async def migrate(self) -> list[str]:
        link = PersistentWire(self._connector, "migrate", patience=self._patience)
        now = None if self._clock is None else self._clock.now()
        done: list[str] = []

        async def migrate(wire: Wire, _: bool) -> None:
            await schema.migrate(wire, now, done)

        try:
            with _admitted():
                await link.run(migrate)
        finally:
            await link.close()
        return done

    def _session(self, wire: Speaker) -> Session:
        return Session(wire, self._clock)

    def _use(self, name: str) -> PersistentWire:
        if not self._opened:
            raise StoreError("the store is closed; use it inside `async with app`")
        self._home.refuse_strangers()
        return self._links[name]

    # writing

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        self._use("put")
        await self._refuse_replica()
        stored: Stored | None = None
        if len(envelopes) == 1 and options == KEEP:
            stored = await self._put_shared(envelopes)
        if stored is not None:
            self._notifier.ring_here(queues_to_ring(envelopes))
            return [stored]
        answers = await self._put_alone(envelopes, options)
        self._notifier.ring(queues_to_ring(envelopes))
        return answers

    async def _put_shared(self, envelopes: Sequence[Envelope]) -> Stored | None:
        """Put one message in a statement shared with others; None when it would keep them waiting."""
        try:
            stored: Stored | None = None
            if envelopes[0].deduplication_key is None:
                # A lone caller does not go through the task of a group.
                alone = self._links["put"].idle
                stored = (await (self._flush_puts([*envelopes]) if alone else self._puts.add(envelopes)))[0]
            return stored or (await self._contests.add(envelopes))[0]
        except BlockedError:
            return None

    async def _put_alone(self, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        async def work(wire: Wire, _: bool) -> list[Stored]:
            async with wire.transaction():
                return await put(self._session(wire), envelopes, options)

        return await self._pool.run(work) if envelopes else []

    async def _flush_puts(self, envelopes: list[Envelope]) -> list[Stored | None]:
        """Store messages whose keys are free, in one statement; None for the others."""

        queues = queues_to_ring(envelopes)
        notification = self._notifier.take_along(queues)

        async def work(wire: Wire, _: bool) -> set[str]:
            if notification is not None:
                wire.send_behind(notification)
            return await store_fresh(wire, self._session(wire).now, envelopes)

        taken = await self._use("put").run(work)
        if notification is None:
            self._notifier.ring_elsewhere(queues)
        return [None if e.id in taken else Stored(e.id, State.SCHEDULED) for e in envelopes]

    async def _flush_contests(self, envelopes: list[Envelope]) -> list[Stored]:
        """Judge messages whose keys are taken."""

        async def work(wire: Wire, _: bool) -> list[Stored]:
            async with wire.transaction():
                return await put_contested(self._session(wire), envelopes)

        answers = await self._use("put").run(work)
        self._notifier.ring_elsewhere(queues_to_ring(envelopes))
        return answers

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        """Settle; raises ``BlockedError`` when another transaction has locked some of the rows.

        The others are settled then, and when the call is made again it returns for them what they were answered.
        """
        self._use("settle")
        if not settlements:
            return []
        won = await (self._settle_rest(settlements) if self._answered else self._settles.add(settlements))
        settled = [one for one, held in zip(settlements, won, strict=True) if held]
        self._claimer.gates.settled(lease for lease, _ in settled)
        self._notifier.ring(settled_queues(settled), back=came_back(settled))
        self._notifier.ring_here(opened_queues(settled))
        if None not in won:
            return [bool(held) for held in won]
        self._remember(settlements, won)
        blocked = next(lease for (lease, _), held in zip(settlements, won, strict=True) if held is None)
        raise BlockedError(f"another transaction has locked the row of message {blocked.id}; it was not settled")

    async def _settle_rest(self, settlements: Sequence[Settlement]) -> list[bool | None]:
        """Settle the messages that an earlier call has not answered."""
        known = [self._answered.get((lease.id, lease.fence)) for lease, _ in settlements]
        asked = [one for one, answer in zip(settlements, known, strict=True) if answer is None]
        answers = iter(await self._settles.add(asked) if asked else [])
        for lease, _ in settlements:
            self._answered.pop((lease.id, lease.fence), None)
        return [next(answers) if answer is None else answer for answer in known]

    def _remember(self, settlements: Sequence[Settlement], won: Sequence[bool | None]) -> None:
        if len(self._answered) > _ANSWERED_MAX:
            # Their callers have given up.
            self._answered.clear()
        pairs = zip(settlements, won, strict=True)
        self._answered.update({(lease.id, lease.fence): held for (lease, _), held in pairs if held is not None})

    async def _flush_settles(self, settlements: list[Settlement]) -> list[bool | None]:
        """Settle; None for each whose row another transaction has locked."""
        try:
            won: list[bool | None] = [*await self._use("settle").run(partial(self._settle_on, settlements))]
        except BlockedError:
            won = await self._use("settle").run(partial(self._settle_unlocked_on, settlements))
        return won

    async def _settle_on(self, settlements: Sequence[Settlement], wire: Wire, repeated: bool) -> list[bool]:
        session = self._session(wire)
        if repeated:
            return await resolve.settle_again(wire, session, settlements)
        if not brings_more(settlements):
            won = await settle(session, settlements)
        else:
            async with wire.transaction():
                won = await settle(session, settlements, [BE_PATIENT])
        self._notifier.ring(session.woken)
        return won

    async def _settle_unlocked_on(
        self, settlements: Sequence[Settlement], wire: Wire, repeated: bool
    ) -> list[bool | None]:
        """Settle the messages whose rows are not locked, in one transaction; None for the others."""
        session = self._session(wire)
        if repeated:
            return [*await resolve.settle_again(wire, session, settlements)]
        async with wire.transaction():
            locked = await lock_for_settling(session, settlements)
            free = [one for one in settlements if one[0].id not in locked]
            answers = iter(await settle(session, free, [BE_PATIENT]) if free else [])
        self._notifier.ring(session.woken)
        return [None if lease.id in locked else next(answers) for lease, _ in settlements]

    async def record(self, owner: Fenced | str, steps: Sequence[Line]) -> list[Line]:
        link = self._use("record")
        if isinstance(owner, str):
            return await link.run(lambda wire, _: self._record_for(wire, owner, steps))
        # A lone caller does not go through the task of a group.
        flush = self._flush_records if link.idle else self._records.add
        return or_lost(owner, (await flush([(owner, steps)]))[0])

    async def _record_for(self, wire: Wire, message_id: str, steps: Sequence[Line]) -> list[Line]:
        session = self._session(wire)
        async with wire.transaction():
            recorded = await session.journals.record(message_id, steps)
        self._notifier.ring(session.woken)
        return recorded or []

    async def _flush_records(self, recordings: list[Recording]) -> list[list[Line] | None]:
        async def work(wire: Wire, _: bool) -> list[list[Line] | None]:
            session = self._session(wire)
            if not any(is_large(step) for _, steps in recordings for step in steps):
                return await session.journals.by_owners(recordings)
            async with wire.transaction():
                return await session.journals.by_owners(recordings)

        return await self._use("record").run(work)

    async def steps(self, message_id: str) -> list[Line]:
        self._use("record")
        return (await self._journals.add([message_id]))[0]

    async def _flush_journals(self, message_ids: list[str]) -> list[list[Line]]:
        return await self._use("record").run(lambda wire, _: self._session(wire).journals.read(message_ids))

    async def claim(
        self,
        queues: Sequence[str],
        *,
        types: Sequence[str],
        limit: int,
        lease: float,
        worker: str,
        lane: Lane = Lane.ANY,
        gatings: Mapping[str, Gating] = NO_GATINGS,
        at_once: int | None = None,
        thorough: bool = True,
    ) -> list[Lease]:
        call = _chance.getrandbits(_CALL_BITS)
        wanted = Wanted(queues, types, limit, lease, worker, lane, call, gatings, at_once, thorough)
        now = None if self._clock is None else self._clock.now()
        return await self._use("claim").run(self._claimer.call(wanted, now))

    async def extend(self, leases: Sequence[Fenced], *, lease: float, starting: bool = False) -> list[bool]:
        """Extend leases; one whose row another transaction has locked is tried again for a while.

        While it is locked no claim can take it over, so it counts as kept.  A suspect must not begin then: it could not
        be blamed for a crash.
        """
        answers: list[bool | None] = [None] * len(leases)
        give_up_at = _machine.steady() + round((lease if starting else _LOCKED_SECONDS) * MICROSECONDS)
        while True:
            left = [number for number, answer in enumerate(answers) if answer is None]
            asked = [leases[number] for number in left]
            extended = await self._use("spare").run(partial(self._extend_on, asked, lease, starting))
            for number, answer in zip(left, extended, strict=True):
                answers[number] = answer
            if None not in extended or _machine.steady() >= give_up_at:
                return [not starting if answer is None else answer for answer in answers]
            await _machine.sleep(_LOCKED_PAUSE_SECONDS)

    async def _extend_on(
        self, leases: Sequence[Fenced], lease: float, starting: bool, wire: Wire, _: bool
    ) -> list[bool | None]:
        return await extend(self._session(wire), leases, lease, starting)

    async def report(self, reports: Sequence[tuple[Fenced, Said | None]]) -> list[bool]:
        return await self._use("spare").run(lambda wire, _: report(self._session(wire), reports))

    async def progress(self, ids: Sequence[str]) -> dict[str, Progress]:
        return await self._use("spare").run(lambda wire, _: progress(self._session(wire), ids))

    async def wait(self, queues: Sequence[str], *, timeout: float) -> None:
        self._use("spare")
        await self._notifier.wait(queues, timeout)

    # transactions

    @asynccontextmanager
    async def transaction(
        self, connection: Any = None, *, seconds: float | None = None
    ) -> AsyncIterator[PostgresTransaction]:
        if connection is not None:
            joined = JoinedWire(refuse_foreign(connection))
            transaction = PostgresTransaction(self._session(joined), joined)
            try:
                yield transaction
            finally:
                transaction.over = True
            return
        self._use("settle")
        await self._refuse_replica()
        wire = await self._pool.begin(BEGIN)
        try:
            own = OwnTransaction(self._session(wire), wire, self._was_committed)
            try:
                yield own
            except BaseException as error:
                if not own.over:
                    await self._undo(own, error)
                raise
            if not own.over:
                await own.commit()
        finally:
            self._pool.give_back(wire)
        self._claimer.gates.settled(lease for lease, _ in own.settled)
        self._notifier.ring(own.queues, back=own.came_back)
        self._notifier.ring_here(opened_queues(own.settled))

    async def _undo(self, own: OwnTransaction, error: BaseException) -> None:
        """Roll back; raises when the failure means more than the caller's code could know."""
        connection = own.session.wire.connection
        lost = isinstance(error, psycopg.Error) and is_gone(error, connection)
        try:
            await own.roll_back()
        except TransactionEndedError as ended:
            raise ended from error
        if lost:
            assert isinstance(error, psycopg.Error)
            refuse_lost(error, connection)

    async def _was_committed(self, transaction: OwnTransaction) -> bool:
        return await resolve.was_committed(self._use("record"), self._session, transaction)

    async def restored(self) -> int:
        self._use("claim")
        ended = await restore(self._pool, self._session)
        self._claimer.look_everywhere()
        return ended

    # reading

    async def fetch(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Refuse to write: what is written outside a transaction is not part of any promise."""
        self._use("spare")
        refuse_endings(statement)
        wire = await self._pool.begin(BEGIN_READING)
        try:
            rows = await wire.execute(statement, parameters)
            await wire.commit()
        except psycopg.Error as error:
            if has_ended(error):
                raise TransactionEndedError(ENDED) from error
            refuse_lost(error, wire.connection)
            raise
        finally:
            self._pool.give_back(wire)
        return rows

    async def find(self, query: Query) -> list[Record]:
        self._use("spare")
        return await self._pool.run(lambda wire, _: find(self._session(wire), query))

    async def attempts(self, message_id: str) -> list[Attempt]:
        return await self._use("spare").run(lambda wire, _: attempts(self._session(wire), message_id))

    async def registered(self, kind: str, name: str) -> Registered | None:
        return await self._use("spare").run(lambda wire, _: registered(self._session(wire), kind, name))

    async def entries(self, kind: str) -> dict[str, Registered]:
        return await self._use("spare").run(lambda wire, _: entries(self._session(wire), kind))

    async def now(self) -> int:
        async def ask(wire: Wire, _: bool) -> int:
            now: int = (await wire.rows("now", {"now": self._session(wire).now}))[0][0]
            return now

        return await self._use("spare").run(ask)

    async def count(self) -> dict[str, Counts]:
        self._use("spare")
        return await self._pool.run(lambda wire, _: count(self._session(wire)))


@contextmanager
def _admitted() -> Iterator[None]:
    """While a store is opened, a server that does not let it in is a mistake in the URL; later it may be one's own."""
    try:
        yield
    except RefusedError as error:
        raise ConfigurationError(
            f"{error}; name a database and a role that exist in the URL, and its password"
        ) from error
