"""Connections that come back when they were lost.

An operation is given again after its connection was lost, until patience ends.
It gets to know that it is given again, because the outcome of the first time is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import psycopg
from psycopg import errors

from onefold.clock import MICROSECONDS, SystemClock, system_random
from onefold.errors import StoreError, StoreUnavailableError
from onefold.store.postgres.wire.connect import Connector, Role
from onefold.store.postgres.wire.errors import READ_ONLY, is_adrift, is_lost, may_rerun, refuse_refused, translated
from onefold.store.postgres.wire.wire import Wire
from onefold.store.shared.ownership import Ownership

Answer = TypeVar("Answer")
AnyWire = TypeVar("AnyWire", bound=Wire)
#: Gets a connection, and whether it may have been done before.
Work = Callable[[AnyWire, bool], Awaitable[Answer]]

_BACKOFF_SECONDS = 0.02
_BACKOFF_SECONDS_MAX = 1.0
#: Losing a deadlock this often is not chance.
_RERUNS_MAX = 10

_machine = SystemClock()
_chance = system_random()


class Backoff:
    """Waits longer and longer between tries, and says when enough is enough."""

    def __init__(self, seconds: float, since: int | None = None) -> None:
        self._give_up_at = (since or _machine.steady()) + round(seconds * MICROSECONDS)
        self._pause = _BACKOFF_SECONDS

    async def pause(self) -> bool:
        """Wait before the next try; False at once when there is to be none.  There is always a second one."""
        if self._pause > _BACKOFF_SECONDS and _machine.steady() >= self._give_up_at:
            return False
        # All clients lost the same server at the same moment; they must not come back at the same moment too.
        await _machine.sleep(self._pause * _chance.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, _BACKOFF_SECONDS_MAX)
        return True


class LostError(Exception):
    """The connection was lost; the cause says how."""


async def persistently(
    attempt: Callable[[bool], Awaitable[Answer]], *, patience: float, since: int | None = None
) -> Answer:
    """Make attempts until one reaches the server; afterwards the answer is certain, or an error of ours was raised.

    Patience is counted from ``since``, so that a caller that waited for its turn does not wait as long again.
    """
    since = since or _machine.steady()
    backoff: Backoff | None = None
    repeated, reruns = False, 0
    while True:
        try:
            return await attempt(repeated)
        except LostError as error:
            repeated = True
            backoff = backoff or Backoff(patience, since)
            if not await backoff.pause():
                raise _unavailable(error.__cause__) from error.__cause__
        except psycopg.Error as error:
            reruns += 1
            backoff = backoff or Backoff(patience, since)
            if not may_rerun(error) or reruns > _RERUNS_MAX or not await backoff.pause():
                raise translated(error) from error


def _unavailable(cause: BaseException | None) -> StoreUnavailableError:
    """Say what kept every attempt from being answered."""
    if isinstance(cause, errors.ReadOnlySqlTransaction):
        return StoreUnavailableError(READ_ONLY)
    return StoreUnavailableError(f"PostgreSQL cannot be reached: {cause}")


async def do(work: Work[AnyWire, Answer], wire: AnyWire, repeated: bool) -> Answer:
    """Do the work; a connection that is lost, or of no more use, is closed, and raises ``LostError``.

    An answer to ``repeated`` work may rest on what the lost session has committed on this server alone, so it is given
    when a commit behind it is on the synchronous standby too, if there is one.
    """
    try:
        answer = await work(wire, repeated)
        if repeated:
            await wire.rows("replicated")
        return answer
    except psycopg.Error as error:
        if is_lost(error, wire.connection) or is_adrift(error):
            await wire.close()
            raise LostError from error
        raise


@contextmanager
def reaching() -> Iterator[None]:
    """Around connecting: a server that cannot be reached counts as a lost connection."""
    try:
        yield
    except psycopg.OperationalError as error:
        refuse_refused(error)
        raise LostError from error


class PersistentWire:
    """One control connection; its users take turns."""

    def __init__(self, connector: Connector, role: Role, *, patience: float) -> None:
        self._connector = connector
        self._role = role
        self._patience = patience
        self._turn = asyncio.Lock()
        self._wire: Wire | None = None
        self._closed = False
        self._home = Ownership()

    async def run(self, work: Work[Wire, Answer]) -> Answer:
        """Do the work and return its answer; it is given again when the connection was lost."""
        self._home.refuse_strangers()
        since = _machine.steady()
        async with self._turn:
            return await persistently(partial(self._attempt, work), patience=self._patience, since=since)

    async def _attempt(self, work: Work[Wire, Answer], repeated: bool) -> Answer:
        if self._closed and repeated:
            raise StoreUnavailableError("the store was closed before its server answered; it may have been done")
        if self._closed:
            raise StoreError("the store is closed; use it inside `async with app`")
        if self._wire is None or self._wire.connection.closed:
            with reaching():
                self._wire = await self._connector.connect(self._role)
            if self._closed:
                await self.close()
                raise StoreError("the store was closed while it connected")
        return await do(work, self._wire, repeated)

    @property
    def idle(self) -> bool:
        """Whether it is not in use."""
        return not self._turn.locked()

    async def quiet(self) -> None:
        """Wait for what is under way."""
        async with self._turn:
            pass

    async def close(self) -> None:
        """Disconnect for good; whatever is still under way fails."""
        self._closed = True
        if self._wire is not None:
            await self._wire.close()
            self._wire = None

    @property
    def backend_pid(self) -> int | None:
        """The server's number for this session, by which its notifications are known."""
        if self._wire is None or self._wire.connection.closed:
            return None
        return self._wire.connection.info.backend_pid
