"""A connection for reading, which no writer ever makes wait, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from onefold import limits
from onefold.clock import MICROSECONDS, Clock, SystemClock
from onefold.errors import ReadTooLongError, StoreError, TransactionTooLongError
from onefold.store.sqlite.connection import Patience
from onefold.store.sqlite.drivers import ERRORS, Connection, is_breaking
from onefold.store.sqlite.interrupt import Running
from onefold.store.sqlite.session import Row, Session
from onefold.store.sqlite.thread import InlineRunner, Runner, ThreadRunner
from onefold.store.sqlite.transaction import CallersTransaction
from onefold.store.sqlite.writer.connection import Ending
from onefold.store.sqlite.writer.writer import Writer, closed

Answer = TypeVar("Answer")

#: The use of a connection for reading: each kind has its own, so that a long read of one makes no other wait.
Use = Literal["claims", "operators", "callers"]

#: How long a read takes is a matter of real time: a test that moves its clock does not make it longer.
_machine = SystemClock()


class Read:
    """One read of a caller's, as the event loop and the reader's thread see it."""

    __slots__ = ("begun_at", "ended_by", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        #: When it began, by the machine's clock; 0 while it waits for others.
        self.begun_at = 0
        #: Why it is not to go on.
        self.ended_by: StoreError | None = None

    def is_given_up(self) -> bool:
        """Whether it is not to begin; otherwise it begins now."""
        self.begun_at = _machine.steady()
        return self.ended_by is not None

    def seconds_left(self) -> float:
        """Return how long it may still take; the wait for its turn does not count."""
        return self.seconds - (_machine.steady() - self.begun_at) / MICROSECONDS if self.begun_at else self.seconds


class Reader:
    """One connection for reading, opened when it is first used, and again after it broke."""

    def __init__(
        self, connect: Callable[[Patience], Connection], clock: Clock, runner: Runner, patience: Patience
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._runner = runner
        self._patience = patience
        self._session: Session | None = None
        self._running = Running(self._interrupt)
        #: Reads of callers that are not over.
        self._reads: set[Read] = set()

    async def open(self) -> None:
        """Connect."""
        await self.read(lambda _: None)

    async def read(self, operation: Callable[[Session], Answer]) -> Answer:
        """Run an operation of ours that only reads."""
        return await self._runner.run(self._run, operation)

    async def fetch(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any], seconds: float) -> list[Row]:
        """Run a read of the caller's, which is interrupted after so many seconds, or when the wait for it is over."""
        read = Read(seconds)
        self._reads.add(read)
        timer = asyncio.get_running_loop().call_later(seconds, self._look_at, read)
        try:
            return await self._runner.run(self._run_read, read, statement, parameters)
        except asyncio.CancelledError:
            self._end(read, StoreError("the wait for a read was given up"))
            raise
        finally:
            timer.cancel()
            self._reads.discard(read)

    async def close(self) -> None:
        """End the reads of callers, then let go of the file."""
        for read in self._reads:
            self._end(read, closed())
        await self._runner.run(self._let_go)
        self._runner.close()

    def _look_at(self, read: Read) -> None:
        if read not in self._reads:
            return
        if (left := read.seconds_left()) > 0:
            asyncio.get_running_loop().call_later(left, self._look_at, read)
        else:
            self._end(read, _too_long(read.seconds))

    def _end(self, read: Read, error: StoreError) -> None:
        read.ended_by = read.ended_by or error
        self._running.stop(read)

    # in the thread

    def _run(self, operation: Callable[[Session], Answer]) -> Answer:
        if self._session is None:
            self._session = Session(self._connect(self._patience), self._clock)
        try:
            return operation(self._session)
        except ERRORS as error:
            if is_breaking(error):
                self._let_go()
            raise

    def _run_read(self, read: Read, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
        def run(session: Session) -> list[Row]:
            if not self._running.start(read.is_given_up, read):
                raise read.ended_by or closed()
            try:
                return fetch(session, statement, parameters)
            except ERRORS as error:
                raise (read.ended_by or error) from error
            finally:
                self._running.finish()

        return self._run(run)

    def _interrupt(self) -> None:
        if self._session is not None:
            self._session.connection.interrupt()

    def _let_go(self) -> None:
        if self._session is not None:
            with suppress(*ERRORS):
                self._session.connection.close(True)
            self._session = None


class Readers:
    """The connections for reading of one store, each made when it is first needed."""

    def __init__(self, connect: Callable[[Patience], Connection], clock: Clock, *, inline: bool) -> None:
        self._connect = connect
        self._clock = clock
        self._inline = inline
        self._readers: dict[Use, Reader] = {}

    def of(self, use: Use) -> Reader:
        """Return the connection for reads of one kind."""
        use = "claims" if self._inline else use
        if use not in self._readers:
            runner: Runner = InlineRunner() if self._inline else ThreadRunner(f"onefold-{use}")
            self._readers[use] = Reader(self._connect, self._clock, runner, Patience(allowed=not self._inline))
        return self._readers[use]

    async def close(self) -> None:
        """Let go of the file."""
        for reader in self._readers.values():
            await reader.close()


def fetch(session: Session, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
    """Run a read of the caller's; what it wrote outside a transaction would not be part of any promise."""
    session.connection.execute("PRAGMA query_only = ON")
    try:
        return session.run_callers(statement, parameters)
    finally:
        session.connection.execute("PRAGMA query_only = OFF")


async def fetch_from_memory(writer: Writer, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
    """Run a read of the caller's through the writer: a database in memory has no other connection."""
    transaction = CallersTransaction(writer, limits.FETCH_SECONDS_MAX)
    try:
        return await transaction.execute(fetch, statement, parameters)
    except TransactionTooLongError as error:
        raise _too_long(limits.FETCH_SECONDS_MAX) from error
    finally:
        await transaction.end(Ending.ROLLBACK)


def _too_long(seconds: float) -> ReadTooLongError:
    return ReadTooLongError(
        f"the read took more than {seconds:g} s and was interrupted; read less at a time, or give it a connection of "
        "your own"
    )
