"""Stage 7, handle: a run from one claim to the next time it waits, fails or is through.

The workflow's code knows nothing of claims.  When everything it does has come to wait, the stretch is over: the code is
left by an exception that it cannot mean to catch, and the run is parked together with all that is not written down yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.codec import fingerprint_of_call
from onefold.context import Context, StepScope
from onefold.effects import Ledger
from onefold.envelope import Envelope
from onefold.errors import KeyReuseError, LeaseLostError, ReplayError, StepError, StoreUnavailableError, UncertainError
from onefold.handling import end_strays, refuse_strays
from onefold.holding import Hold, deadline_of, stopped_from_outside
from onefold.inside import current
from onefold.journal import Journal, Retried, decode_failure, encode
from onefold.receipt import Receipt
from onefold.retry import decide, failure_of
from onefold.step import Note, Step, StepKind
from onefold.stepping import StepFunction, in_time
from onefold.store import Dead, Failure, Lease, Parked, Transaction
from onefold.task import Call
from onefold.threads import BusyError
from onefold.tools import Tools

logger = logging.getLogger("onefold")

R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

#: Nothing more can be done under this claim, whatever the workflow makes of the exception.
_FATAL = (ReplayError, UncertainError, LeaseLostError, StoreUnavailableError, BusyError)

#: Where the code is: the names of its steps begin with it.
branch: ContextVar[str] = ContextVar("onefold_branch", default="")


class Parking(BaseException):
    """Leaves the workflow's code because everything it does has come to wait."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What one branch waits for: a moment, so many records of others, or only a person."""

    until: int | None = None
    awaits: int = 0
    failure: Failure | None = None


