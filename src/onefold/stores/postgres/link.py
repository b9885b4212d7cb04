"""Connections that come back: a control connection of its own, or one of the handlers' pool.

An operation is given again after its connection was lost, until patience ends.
It is told that it is given again, because nobody knows what became of the first time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool

from onefold.clock import MICROSECONDS, SystemClock, system_random
from onefold.errors import StoreError, StoreUnavailableError
from onefold.stores.postgres.connection import Connector, Role, Wire
from onefold.stores.postgres.faults import is_lost, may_rerun, translated

Answer = TypeVar("Answer")
#: Gets a connection, and whether it may have been done before.
Work = Callable[[Wire, bool], Awaitable[Answer]]

_BACKOFF_SECONDS = 0.02
_BACKOFF_SECONDS_MAX = 1.0
#: Losing a deadlock this often means something other than bad luck.
_RERUNS_MAX = 10
#: Open pooled connections beyond these are closed again when they are not needed.
_POOL_MIN = 1

_machine = SystemClock()
_chance = system_random()


class Backoff:
    """Waits longer and longer between tries, and says when enough is enough."""

    def __init__(self, seconds: float) -> None:
        self._give_up_at = _machine.steady() + round(seconds * MICROSECONDS)
        self._pause = _BACKOFF_SECONDS

    async def pause(self) -> bool:
        """Wait before the next try; False at once when there is to be none."""
        if _machine.steady() >= self._give_up_at:
            return False
        # Everybody lost the same server at the same moment; they must not come back at the same moment too.
        await _machine.sleep(self._pause * _chance.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, _BACKOFF_SECONDS_MAX)
        return True


class _LostError(Exception):
    """The connection was lost; the cause says how."""


async def persistently(attempt: Callable[[bool], Awaitable[Answer]], *, patience: float) -> Answer:
    """Make attempts until one reaches the server; afterwards the answer is certain, or an error of ours was raised."""
    backoff: Backoff | None = None
    repeated, reruns = False, 0
    while True:
        try:
            return await attempt(repeated)
        except _LostError as error:
            repeated = True
            backoff = backoff or Backoff(patience)
            if not await backoff.pause():
                raise StoreUnavailableError(f"PostgreSQL cannot be reached: {error.__cause__}") from error.__cause__
        except psycopg.Error as error:
            reruns += 1
            backoff = backoff or Backoff(patience)
            if not may_rerun(error) or reruns > _RERUNS_MAX or not await backoff.pause():
                raise translated(error) from error


async def _do(work: Work[Answer], wire: Wire, repeated: bool) -> Answer:
    try:
        return await work(wire, repeated)
    except psycopg.Error as error:
        await _raise_if_lost(error, wire)
        raise
    finally:
        # Whoever was cancelled in the middle of something must not leave it to the next one.
        if wire.connection.pgconn.transaction_status != TransactionStatus.IDLE:
            await wire.connection.close()


async def _begin(wire: Wire, statement: str) -> None:
    try:
        await wire.execute(statement)
    except psycopg.Error as error:
        await _raise_if_lost(error, wire)
        raise


async def _raise_if_lost(error: psycopg.Error, wire: Wire) -> None:
    if is_lost(error, wire.connection):
        await wire.connection.close()
        raise _LostError from error


class Link:
    """One control connection; its users take turns."""

    def __init__(self, connector: Connector, role: Role, *, patience: float) -> None:
        self._connector = connector
        self._role = role
        self._patience = patience
        self._turn = asyncio.Lock()
        self._wire: Wire | None = None
        self._closed = False
        self._process = os.getpid()

    async def run(self, work: Work[Answer]) -> Answer:
        """Do the work and return its answer; it is given again when the connection was lost."""
        refuse_fork(self._process)
        async with self._turn:
            return await persistently(partial(self._attempt, work), patience=self._patience)

    async def _attempt(self, work: Work[Answer], repeated: bool) -> Answer:
        if self._closed:
            raise StoreError("the store is closed; use it inside `async with app`")
        if self._wire is None or self._wire.connection.closed:
            try:
                self._wire = await self._connector.connect(self._role)
            except psycopg.OperationalError as error:
                raise _LostError from error
        return await _do(work, self._wire, repeated)

    @property
    def idle(self) -> bool:
        """Whether nobody is using it."""
        return not self._turn.locked()

    async def close(self) -> None:
        """Wait for what is under way, then disconnect for good."""
        self._closed = True
        async with self._turn:
            if self._wire is not None:
                await self._wire.connection.close()
                self._wire = None

    @property
    def backend_pid(self) -> int | None:
        """The server's number for this session, by which its notifications are known."""
        if self._wire is None or self._wire.connection.closed:
            return None
        return self._wire.connection.info.backend_pid


class Handlers:
    """The pool for handlers' transactions and for reads, apart from the control connections."""

    def __init__(self, connector: Connector, *, size: int, patience: float) -> None:
        self._connector = connector
        self._patience = patience
        self._process = os.getpid()
        self._pool = AsyncConnectionPool(
            connector.conninfo,
            kwargs={"autocommit": True, "prepare_threshold": connector.prepare_threshold},
            min_size=min(_POOL_MIN, size),
            max_size=size,
            open=False,
            configure=self._configure,
            timeout=patience,
        )

    async def open(self) -> None:
        await self._pool.open()

    async def close(self) -> None:
        await self._pool.close()

    async def _configure(self, connection: AsyncConnection[Any]) -> None:
        await self._connector.equip(connection, "handlers")

    async def run(self, work: Work[Answer]) -> Answer:
        """Do the work on a pooled connection and return its answer; it is given again when that was lost."""
        return await persistently(partial(self._attempt, work), patience=self._patience)

    async def _attempt(self, work: Work[Answer], repeated: bool) -> Answer:
        wire = await self.take()
        try:
            return await _do(work, wire, repeated)
        finally:
            await self.give_back(wire)

    async def begin(self, statement: str) -> Wire:
        """Take a connection and begin a transaction on it; stale ones are passed over, since nothing has run yet."""

        async def begun(_: bool) -> Wire:
            wire = await self.take()
            try:
                await _begin(wire, statement)
            except BaseException:
                await self.give_back(wire)
                raise
            return wire

        return await persistently(begun, patience=self._patience)

    async def take(self) -> Wire:
        refuse_fork(self._process)
        try:
            return self._connector.wire(await self._pool.getconn(), "handlers")
        except psycopg.OperationalError as error:
            raise translated(error) from error

    async def give_back(self, wire: Wire) -> None:
        await self._pool.putconn(wire.connection)


def refuse_fork(process: int) -> None:
    """Refuse to share a parent's connection: two processes on one would read each other's answers."""
    if os.getpid() != process:
        raise StoreError("this store was opened before a fork; open one in the child process")
