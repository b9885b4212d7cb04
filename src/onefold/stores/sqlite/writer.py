"""The one writer of a SQLite file in this process: who may write when, and who commits together.

Operations that need no transaction of their own share a commit with whatever else is waiting.
An exclusive turn is one transaction that stays open while its owner runs statements in it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import apsw

from onefold.clock import MICROSECONDS, Clock
from onefold.errors import StoreError
from onefold.stores.coalesce import Coalescer
from onefold.stores.sqlite.session import Session

Answer = TypeVar("Answer")
Operation = Callable[[Session], Any]
_Call = tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]]

_Told = tuple[asyncio.Future[Any], Any, BaseException | None]

#: Wait this long for the write lock of another process before giving up.
BUSY_SECONDS_MAX = 10.0
#: Look for it this often where waiting must not block anybody.
_BUSY_SLEEP_SECONDS = 0.005
#: Operations that share one commit; more would make the first of them wait.
_TOGETHER_MAX = 1_000


class Turn(Protocol):
    """One transaction, from ``begin`` to ``end``."""

    async def begin(self) -> None:
        """Wait for the write lock and take it."""
        ...

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Run a blocking call inside the transaction."""
        ...

    async def conclude(self, function: Callable[[], None]) -> None:
        """Run a last call and commit; rolled back if it raises, and over in any case."""
        ...

    async def end(self, statement: str) -> None:
        """Commit or roll back unless it is over; afterwards nothing of the transaction is open, even if this raises."""
        ...


class Writer(Protocol):
    """The writer's connection behind its queue."""

    session: Session

    async def open(self) -> None:
        """Connect."""
        ...

    async def write(self, operation: Callable[[Session], Answer]) -> Answer:
        """Run an operation in a transaction that others may share; durable when it returns."""
        ...

    def turn(self) -> Turn:
        """Take a turn of one's own."""
        ...

    async def close(self) -> None:
        """Finish what was asked, then close the connection."""
        ...


def end(session: Session, statement: str) -> None:
    """Commit or roll back; after any failure nothing of the transaction is left behind."""
    connection = session.connection
    try:
        if connection.in_transaction:
            connection.execute(statement)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def conclude(session: Session, function: Callable[[], None]) -> None:
    """Run a last call in the transaction and commit; if either fails, nothing of the transaction is left behind."""
    try:
        function()
    except BaseException:
        end(session, "ROLLBACK")
        raise
    end(session, "COMMIT")


def run_together(session: Session, operations: list[Operation]) -> list[Any]:
    """Run operations in one transaction: all of them are durable afterwards, or none happened."""
    session.connection.execute("BEGIN IMMEDIATE")
    try:
        answers = [operation(session) for operation in operations]
        session.connection.execute("COMMIT")
    except BaseException:
        end(session, "ROLLBACK")
        raise
    return answers


class ThreadWriter:
    """Writes in a thread of its own, so that a slow disk does not stop the event loop."""

    def __init__(self, connect: Callable[[], apsw.Connection], clock: Clock) -> None:
        self._connect = connect
        self._clock = clock
        self._jobs: SimpleQueue[tuple[Operation, asyncio.Future[Any]] | _ThreadTurn | None] = SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="onefold-writer", daemon=True)
        self.session: Session

    async def open(self) -> None:
        """Start the thread and connect in it."""
        self._thread.start()
        await self.write(lambda _: None)

    async def write(self, operation: Callable[[Session], Answer]) -> Answer:
        future = self.future()
        self._jobs.put((operation, future))
        answer: Answer = await future
        return answer

    def turn(self) -> _ThreadTurn:
        return _ThreadTurn(self)

    def future(self) -> asyncio.Future[Any]:
        """Make the place where the thread puts an answer."""
        if os.getpid() != self._process:
            raise StoreError("this store was opened before a fork; open one in the child process")
        return asyncio.get_running_loop().create_future()

    def submit(self, turn: _ThreadTurn) -> None:
        """Queue a turn behind what was asked before."""
        self._jobs.put(turn)

    async def close(self) -> None:
        self._jobs.put(None)
        if os.getpid() == self._process:
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        try:
            self.session = Session(self._connect(), self._clock)
        except BaseException as error:
            self._refuse_all(error)
            return
        job = self._jobs.get()
        while job is not None:
            if isinstance(job, _ThreadTurn):
                job.serve(self.session)
                job = self._jobs.get()
                continue
            together = [job]
            job = self._collect(together)
            self._flush(together)
            if job is _NOTHING:
                job = self._jobs.get()
        self.session.connection.close()

    def _collect(self, together: list[tuple[Operation, asyncio.Future[Any]]]) -> Any:
        """Take what else waits, up to the next turn; return what is to be done after it."""
        while len(together) < _TOGETHER_MAX:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return _NOTHING
            if not isinstance(job, tuple):
                return job
            together.append(job)
        return _NOTHING

    def _flush(self, together: list[tuple[Operation, asyncio.Future[Any]]]) -> None:
        """Commit together; when that fails, each alone, so that one operation cannot fail another."""
        try:
            answers = run_together(self.session, [operation for operation, _ in together])
        except BaseException as error:
            if len(together) == 1:
                _tell(together[0][1].get_loop(), [(together[0][1], None, error)])
                return
            for one in together:
                self._flush([one])
            return
        told: list[_Told] = [(future, answer, None) for (_, future), answer in zip(together, answers, strict=True)]
        _tell(together[0][1].get_loop(), told)

    def _refuse_all(self, error: BaseException) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, tuple):
                _tell(job[1].get_loop(), [(job[1], None, error)])


