"""The one writer of a SQLite file in this process: callers wait here for their turn, and commit together.

A write that finds nothing waiting runs at once; those that come while it is being committed share the next commit.
A caller's transaction stays open from its first call to its end; when others wait at its end, they go on in the same
SQLite transaction, and all of them are answered after one commit.

Where it runs, decided once: statements of ours on the event loop, commits and the caller's own SQL in a thread.
While the loop runs our statements it runs no handler, so a handler that holds the interpreter cannot hold the write
lock as well; and a commit, which waits for the disk, blocks nothing: SQLite syncs and lets go of the lock in one call
that needs no interpreter.
One commit is made on the loop: that of a caller that writes alone, one message after the other, on a quick disk.  To
hand it to the thread and back would take as long as the disk does.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from onefold import limits
from onefold.clock import Clock, SystemClock
from onefold.errors import StoreError, TransactionTooLongError
from onefold.store.sqlite.connection import Patience, waited_enough
from onefold.store.sqlite.drivers import Connection
from onefold.store.sqlite.second_library import Files
from onefold.store.sqlite.session import HERE_ROWS, Session
from onefold.store.sqlite.thread import Runner, tell
from onefold.store.sqlite.writer.connection import Call, Ending, Write, WriterConnection
from onefold.store.sqlite.writer.turns import PAUSE_SECONDS

if TYPE_CHECKING:
    from onefold.store.sqlite.transaction import CallersTransaction

Answer = TypeVar("Answer")

#: On the event loop, look for the lock of another process this often; its timers count milliseconds.
_LOOK_SECONDS = 0.001
#: Callers' transactions share a commit when they begin within this time, because all of them wait for the last.
_TOGETHER_MICROS = 10_000
#: The event loop waits so long for the commit of a claim: if it went on at once, the next handler could block it, and
#: each look for a dead worker's messages would take as long as a handler.  A slow disk does not stop it for longer.
_URGENT_SECONDS = 0.002
#: A disk is quick if the last commit took no longer than this: as long as it takes to hand one to the thread and back.
_QUICK_MICROS = 300
#: So long after a write the log is looked at: one that grew too long, in a large transaction or beside a long read,
#: is made empty.
_SHORTEN_LOG_SECONDS = 1.0
#: How long others have waited is a matter of real time.
_machine = SystemClock()


#: One use of the connection, ``step(patient=…, last=…)``; False if the write lock is another process's.
_Step = Callable[..., bool]


class Writer:
    """The writer's connection behind its queue.  All of it runs on the event loop, except for the steps it submits."""

    def __init__(
        self,
        connect: Callable[[Patience], Connection],
        clock: Clock,
        runner: Runner,
        *,
        path: str,
        threaded: bool,
        lasting: bool,
        files: Files | None = None,
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._log = f"{os.path.realpath(path)}-wal"
        self._threaded = threaded
        self._lasting = lasting
        self._connection = WriterConnection(connect, clock, lasting=lasting, files=files)
        self._waiting: deque[Write | CallersTransaction] = deque()
        #: The transaction whose owner may make calls now.
        self._current: CallersTransaction | None = None
        #: The content of the open transaction: about so many rows of ours, and whether callers' own SQL.
        self._rows = 0
        self._has_callers = False
        self._is_urgent = False
        #: Whether it is one row, of the task that wrote before: writes of other tasks could share the next commit.
        self._is_lone = False
        self._opened_at = 0
        self._last_task: asyncio.Task[Any] | None = None
        #: Whether the connection is in use, in the thread or until a lock is looked for again.
        self._busy = False
        self._quiet: asyncio.Future[None] | None = None
        self._shortening: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.closed = False

    async def open(self) -> None:
        """Connect."""
        self._connection.patience.allowed = self._threaded
        await self._runner.run(self._connection.open)

    @property
    def journal(self) -> str:
        """How the file keeps what is not committed yet, as SQLite calls it."""
        return "delete" if self._connection.waits_for_readers else "wal"

    async def write(self, operation: Callable[[Session], Answer], *, rows: int = 1, urgent: bool = False) -> Answer:
        """Run an operation in a transaction that others may share; durable when it returns.

        ``rows`` says how much is written, in rows of ordinary size: more than ``HERE_ROWS`` run in the thread.
        ``urgent`` has the event loop wait for a short commit, instead of running a handler that may block it.
        """
        answer: Answer = await self._add(Write(operation, None, rows, self._loop.create_future(), urgent))
        return answer

    async def write_each(
        self, operation: Callable[[Session, Sequence[Any]], list[Answer]], items: Sequence[Any], *, rows: int
    ) -> list[Answer]:
        """Like ``write``, for one answer per item: callers with the same operation are served by one run of it."""
        answers: list[Answer] = await self._add(Write(operation, items, rows, self._loop.create_future()))
        return answers

    async def close(self) -> None:
        """Finish what was asked, roll back what is open, refuse transactions that wait, then close the connection.

        A statement of a caller's that still runs is interrupted after a transaction's usual time.
        """
        self.closed = True
        for one in list(self._waiting):
            if not isinstance(one, Write):
                self.forget(one)
                one.refuse(closed())
        if (current := self._current) is not None:
            self._loop.call_later(limits.TRANSACTION_SECONDS_MAX, self._connection.running.stop, current.part)
            self._roll_back(current)
        self._quiet = self._loop.create_future()
        self._proceed()
        await self._quiet
        if self._shortening is not None:
            self._shortening.cancel()
        await self._runner.run(self._connection.close)

    def _add(self, write: Write) -> asyncio.Future[Any]:
        if self.closed:
            raise closed()
        task = asyncio.current_task()
        write.is_next, self._last_task = task is self._last_task, task
        self._waiting.append(write)
        self._proceed()
        return write.future

    # one step after the other

    def _proceed(self) -> None:
        """Do all that can be done now, in the order of asking; then commit."""
        while not self._busy:
            if self._gives_way():
                break
            if self._current is not None:
                if not self._current.calls:
                    break  # its owner has the transaction
                self._call(self._current, self._current.calls.popleft())
            elif self._waiting and self._may_join(self._waiting[0]):
                joining = self._waiting.popleft()
                if isinstance(joining, Write):
                    self._write(joining)
                else:
                    self._begin(joining)
            elif self._connection.is_open:
                self._commit()
            else:
                if self._quiet is not None and not self._quiet.done():
                    self._quiet.set_result(None)
                break

    def _gives_way(self) -> bool:
        """Whether other processes have the lock for a moment, before a new transaction begins here."""
        if self._connection.is_open or self._current is not None or not self._waiting or not self._threaded:
            return False
        if not self._connection.turns.is_over(_machine.steady()):
            return False
        self._busy = True
        self._loop.call_later(PAUSE_SECONDS, self._resume)
        return True

    def _may_join(self, joining: Write | CallersTransaction) -> bool:
        """Whether this may go into the transaction that is open; into a new one it may always."""
        if not self._connection.is_open:
            self._rows, self._has_callers, self._is_urgent, self._is_lone = 0, False, False, False
            self._opened_at = self._clock.steady()
            return True
        if not self._connection.sees_dangling and (self._has_callers or not isinstance(joining, Write)):
            # Whether the caller's references hold shows only in the commit, which must fail for this caller alone.
            return False
        if isinstance(joining, Write):
            return self._rows + joining.rows <= HERE_ROWS
        return self._clock.steady() - self._opened_at <= _TOGETHER_MICROS

    def _write(self, write: Write) -> None:
        """Run an operation, and with it all of its kind that wait behind it."""
        together, rows = [write], write.rows
        while write.items is not None and self._waiting:
            following = self._waiting[0]
            if not isinstance(following, Write) or following.operation is not write.operation:
                break
            if self._rows + rows + following.rows > HERE_ROWS:
                break
            together.append(following)
            rows += following.rows
            self._waiting.popleft()
        self._is_lone = not self._rows and rows == 1 and write.is_next
        self._rows += rows
        self._is_urgent = self._is_urgent or write.urgent
        self._run(partial(self._connection.write, together), is_short=rows <= HERE_ROWS)

    def _begin(self, transaction: CallersTransaction) -> None:
        self._current = transaction
        self._has_callers = True
        if transaction.seconds is not None and self._threaded:
            transaction.timer = self._loop.call_later(transaction.seconds, self._look_at, transaction)

    def _call(self, transaction: CallersTransaction, call: Call) -> None:
        if call.ending is not None:
            self._current = None
            if transaction.timer is not None:
                transaction.timer.cancel()
        is_short = call.rows is not None and call.rows <= HERE_ROWS
        self._run(partial(self._connection.call, transaction.part, call), is_short=is_short)

    def _run(self, step: _Step, *, is_short: bool) -> None:
        self._busy = True
        if not self._threaded or (is_short and not self._connection.broken):
            self._run_here(step)
        else:
            self._runner.submit(partial(self._run_there, step))

    def _run_here(self, step: _Step) -> None:
        if step(patient=False, last=False):
            self._tell()
        else:
            self._look_later(step, 0.0)

    def _look_later(self, step: _Step, waited: float) -> None:
        self._connection.turns.had_to_wait(_machine.steady())
        self._loop.call_later(_LOOK_SECONDS, self._look_again, step, waited + _LOOK_SECONDS)

    def _look_again(self, step: _Step, waited: float) -> None:
        """Try once more to get the lock of another process."""
        if step(patient=False, last=waited_enough(waited)):
            self._resume()
        else:
            self._look_later(step, waited)

    def _run_there(self, step: _Step) -> None:
        """In the thread."""
        step(patient=True, last=True)
        tell(self._loop, self._resume)

    def _commit(self) -> None:
        self._shorten_log_later()
        if not self._threaded:
            self._connection.commit(patient=False)
            self._tell()
            return
        self._busy = True
        if self._is_lone and 0 < self._connection.commit_micros <= _QUICK_MICROS:
            self._connection.commit(patient=False)
            # Not at once: a caller that sends in a loop must let others run.
            self._loop.call_soon(self._resume)
            return
        # No handler runs here before the commit is under way, because it might hold the interpreter.
        commit = partial(self._connection.commit, patient=True)
        wait_seconds = _URGENT_SECONDS if self._is_urgent else 0.0
        if self._runner.start(commit, partial(tell, self._loop, self._resume), seconds=wait_seconds):
            self._tell()

    def _resume(self) -> None:
        self._tell()
        self._proceed()

    def _tell(self) -> None:
        """Give the answers that are there."""
        self._busy = False
        told, self._connection.told = self._connection.told, []
        for future, answer, error in told:
            if future.done():
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

    # the log

    def _shorten_log_later(self) -> None:
        if self._threaded and self._lasting and self._shortening is None and not self.closed:
            self._shortening = self._loop.call_later(_SHORTEN_LOG_SECONDS, self._shorten_log)

    def _shorten_log(self) -> None:
        self._shortening = None
        if self._busy or self._connection.is_open or self.closed:
            self._shorten_log_later()
            return
        self._busy = True
        self._runner.submit(self._shorten_log_there)

    def _shorten_log_there(self) -> None:
        """In the thread."""
        is_short = self._connection.shorten_log(self._log)
        tell(self._loop, self._shortened, is_short)

    def _shortened(self, is_short: bool) -> None:
        if not is_short:
            self._shorten_log_later()
        self._resume()

    # callers' transactions

    async def ask(self, transaction: CallersTransaction, call: Call) -> Any:
        """Run a call when it is this transaction's turn."""
        if self.closed:
            raise closed()
        if transaction.ended_by is not None:
            raise transaction.ended_by
        if not transaction.queued:
            transaction.queued = True
            self._waiting.append(transaction)
        transaction.calls.append(call)
        self._proceed()
        try:
            return await call.future
        except asyncio.CancelledError:
            self._give_up(transaction, call)
            raise

    def _give_up(self, transaction: CallersTransaction, call: Call) -> None:
        """Take back a call whose caller no longer waits; if it has begun, it cannot be committed."""
        if call in transaction.calls:
            if call.ending is None:
                transaction.calls.remove(call)
            if not transaction.calls:
                self.forget(transaction)
        elif call.ending is None:
            # Under the lock of ``Running``, so that afterwards it has begun or never will.
            self._connection.running.stop(call)
            if call.begun and transaction.part.failed is None:
                transaction.part.failed = _given_up()

    def forget(self, transaction: CallersTransaction) -> bool:
        """Take back a transaction that has not begun."""
        if transaction not in self._waiting:
            return False
        self._waiting.remove(transaction)
        transaction.queued = False
        return True

    def stop(self, transaction: CallersTransaction) -> None:
        """Interrupt the statement that it runs, if any: it is to be rolled back."""
        if transaction.part.failed is None:
            transaction.part.failed = _given_up()
        self._connection.running.stop(transaction.part)

    def _roll_back(self, transaction: CallersTransaction) -> None:
        transaction.calls.append(Call(nothing, (), self._loop.create_future(), ending=Ending.ROLLBACK))

    def _look_at(self, transaction: CallersTransaction) -> None:
        """End the transaction if its owner has had it for too long."""
        if transaction is not self._current or transaction.seconds is None or transaction.ended_by is not None:
            return
        if (left := transaction.seconds - transaction.owned_seconds()) > 0:
            transaction.timer = self._loop.call_later(left, self._look_at, transaction)
            return
        transaction.part.failed = transaction.ended_by = _too_long(transaction.seconds)
        self._roll_back(transaction)
        self._connection.running.stop(transaction.part)
        self._proceed()


def _too_long(seconds: float) -> TransactionTooLongError:
    return TransactionTooLongError(
        f"the transaction kept the only write lock of the file for more than {seconds:g} s and was rolled back; "
        "do slow work before its first statement"
    )


def _given_up() -> StoreError:
    return StoreError(
        "the wait for a statement was given up while it ran, so it is not known what it did: its transaction cannot be "
        "committed any more"
    )


def closed() -> StoreError:
    """Return the error of all that is asked after the store was closed."""
    return StoreError("the store is closed; use it inside `async with app`")


def nothing(session: Session) -> None:
    """Do nothing, as the last call before a commit or a rollback."""
