"""A store that fails where a test says so, to prove that the code above it copes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from onefold import limits
from onefold.clock import Clock, SystemClock
from onefold.errors import StoreUnavailableError
from onefold.message.envelope import Envelope
from onefold.store import (
    KEEP,
    Act,
    Attempt,
    Capabilities,
    Counts,
    Fenced,
    Lane,
    Lease,
    Outcome,
    Progress,
    Purged,
    PutOptions,
    Query,
    Record,
    Registered,
    Said,
    State,
    Store,
    Stored,
    Transaction,
)
from onefold.store.gates import NO_GATINGS, Gating
from onefold.store.journal_lines import Line
from onefold.testing.clock import FakeClock

Answer = TypeVar("Answer")

#: Longer sleeps than this wait until the test advances the clock, as on any ``FakeClock``.
_HASTE_SECONDS = 5.0


class HastyClock(FakeClock):
    """A fake clock on which short sleeps end at once; longer ones still wait for ``advance``."""

    async def sleep(self, seconds: float) -> None:
        if seconds >= _HASTE_SECONDS:
            await super().sleep(seconds)
            return
        self.advance(seconds)
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()  # other tasks run, as in any sleep


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, in one call.

    ``refuse``: the store cannot be reached and does nothing.  ``lose``: the call is done, but its answer is lost.
    ``delay``: it is done ``seconds`` later.  ``kill``, ``kill after``: the process dies before or after it is done.
    """

    kind: Literal["refuse", "lose", "delay", "kill", "kill after"]
    #: Which call fails, counted from 1 over the calls of this verb, or of any verb.
    at: int = 1
    verb: str | None = None
    seconds: float = 0.0


