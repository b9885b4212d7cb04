"""The writer's connection and the transaction on it, in which several callers' work may commit together.

Everybody's work can be undone by itself, and nobody's is kept before all of it is durable.
Plain blocking code: whoever runs it sees to it that nobody else does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import apsw

from onefold.clock import Clock, pause
from onefold.errors import StoreUnavailableError
from onefold.stores.sqlite.connection import BREAKING, Patience
from onefold.stores.sqlite.session import Session

#: A connection that broke is replaced before the next use: at once, or after these pauses, or at the use after that.
_AGAIN_AFTER_SECONDS = (0.0, 0.01, 0.05)
#: The log is copied into the file when it has this many pages, 4 MB, as SQLite itself would do in somebody's commit.
#: Copying takes a millisecond, and commits are half as fast while the log grows longer than it has ever been: with half
#: as many pages long runs were slower, with twice as many short ones were, though large batches were a little faster.
_CHECKPOINT_PAGES = 1_000
#: The length of the log is looked at after about so many rows, each of which is four pages or so: asking after each
#: commit, or being told by SQLite, takes longer than to write a page.
_LOOK_ROWS = 64
#: What is not known yet is taken to be slow.
_UNKNOWN_MICROS = 1_000_000


class Link:
    """One connection for writing; replaced when it breaks."""

    def __init__(self, connect: Callable[[Patience], apsw.Connection], clock: Clock, *, lasting: bool) -> None:
        self._connect = connect
        self._clock = clock
        self._lasting = lasting
        self._open = False
        self._copied_at = 0
        #: About how many rows were written since the length of the log was looked at.
        self.written = 0
        self.patience = Patience(clock, allowed=True)
        self.standstill = self.patience.standstill
        self._begun_at = 0
        self.session: Session
        self._connected = False
        #: Whether something failed after which the connection is not to be trusted.
        self.broken = False
        #: Microseconds that a commit takes, of late, and that it took to copy the log the last time.
        self.commit_micros = 0
        self.checkpoint_micros = _UNKNOWN_MICROS

    def open(self) -> None:
        """Connect."""
        connection = self._connect(self.patience)
        connection.wal_autocheckpoint(0)
        self.session = Session(connection, self._clock)
        self._connected = True
        self.broken = False

    def close(self) -> None:
        """Let go of the file."""
        if self._connected:
            self.session.connection.close()

    # the transaction

    def begin(self) -> bool:
        """Begin somebody's part: alone in a transaction, or, then it is nested, behind others in one."""
        if self.broken:
            self._replace()
        if self._open:
            self.session.connection.execute("SAVEPOINT onefold_part")
            return True
        self.session.connection.execute("BEGIN IMMEDIATE")
        self._open = True
        self.standstill.admitted()
        self._begun_at = self._clock.steady()
        return False

    def keep(self, nested: bool) -> None:
        """End a part that is to be committed with the others."""
        if nested:
            self.session.connection.execute("RELEASE onefold_part")

    def undo(self, nested: bool) -> None:
        """End a part as if it had never begun; what others did in the same transaction stays."""
        connection = self.session.connection
        if nested:
            connection.execute("ROLLBACK TO onefold_part")
            connection.execute("RELEASE onefold_part")
        else:
            connection.execute("ROLLBACK")
            self._open = False
            self.standstill.note(self._begun_at)

    def commit(self, rows: int) -> None:
        """Make everything durable that was kept, about so many rows; when this raises, nothing of it is."""
        if not self._open:
            return
        began = self._clock.steady()
        self.session.connection.execute("COMMIT")
        self._open = False
        self.written += rows
        self.note_commit(began)
        self.standstill.note(self._begun_at)

    def note_commit(self, began: int) -> None:
        """Take down how long a commit took that is over now."""
        # One slow commit among fast ones says little about the next.
        self.commit_micros += (self._clock.steady() - began - self.commit_micros) // 4

    def refuse_dangling(self) -> None:
        """Raise for a reference of the caller's that points nowhere: it would fail the commit of everybody else."""
        if self.session.connection.status(apsw.SQLITE_DBSTATUS_DEFERRED_FKS)[0]:
            raise apsw.ConstraintError("FOREIGN KEY constraint failed")

    @property
    def lost(self) -> bool:
        """Whether the transaction is gone: SQLite rolled it back by itself, or there is no connection any more."""
        try:
            return self._open and not self.session.connection.in_transaction
        except apsw.ConnectionClosedError:
            return True

    def abandon(self, error: BaseException) -> None:
        """After an error that ended the transaction: leave nothing of it, and no broken connection, behind."""
        with suppress(apsw.Error):
            if self.session.connection.in_transaction:
                self.session.connection.execute("ROLLBACK")
        if self._open:
            self.standstill.note(self._begun_at)
        self._open = False
        self.note(error)

    # the connection

    def note(self, error: BaseException) -> None:
        """Take down an error after which the connection cannot be trusted any more."""
        self.broken = self.broken or (self._lasting and isinstance(error, BREAKING))

    def _replace(self) -> None:
        """Close and connect again, a few times if need be; whoever comes next tries again."""
        with suppress(apsw.Error):
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

    def has_long_log(self) -> bool:
        """Whether the log is long enough to be copied into the file; looked at now and then."""
        if self._open or self.broken or self.written < _LOOK_ROWS:
            return False
        self.written = 0
        try:
            pages, copied = self.session.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        except apsw.Error as error:
            self.note(error)
            return False
        # It begins anew when all of it was copied and nobody reads it; until then it is copied once per so many pages.
        if pages < self._copied_at:
            self._copied_at = 0
        if pages - max(copied, self._copied_at) < _CHECKPOINT_PAGES:
            return False
        self._copied_at = pages
        return True

    def checkpoint(self) -> None:
        """Copy the log into the file, apart from anybody's commit."""
        began = self._clock.steady()
        try:
            self.session.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error as error:
            self.note(error)  # nothing is lost: it stays in the log
        self.checkpoint_micros = self._clock.steady() - began
