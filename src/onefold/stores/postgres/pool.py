"""The connections for handlers' transactions and for reads, apart from the control connections."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any

from psycopg import AsyncConnection

from onefold.errors import StoreError, StoreUnavailableError
from onefold.stores.home import Home
from onefold.stores.postgres.connection import Connector
from onefold.stores.postgres.handling import HandlerWire
from onefold.stores.postgres.link import Answer, Work, do, persistently, reaching


class Pool:
    """Lends connections, never more than ``size`` of them; they are made when they are needed and kept.

    Whoever waits longer than ``patience`` seconds for one gets ``StoreUnavailableError``.
    """

    def __init__(self, connector: Connector, *, size: int, patience: float) -> None:
        self._connector = connector
        self._size = size
        self._patience = patience
        self._home = Home()
        self._idle: list[HandlerWire] = []
        self._made = 0
        self._waiting: deque[asyncio.Future[HandlerWire | None]] = deque()
        self._closed = False

    async def run(self, work: Work[HandlerWire, Answer]) -> Answer:
        """Do the work on a connection and return its answer; it is given again when that was lost."""
        return await persistently(partial(self._attempt, work), patience=self._patience)

    async def _attempt(self, work: Work[HandlerWire, Answer], repeated: bool) -> Answer:
        wire = await self._take()
        try:
            return await do(work, wire, repeated)
        finally:
            await self.give_back(wire)

    async def begin(self, how: str) -> HandlerWire:
        """Take a connection for a transaction, which begins with the first statement."""
        wire = await persistently(lambda _: self._take(), patience=self._patience)
        await wire.begin(self._renew, how)
        return wire

    async def _renew(self) -> AsyncConnection[Any]:
        """Connect again in place of a connection that turned out to be lost."""

        async def attempt(_: bool) -> AsyncConnection[Any]:
            with reaching():
                return await self._connector.redial()

        return await persistently(attempt, patience=self._patience)

    async def _take(self) -> HandlerWire:
        self._home.refuse_strangers()
        while True:
            if self._closed:
                raise StoreError("the store is closed; use it inside `async with app`")
            while self._idle:
                wire = self._idle.pop()
                if wire.alive:
                    return wire
                await self._forget(wire)
            if self._made < self._size:
                return await self._make()
            if given := await self._wait():
                return given

    async def _make(self) -> HandlerWire:
        self._made += 1
        try:
            with reaching():
                return await self._connector.connect_handler()
        except BaseException:
            self._made -= 1
            self._hand_over(None)
            raise

    async def _wait(self) -> HandlerWire | None:
        """Wait for a connection; None when there is room for another, or the pool was closed."""
        turn: asyncio.Future[HandlerWire | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._patience):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and (given := turn.result()):
                await self.give_back(given)
            if isinstance(error, TimeoutError):
                raise StoreUnavailableError(
                    f"all {self._size} connections were in use for {self._patience:g} s; raise pool_size"
                ) from None
            raise

    def _hand_over(self, wire: HandlerWire | None) -> bool:
        """Give a connection, or the room for one, to whoever waits longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(wire)
                return True
        return False

    async def give_back(self, wire: HandlerWire) -> None:
        """Take a connection back; one with which anything is wrong is closed."""
        await wire.end()
        if self._closed or wire.connection.closed:
            await self._forget(wire)
            self._hand_over(None)
        elif not self._hand_over(wire):
            self._idle.append(wire)

    async def _forget(self, wire: HandlerWire) -> None:
        self._made -= 1
        await wire.close()

    async def close(self) -> None:
        """Close what is idle now, and the others when they are given back."""
        self._closed = True
        while self._idle:
            await self._forget(self._idle.pop())
        while self._hand_over(None):
            pass
