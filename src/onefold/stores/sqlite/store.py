"""The store on SQLite: one writer, shared commits, no server.

Writes of one process take turns on one connection; calls that need no transaction of their own share a commit.
Processes take turns through SQLite's own lock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import apsw

from onefold import limits
from onefold.clock import Clock, SystemClock, boot_id
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError, LeaseLostError, StoreError
from onefold.step import Step
from onefold.store import (
    Act,
    Attempt,
    Capabilities,
    Counts,
    Done,
    Fenced,
    HandBack,
    Lane,
    Lease,
    Outcome,
    Parked,
    Purged,
    PutOptions,
    Query,
    Record,
    Registered,
    State,
    Stored,
)
from onefold.stores.sqlite.connection import (
    UNREADABLE,
    InlineRunner,
    Runner,
    ThreadRunner,
    Trace,
    open_connection,
    refuse_unsafe_file,
    translated,
)
from onefold.stores.sqlite.schema import migrate
from onefold.stores.sqlite.session import Session
from onefold.stores.sqlite.wake import Wake
from onefold.stores.sqlite.writer import InlineWriter, ThreadWriter, Turn, Writer
from onefold.stores.steps import or_lost

Answer = TypeVar("Answer")

_KEEP = PutOptions()


class SQLiteTransaction:
    """One open transaction on the writer's connection."""

    def __init__(self, store: SQLiteStore, turn: Turn, session: Session) -> None:
        self._store = store
        self._turn = turn
        self._session = session
        self.brings_work = False
        #: The connection goes on to serve others: a statement that comes too late would be committed with theirs.
        self.over = False

    @property
    def connection(self) -> Any:
        raise ConfigurationError(
            "the SQLite store lends its connection to nobody, because every message of this process is written through "
            "it; use execute()"
        )

    def _refuse_late(self) -> None:
        if self.over:
            raise StoreError("the transaction is over; this statement came too late and was not run")

    async def execute(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        self._refuse_late()
        try:
            return await self._turn.run(self._session.execute, statement, parameters)
        except (apsw.BusyError, apsw.FullError, apsw.IOError) as error:
            # These are the store's troubles; anything else is about the caller's own SQL, and the caller's to read.
            raise translated(error, self._store.path) from error

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = _KEEP) -> list[Stored]:
        self.brings_work = True
        return await self._run(self._session.put, envelopes, options)

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        self.brings_work = self.brings_work or _may_bring_work(settlements)
        return await self._run(self._session.settle, settlements)

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        self._refuse_late()
        self.over = True
        try:
            await self._turn.conclude(partial(_settle_all, self._session, settlements))
        except apsw.Error as error:
            raise translated(error, self._store.path) from error
        if self.brings_work or _may_bring_work(settlements):
            self._store.ring()

    async def record(self, owner: Fenced | str, steps: Sequence[Step], *, act: Act | None = None) -> list[Step]:
        self.brings_work = self.brings_work or isinstance(owner, str)
        return or_lost(owner, await self._run(self._session.record, owner, steps, act))

    async def rewind(self, message_id: str, step: str, act: Act) -> list[Step]:
        self.brings_work = True
        return await self._run(self._session.rewind, message_id, step, act)

    async def move(self, ids: Iterable[str], to: State, act: Act) -> list[str]:
        self.brings_work = True
        return await self._run(self._session.move, list(ids), to, act)

    async def register(
        self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None = None
    ) -> bool:
        write = partial(self._session.register, kind, name, value, version=version, expires_at=expires_at)
        return await self._run(write)

    async def purge(self, *, limit: int = limits.PURGE_BATCH) -> Purged:
        return await self._run(self._session.purge, limit)

    async def _run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        self._refuse_late()
        try:
            return await self._turn.run(function, *args)
        except apsw.Error as error:
            raise translated(error, self._store.path) from error


