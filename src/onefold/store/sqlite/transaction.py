"""One open transaction on the writer's connection, as its owner sees it: the protocol, and below it the calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from onefold import limits
from onefold.clock import MICROSECONDS, SystemClock
from onefold.errors import ConfigurationError, StoreError
from onefold.message.envelope import Envelope
from onefold.store import (
    KEEP,
    Act,
    Again,
    Dead,
    Done,
    Fenced,
    Lease,
    Outcome,
    Purged,
    PutOptions,
    State,
    Stored,
)
from onefold.store.journal_lines import Line
from onefold.store.shared.journal import or_lost
from onefold.store.shared.ownership import Ownership
from onefold.store.sqlite.connection import translated
from onefold.store.sqlite.drivers import ERRORS, is_trouble
from onefold.store.sqlite.notify import Notifier
from onefold.store.sqlite.session import Row, Session
from onefold.store.sqlite.verbs.gates import Gates
from onefold.store.sqlite.verbs.journal import record, rewind
from onefold.store.sqlite.verbs.move import lock, move
from onefold.store.sqlite.verbs.purge import purge
from onefold.store.sqlite.verbs.put import put
from onefold.store.sqlite.verbs.register import register
from onefold.store.sqlite.verbs.settle import rows_in, settle, settle_all
from onefold.store.sqlite.writer.connection import Call, Ending, Part
from onefold.store.sqlite.writer.writer import Writer, nothing

Answer = TypeVar("Answer")

#: How long a transaction is open is a matter of real time: a test that moves its clock does not make it longer.
_machine = SystemClock()


class SQLiteTransaction:
    """Everything in it commits together, or nothing does; it begins with its first call."""

    def __init__(self, path: str, home: Ownership, part: CallersTransaction, wake: Notifier, gates: Gates) -> None:
        self._path = path
        self._home = home
        self._part = part
        self._wake = wake
        self._gates = gates
        self._brings_work = False
        #: Messages that leave a place at a gate.
        self._leaving: list[Lease] = []
        #: The connection goes on to serve others: a statement that comes too late would be committed with theirs.
        self._over = False

    async def __aenter__(self) -> SQLiteTransaction:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        over, self._over = self._over, True
        self._home.refuse_strangers()
        if error is not None:
            await self._part.end(Ending.ROLLBACK)
        elif not over:
            await self._translate(self._part.end(Ending.COMMIT))
            self._tell()

    @property
    def connection(self) -> Any:
        raise ConfigurationError(
            "the SQLite store does not lend its connection, because every message of this process is written through "
            "it; use execute()"
        )

    async def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        self._refuse_late()
        try:
            return await self._part.execute(Session.run_callers, statement, parameters)
        except ERRORS as error:
            if not is_trouble(error):
                raise  # it is about the caller's own SQL, and the caller's to read
            raise translated(error, self._path) from error

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        self._brings_work = True
        return await self._run(put, envelopes, options)

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        self._note(settlements)
        return await self._run(settle, settlements)

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        self._refuse_late()
        self._over = True
        self._note(settlements)
        await self._translate(self._part.conclude(settle_all, settlements, rows=rows_in(settlements)))
        self._tell()

    async def record(self, owner: Fenced | str, steps: Sequence[Line], *, act: Act | None = None) -> list[Line]:
        self._brings_work = self._brings_work or isinstance(owner, str)
        return or_lost(owner, await self._run(record, owner, steps, act))

    async def rewind(self, message_id: str, step: str, act: Act) -> list[Line]:
        self._brings_work = True
        return await self._run(rewind, message_id, step, act)

    async def lock(self, ids: Sequence[str]) -> dict[str, State]:
        return await self._run(lock, ids)

    async def move(self, ids: Iterable[str], to: State, act: Act) -> list[str]:
        self._brings_work = True
        return await self._run(move, list(ids), to, act)

    async def register(
        self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None = None
    ) -> bool:
        def write(session: Session) -> bool:
            return register(session, kind, name, value, version=version, expires_at=expires_at)

        return await self._run(write)

    async def purge(self, *, limit: int = limits.PURGE_BATCH) -> Purged:
        return await self._run(purge, limit)

    async def _run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        self._refuse_late()
        return await self._translate(self._part.run(function, *args))

    async def _translate(self, awaited: Awaitable[Answer]) -> Answer:
        try:
            return await awaited
        except ERRORS as error:
            raise translated(error, self._path) from error

    def _refuse_late(self) -> None:
        if self._over:
            raise StoreError("the transaction is over; this statement came too late and was not run")
        self._home.refuse_strangers()

    def _note(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        self._brings_work = self._brings_work or may_bring_work(settlements)
        self._leaving += [lease for lease, _ in settlements if lease.gate is not None]

    def _tell(self) -> None:
        self._gates.settled(self._leaving)
        if self._brings_work or self._leaving:
            self._wake.ring(elsewhere=self._brings_work)


class CallersTransaction:
    """One transaction on the writer's connection, from its first call to its end, as its owner uses it."""

    __slots__ = ("_over", "_writer", "calls", "ended_by", "part", "queued", "seconds", "timer")

    def __init__(self, writer: Writer, seconds: float | None) -> None:
        self._writer = writer
        self._over = False
        #: How long it may be open, and why the writer has ended it.
        self.seconds = seconds
        self.ended_by: Exception | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.calls: deque[Call] = deque()
        self.part = Part()
        self.queued = False

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Run an operation of ours, whose first argument is the session, inside the transaction."""
        answer: Answer = await self._ask(function, args)
        return answer

    async def execute(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Run the caller's own SQL, which is interrupted when its time or the wait for it is over."""
        answer: Answer = await self._ask(function, args, is_callers=True)
        return answer

    async def conclude(self, function: Callable[..., None], *args: Any, rows: int) -> None:
        """Run a last operation and commit; rolled back if it raises, and over in any case."""
        self._over = True
        await self._ask(function, args, ending=Ending.COMMIT, rows=rows)

    async def end(self, ending: Ending) -> None:
        """Commit or roll back unless it is over; afterwards nothing of the transaction is open, even if this raises."""
        if self._over or (not self.queued and self.ended_by is None):
            return
        self._over = True
        if ending is Ending.ROLLBACK:
            if self._writer.closed or self.ended_by is not None or self._writer.forget(self):
                return
            self._writer.stop(self)
        await self._ask(nothing, (), ending=ending)

    def _ask(self, function: Callable[..., Any], args: Sequence[Any], **how: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        return self._writer.ask(self, Call(function, args, future, **how))

    def refuse(self, error: Exception) -> None:
        """End it before it has begun: every call gets this error."""
        self.ended_by = error
        for call in self.calls:
            if not call.future.done():
                call.future.set_exception(error)
        self.calls.clear()

    def owned_seconds(self) -> float:
        """Return for how long the owner has kept the lock; waiting does not count, nor do operations of ours."""
        since = self.part.owned_since
        return (_machine.steady() - since) / MICROSECONDS if since else 0.0


def may_bring_work(settlements: Sequence[tuple[Lease, Outcome]]) -> bool:
    """Whether settling these leaves something that another worker could take at once."""
    for lease, o in settlements:
        if isinstance(o, Done):
            if o.sends or o.notes or lease.envelope.reply_to:
                return True
        elif isinstance(o, Dead):
            if o.sends or lease.envelope.reply_to:
                return True
        elif not isinstance(o, Again):
            return True
    return False


def frees_places(settlements: Sequence[tuple[Lease, Outcome]]) -> bool:
    """Whether a place at a gate is free now, or the next in a line may come.

    The process that had it takes the next: waking all processes would have them all run for one place.
    """
    return any(lease.gate is not None for lease, _ in settlements)
