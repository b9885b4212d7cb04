"""The store on SQLite: one writer, shared commits, no server.

Writes of one process take turns on one connection; calls that need no transaction of their own share a commit.
Processes take turns through SQLite's own lock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import apsw

from onefold import limits
from onefold.clock import Clock, SystemClock, boot_id
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError, StoreError
from onefold.gate import NO_GATINGS, Gating
from onefold.step import Step
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
    Stored,
)
from onefold.stores.coalesce import Coalescer
from onefold.stores.home import Home
from onefold.stores.sqlite.connection import BREAKING, UNREADABLE, Patience, Trace, open_connection, translated
from onefold.stores.sqlite.files import refuse_unsafe_file
from onefold.stores.sqlite.finding import attempts, count, find
from onefold.stores.sqlite.gates import Asked, Gates
from onefold.stores.sqlite.leasing import claim, claim_possible, extend, has_run_out
from onefold.stores.sqlite.operating import (
    entries,
    record,
    record_by_owners,
    registered,
    release_after_boot,
    restored,
)
from onefold.stores.sqlite.putting import put, put_lone
from onefold.stores.sqlite.reader import Reader, fetch
from onefold.stores.sqlite.reporting import progress, report
from onefold.stores.sqlite.runner import InlineRunner, Runner, ThreadRunner
from onefold.stores.sqlite.schema import migrate
from onefold.stores.sqlite.session import Row, Session, as_json, rows_for
from onefold.stores.sqlite.settling import rows_in, settle
from onefold.stores.sqlite.standstill import CHANCE_SECONDS
from onefold.stores.sqlite.steps import Steps
from onefold.stores.sqlite.transaction import SQLiteTransaction, frees_places, may_bring_work
from onefold.stores.sqlite.wake import Wake
from onefold.stores.sqlite.writer import Writer
from onefold.stores.steps import or_lost

Answer = TypeVar("Answer")

#: How long others have their chance is a matter of real time: a test that moves its clock gives nobody any.
_machine = SystemClock()

#: What touches any number of rows is never done on the event loop.
_MANY_ROWS = limits.SEND_MANY_MAX
#: Journals that are read together; each may be large.
_JOURNALS_MAX = 100


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
        #: Whether the last claim found something, so that the next one need not look first.
        self._found = False
        self._gates = Gates()
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
        self._home = Home()
        self._wake = Wake(self.path, between_processes=not self._inline and not self._memory)
        self._writing: Runner = InlineRunner() if self._inline else ThreadRunner("onefold-writer")
        self._writer = Writer(
            self._connect, self._clock, self._writing, threaded=not self._inline, lasting=not self._memory
        )
        self._reader = None if self._memory else self._make_reader()
        self._journals: Coalescer[str, list[Step]] = Coalescer(self._read_journals, most=_JOURNALS_MAX)
        self._opened = True
        try:
            await self._writer.open()
            self._applied = await self.migrate()
            await self._write(lambda session: release_after_boot(session, self._boot))
            if self._reader is not None:
                await self._reader.open()
        except BaseException:
            await self.close()
            raise

    def _make_reader(self) -> Reader:
        runner: Runner = InlineRunner() if self._inline else ThreadRunner("onefold-reader")
        return Reader(self._connect, self._clock, runner, Patience(self._clock, allowed=not self._inline))

    def _connect(self, patience: Patience) -> apsw.Connection:
        return open_connection(self.path, synchronous=self._synchronous, patience=patience, trace=self._trace)

    async def close(self) -> None:
        if not self._opened or self._home.abroad:
            return
        self._home.refuse_strangers()
        await self._journals.close()
        self._opened = False
        self._wake.close()
        await self._writer.close()
        self._writing.close()
        if self._reader is not None:
            await self._reader.close()

    async def migrate(self) -> list[str]:
        if not self._opened:
            await self.open()
            return self._applied
        return await self._write(lambda session: migrate(session.connection, self._clock.now()), rows=_MANY_ROWS)

    def _refuse_misuse(self) -> None:
        if not self._opened:
            raise StoreError("the store is closed; use it inside `async with app`")
        self._home.refuse_strangers()

    # writing

    def transaction(self, connection: Any = None) -> SQLiteTransaction:
        if connection is not None:
            raise ConfigurationError(
                f"the SQLite store cannot join a {type(connection).__module__} connection; use app.transaction() and "
                "its execute(), so that one SQLite library writes the file"
            )
        self._refuse_misuse()
        return SQLiteTransaction(self.path, self._home, self._writer.turn(), self._wake)

    async def _write(self, operation: Callable[[Session], Answer], *, rows: int = 1) -> Answer:
        """Run one operation in a transaction that concurrent callers share; durable when it returns."""
        self._refuse_misuse()
        return await self._translate(self._writer.write(operation, rows=rows))

    async def _translate(self, awaited: Awaitable[Answer]) -> Answer:
        try:
            return await awaited
        except (apsw.Error, *UNREADABLE) as error:
            raise translated(error, self.path) from error

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        self._refuse_misuse()
        plain = options is KEEP or options == KEEP
        if plain and len(envelopes) == 1 and (self._writer.is_alone or await self._writer.find_alone()):
            lone = self._writer.write_lone(put_lone, envelopes[0])
            if lone is not None:
                self._wake.ring()
                return [lone]
        rows = rows_for(envelopes, lambda e: e.payload_inline)
        if plain:
            stored = await self._translate(self._writer.write_each(put, envelopes, rows=rows))
        else:
            stored = await self._write(lambda session: put(session, envelopes, options), rows=rows)
        self._wake.ring()
        return stored

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        self._refuse_misuse()
        won = await self._translate(self._writer.write_each(settle, settlements, rows=rows_in(settlements)))
        brings_work = may_bring_work(settlements)
        if brings_work or frees_places(settlements):
            self._wake.ring(elsewhere=brings_work)
        return won

    async def record(self, owner: Fenced | str, steps: Sequence[Step]) -> list[Step]:
        rows = rows_for(steps, lambda step: step.value)
        if not isinstance(owner, str):
            self._refuse_misuse()
            together = self._writer.write_each(record_by_owners, [(owner, steps)], rows=rows)
            return or_lost(owner, (await self._translate(together))[0])
        recorded = or_lost(owner, await self._write(lambda session: record(session, owner, steps), rows=rows))
        self._wake.ring()
        return recorded

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
    ) -> list[Lease]:
        asked = Asked(queues, frozenset(types), as_json(types), limit, lane, gatings, at_once)
        # Looking first keeps idle workers away from the write lock.
        if not self._found and not await self._read(
            lambda session: claim_possible(session, self._gates, asked, self._writer.ran_out_before(lease))
        ):
            return []

        doubted = False

        def take(session: Session) -> list[Lease]:
            nonlocal doubted
            # Asked here, where it is known how long the lock had to be waited for.
            ran_out_before = self._writer.ran_out_before(lease)
            doubted = not self._writer.knows_standstills and has_run_out(session, ran_out_before)
            if doubted:
                ran_out_before = -limits.INTEGER_MAX
            return claim(session, self._gates, asked, lease=lease, worker=worker, ran_out_before=ran_out_before)

        leases = await self._write(take, rows=limit)
        while doubted and not leases:
            # Perhaps their owners are alive and could not renew them, for want of the lock: let them do so first.
            # Whoever hangs meanwhile knows as little as before.
            await _machine.sleep(CHANCE_SECONDS)
            leases = await self._write(take, rows=limit)
        self._found = bool(leases)
        return leases

    async def extend(self, leases: Sequence[Fenced], *, lease: float, starting: bool = False) -> list[bool]:
        return await self._write(lambda session: extend(session, leases, lease, starting), rows=len(leases))

    async def report(self, reports: Sequence[tuple[Fenced, Said | None]]) -> list[bool]:
        if all(said is None for _, said in reports):
            return await self._read(lambda session: report(session, reports))
        return await self._write(lambda session: report(session, reports), rows=len(reports))

    async def restored(self) -> int:
        ended = await self._write(restored, rows=_MANY_ROWS)
        self._wake.ring()
        return ended

    async def wait(self, queues: Sequence[str], *, timeout: float) -> None:
        await self._wake.wait(timeout)

    # reading

    async def _read(self, operation: Callable[[Session], Answer]) -> Answer:
        self._refuse_misuse()
        reading = self._writer.write(operation) if self._reader is None else self._reader.read(operation)
        return await self._translate(reading)

    async def fetch(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        self._refuse_misuse()

        def read(session: Session) -> list[Row]:
            return fetch(session, statement, parameters)

        try:
            return await (
                self._writer.write(read, rows=_MANY_ROWS) if self._reader is None else self._reader.read(read)
            )
        except (apsw.BusyError, *BREAKING) as error:
            # These are the store's troubles; anything else is about the caller's own SQL, and the caller's to read.
            raise translated(error, self.path) from error

    async def find(self, query: Query) -> list[Record]:
        return await self._read(lambda session: find(session, query))

    async def steps(self, message_id: str) -> list[Step]:
        self._refuse_misuse()
        return (await self._journals.add([message_id]))[0]

    async def _read_journals(self, message_ids: list[str]) -> list[list[Step]]:
        """Read several in one go: the way to the reader's thread costs more than a journal."""
        return await self._read(lambda session: [Steps(session.connection).read(one) for one in message_ids])

    async def progress(self, ids: Sequence[str]) -> dict[str, Progress]:
        return await self._read(lambda session: progress(session, ids))

    async def attempts(self, message_id: str) -> list[Attempt]:
        return await self._read(lambda session: attempts(session, message_id))

    async def registered(self, kind: str, name: str) -> Registered | None:
        return await self._read(lambda session: registered(session, kind, name))

    async def entries(self, kind: str) -> dict[str, Registered]:
        return await self._read(lambda session: entries(session, kind))

    async def now(self) -> int:
        return self._clock.now()

    async def count(self) -> dict[str, Counts]:
        return await self._read(count)


def _durability(memory: bool, synchronous: str) -> Literal["power loss", "process crash", "nothing"]:
    if memory:
        return "nothing"
    return "power loss" if synchronous in ("FULL", "EXTRA") else "process crash"
