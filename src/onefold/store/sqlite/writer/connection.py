"""The writer's connection and the one transaction on it, in which the work of several callers may commit together.

The work of one caller is a part: the first begins the transaction, each further one begins behind a savepoint, so that
it can be undone by itself.  No part is answered as durable before the commit of all of them.
Plain blocking code, used in one place at a time; the writer says where.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from onefold.clock import Clock, SystemClock, pause
from onefold.errors import StoreError, StoreReplacedError, StoreUnavailableError
from onefold.store.sqlite.connection import LOG_BYTES_MAX, Patience
from onefold.store.sqlite.drivers import ERRORS, Connection, is_breaking, is_busy, is_trouble
from onefold.store.sqlite.interrupt import Running
from onefold.store.sqlite.second_library import Files
from onefold.store.sqlite.session import Session
from onefold.store.sqlite.writer.turns import Turns

#: A connection that broke is replaced before the next use: at once, or after these pauses, or at the use after that.
_AGAIN_AFTER_SECONDS = (0.0, 0.01, 0.05)

#: How long a transaction is open is a matter of real time: a test that moves its clock does not make it longer.
_machine = SystemClock()

#: A future, and the answer or the error it is to be given.
Told = tuple["asyncio.Future[Any]", Any, BaseException | None]


class Ending(Enum):
    """How a call ends its transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(slots=True, eq=False)
class Write:
    """An operation that needs no transaction of its own; those on items run together with others of their kind."""

    operation: Callable[..., Any]
    items: Sequence[Any] | None
    #: About how many rows it writes.
    rows: int
    future: asyncio.Future[Any]
    #: Whether its answer must not wait for a handler that blocks the event loop.
    urgent: bool = False
    #: Whether the task that wrote before it wrote it too.
    is_next: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """One call in a caller's transaction."""

    function: Callable[..., Any]
    args: Sequence[Any]
    future: asyncio.Future[Any]
    ending: Ending | None = None
    #: Whether it runs the caller's own SQL, which may take any time.
    is_callers: bool = False
    #: About how many rows it writes, None if that is not known.
    rows: int | None = None
    begun: bool = False

    def is_given_up(self) -> bool:
        """Whether its caller no longer waits for it and it has not begun; from then on it never begins."""
        self.begun = not self.future.cancelled()
        return not self.begun


@dataclass(slots=True, eq=False)
class Part:
    """A caller's part of the transaction that lasts for several calls."""

    #: Whether there is something to keep or to undo, and whether behind a savepoint.
    begun: bool = False
    nested: bool = False
    #: Since when its owner has had the lock to itself, by the machine's clock; 0 while a call of ours runs.
    owned_since: int = 0
    #: Why nothing more can be done in it.
    failed: BaseException | None = None


