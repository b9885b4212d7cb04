"""The store on PostgreSQL: many machines, one database, the server's clock.

Claim, settle and put each have a connection of their own, so that they overlap and none waits for a handler.
Handlers' transactions come from a pool.  Every statement of the hot path is one round trip for a whole batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psycopg

from onefold.clock import MICROSECONDS, Clock, SystemClock
from onefold.envelope import Envelope
from onefold.errors import StoreError, StoreUnavailableError
from onefold.store import (
    Attempt,
    Capabilities,
    Counts,
    Lease,
    Outcome,
    PutOptions,
    Query,
    Record,
    Registered,
    State,
    Stored,
)
from onefold.stores.coalesce import Coalescer
from onefold.stores.postgres import resolve, schema
from onefold.stores.postgres.connection import BEGIN, BEGIN_READING, Connector, Pooler, Trace, Wire, refuse_foreign
from onefold.stores.postgres.connection import refuse_lost
from onefold.stores.postgres.faults import BlockedError, is_lost, translated
from onefold.stores.postgres.link import Handlers, Link
from onefold.stores.postgres.session import Session, Settlement, is_one_statement
from onefold.stores.postgres.transaction import KEEP, PostgresTransaction, queues_to_ring, settled_queues
from onefold.stores.postgres.wake import Bell

#: Messages that share a statement and a commit; more would make the first of them wait.
_TOGETHER_MAX = 1_000
#: Look for run-out leases this often; nobody is in a hurry who waited for a whole lease.
_EXPIRED_SECONDS = 1.0

_machine = SystemClock()


class PostgresStore:
    """Messages in the schema ``onefold`` of one database.

    ``clock`` replaces the server's clock, for tests.
    ``pooler="transaction"`` is for a pooler that gives each transaction another session: nothing is prepared and
    nothing set; notifications then need a ``listen_url`` that goes around it.
    ``patience`` is how many seconds an operation tries to reach the server again.
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
        self._clock = clock
        self._pool_size = pool_size
        self._patience = patience
        self._connector = Connector(url, pooler=pooler, trace=trace)
        self._listening: Connector | None = None
        if listen_url is not None or pooler == "session":
            self._listening = Connector(listen_url or url, pooler="session", trace=trace)
        self._opened = False
        self._expired_at = 0
        self.capabilities = Capabilities(
            transactional=True, shared=True, notifies=self._listening is not None, durability="process crash"
        )

    async def open(self) -> None:
        if self._opened:
            return
        self._links = {role: self._link(role) for role in ("put", "settle", "claim", "spare")}
        self._handlers = Handlers(self._connector, size=self._pool_size, patience=self._patience)
        self._bell = Bell(self._links["spare"], self._listening)
        self._puts: Coalescer[Envelope, Stored | None] = Coalescer(self._flush_puts, most=_TOGETHER_MAX)
        self._contests: Coalescer[Envelope, Stored | None] = Coalescer(self._flush_contests, most=_TOGETHER_MAX)
        self._settles: Coalescer[Settlement, bool] = Coalescer(self._flush_settles, most=_TOGETHER_MAX)
        self._opened = True
        try:
            durable = await self._links["claim"].run(self._check)
            self.capabilities = replace(self.capabilities, durability="power loss" if durable else "process crash")
            await self._handlers.open()
        except BaseException:
            await self.close()
            raise

    def _link(self, name: str) -> Link:
        role = name if name in ("put", "spare") else "control"
        return Link(self._connector, role, patience=self._patience)  # type: ignore[arg-type]

    async def _check(self, wire: Wire, _: bool) -> bool:
        await schema.refuse_unfinished(wire)
        return bool((await wire.rows("durability"))[0][0])

    async def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        for coalescer in (self._puts, self._contests, self._settles):
            await coalescer.close()
        await self._bell.close()
        await self._handlers.close()
        for link in self._links.values():
            await link.close()

    async def migrate(self) -> list[str]:
        link = Link(self._connector, "migrate", patience=self._patience)
        now = None if self._clock is None else self._clock.now()
        done: list[str] = []

        async def migrate(wire: Wire, _: bool) -> None:
            done.extend(await schema.migrate(wire, now))

        try:
            await link.run(migrate)
        finally:
            await link.close()
        return done

    def _session(self, wire: Wire) -> Session:
        return Session(wire, self._clock)

    def _use(self, name: str) -> Link:
        if not self._opened:
            raise StoreError("the store is closed; use it inside `async with app`")
        return self._links[name]