_NOTHING: Any = object()


class _ThreadTurn:
    """A turn in the writer's thread: while it lasts, the thread serves nobody else."""

    def __init__(self, writer: ThreadWriter) -> None:
        self._writer = writer
        self._calls: SimpleQueue[tuple[_Call, str | None]] = SimpleQueue()
        self._queued = False
        self._over = False

    async def begin(self) -> None:
        await self._ask(lambda: None, (), None)

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        answer: Answer = await self._ask(function, args, None)
        return answer

    async def conclude(self, function: Callable[[], None]) -> None:
        self._over = True
        await self._ask(lambda: conclude(self._writer.session, function), (), "COMMIT")

    async def end(self, statement: str) -> None:
        if self._queued and not self._over:
            self._over = True
            await self._ask(lambda: end(self._writer.session, statement), (), statement)

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...], ending: str | None) -> asyncio.Future[Any]:
        future = self._writer.future()
        self._calls.put(((function, args, future), ending))
        if not self._queued:
            self._queued = True
            self._writer.submit(self)
        return future

    def serve(self, session: Session) -> None:
        """In the thread: begin, run what the owner asks, until it ends the turn."""
        failed: BaseException | None = None
        try:
            session.connection.execute("BEGIN IMMEDIATE")
        except BaseException as error:
            failed = error
        ending: str | None = None
        while ending is None:
            (function, args, future), ending = self._calls.get()
            if failed is not None:
                # Nothing was begun: every call fails with the reason, and only a rollback has nothing to complain of.
                _tell(future.get_loop(), [(future, None, None if ending == "ROLLBACK" else failed)])
                continue
            try:
                told: _Told = (future, function(*args), None)
            except BaseException as error:
                told = (future, None, error)
            _tell(future.get_loop(), [told])


def _tell(loop: asyncio.AbstractEventLoop, told: list[_Told]) -> None:
    try:
        loop.call_soon_threadsafe(_answer_all, told)
    except RuntimeError:
        return  # the event loop was closed; nobody waits for the answers any more


def _answer_all(told: list[_Told]) -> None:
    for future, answer, error in told:
        if future.done():
            continue
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)


class InlineWriter:
    """Writes where it is asked, without threads, so that a simulation is the same every time."""

    def __init__(self, connect: Callable[[], apsw.Connection], clock: Clock) -> None:
        self._connect = connect
        self._clock = clock
        self._free = asyncio.Lock()
        self._writes: Coalescer[Operation, Any] = Coalescer(self._flush, most=_TOGETHER_MAX)
        self.session: Session

    async def open(self) -> None:
        """Connect."""
        self.session = Session(self._connect(), self._clock)

    async def write(self, operation: Callable[[Session], Answer]) -> Answer:
        answer: Answer = (await self._writes.add([operation]))[0]
        return answer

    def turn(self) -> _InlineTurn:
        return _InlineTurn(self)

    async def close(self) -> None:
        await self._writes.close()
        self.session.connection.close()

    async def _flush(self, operations: list[Operation]) -> list[Any]:
        async with self._free:
            return await self.patiently(partial(run_together, self.session, operations))

    async def patiently(self, call: Callable[[], Answer]) -> Answer:
        """Repeat a call that found the write lock taken, for a bounded time."""
        give_up_at = self._clock.steady() + round(BUSY_SECONDS_MAX * MICROSECONDS)
        while True:
            try:
                return call()
            except (apsw.BusyError, apsw.LockedError):
                if self._clock.steady() >= give_up_at:
                    raise
            await self._clock.sleep(_BUSY_SLEEP_SECONDS)

    async def take(self) -> None:
        """Wait for the turn and begin a transaction."""
        await self._free.acquire()
        try:
            await self.patiently(partial(self.session.connection.execute, "BEGIN IMMEDIATE"))
        except BaseException:
            self._free.release()
            raise

    def give(self) -> None:
        """Let the next one have the turn."""
        self._free.release()


class _InlineTurn:
    def __init__(self, writer: InlineWriter) -> None:
        self._writer = writer
        self._begun = False

    async def begin(self) -> None:
        await self._writer.take()
        self._begun = True

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        return function(*args)

    async def conclude(self, function: Callable[[], None]) -> None:
        self._begun = False
        try:
            conclude(self._writer.session, function)
        finally:
            self._writer.give()

    async def end(self, statement: str) -> None:
        if not self._begun:
            return
        self._begun = False
        try:
            end(self._writer.session, statement)
        finally:
            self._writer.give()