class WriterConnection:
    """One connection for writing; replaced when it breaks."""

    def __init__(
        self, connect: Callable[[Patience], Connection], clock: Clock, *, lasting: bool, files: Files | None = None
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._lasting = lasting
        self._files = files
        self._connected = False
        self._kept: list[Told] = []
        self.session: Session
        #: Answers that may be given.
        self.told: list[Told] = []
        #: Whether a transaction is open.
        self.is_open = False
        #: Whether a commit must wait for readers, which is the case without a write-ahead log.
        self.waits_for_readers = False
        #: Whether a reference that points nowhere is known before the commit.
        self.sees_dangling = True
        self.patience = Patience(allowed=True)
        self.turns = Turns()
        #: The call that runs, known by its part and by itself.
        self.running = Running(lambda: self.session.connection.interrupt())
        #: How long the last commit took; 0 as long as it is not known, or where commits wait for readers.
        self.commit_micros = 0
        #: Whether something failed after which the connection is not to be trusted.
        self.broken = False

    def open(self) -> None:
        """Connect."""
        connection = self._connect(self.patience)
        connection.become_writer()
        self.sees_dangling = connection.sees_dangling
        self.session = Session(connection, self._clock)
        self._connected = True
        self.broken = False
        self.waits_for_readers = connection.pragma("journal_mode") == "delete"
        if self._files is not None:
            self._files.note_log()

    def close(self) -> None:
        """Let go of the file."""
        if self._connected:
            self.session.connection.close()

    # what the writer asks for

    def write(self, writes: list[Write], *, patient: bool, last: bool) -> bool:
        """Run operations of one kind as one part; when that fails and they are several, each as a part of its own.

        False, and nothing was done, if another process has the write lock, unless this was the ``last`` time to ask.
        """
        self.patience.allowed = patient
        writes = [one for one in writes if not one.future.cancelled()]
        if not writes:
            return True
        try:
            nested = self._begin()
        except BaseException as error:
            if is_busy(error) and not last:
                return False
            self._note(error)
            self.told += [(one.future, None, error) for one in writes]
            return True
        try:
            if len(writes) > 1 and not nested:
                # The lock is kept when they fail together, so that each can be run again.
                nested = self._begin()
            answered = _run_together(self.session, writes)
            self._keep(nested)
        except BaseException as error:
            if self._undo(error, nested) and len(writes) > 1:
                for one in writes:
                    self.write([one], patient=patient, last=True)
            else:
                self.told += [(one.future, None, error) for one in writes]
        else:
            self._kept += answered
        return True

    def call(self, part: Part, call: Call, *, patient: bool, last: bool) -> bool:
        """Run one call of a part; False, and nothing was done, as for ``write``."""
        self.patience.allowed = patient
        rolls_back = call.ending is Ending.ROLLBACK
        if not (rolls_back or part.begun or part.failed):
            try:
                part.nested = self._begin()
            except BaseException as error:
                if is_busy(error) and not last:
                    return False
                self._note(error)
                part.failed = error
            else:
                part.begun = True
                part.owned_since = _machine.steady()
        if not rolls_back and part.failed is None and self.running.start(call.is_given_up, part, call):
            self._run_in(part, call)
            return True
        if call.ending is not None and part.begun:
            part.begun = False
            self._undo(None, part.nested)
        self.told.append((call.future, None, None if rolls_back else part.failed))
        return True

    def commit(self, *, patient: bool) -> None:
        """Make durable what was kept; when that fails, every caller with a part in it is told, and nothing stays."""
        self.patience.allowed = patient
        began_at = _machine.steady()
        try:
            self.session.connection.commit()
            self.is_open = False
            ended_at = _machine.steady()
            self.turns.ended(ended_at)
            self.commit_micros = 0 if self.waits_for_readers else max(1, ended_at - began_at)
            if self._files is not None:
                # A commit that went into a file without a name, or with another library's log beside it, is none.
                self._files.check()
        except BaseException as error:
            self._lose(error, is_own=len(self._kept) == 1)
        else:
            self.told += self._kept
            self._kept.clear()

    def shorten_log(self, log: str) -> bool:
        """Make the log empty if it has grown too long; False if it stays so, because it is in use just now."""
        try:
            if self.broken or os.stat(log).st_size <= LOG_BYTES_MAX:
                return True
            self.patience.allowed = False
            self.session.connection.empty_log()
            return os.stat(log).st_size <= LOG_BYTES_MAX
        except OSError:
            return True  # there is none
        except ERRORS as error:
            self._note(error)  # nothing is lost: it stays in the log
            return False

    # parts

    def _begin(self) -> bool:
        """Begin a part; True if it is nested behind others in the same transaction."""
        if self.broken:
            self._replace()
        connection = self.session.connection
        if self.is_open:
            connection.execute("SAVEPOINT onefold_part")
            return True
        if connection.in_transaction:
            # An exception, as of a signal handler, came right behind a BEGIN: no part knows of this transaction, and
            # work in it would be answered as durable and never committed.
            connection.execute("ROLLBACK")
        connection.begin()
        self.is_open = True
        self.turns.begun(_machine.steady(), connection.pragma("data_version"))
        return False

    def _run_in(self, part: Part, call: Call) -> None:
        """Run a call in a part that has begun."""
        try:
            try:
                # The time of our own operations is not held against an owner.
                part.owned_since = part.owned_since if call.is_callers else 0
                answer = call.function(self.session, *call.args)
            finally:
                part.owned_since = part.owned_since or _machine.steady()
                self.running.finish()
            if call.ending is Ending.COMMIT:
                if self.session.connection.has_dangling():
                    # It would fail the commit for every caller that shares it.
                    raise StoreError("FOREIGN KEY constraint failed")
                self._keep(part.nested)
        except BaseException as error:
            if call.ending is Ending.COMMIT:
                self._undo(error, part.nested)
            elif is_breaking(error) or self._is_lost:
                self._lose(error)
                part.begun = False
                part.failed = part.failed or error
            # When its time is up or its caller has given up, that is the reason, and not that it was interrupted.
            self.told.append((call.future, None, part.failed or error))
        else:
            (self.told if call.ending is None else self._kept).append((call.future, answer, None))

    def _keep(self, nested: bool) -> None:
        """End a part that is to be committed with the others."""
        if nested:
            self.session.connection.execute("RELEASE onefold_part")

    def _undo(self, error: BaseException | None, nested: bool) -> bool:
        """End a part as if it had never begun; True if the parts of others are still there."""
        connection = self.session.connection
        try:
            if not is_breaking(error) and not self._is_lost:
                if nested:
                    connection.execute("ROLLBACK TO onefold_part")
                    connection.execute("RELEASE onefold_part")
                else:
                    connection.execute("ROLLBACK")
                    self.is_open = False
                return True
        except BaseException as worse:
            error = worse
        self._lose(error or StoreUnavailableError("the transaction was rolled back"))
        return False

    # failures

    @property
    def _is_lost(self) -> bool:
        """Whether SQLite rolled the transaction back by itself, or there is no connection any more."""
        try:
            return self.is_open and not self.session.connection.in_transaction
        except ERRORS:
            return True

    def _lose(self, error: BaseException, *, is_own: bool = False) -> None:
        """The whole transaction is gone: tell each caller with a part in it; the error may be the only one's own."""
        with suppress(*ERRORS):
            if self.session.connection.in_transaction:
                self.session.connection.execute("ROLLBACK")
        self.is_open = False
        self._note(error)
        if not (is_own or is_trouble(error) or isinstance(error, StoreUnavailableError | StoreReplacedError)):
            # The mistake of one caller is not counted against the others.
            error = StoreUnavailableError("a commit shared with others was rolled back; trying again is safe")
        self.told += [(future, None, error) for future, _, _ in self._kept]
        self._kept.clear()

    def _note(self, error: BaseException) -> None:
        self.broken = self.broken or (self._lasting and is_breaking(error))

    def _replace(self) -> None:
        """Close and connect again, a few times if need be; the next use tries again."""
        with suppress(*ERRORS):
            self.session.connection.close(True)
        for seconds in _AGAIN_AFTER_SECONDS:
            if self.patience.allowed:
                pause(seconds)
            try:
                self.open()
                return
            except StoreUnavailableError:
                if seconds == _AGAIN_AFTER_SECONDS[-1]:
                    raise


def _run_together(session: Session, writes: list[Write]) -> list[Told]:
    """Answer several writes of one kind by one run of it."""
    first = writes[0]
    if first.items is None:
        return [(first.future, first.operation(session), None)]
    if len(writes) == 1:
        return [(first.future, first.operation(session, first.items), None)]
    answers = first.operation(session, [item for one in writes for item in one.items or ()])
    told: list[Told] = []
    start = 0
    for one in writes:
        end = start + len(one.items or ())
        told.append((one.future, answers[start:end], None))
        start = end
    return told