class Stretch:
    """One claim of a run; one that nobody holds is a rehearsal, and stops before what the journal does not have."""

    __slots__ = (
        "_began",
        "_fresh",
        "_hold",
        "_leaving",
        "_parked",
        "_running",
        "_waits",
        "journal",
        "lease",
        "over",
        "parking",
        "tools",
    )

    def __init__(self, lease: Lease, journal: Journal, tools: Tools, hold: Hold | None = None) -> None:
        self.lease = lease
        self.journal = journal
        self.tools = tools
        self._hold = hold
        self._began = tools.clock.steady()
        self._begin()

    def _begin(self) -> None:
        """Set out from the beginning of the code."""
        #: What the code was told that failed in this replay of the run.
        self._fresh: list[BaseException] = []
        self._waits: list[Wait] = []
        #: Commits under way that carry decisions of the run; a branch may act on one that another branch is writing.
        self._leaving: set[asyncio.Future[None]] = set()
        #: Branches that neither wait nor have ended.
        self._running = 1
        #: Whether everything has come to wait, and for branches that wait while others run, the moment it does.
        self.parking = False
        self._parked: asyncio.Event | None = None
        #: Why nothing more can be done, if that is so.
        self.over: BaseException | None = None

    @property
    def fatal(self) -> _Fatal:
        """Around what may find that nothing more can be done."""
        return _Fatal(self)

    @property
    def now(self) -> int:
        """The time by the store's clock."""
        return self.lease.claimed_at + self.tools.clock.steady() - self._began

    # failures

    def failing(self, name: str, error: E, place: str | None = None) -> E:
        """Take down what the code is told, and where if not in this branch: a failure from now or before a redrive."""
        if self.journal.is_old(name):
            self.journal.struck[name] = branch.get() if place is None else place
        else:
            self._fresh.append(error)
        return error

    async def reopen(self, error: BaseException) -> bool:
        """Set out anew if the code fails because of failures from before a redrive, and forget those.

        Those stay with which the code has dealt: it asked for something after it was told of them.
        """
        names = list(self.journal.struck)
        if not names or self.over is not None or self.parking or not isinstance(error, Exception):
            return False
        if any(one is fresh for one in _chain(error) for fresh in self._fresh):
            return False
        lease, store = self.lease, self.tools.store
        # What is pending was decided on the way to this end, and is decided anew on the way to another.
        await store.record(lease, self.journal.reopen(names))
        self.journal = Journal(lease.id, await store.steps(lease.id), replay_count=lease.replay_count)
        self._begin()
        logger.info("failures_reopened run_id=%s steps=%s", lease.id, ",".join(names))
        return True

    # waiting

    def refuse(self) -> None:
        """Do nothing more once the stretch is over."""
        if self.over is not None:
            raise self.over
        if self.parking:
            raise Parking

    def find(self, name: str, kind: StepKind, fingerprint: bytes) -> Step | None:
        """Return a line of the journal; one that was recorded for other arguments ends the stretch."""
        try:
            return self.journal.find(name, kind, fingerprint)
        except ReplayError as error:
            self.over = error
            raise

    def begin(self, name: str) -> None:
        """Something that the journal does not have is about to be done."""
        self.refuse()
        try:
            self.journal.begin(name)
        except ReplayError as error:
            self.over = error
            raise
        if self._hold is None:
            raise self._stop()

    async def wait(self, wait: Wait) -> None:
        """Wait; the branch does not go on in this stretch."""
        self.refuse()
        with self.fatal:
            self.journal.pause(branch.get())
        self._waits.append(wait)
        parking = self._stop()
        if not self.parking:
            self._parked = self._parked or asyncio.Event()
            await self._parked.wait()
        raise parking

    def _stop(self) -> Parking:
        """Stop one branch; when it was the last that was running, everything has come to wait."""
        self._running -= 1
        return self._park() if self._running <= 0 else Parking()

    def is_before(self, instant: int | None) -> bool:
        """Whether a time has not come yet; None never does."""
        # What had come when the run was claimed needs no look at the clock.
        return instant is None or (instant > self.lease.claimed_at and instant > self.now)

    async def wait_until(self, instant: int | None, *, awaits: int = 0) -> None:
        """Wait unless the time has come; None never does."""
        if self.is_before(instant):
            await self.wait(Wait(instant, awaits))

    async def wait_for(self, seconds: float | None, *, awaits: int = 0, failure: Failure | None = None) -> None:
        """Wait for so long, from now; without a number, for others only."""
        until = None if seconds is None else self.now + round(seconds * MICROSECONDS)
        await self.wait(Wait(until, awaits, failure))

    def _park(self) -> Parking:
        self.parking = True
        if self._parked is not None:
            self._parked.set()
        return Parking()

    def parked(self) -> Parked:
        """Return the outcome of a stretch that came to wait."""
        times = [max(0, wait.until - self.now) / MICROSECONDS for wait in self._waits if wait.until is not None]
        awaits = [wait.awaits for wait in self._waits if wait.awaits]
        failures = [wait.failure for wait in self._waits if wait.failure is not None]
        journal = self.journal
        return Parked(
            min(times, default=None),
            self.lease.wake,
            min(awaits, default=0),
            failures[0] if failures else None,
            tuple(journal.take_pending()),
            tuple(journal.sends),
            tuple(journal.notes),
        )

    # branches

    async def branches(self, given: Sequence[tuple[str, Awaitable[Any]]]) -> list[Any]:
        """Run these at once, each under its own name, and return what they returned or raised, when all are through."""
        left = len(given)
        self._running += left - 1

        async def run(name: str, awaitable: Awaitable[Any]) -> Any:
            nonlocal left
            branch.set(name)
            try:
                answer = await awaitable
            except Parking:
                raise
            except BaseException as error:
                answer = Raised(error)
            left -= 1
            # The last one hands over to whoever waits for all of them, who is running again.
            if left:
                self._running -= 1
                if self._running <= 0:
                    self._park()
            return answer

        tasks = [asyncio.ensure_future(run(name, awaitable)) for name, awaitable in given]
        try:
            await asyncio.wait(tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _, awaitable in given:
                if isinstance(awaitable, Coroutine):
                    awaitable.close()  # one that never began is nothing to warn of
            raise
        # Each task is asked, or asyncio complains of those that were not.
        raised = [task.exception() for task in tasks]
        if any(isinstance(error, Parking) for error in raised):
            raise Parking
        return [task.result() for task in tasks]

    # recording

    def prepare(self, name: str, call: Call[R]) -> tuple[Envelope, Receipt[R]]:
        """Make the message that the workflow sends under this name, and the receipt for it."""
        cause = StepScope(name, 1, None, self.journal.restarts).cause(self.lease.envelope)
        return self.tools.prepare(call, cause, 0)

    async def record(self, steps: Sequence[Step], context: Context | None = None) -> list[Step]:
        """Write these lines, and with them all that is pending, in one commit; returns those that stand.

        What a step did through its ``context`` is part of that commit.
        """
        self.refuse()
        if self._hold is None:
            raise self._stop()
        async with self.leaving() as (pending, sends, notes):
            lines = [*pending, *steps]
            if context is None:
                recorded = await self._commit(lines, sends, notes, None)
            else:
                recorded = await self._commit(lines, (*sends, *context.sends), (*notes, *context.notes), context)
        self.journal.add(recorded)
        return recorded[len(pending) :]

    @asynccontextmanager
    async def leaving(self) -> AsyncIterator[tuple[list[Step], list[Envelope], list[Note]]]:
        """Hand over everything that waits for the next record, and take it back should that fail.

        What other branches are writing is waited for first: what is recorded now may follow from it.
        """
        while self._leaving:
            await asyncio.wait(self._leaving)
        with self.journal.leaving() as left, self.fatal:
            if not any(left):
                yield left
                return
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._leaving.add(over)
            try:
                yield left
            finally:
                self._leaving.discard(over)
                over.set_result(None)

    async def secure(self) -> None:
        """Write down what the run has decided, before anything acts on it; nothing is written if it has not."""
        while self._leaving:
            await asyncio.wait(self._leaving)
        if self.journal.has_pending:
            await self.record([])

    async def _commit(
        self, lines: Sequence[Step], sends: Sequence[Envelope], notes: Sequence[Note], context: Context | None
    ) -> list[Step]:
        store, recorded = self.tools.store, list[Step]()

        async def write(transaction: Transaction) -> None:
            recorded.extend(await transaction.record(self.lease, lines))
            await leave(transaction, sends, notes)

        if context is not None and context.in_transaction:
            await context.commit_with(write)
        elif sends or notes:
            async with store.transaction() as transaction:
                await write(transaction)
        else:
            return await store.record(self.lease, lines)
        return recorded

    # steps

    async def perform(self, name: str, function: StepFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the journal has for a step, or call its function until it is through or has failed for good."""
        fingerprint = fingerprint_of_call(args, kwargs)
        if (known := self.find(name, StepKind.RESULT, fingerprint)) is not None:
            return function.codec.decode(known.value)
        if (failed := self.find(name, StepKind.FAILED, fingerprint)) is not None:
            raise self.failing(name, step_error(name, decode_failure(failed.value)))
        self.begin(name)
        tries = self.journal.tries(name)
        attempt = 1
        if tries:
            attempt += sum(retried.counted for _, retried in tries)
            step, retried = tries[-1]
            await self.wait_until(step.at + round(retried.delay * MICROSECONDS))
        while True:
            # A failure here is the run's own, such as a key that belongs to another payload, and not the step's.
            await self.secure()
            try:
                return await self._try(name, attempt, function, args, kwargs, fingerprint)
            except BaseException as error:
                if isinstance(error, _FATAL):
                    self.over = error
                if isinstance(error, (Parking, *_FATAL)) or stopped_from_outside(error):
                    raise
                attempt += await self._after_failure(name, attempt, function, fingerprint, error)

    async def _try(
        self,
        name: str,
        attempt: int,
        function: StepFunction,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        fingerprint: bytes,
    ) -> Any:
        tools, journal, hold = self.tools, self.journal, self._hold
        assert hold is not None, "a rehearsal stops before it calls anything"
        ledger = Ledger(self.lease.id, _answering(journal, name), self.record, f"{name}/")
        scope = StepScope(name, attempt, ledger, journal.restarts, journal.rounds)
        held_until = partial(deadline_of, hold, tools.clock)
        context = Context(
            self.lease,
            tools.store,
            tools.prepare,
            tools.resources,
            held_until,
            scope,
            bearer=hold,
            origin=tools.origin,
        )
        call: Callable[[], Awaitable[Any]] = partial(function.call, context, args, kwargs, tools.threads)
        for middleware in reversed(tools.middleware):
            call = partial(middleware, context, call)
        token = current.set(context)
        try:
            result = await in_time(call, function.settings.timeout_seconds, name)
            await refuse_strays(context)
            context.close()
            if context.uncertain is not None:
                raise context.uncertain
            line = Step(name, StepKind.RESULT, function.codec.encode(result), fingerprint)
            (stands,) = await self.record([line], context)
            return function.codec.decode(stands.value)
        except BaseException as error:
            context.close()
            await end_strays(context)
            meant = await context.roll_back(error)
            if context.uncertain is not None:
                raise context.uncertain from error
            if meant is not error:
                raise meant from error
            raise
        finally:
            current.reset(token)

    async def _after_failure(
        self, name: str, attempt: int, function: StepFunction, fingerprint: bytes, error: BaseException
    ) -> bool:
        """Wait as long as the policy says and return whether an attempt was used up; raises if it was the last."""
        lease = msgspec.structs.replace(self.lease, attempt=attempt)
        outcome = decide(function.settings.retry, lease, error, now=self.now, chance=self.tools.chance)
        told = "-" if isinstance(outcome, Dead) else f"{outcome.delay:.1f}"
        logger.warning(
            "step_failed run_id=%s step=%s attempt=%d delay=%s error=%s",
            self.lease.id,
            name,
            attempt,
            told,
            type(error).__name__,
        )
        if isinstance(outcome, Dead):
            line = self.journal.verdict_line(name)
            self.journal.pending.append(Step(line, StepKind.FAILED, encode(outcome.failure), fingerprint))
            raise self.failing(name, step_error(name, outcome.failure)) from error
        in_place = outcome.delay <= limits.RETRY_IN_PLACE_SECONDS
        # One that uses up no attempt and holds the worker may be repeated many times a minute: no line for each.
        if outcome.counted or not in_place:
            line = self.journal.try_line(name, len(self.journal.tries(name)))
            retried = Retried(outcome.failure, outcome.delay, outcome.counted)
            self.journal.pending.append(Step(line, StepKind.RETRY, encode(retried)))
        if in_place:
            await self.tools.clock.sleep(outcome.delay)
        else:
            await self.wait_for(outcome.delay, failure=outcome.failure)
        return outcome.counted


@dataclass(frozen=True, slots=True)
class Raised:
    """What a branch raised."""

    error: BaseException


class _Fatal:
    """Remembers an error after which nothing more can be done, even if the workflow's code catches it."""

    __slots__ = ("_stretch",)

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, _FATAL):
            self._stretch.over = error


async def leave(transaction: Transaction, sends: Sequence[Envelope], notes: Sequence[Note]) -> None:
    """Let messages and signals leave with a transaction; a key that belongs to another payload fails it."""
    if sends:
        for envelope, stored in zip(sends, await transaction.put(sends), strict=True):
            if stored.clash:
                raise KeyReuseError(envelope.message_type, envelope.idempotency_key, stored.id)
    for note in notes:
        await transaction.record(note.message_id, [note.step])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error and those that it was raised from or after."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


def step_error(name: str, failure: Failure) -> StepError:
    """Return what a step that failed for good raises."""
    return StepError(name, failure.reason, failure.error_type, failure.error_message)


def _answering(journal: Journal, name: str) -> Callable[[], Awaitable[list[Step]]]:
    async def load() -> list[Step]:
        return journal.within(name)

    return load


def until_a_person_acts(lease: Lease, error: ReplayError | UncertainError) -> Parked:
    """Return the outcome of a message that cannot go on before somebody has looked at it."""
    logger.warning("parked_for_a_person message_id=%s error=%s", lease.id, error)
    reason = "replay" if isinstance(error, ReplayError) else "uncertain"
    return Parked(None, lease.wake, awaits=0, failure=failure_of(error, reason))