class SQLiteStore:
    """Messages in one file on a local disk; ``:memory:`` for tests.

    ``inline`` runs every call where it is made instead of in a thread, for simulations.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Clock | None = None,
        synchronous: str = "FULL",
        inline: bool = False,
        boot: str | None = None,
        trace: Trace | None = None,
    ) -> None:
        if synchronous not in ("OFF", "NORMAL", "FULL", "EXTRA"):
            raise ConfigurationError(f"synchronous is {synchronous!r}; SQLite knows OFF, NORMAL, FULL and EXTRA")
        self.path = path
        self._clock = clock or SystemClock()
        self._synchronous = synchronous
        self._inline = inline
        self._boot = boot or boot_id()
        self._trace = trace
        self._memory = path == ":memory:"
        self._opened = False
        self.capabilities = Capabilities(
            transactional=True,
            shared=False,
            notifies=not self._memory,
            durability=_durability(self._memory, synchronous),
        )

    async def open(self) -> None:
        if self._opened:
            return
        if not self._memory:
            refuse_unsafe_file(self.path)
        self._wake = Wake(self.path, between_processes=not self._inline and not self._memory)
        self._writer: Writer = (InlineWriter if self._inline else ThreadWriter)(self._connect, self._clock)
        self._reading: Runner = InlineRunner() if self._inline else ThreadRunner("onefold-reader")
        self._reader: Session | None = None
        self._opened = True
        try:
            await self._writer.open()
            await self.migrate()
            await self._write(self._release_after_boot)
            if not self._memory:
                self._reader = Session(await self._reading.run(self._connect), self._clock)
        except BaseException:
            await self.close()
            raise

    def _connect(self) -> apsw.Connection:
        return open_connection(self.path, synchronous=self._synchronous, trace=self._trace, blocking=not self._inline)

    async def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        self._wake.close()
        await self._writer.close()
        if self._reader is not None:
            await self._reading.run(self._reader.connection.close)
        self._reading.close()

    async def migrate(self) -> list[str]:
        await self.open()
        return await self._write(lambda session: migrate(session.connection, self._clock.now()))

    def _release_after_boot(self, session: Session) -> None:
        """Leases are dated by the time since the machine started, so they mean nothing after another start."""
        known = session.registered("boot", "id")
        if known is None or known.value != self._boot.encode():
            session.rows("expire_all")
            version = known.version if known else 0
            session.register("boot", "id", self._boot.encode(), version=version, expires_at=None)

    # writing

    @asynccontextmanager
    async def transaction(self, connection: Any = None) -> AsyncIterator[SQLiteTransaction]:
        if connection is not None:
            raise ConfigurationError(
                f"the SQLite store cannot join a {type(connection).__module__} connection; use app.transaction() and "
                "its execute(), so that one SQLite library writes the file"
            )
        self._refuse_closed()
        turn = self._writer.turn()
        opened = SQLiteTransaction(self, turn, self._writer.session)
        try:
            # A caller who is cancelled here does not stop the thread: it may still begin, so it must also end.
            await self._begin(turn)
            yield opened
        except BaseException:
            opened.over = True
            await turn.end("ROLLBACK")
            raise
        if opened.over:
            return
        opened.over = True
        try:
            await turn.end("COMMIT")
        except apsw.Error as error:
            raise translated(error, self.path) from error
        if opened.brings_work:
            self.ring()

    def ring(self) -> None:
        """Tell whoever waits for work that there may be some."""
        self._wake.ring()

    async def _begin(self, turn: Turn) -> None:
        try:
            await turn.begin()
        except apsw.Error as error:
            raise translated(error, self.path) from error

    def _refuse_closed(self) -> None:
        if not self._opened:
            raise StoreError("the store is closed; use it inside `async with app`")

    async def _write(self, operation: Callable[[Session], Answer]) -> Answer:
        """Run one operation in a transaction that concurrent callers share; durable when it returns."""
        self._refuse_closed()
        try:
            return await self._writer.write(operation)
        except (apsw.Error, *UNREADABLE) as error:
            raise translated(error, self.path) from error

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = _KEEP) -> list[Stored]:
        stored = await self._write(lambda session: session.put(envelopes, options))
        self.ring()
        return stored

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        won = await self._write(lambda session: session.settle(settlements))
        if _may_bring_work(settlements):
            self.ring()
        return won

    async def record(self, owner: Fenced | str, steps: Sequence[Step]) -> list[Step]:
        recorded = or_lost(owner, await self._write(lambda session: session.record(owner, steps)))
        if isinstance(owner, str):
            self.ring()
        return recorded

    async def steps(self, message_id: str) -> list[Step]:
        return await self._read(lambda session: session.steps(message_id))

    async def claim(
        self,
        queues: Sequence[str],
        *,
        types: Sequence[str],
        limit: int,
        lease: float,
        worker: str,
        lane: Lane = Lane.ANY,
    ) -> list[Lease]:
        # Looking first keeps idle workers away from the write lock.
        if not await self._read(lambda session: session.claim_possible(queues, types, lane)):
            return []
        return await self._write(
            lambda session: session.claim(queues, types=types, limit=limit, lease=lease, worker=worker, lane=lane)
        )

    async def extend(self, leases: Sequence[Fenced], *, lease: float, starting: bool = False) -> list[bool]:
        return await self._write(lambda session: session.extend(leases, lease, starting))

    async def restored(self) -> int:
        ended = await self._write(lambda session: session.restored())
        self.ring()
        return ended

    async def wait(self, queues: Sequence[str], *, timeout: float) -> None:
        await self._wake.wait(timeout)

    # reading

    async def _read(self, operation: Callable[[Session], Answer]) -> Answer:
        self._refuse_closed()
        if self._reader is None:
            return await self._write(operation)
        try:
            return await self._reading.run(operation, self._reader)
        except (apsw.Error, *UNREADABLE) as error:
            raise translated(error, self.path) from error

    async def fetch(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        self._refuse_closed()
        if self._reader is None:
            return await self._writer.write(lambda session: _fetch(session, statement, parameters))
        return await self._reading.run(_fetch, self._reader, statement, parameters)

    async def find(self, query: Query) -> list[Record]:
        return await self._read(lambda session: session.find(query))

    async def attempts(self, message_id: str) -> list[Attempt]:
        return await self._read(lambda session: session.attempts(message_id))

    async def registered(self, kind: str, name: str) -> Registered | None:
        return await self._read(lambda session: session.registered(kind, name))

    async def entries(self, kind: str) -> dict[str, Registered]:
        return await self._read(lambda session: session.entries(kind))

    async def now(self) -> int:
        self._refuse_closed()
        return self._clock.now()

    async def count(self) -> dict[str, Counts]:
        return await self._read(lambda session: session.count())


def _may_bring_work(settlements: Sequence[tuple[Lease, Outcome]]) -> bool:
    """Whether settling these leaves something that another worker could take at once."""
    return any(
        isinstance(o, HandBack | Parked) or lease.envelope.reply_to or (isinstance(o, Done) and (o.sends or o.notes))
        for lease, o in settlements
    )


def _settle_all(session: Session, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
    """Settle all of them, or refuse: what is rolled back then is the work of somebody who was overtaken."""
    for (lease, _), held in zip(settlements, session.settle(settlements), strict=True):
        if not held:
            raise LeaseLostError(f"message {lease.id} was taken over; its handler's work was rolled back")


def _fetch(session: Session, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Refuse to write: what is written outside a transaction is not part of any promise."""
    session.connection.execute("PRAGMA query_only = ON")
    try:
        return session.execute(statement, parameters)
    finally:
        session.connection.execute("PRAGMA query_only = OFF")


def _durability(memory: bool, synchronous: str) -> Literal["power loss", "process crash", "nothing"]:
    if memory:
        return "nothing"
    return "power loss" if synchronous in ("FULL", "EXTRA") else "process crash"
