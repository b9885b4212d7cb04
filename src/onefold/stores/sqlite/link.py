"""The writer's connection and the transaction on it, in which several callers' work may commit together.

Everybody's work can be undone by itself, and nobody's is kept before all of it is durable.
Plain blocking code: whoever runs it sees to it that nobody else does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from onefold.clock import Clock, pause
from onefold.errors import StoreError, StoreUnavailableError
from onefold.stores.sqlite.connection import LOG_BYTES_MAX, Patience
from onefold.stores.sqlite.drivers import ERRORS, Connection, is_breaking
from onefold.stores.sqlite.guard import Files
from onefold.stores.sqlite.interrupting import Running
from onefold.stores.sqlite.session import Session

#: A connection that broke is replaced before the next use: at once, or after these pauses, or at the use after that.
_AGAIN_AFTER_SECONDS = (0.0, 0.01, 0.05)
#: The log is copied into the file when it has this many pages, 4 MB, as SQLite itself would do in somebody's commit.
#: Copying takes a millisecond, and commits are half as fast while the log grows longer than it has ever been: with half
#: as many pages long runs were slower, with twice as many short ones were, though large batches were a little faster.
_CHECKPOINT_PAGES = 1_000
#: A log that grew longer, in a large transaction or while a long read kept it from beginning anew, is made empty when
#: nothing is to be written.
_LOG_PAGES_MAX = LOG_BYTES_MAX // 4_096
#: The length of the log is looked at after about so many rows, each of which is four pages or so: asking after each
#: commit, or being told by SQLite, takes longer than to write a page.
_LOOK_ROWS = 64
#: What is not known yet is taken to be slow.
_UNKNOWN_MICROS = 1_000_000


class Link:
    """One connection for writing; replaced when it breaks."""

    def __init__(
        self, connect: Callable[[Patience], Connection], clock: Clock, *, lasting: bool, files: Files | None = None
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._lasting = lasting
        self._files = files
        #: Whether a commit must wait for readers, which is the case without a write-ahead log.
        self.waits_for_readers = False
        #: Whether a reference that points nowhere is known before the commit; see ``refuse_dangling``.
        self.sees_dangling = True
        self._open = False
        self._copied_at = 0
        #: Whether the log is copied into the file here, and not by SQLite in a commit.
        self._copies = False
        #: Whether the log was longer than it is to stay when it was last looked at.
        self.has_overlong_log = False
        #: About how many rows were written since the length of the log was looked at.
        self.written = 0
        self.patience = Patience(allowed=True)
        self.session: Session
        self._connected = False
        #: The call that runs, known by its part and by itself.
        self.running = Running(lambda: self.session.connection.interrupt())
        #: Whether something failed after which the connection is not to be trusted.
        self.broken = False
        #: Microseconds that a commit takes, of late, and that it took to copy the log the last time.
        self.commit_micros = 0
        self.checkpoint_micros = _UNKNOWN_MICROS

    def open(self) -> None:
        """Connect."""
        connection = self._connect(self.patience)
        self._copies = connection.become_writer()
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

    # the transaction

    def begin(self) -> bool:
        """Begin somebody's part: alone in a transaction, or, then it is nested, behind others in one."""
        if self.broken:
            self._replace()
        if self._open:
            self.session.connection.execute("SAVEPOINT onefold_part")
            return True
        if self.has_stray:
            self.session.connection.execute("ROLLBACK")
        self.session.connection.begin()
        self._open = True
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

    def commit(self, rows: int) -> None:
        """Make everything durable that was kept, about so many rows; when this raises, nothing of it is."""
        if not self._open:
            return
        began = self._clock.steady()
        self.session.connection.commit()
        self._open = False
        self.written += rows
        self.note_commit(began)
        self.confirm()

    def confirm(self) -> None:
        """Raise after a commit that went into a file without a name, or with another library's log beside it."""
        if self._files is not None:
            self._files.check()

    def note_commit(self, began: int) -> None:
        """Take down how long a commit took that is over now."""
        # One slow commit among fast ones says little about the next.
        self.commit_micros += (self._clock.steady() - began - self.commit_micros) // 4

    def refuse_dangling(self) -> None:
        """Raise for a reference of the caller's that points nowhere: it would fail the commit of everybody else."""
        if self.session.connection.has_dangling():
            raise StoreError("FOREIGN KEY constraint failed")

    @property
    def has_stray(self) -> bool:
        """Whether a transaction is open that no part began, because an exception came right behind its BEGIN.

        Work that is done in it would be answered as durable and never committed.
        """
        return not self._open and self.session.connection.in_transaction

    @property
    def lost(self) -> bool:
        """Whether the transaction is gone: SQLite rolled it back by itself, or there is no connection any more."""
        try:
            return self._open and not self.session.connection.in_transaction
        except ERRORS:
            return True

    def abandon(self, error: BaseException) -> None:
        """After an error that ended the transaction: leave nothing of it, and no broken connection, behind."""
        with suppress(*ERRORS):
            if self.session.connection.in_transaction:
                self.session.connection.execute("ROLLBACK")
        self._open = False
        self.note(error)

    # the connection

    def note(self, error: BaseException) -> None:
        """Take down an error after which the connection cannot be trusted any more."""
        self.broken = self.broken or (self._lasting and is_breaking(error))

    def _replace(self) -> None:
        """Close and connect again, a few times if need be; whoever comes next tries again."""
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

    def has_long_log(self) -> bool:
        """Whether the log is long enough to be copied into the file; looked at now and then."""
        if not self._copies or self._open or self.broken or self.written < _LOOK_ROWS:
            return False
        self.written = 0
        try:
            pages, copied = self.session.connection.log_pages()
        except ERRORS as error:
            self.note(error)
            return False
        self.has_overlong_log = pages > _LOG_PAGES_MAX
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
            self.session.connection.checkpoint()
        except ERRORS as error:
            self.note(error)  # nothing is lost: it stays in the log
        self.checkpoint_micros = self._clock.steady() - began

    def empty_log(self) -> None:
        """Make the log empty, unless it is in use just now."""
        if self.broken or self._open:
            return
        self.patience.allowed = False
        try:
            self.session.connection.empty_log()
            self.has_overlong_log = False
            self._copied_at = 0
        except ERRORS as error:
            self.note(error)  # nothing is lost: it stays in the log