class FaultyStore:
    """A store whose calls fail as planned; every other call goes through.

    The verbs are those of ``Store`` and, inside a transaction, ``begin``, ``commit`` and those of ``Transaction`` with
    ``transaction.`` before them.  ``open``, ``close``, ``migrate`` and rollbacks always work and are not counted.
    """

    def __init__(self, store: Store, plan: Sequence[Fault] = (), *, clock: Clock | None = None) -> None:
        self._store = store
        self._plan = tuple(plan)
        self._clock = clock or SystemClock()
        self._counts: Counter[str] = Counter()
        #: The verb of every call so far, in order.
        self.calls: list[str] = []
        #: The faults that have happened.
        self.fired: list[Fault] = []

    @property
    def clock(self) -> Clock | None:
        """The clock of the real store."""
        return getattr(self._store, "clock", None)

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    async def before(self, verb: str) -> Fault | None:
        """Count one call and cause the fault planned before it; return the fault still to come after it."""
        self.calls.append(verb)
        self._counts[verb] += 1
        for fault in self._plan:
            if fault.at != (len(self.calls) if fault.verb is None else self._counts[verb] * (fault.verb == verb)):
                continue
            self.fired.append(fault)
            if fault.kind == "kill":
                _kill_this_process()
            if fault.kind == "refuse":
                raise StoreUnavailableError(f"a planned fault: {verb}, call {len(self.calls)}, was refused")
            if fault.kind == "delay":
                await self._clock.sleep(fault.seconds)
            else:
                return fault
        return None

    def after(self, verb: str, fault: Fault | None) -> None:
        """Cause the fault planned after a call."""
        if fault is None:
            return
        if fault.kind == "kill after":
            _kill_this_process()
        raise StoreUnavailableError(f"a planned fault: the answer to {verb} was lost")

    async def call(self, verb: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """Make one call with the faults planned for it."""
        fault = await self.before(verb)
        answer = await make()
        self.after(verb, fault)
        return answer

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    def twin(self) -> Store | None:
        """Return None, because calls on another store would not be counted here."""
        return None

    async def migrate(self) -> list[str]:
        return await self._store.migrate()

    @asynccontextmanager
    async def transaction(self, connection: Any = None, *, seconds: float | None = None) -> AsyncIterator[Transaction]:
        begin = await self.before("begin")
        async with self._store.transaction(connection, seconds=seconds) as opened:
            self.after("begin", begin)
            inside = FaultyTransaction(self, opened)
            yield inside
            commit = None if inside.concluded else await self.before("commit")
        self.after("commit", commit)

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        return await self.call("put", lambda: self._store.put(envelopes, options))

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        return await self.call("settle", lambda: self._store.settle(settlements))

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
        return await self.call(
            "claim",
            lambda: self._store.claim(
                queues,
                types=types,
                limit=limit,
                lease=lease,
                worker=worker,
                lane=lane,
                gatings=gatings,
                at_once=at_once,
                thorough=thorough,
            ),
        )

    async def extend(self, leases: Sequence[Fenced], *, lease: float, starting: bool = False) -> list[bool]:
        return await self.call("extend", lambda: self._store.extend(leases, lease=lease, starting=starting))

    async def report(self, reports: Sequence[tuple[Fenced, Said | None]]) -> list[bool]:
        return await self.call("report", lambda: self._store.report(reports))

    async def progress(self, ids: Sequence[str]) -> dict[str, Progress]:
        return await self.call("progress", lambda: self._store.progress(ids))

    async def wait(self, queues: Sequence[str], *, timeout: float) -> None:
        await self.call("wait", lambda: self._store.wait(queues, timeout=timeout))

    async def fetch(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        return await self.call("fetch", lambda: self._store.fetch(statement, parameters))

    async def find(self, query: Query) -> list[Record]:
        return await self.call("find", lambda: self._store.find(query))

    async def record(self, owner: Fenced | str, steps: Sequence[Line]) -> list[Line]:
        return await self.call("record", lambda: self._store.record(owner, steps))

    async def steps(self, message_id: str) -> list[Line]:
        return await self.call("steps", lambda: self._store.steps(message_id))

    async def attempts(self, message_id: str) -> list[Attempt]:
        return await self.call("attempts", lambda: self._store.attempts(message_id))

    async def registered(self, kind: str, name: str) -> Registered | None:
        return await self.call("registered", lambda: self._store.registered(kind, name))

    async def entries(self, kind: str) -> dict[str, Registered]:
        return await self.call("entries", lambda: self._store.entries(kind))

    async def restored(self) -> int:
        return await self.call("restored", lambda: self._store.restored())

    async def now(self) -> int:
        return await self.call("now", lambda: self._store.now())

    async def count(self) -> dict[str, Counts]:
        return await self.call("count", lambda: self._store.count())


class FaultyTransaction:
    """The transaction of a faulty store."""

    def __init__(self, store: FaultyStore, opened: Transaction) -> None:
        self._store = store
        self._opened = opened
        self.concluded = False

    @property
    def connection(self) -> Any:
        return self._opened.connection

    async def execute(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        return await self._store.call("transaction.execute", lambda: self._opened.execute(statement, parameters))

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
        return await self._store.call("transaction.put", lambda: self._opened.put(envelopes, options))

    async def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        return await self._store.call("transaction.settle", lambda: self._opened.settle(settlements))

    async def conclude(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        # The call stands for two verbs, and a fault planned for either of them hits it.
        settle = await self._store.before("transaction.settle")
        commit = await self._store.before("commit")
        self.concluded = True
        await self._opened.conclude(settlements)
        self._store.after("transaction.settle", settle)
        self._store.after("commit", commit)

    async def record(self, owner: Fenced | str, steps: Sequence[Line], *, act: Act | None = None) -> list[Line]:
        return await self._store.call("transaction.record", lambda: self._opened.record(owner, steps, act=act))

    async def rewind(self, message_id: str, step: str, act: Act) -> list[Line]:
        return await self._store.call("transaction.rewind", lambda: self._opened.rewind(message_id, step, act))

    async def lock(self, ids: Sequence[str]) -> dict[str, State]:
        return await self._store.call("transaction.lock", lambda: self._opened.lock(ids))

    async def move(self, ids: Iterable[str], to: State, act: Act) -> list[str]:
        return await self._store.call("transaction.move", lambda: self._opened.move(ids, to, act))

    async def register(
        self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None = None
    ) -> bool:
        return await self._store.call(
            "transaction.register",
            lambda: self._opened.register(kind, name, value, version=version, expires_at=expires_at),
        )

    async def purge(self, *, limit: int = limits.PURGE_BATCH) -> Purged:
        return await self._store.call("transaction.purge", lambda: self._opened.purge(limit=limit))


def _kill_this_process() -> None:
    """End at once, as by ``kill -9``: no handler runs and no buffer is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
