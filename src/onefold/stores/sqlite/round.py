"""One round of the writer: parts of several callers' work, run one after the other where nobody else writes.

An answer inside an open transaction is told at once; what a part wants kept is told after the commit,
which may come in a later round.  When one part fails, the others do not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from onefold.clock import SystemClock
from onefold.errors import StoreReplacedError, StoreUnavailableError
from onefold.stores.sqlite.drivers import is_breaking, is_busy, is_trouble
from onefold.stores.sqlite.link import Link
from onefold.stores.sqlite.session import HERE_ROWS, Session

#: How long a transaction is open is a matter of real time: a test that moves its clock does not make it longer.
_machine = SystemClock()

#: A future, and the answer or the error it is to be given.
Told = tuple["asyncio.Future[Any]", Any, BaseException | None]


class Ending(Enum):
    """How a call ends its turn."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


class Write:
    """An operation that needs no turn of its own; those on items are run together with others of their kind."""

    __slots__ = ("future", "items", "operation", "rows")

    def __init__(
        self, operation: Callable[..., Any], items: Sequence[Any] | None, rows: int, future: asyncio.Future[Any]
    ) -> None:
        self.operation = operation
        self.items = items
        self.rows = rows
        self.future = future


class Call:
    """One call inside a turn."""

    __slots__ = ("args", "begun", "ending", "function", "future", "is_callers")

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        ending: Ending | None,
        future: asyncio.Future[Any],
        is_callers: bool = False,
    ) -> None:
        self.function = function
        #: Whether it runs the caller's own SQL, which may take any time.
        self.is_callers = is_callers
        self.args = args
        self.ending = ending
        self.future = future
        self.begun = False

    def is_given_up(self) -> bool:
        """Whether its caller no longer waits for it and it has not begun; from then on it never begins."""
        self.begun = not self.future.cancelled()
        return not self.begun


class Part:
    """A turn's part of the transaction, as the thread that runs the round knows it."""

    __slots__ = ("begun", "failed", "nested", "owned_since")

    def __init__(self) -> None:
        #: Whether there is something to keep or to undo.
        self.begun = False
        #: Since when its owner has had the lock to itself, by the machine's clock; 0 while it waits for us.
        self.owned_since = 0
        self.nested = False
        #: Why nothing more can be done in it.
        self.failed: BaseException | None = None


Step = list[Write] | tuple[Part, Call]


