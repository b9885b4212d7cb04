"""One open transaction on the writer's connection, as its owner sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from onefold import limits
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError, StoreError
from onefold.step import Step
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
from onefold.stores.home import Home
from onefold.stores.sqlite.connection import translated
from onefold.stores.sqlite.drivers import ERRORS, is_trouble
from onefold.stores.sqlite.operating import lock, move, purge, record, register, rewind
from onefold.stores.sqlite.putting import put
from onefold.stores.sqlite.round import Ending
from onefold.stores.sqlite.session import Row, Session
from onefold.stores.sqlite.settling import settle, settle_all
from onefold.stores.sqlite.turn import Turn
from onefold.stores.sqlite.wake import Wake
from onefold.stores.steps import or_lost

Answer = TypeVar("Answer")


class SQLiteTransaction:
    """Everything in it commits together, or nothing does; it begins with its first call."""

    def __init__(self, path: str, home: Home, turn: Turn, wake: Wake) -> None:
        self._path = path
        self._home = home
        self._turn = turn
        self._wake = wake
        self._brings_work = False
        self._frees_places = False
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
            await self._turn.end(Ending.ROLLBACK)
        elif not over:
            await self._translate(self._turn.end(Ending.COMMIT))
            self._tell()

    @property
    def connection(self) -> Any:
        raise ConfigurationError(
            "the SQLite store lends its connection to nobody, because every message of this process is written through "
            "it; use execute()"
        )

    async def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        self._refuse_late()
        try:
            return await self._turn.execute(Session.run_callers, statement, parameters)
        except ERRORS as error:
            if not is_trouble(error):
                raise  # it is about the caller's own SQL, and the caller's to read
            raise translated(error, self._path) from error

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        self._brings_work = True
        return await self._run(put, envelopes, options)

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        self._brings_work = self._brings_work or may_bring_work(settlements)
        self._frees_places = self._frees_places or frees_places(settlements)
        return await self._run(settle, settlements)

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        self._refuse_late()
        self._over = True
        self._brings_work = self._brings_work or may_bring_work(settlements)
        self._frees_places = self._frees_places or frees_places(settlements)
        await self._translate(self._turn.conclude(settle_all, settlements))
        self._tell()

    async def record(self, owner: Fenced | str, steps: Sequence[Step], *, act: Act | None = None) -> list[Step]:
        self._brings_work = self._brings_work or isinstance(owner, str)
        return or_lost(owner, await self._run(record, owner, steps, act))

    async def rewind(self, message_id: str, step: str, act: Act) -> list[Step]:
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
        return await self._translate(self._turn.run(function, *args))

    async def _translate(self, awaited: Awaitable[Answer]) -> Answer:
        try:
            return await awaited
        except ERRORS as error:
            raise translated(error, self._path) from error

    def _refuse_late(self) -> None:
        if self._over:
            raise StoreError("the transaction is over; this statement came too late and was not run")
        self._home.refuse_strangers()

    def _tell(self) -> None:
        if self._brings_work or self._frees_places:
            self._wake.ring(elsewhere=self._brings_work)


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

    Who had it takes the next: to wake all processes for each place would have them all run for one.
    """
    return any(lease.gate is not None for lease, _ in settlements)
