"""The store on SQLite: one writer, shared commits, no server.

Writes of one process take turns on one connection; calls that need no transaction of their own share a commit.
Processes take turns through SQLite's own lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, SystemClock, boot_id
from onefold.errors import ConfigurationError, StoreError
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
    Stored,
)
from onefold.store.gates import NO_GATINGS, Gating
from onefold.store.journal_lines import Line
from onefold.store.shared.group_commit import GroupCommit
from onefold.store.shared.journal import or_lost
from onefold.store.shared.ownership import Ownership
from onefold.store.sqlite.connection import (
    TRANSLATED,
    Patience,
    Settings,
    is_unreadable,
    open_connection,
    refuse_unsafe_file,
    translated,
)
from onefold.store.sqlite.drivers import (
    Connection,
    Journal,
    Library,
    Trace,
    has_safe_log,
    is_trouble,
    load_driver,
)
from onefold.store.sqlite.notify import Notifier
from onefold.store.sqlite.reader import Readers, Use, fetch_from_memory
from onefold.store.sqlite.restore import release_after_boot, restored
from onefold.store.sqlite.schema import migrate
from onefold.store.sqlite.second_library import FileHold, Files, hold
from onefold.store.sqlite.session import Row, Session, as_json, rows_for
from onefold.store.sqlite.thread import InlineRunner, Runner, ThreadRunner
from onefold.store.sqlite.transaction import CallersTransaction, SQLiteTransaction, frees_places, may_bring_work
from onefold.store.sqlite.verbs.claim import claim, look
from onefold.store.sqlite.verbs.extend import extend, extend_once
from onefold.store.sqlite.verbs.find import attempts, count, find
from onefold.store.sqlite.verbs.gates import Asked, Gates, Worth
from onefold.store.sqlite.verbs.journal import JournalTable, record, record_by_owners
from onefold.store.sqlite.verbs.put import put
from onefold.store.sqlite.verbs.register import entries, registered
from onefold.store.sqlite.verbs.report import progress, report
from onefold.store.sqlite.verbs.settle import rows_in, settle
from onefold.store.sqlite.writer.writer import Writer

logger = logging.getLogger("onefold")

Answer = TypeVar("Answer")

#: How long a lease that ran out is left to its owner, which may be alive and have waited for the write lock to renew
#: it: a process that waits for the lock asks for it every few milliseconds.
TAKEOVER_GRACE_MICROS = 300_000

#: Operations that touch any number of rows are never run on the event loop.
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
        driver: Library = "apsw",
        journal: Journal | None = None,
    ) -> None:
        if journal not in (None, "wal", "delete"):
            raise ConfigurationError(f"journal is {journal!r}; the SQLite store knows 'wal' and 'delete'")
        if synchronous not in ("OFF", "NORMAL", "FULL", "EXTRA"):
            raise ConfigurationError(f"synchronous is {synchronous!r}; SQLite knows OFF, NORMAL, FULL and EXTRA")
        self.path = path
        self._clock = clock or SystemClock()
        self._inline = inline
        self._boot = boot or boot_id()
        self._settings = Settings(load_driver(driver), path, synchronous, journal, trace)
        self._library: Library = driver
        self._memory = self._settings.in_memory
        self._files: Files | None = None
        self._hold: FileHold | None = None
        self._opened = False
        #: Whether the last claim found something, so that the next one need not look first.
        self._found = False
        self._gates = Gates()
        # Where all that write are in this process, they take turns, and no owner is kept from renewing; nor is one by
        # a test that moves its clock.
        is_alone = inline or self._memory or not isinstance(self._clock, SystemClock)
        self._grace_micros = 0 if is_alone else TAKEOVER_GRACE_MICROS
        self._graced_until = 0
        self.capabilities = Capabilities(
            transactional=True,
            shared=False,
            notifies=not self._memory,
            durability=self._durability(journal),
        )

    @property
    def clock(self) -> Clock:
        """The clock that says what is due; an app on this store goes by the same."""
        return self._clock

    async def open(self) -> None:
        if self._opened:
            return
        if not self._memory:
            self._hold_file()
        self._home = Ownership()
        self._wake = Notifier(self.path, between_processes=not self._inline and not self._memory)
        self._writing: Runner = InlineRunner() if self._inline else ThreadRunner("onefold-writer")
        self._writer = Writer(
            self._connect,
            self._clock,
            self._writing,
            path=self._settings.path,
            threaded=not self._inline,
            lasting=not self._memory,
            files=self._files,
        )
        self._readers = Readers(self._connect, self._clock, inline=self._inline)
        self._journals: GroupCommit[str, list[Line]] = GroupCommit(self._read_journals, most=_JOURNALS_MAX)
        self._opened = True
        try:
            await self._writer.open()
            if not self._memory:
                self._judge(self._writer.journal)
            self._applied = await self.migrate()
            await self._write(lambda session: release_after_boot(session, self._boot))
            if not self._memory:
                await self._readers.of("claims").open()
        except BaseException:
            await self.close()
            raise

    def _hold_file(self) -> None:
        # A change of the working directory must not lead a later connection to another file.
        path = os.path.abspath(self.path)
        refuse_unsafe_file(path)
        self._hold = hold(path, self._library)
        self._files = Files(path, self._hold.identity)
        self._settings = replace(self._settings, path=path)

    def _connect(self, patience: Patience) -> Connection:
        return open_connection(self._settings, patience)

    async def close(self) -> None:
        if not self._opened or self._home.abroad:
            return
        self._home.refuse_strangers()
        await self._journals.close()
        self._opened = False
        self._wake.close()
        await self._writer.close()
        self._writing.close()
        await self._readers.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    def twin(self) -> SQLiteStore | None:
        if self._memory or self._inline or not isinstance(self._clock, SystemClock):
            return None
        # Its event loop has nothing else to do, so it needs no threads of its own.
        return SQLiteStore(
            self._settings.path,
            synchronous=self._settings.synchronous,
            inline=True,
            boot=self._boot,
            driver=self._library,
            journal=self._settings.journal,
        )

    async def migrate(self) -> list[str]:
        if not self._opened:
            await self.open()
            return self._applied
        return await self._write(lambda session: migrate(session.connection, self._clock.now()), rows=_MANY_ROWS)

    def _durability(self, journal: str | None) -> Literal["power loss", "process crash", "nothing"]:
        if self._memory:
            return "nothing"
        safe = self._settings.synchronous in ("FULL", "EXTRA")
        if journal != "delete" and not has_safe_log(self._settings.driver.VERSION):
            safe = False
        return "power loss" if safe else "process crash"

    def _judge(self, journal: str) -> None:
        """Say what the journal that the file turned out to have is worth with this version of SQLite."""
        self.capabilities = replace(self.capabilities, durability=self._durability(journal))
        version = self._settings.driver.VERSION
        # An inline store is the second of its process, or part of a simulation: it need not be said again.
        if journal == "wal" and not has_safe_log(version) and not self._inline:
            logger.warning(
                "sqlite_unsafe file=%s version=%s module=%s can, rarely, damage a file with a write-ahead log when two "
                "connections copy the log at the same moment; it was mended in 3.51.3, 3.50.7 and 3.44.6.  "
                "Use journal='delete', or a Python with a newer SQLite",
                self.path,
                ".".join(map(str, version)),
                self._library,
            )

    def _refuse_misuse(self) -> None:
        if not self._opened:
            raise StoreError("the store is closed; use it inside `async with app`")
        self._home.refuse_strangers()
        if self._files is not None:
            self._files.refuse_replaced()

    # writing

    def transaction(self, connection: Any = None, *, seconds: float | None = None) -> SQLiteTransaction:
        if connection is not None:
            raise ConfigurationError(
                f"the SQLite store cannot join a {type(connection).__module__} connection; use app.transaction() and "
                "its execute(), so that one SQLite library writes the file"
            )
        self._refuse_misuse()
        part = CallersTransaction(self._writer, seconds)
        return SQLiteTransaction(self.path, self._home, part, self._wake, self._gates)

    async def _write(self, operation: Callable[[Session], Answer], *, rows: int = 1, urgent: bool = False) -> Answer:
        """Run one operation in a transaction that concurrent callers share; durable when it returns."""
        self._refuse_misuse()
        return await self._translate(self._writer.write(operation, rows=rows, urgent=urgent))

    async def _translate(self, awaited: Awaitable[Answer]) -> Answer:
        try:
            return await awaited
        except TRANSLATED as error:
            raise translated(error, self.path) from error

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        self._refuse_misuse()
        rows = rows_for(envelopes, lambda e: e.payload_inline)
        if options is KEEP or options == KEEP:
            stored = await self._translate(self._writer.write_each(put, envelopes, rows=rows))
        else:
            stored = await self._write(lambda session: put(session, envelopes, options), rows=rows)
        self._wake.ring()
        return stored

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        self._refuse_misuse()
        won = await self._translate(self._writer.write_each(settle, settlements, rows=rows_in(settlements)))
        self._gates.settled(lease for lease, _ in settlements)
        brings_work = may_bring_work(settlements)
        if brings_work or frees_places(settlements):
            self._wake.ring(elsewhere=brings_work)
        return won

    async def record(self, owner: Fenced | str, steps: Sequence[Line]) -> list[Line]:
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
        thorough: bool = True,
    ) -> list[Lease]:
        asked = Asked(queues, frozenset(types), as_json(types), limit, lane, gatings, at_once, thorough)
        while True:
            worth: Mapping[str, Worth] = {}
            looks = self._gates.are_used or not self._found
            if looks:
                # Looking first keeps idle workers, and walks past gates, away from the write lock.
                for_all = not self._found
                found = await self._read(lambda session: look(session, self._gates, asked, for_all=for_all))  # noqa: B023
                if found is None:
                    return []
                worth = found

            def take(session: Session, worth: Mapping[str, Worth] = worth) -> list[Lease]:
                if self._grace_micros and extend_once(session, self._grace_micros):
                    self._graced_until = self._clock.steady() + self._grace_micros
                return claim(session, self._gates, asked, worth, lease=lease, worker=worker)

            leases = await self._write(take, rows=limit, urgent=True)
            if leases or looks or not self._gates.are_used:
                break
        while not leases and (left := self._graced_until - self._clock.steady()) > 0:
            # With nothing else to do, look again when the time of those owners is over, or when something comes.
            await self._wake.wait(left / MICROSECONDS)
            leases = await self._write(take, rows=limit, urgent=True)
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

    async def _read(self, operation: Callable[[Session], Answer], use: Use = "claims") -> Answer:
        self._refuse_misuse()
        reading = self._writer.write(operation) if self._memory else self._readers.of(use).read(operation)
        return await self._translate(reading)

    async def fetch(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        self._refuse_misuse()
        try:
            if self._memory:
                return await fetch_from_memory(self._writer, statement, parameters)
            # Without a write-ahead log a read keeps writers from committing.
            seconds = limits.FETCH_SECONDS_MAX if self._writer.journal == "wal" else limits.TRANSACTION_SECONDS_MAX
            return await self._readers.of("callers").fetch(statement, parameters, seconds)
        except TRANSLATED as error:
            if not (is_trouble(error) or is_unreadable(error)):
                raise  # it is about the caller's own SQL, and the caller's to read
            raise translated(error, self.path) from error

    async def find(self, query: Query) -> list[Record]:
        return await self._read(lambda session: find(session, query), "operators")

    async def steps(self, message_id: str) -> list[Line]:
        self._refuse_misuse()
        return (await self._journals.add([message_id]))[0]

    async def _read_journals(self, message_ids: list[str]) -> list[list[Line]]:
        """Read several in one go: the way to the reader's thread costs more than a journal."""
        return await self._read(lambda session: [JournalTable(session).read(one) for one in message_ids])

    async def progress(self, ids: Sequence[str]) -> dict[str, Progress]:
        return await self._read(lambda session: progress(session, ids), "operators")

    async def attempts(self, message_id: str) -> list[Attempt]:
        return await self._read(lambda session: attempts(session, message_id), "operators")

    async def registered(self, kind: str, name: str) -> Registered | None:
        return await self._read(lambda session: registered(session, kind, name))

    async def entries(self, kind: str) -> dict[str, Registered]:
        return await self._read(lambda session: entries(session, kind), "operators")

    async def now(self) -> int:
        return self._clock.now()

    async def count(self) -> dict[str, Counts]:
        return await self._read(count, "operators")