class Round:
    """Steps to be taken in order, and a commit after them unless a turn stays open."""

    def __init__(self, link: Link, kept: list[Told]) -> None:
        self._link = link
        #: To be told after the commit, from this round and those before it.
        self._kept = kept
        self.steps: deque[Step] = deque()
        self.commits = False
        #: What is in it: so many rows of ours, and whether there are calls of a turn.
        self.rows = 0
        self.calls = False
        self.told: list[Told] = []
        #: Whether somebody's statement took the work of others with it.
        self.spoiled = False
        self._last = False

    def add_write(self, write: Write) -> None:
        """Add an operation, to be run together with the last one if they are of one kind."""
        self.rows += write.rows
        last = self.steps[-1] if self.steps else None
        if isinstance(last, list) and write.items is not None and last[0].operation is write.operation:
            last.append(write)
        else:
            self.steps.append([write])

    def add_call(self, part: Part, call: Call) -> None:
        """Add a call of a turn."""
        self.calls = True
        self.steps.append((part, call))

    def take(self, *, patient: bool, last: bool = False) -> bool:
        """Take the steps; False if another process holds the write lock and there is no patience to wait for it.

        The ``last`` time it is an error that the lock is held.
        """
        self._link.patience.allowed = patient
        self._last = patient or last
        while self.steps:
            step = self.steps.popleft()
            if not (self._run_writes(step) if isinstance(step, list) else self._run_call(*step)):
                self.steps.appendleft(step)
                return False
        return True

    def commit(self) -> None:
        """Make durable what was taken, and tell those who waited for that; nothing while a turn stays open."""
        if not self.commits:
            return
        try:
            # How much the caller's own statements wrote is not known.
            self._link.commit(HERE_ROWS if self.calls else self.rows)
        except BaseException as error:
            self._lose(error, is_own=len(self._kept) == 1)
        else:
            self.told += self._kept
            self._kept.clear()

    def _run_writes(self, writes: list[Write]) -> bool:
        writes = [one for one in writes if not one.future.cancelled()]
        if not writes:
            return True
        try:
            nested = self._link.begin()
        except BaseException as error:
            if self._must_wait(error):
                return False
            self._link.note(error)
            self._refuse(writes, error)
            return True
        try:
            answered = _run_together(self._link.session, writes)
            self._link.keep(nested)
        except BaseException as error:
            if self._undo(error, nested) and len(writes) > 1:
                # Each alone, so that one operation cannot fail another.
                self.steps.extendleft([one] for one in reversed(writes))
            else:
                self._refuse(writes, error)
            return True
        self._kept += answered
        return True

    def _run_call(self, part: Part, call: Call) -> bool:
        if call.ending is not Ending.ROLLBACK and not part.begun and part.failed is None and not self._begin(part):
            return False
        if (
            call.ending is not Ending.ROLLBACK
            and part.failed is None
            and self._link.running.start(call.is_given_up, part, call)
        ):
            self._run_in(part, call)
            return True
        if call.ending is not None and part.begun:
            part.begun = False
            self._undo(None, part.nested)
        self.told.append((call.future, None, None if call.ending is Ending.ROLLBACK else part.failed))
        return True

    def _begin(self, part: Part) -> bool:
        """Begin a part; False if that must wait for another process's lock."""
        try:
            part.nested = self._link.begin()
        except BaseException as error:
            if self._must_wait(error):
                return False
            self._link.note(error)
            part.failed = error
        else:
            part.begun = True
            part.owned_since = _machine.steady()
        return True

    def _run_in(self, part: Part, call: Call) -> None:
        """Run a call in a part that has begun."""
        try:
            try:
                # Operations of ours take as long as what they were given is large, which is not held against an owner.
                part.owned_since = part.owned_since if call.is_callers else 0
                answer = call.function(self._link.session, *call.args)
            finally:
                part.owned_since = part.owned_since or _machine.steady()
                self._link.running.finish()
            if call.ending is Ending.COMMIT:
                self._link.refuse_dangling()
                self._link.keep(part.nested)
        except BaseException as error:
            if call.ending is Ending.COMMIT:
                self._undo(error, part.nested)
            elif is_breaking(error) or self._link.lost:
                self._lose(error)
                part.begun = False
                part.failed = part.failed or error
            # When its time is up or its caller has given up, that is the reason, and not that it was interrupted.
            self.told.append((call.future, None, part.failed or error))
        else:
            (self.told if call.ending is None else self._kept).append((call.future, answer, None))

    def _must_wait(self, error: BaseException) -> bool:
        return is_busy(error) and not self._last

    def _refuse(self, writes: list[Write], error: BaseException) -> None:
        self.told += [(one.future, None, error) for one in writes]

    def _undo(self, error: BaseException | None, nested: bool) -> bool:
        """Undo one part; True if what others did is still there."""
        try:
            if not is_breaking(error) and not self._link.lost:
                self._link.undo(nested)
                return True
        except BaseException as worse:
            error = worse
        self._lose(error or StoreUnavailableError("the transaction was rolled back"))
        return False

    def _lose(self, error: BaseException, *, is_own: bool = False) -> None:
        """The whole transaction is gone: tell each caller with a part in it; the error may be the only one's own."""
        self._link.abandon(error)
        if not (is_own or is_trouble(error) or isinstance(error, StoreUnavailableError | StoreReplacedError)):
            # It is somebody else's mistake, which must not be counted against them.
            self.spoiled = bool(self._kept)
            error = StoreUnavailableError("a commit shared with others was rolled back; trying again is safe")
        self.told += [(future, None, error) for future, _, _ in self._kept]
        self._kept.clear()


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
