"""The one writer of a SQLite file in this process: who may write when, and who commits together.

Operations that need no transaction of their own share a commit with whatever else is waiting.
A turn is one transaction that stays open while its owner runs statements in it; when others wait at its end, they
go on in the same SQLite transaction, and all of them are answered after one commit.

Everything is decided on the event loop, and the connection is used in one place at a time: for statements of ours
right on the loop, which costs less than going to the thread and back, and for the caller's own in the writer's thread.
While the loop runs our statements it runs no handler, so that none can hang in the middle of a transaction and keep
the lock that everybody needs; a commit that is slow is made in the thread, and needs nobody's help once it has begun.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from onefold import limits
from onefold.clock import Clock, give_way
from onefold.stores.sqlite.connection import Patience, waited_enough
from onefold.stores.sqlite.drivers import Connection
from onefold.stores.sqlite.guard import Files
from onefold.stores.sqlite.link import Link
from onefold.stores.sqlite.round import Call, Ending, Round, Told, Write
from onefold.stores.sqlite.runner import Runner, tell
from onefold.stores.sqlite.session import HERE_ROWS, Session
from onefold.stores.sqlite.turn import Turn, Watchdog, closed, given_up, nothing, too_long

Answer = TypeVar("Answer")
Item = TypeVar("Item")

#: Where waiting must not block anybody, look for the lock of another process after the first figure, then ever later
#: up to the second.
_LOOK_SECONDS, _LOOK_SECONDS_MAX = 0.001, 0.01
#: Operations that share one commit; more would make the first of them wait.
_TOGETHER_MAX = 1_000
#: Turns that share one commit, and for how long one more may begin: nobody waits much longer than that for others.
_TURNS_TOGETHER_MAX = 64
_TURNS_TOGETHER_MICROS = 10_000
#: Turns share a commit only while they are this short: one that waits for something would make the others wait too.
_SHORT_TURN_MICROS = 5_000
#: A statement that rolled everybody back counts as a turn this long: for some fifty turns nobody shares a commit.
_SPOILED_MICROS = 1_000_000
#: Commits are made, and the log is copied, on the event loop while that takes no longer than this.
_HERE_COMMIT_MICROS = 2_000
#: A log that has grown too long is made empty when nothing is written after this long, or after as long again.
_EMPTY_LOG_SECONDS = 1.0
#: Somebody who writes alone looks for company after so many writes and about so long: all others wait meanwhile.
_LONE_MAX = 16
_LONE_MICROS = 4_000


class Writer:
    """The writer's connection behind its queue."""

    def __init__(
        self,
        connect: Callable[[Patience], Connection],
        clock: Clock,
        runner: Runner,
        *,
        threaded: bool,
        lasting: bool,
        files: Files | None = None,
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._threaded = threaded
        self._link = Link(connect, clock, lasting=lasting, files=files)
        self._waiting: deque[Write | Turn] = deque()
        self._kept: list[Told] = []
        #: The turn whose owner may run statements.
        self._turn: Turn | None = None
        #: Parts of the transaction that is not committed yet, and when the first of them came.
        self._parts = 0
        self._parts_since = 0
        #: Microseconds that a turn takes, of late: rises at once, falls slowly.
        self._turn_micros = 0
        self._busy = False
        self._scheduled = False
        #: Whether somebody is finding out who else wants to write, and how many writes need not ask.
        self._asking = False
        self._lone = 0
        self.closed = False
        self._quiet: asyncio.Future[None] | None = None
        #: When the log is to be made empty, if it is.
        self._emptying: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._watchdog = Watchdog(self._loop, self._look_at_turn)

    async def open(self) -> None:
        """Connect."""
        self._link.patience.allowed = self._threaded
        await self._runner.run(self._link.open)

    async def write(self, operation: Callable[[Session], Answer], *, rows: int = 1) -> Answer:
        """Run an operation in a transaction that others may share; durable when it returns.

        ``rows`` says how much is written, counted in rows of ordinary size: little enough may be done on the loop.
        """
        answer: Answer = await self._queue(Write(operation, None, rows, self._loop.create_future()))
        return answer

    async def write_each(
        self, operation: Callable[[Session, Sequence[Any]], list[Answer]], items: Sequence[Any], *, rows: int
    ) -> list[Answer]:
        """Like ``write``, for one answer per item: callers with the same operation are served by one run of it."""
        answers: list[Answer] = await self._queue(Write(operation, items, rows, self._loop.create_future()))
        return answers

    @property
    def is_alone(self) -> bool:
        """Whether nobody else is known to write, so that ``write_lone`` may be tried."""
        return self._lone > 0 and self._is_idle and self._is_fast and not self._link.has_stray

    @property
    def _is_idle(self) -> bool:
        return not (self._busy or self._waiting or self._turn is not None)

    async def find_alone(self) -> bool:
        """Give everybody who can run now the chance to come, and say whether nobody did."""
        if self._asking or self._waiting or not (self._threaded and self._is_fast):
            return False
        self._asking = True
        try:
            await give_way()
        finally:
            self._asking = False
        # Who is in company would otherwise be taken for alone again as soon as the others have been served.
        self._lone = max(1, min(_LONE_MAX, _LONE_MICROS // max(1, self._link.commit_micros))) if self._is_idle else 0
        return self.is_alone

    def write_lone(self, operation: Callable[[Session, Item], Answer | None], item: Item) -> Answer | None:
        """Run an operation that commits by itself, here and now, for somebody who is alone; durable then.

        None, and nothing is written, when the operation answers None: then it is to be queued like any other.
        So is one that fails, because the queue knows what to do with whom.
        """
        self._lone -= 1
        link = self._link
        link.patience.allowed = False
        began = self._clock.steady()
        try:
            answer = operation(link.session, item)
            link.confirm()
        except Exception as error:
            link.abandon(error)
            return None
        link.note_commit(began)
        link.written += 1
        if link.has_long_log():
            self._checkpoint()
        return answer

    @property
    def journal(self) -> str:
        """How the file keeps what is not committed yet, as SQLite calls it."""
        return "delete" if self._link.waits_for_readers else "wal"

    def turn(self, seconds: float | None = None) -> Turn:
        """Make a turn of one's own, which begins with its first call; it is ended when it is open for longer."""
        return Turn(self, seconds)

    async def close(self) -> None:
        """Finish what was asked, roll back what is open, refuse turns that wait, then close the connection.

        A statement of a caller's that still runs is interrupted after a transaction's usual time.
        """
        self.closed = True
        for turn in [one for one in self._waiting if isinstance(one, Turn)]:
            self.forget(turn)
            turn.refuse(closed())
        if self._turn is not None:
            self._loop.call_later(limits.TRANSACTION_SECONDS_MAX, self._link.running.stop, self._turn.part)
            self._turn.calls.append(Call(nothing, (), Ending.ROLLBACK, self._loop.create_future()))
        self._quiet = self._loop.create_future()
        self._proceed_soon()
        await self._quiet
        if self._emptying is not None:
            self._emptying.cancel()
        self._watchdog.end()
        await self._runner.run(self._link.close)

    # what turns use

    async def ask(
        self,
        turn: Turn,
        function: Callable[..., Any],
        args: Sequence[Any],
        ending: Ending | None,
        is_callers: bool = False,
    ) -> Any:
        """Run a call when it is this turn's turn."""
        self._refuse_closed()
        if turn.ended_by is not None:
            raise turn.ended_by
        if not turn.queued:
            turn.queued = True
            self._waiting.append(turn)
        call = Call(function, args, ending, self._loop.create_future(), is_callers)
        turn.calls.append(call)
        self._proceed_soon()
        try:
            return await call.future
        except asyncio.CancelledError:
            self._give_up(turn, call)
            raise

    def _give_up(self, turn: Turn, call: Call) -> None:
        """A caller no longer waits for its call: what has not begun never does, and what has cannot be committed."""
        if call in turn.calls:
            if call.ending is None:
                turn.calls.remove(call)
            if not turn.calls:
                self.forget(turn)
        elif call.ending is None:
            # Under the lock of the link, so that afterwards it has begun or never will.
            self._link.running.stop(call)
            if call.begun and turn.part.failed is None:
                turn.part.failed = given_up()

    def forget(self, turn: Turn) -> bool:
        """Take back a turn that has not begun."""
        if turn not in self._waiting:
            return False
        self._waiting.remove(turn)
        turn.queued = False
        return True

    def stop(self, turn: Turn) -> None:
        """Interrupt the statement that a turn runs, if any: what it does is to be rolled back."""
        if turn.part.failed is None:
            turn.part.failed = given_up()
        self._link.running.stop(turn.part)

    def _look_at_turn(self) -> None:
        """End the open turn if its time is up."""
        turn = self._turn
        if turn is None or turn.seconds is None or turn.ended_by is not None:
            return
        if (left := turn.seconds - turn.owned_seconds()) > 0:
            self._watchdog.look_in(left)
            return
        turn.part.failed = turn.ended_by = too_long(turn.seconds)
        turn.calls.append(Call(nothing, (), Ending.ROLLBACK, self._loop.create_future()))
        self._link.running.stop(turn.part)
        self._proceed_soon()

    # on the event loop

    def _refuse_closed(self) -> None:
        if self.closed:
            raise closed()

    def _queue(self, write: Write) -> asyncio.Future[Any]:
        self._refuse_closed()
        self._waiting.append(write)
        self._proceed_soon()
        return write.future

    def _proceed_soon(self) -> None:
        """Write after everybody who can run now had the chance to join."""
        if not self._busy and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._proceed)

    def _proceed(self) -> None:
        self._scheduled = False
        if self._busy:
            return
        round_ = self._collect()
        if not round_.steps:
            if self._quiet is not None and not self._quiet.done():
                self._quiet.set_result(None)
            return
        self._busy = True
        if not self._threaded or self._belongs_here(round_):
            self._run_here(round_)
        else:
            self._runner.submit(partial(self._run_there, round_))

    def _belongs_here(self, round_: Round) -> bool:
        """Whether this is done within a moment for sure: the caller's own statements are never."""
        return not round_.calls and round_.rows <= HERE_ROWS and not self._link.broken

    @property
    def _is_fast(self) -> bool:
        link = self._link
        return link.commit_micros <= _HERE_COMMIT_MICROS and not (link.broken or link.waits_for_readers)

    def _run_here(self, round_: Round, looks: int = 0, waited: float = 0.0) -> None:
        if not round_.take(patient=False, last=waited_enough(waited)):
            seconds = min(_LOOK_SECONDS * (1 + looks / 4), _LOOK_SECONDS_MAX)
            self._loop.call_later(seconds, self._run_here, round_, looks + 1, waited + seconds)
        elif self._is_fast or not (self._threaded and round_.commits):
            round_.commit()
            self._finish(round_)
        else:
            # Nothing else happens here before it is under way: what comes next may hang.
            self._runner.start(partial(self._commit_there, round_))

    def _run_there(self, round_: Round) -> None:
        """In the thread."""
        round_.take(patient=True)
        self._commit_there(round_)

    def _commit_there(self, round_: Round) -> None:
        self._link.patience.allowed = True
        round_.commit()
        tell(self._loop, self._finish, round_)

    def _finish(self, round_: Round) -> None:
        for future, answer, error in round_.told:
            if future.done():
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)
        if round_.spoiled:
            self._turn_micros = _SPOILED_MICROS
        if not self._link.has_long_log() or self._checkpoint():
            self._free()

    def _checkpoint(self) -> bool:
        """Copy the log, here if that was quick the last time, or in the thread; say whether it is done."""
        self._empty_log_later()
        if self._link.checkpoint_micros <= _HERE_COMMIT_MICROS:
            self._link.checkpoint()
            return True
        self._busy = True
        self._runner.submit(self._checkpoint_there)
        return False

    def _checkpoint_there(self) -> None:
        self._link.checkpoint()
        tell(self._loop, self._free)

    def _empty_log_later(self) -> None:
        if self._threaded and self._link.has_overlong_log and self._emptying is None and not self.closed:
            self._emptying = self._loop.call_later(_EMPTY_LOG_SECONDS, self._empty_log)

    def _empty_log(self) -> None:
        self._emptying = None
        if self._is_idle and not self.closed:
            self._busy = True
            self._runner.submit(self._empty_log_there)
        else:
            self._empty_log_later()

    def _empty_log_there(self) -> None:
        self._link.empty_log()
        tell(self._loop, self._log_is_empty)

    def _log_is_empty(self) -> None:
        self._free()
        self._empty_log_later()  # if it was in use

    def _free(self) -> None:
        self._busy = False
        if self._waiting or self._quiet is not None or (self._turn is not None and self._turn.calls):
            self._proceed_soon()

    # what is done next

    def _collect(self) -> Round:
        """Take what can be done now: calls of the open turn, and whoever may follow in the same transaction."""
        round_ = Round(self._link, self._kept)
        while self._turn is not None or (self._waiting and self._may_join(round_, self._waiting[0])):
            if self._turn is None:
                self._admit(round_, self._waiting.popleft())
            elif self._turn.calls:
                self._take_call(round_, self._turn)
            else:
                break
        round_.commits = self._turn is None
        if round_.commits:
            self._parts = 0
        return round_

    def _may_join(self, round_: Round, joining: Write | Turn) -> bool:
        """Whether this may go into the transaction that is being made up."""
        if self._parts == 0:
            self._parts_since = self._clock.steady()
            return True
        if not self._link.sees_dangling and (round_.calls or isinstance(joining, Turn)):
            # Whether the caller's references hold shows only in the commit, which must fail for this caller alone.
            return False
        if isinstance(joining, Write):
            return self._parts < _TOGETHER_MAX and round_.rows + joining.rows <= HERE_ROWS
        if self._parts >= _TURNS_TOGETHER_MAX or self._turn_micros > _SHORT_TURN_MICROS:
            return False
        return self._clock.steady() - self._parts_since <= _TURNS_TOGETHER_MICROS

    def _admit(self, round_: Round, joining: Write | Turn) -> None:
        if isinstance(joining, Write) and joining.future.cancelled():
            return
        self._parts += 1
        if isinstance(joining, Turn):
            self._turn = joining
            joining.since = self._clock.steady()
            if joining.seconds is not None and self._threaded:
                self._watchdog.look_in(joining.seconds)
        else:
            round_.add_write(joining)

    def _take_call(self, round_: Round, turn: Turn) -> None:
        call = turn.calls.popleft()
        round_.add_call(turn.part, call)
        if call.ending is not None:
            took = self._clock.steady() - turn.since
            self._turn_micros = took if took > self._turn_micros else (9 * self._turn_micros + took) // 10
            self._turn = None
