"""The connections for handlers' transactions and for reads, apart from the control connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from onefold.current import outside
from onefold.errors import OnefoldError, StoreError, StoreUnavailableError
from onefold.store.postgres.wire.connect import Connector
from onefold.store.postgres.wire.handler_wire import HandlerWire
from onefold.store.postgres.wire.reconnect import Answer, Work, do, persistently, reaching
from onefold.store.shared.ownership import Ownership


class Pool:
    """Lends connections, never more than ``size`` of them; they are made when they are needed and kept.

    Callers wait in turn, for at most ``patience`` seconds; then they get ``StoreUnavailableError``.
    A semaphore keeps the turns.  A place is given back without waiting, so that no cancellation can lose it;
    a connection that needs to be cleaned first keeps its place until a task of the pool's own is done with it.
    """

    def __init__(self, connector: Connector, *, size: int, patience: float) -> None:
        self._connector = connector
        self._size = size
        self._patience = patience
        self._home = Ownership()
        self._places = asyncio.Semaphore(size)
        self._idle: list[HandlerWire] = []
        self._cleaning: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self, work: Work[HandlerWire, Answer]) -> Answer:
        """Do the work on a connection and return its answer; it is given again when that was lost."""
        return await persistently(partial(self._attempt, work), patience=self._patience)

    async def _attempt(self, work: Work[HandlerWire, Answer], repeated: bool) -> Answer:
        wire = await self._take()
        try:
            return await do(work, wire, repeated)
        finally:
            self.give_back(wire)

    async def begin(self, how: str) -> HandlerWire:
        """Begin a transaction; on another connection if one turns out to be lost, for nothing was done on it yet."""
        return await persistently(partial(self._begin, how), patience=self._patience)

    async def _begin(self, how: str, _: bool) -> HandlerWire:
        wire = await self._take()
        try:
            await do(lambda wire, _: wire.begin(how), wire, False)
        except BaseException:
            self.give_back(wire)
            raise
        return wire

    async def _take(self) -> HandlerWire:
        self._home.refuse_strangers()
        await self._wait()
        try:
            if self._closed:
                raise StoreError("the store is closed; use it inside `async with app`")
            while self._idle:
                wire = self._idle.pop()
                if wire.alive:
                    return wire
                wire.drop()
            with reaching():
                return await self._connector.connect_handler()
        except BaseException:
            self._places.release()
            raise

    async def _wait(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._places.acquire()
        except TimeoutError:
            raise StoreUnavailableError(
                f"all {self._size} connections were in use for {self._patience:g} s; raise pool_size"
            ) from None

    def give_back(self, wire: HandlerWire) -> None:
        """Take a connection back; one with which anything is wrong is closed."""
        if wire.clean or wire.connection.closed:
            self._keep(wire)
            return
        # Not a part of the caller's handler, whose tasks are ended with it.
        cleaning = asyncio.get_running_loop().create_task(self._clean(wire), context=outside())
        self._cleaning.add(cleaning)
        cleaning.add_done_callback(self._cleaning.discard)

    async def _clean(self, wire: HandlerWire) -> None:
        try:
            with suppress(OnefoldError):
                await wire.rollback()
            if not wire.clean:
                wire.drop()
        finally:
            self._keep(wire)

    def _keep(self, wire: HandlerWire) -> None:
        if wire.plans_changed:
            # Other connections may have the same plans.
            self._drop_idle()
        if self._closed or wire.plans_changed:
            wire.drop()
        elif not wire.connection.closed:
            wire.reset()
        if not wire.connection.closed:
            self._idle.append(wire)
        self._places.release()

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().drop()

    async def close(self) -> None:
        """Close what is idle now, and the others when they are given back."""
        self._closed = True
        self._drop_idle()
        # Each caller in turn finds the pool closed and passes its place on.
        self._places.release()
        if self._cleaning:
            await asyncio.wait(self._cleaning)
