"""Stage 7, handle: replay a run's code from its beginning, under one claim, until it waits, fails or returns.

The workflow's code knows nothing of claims.  When all its branches wait, the replay is over: ``Parking`` is raised in
the code, and the run is parked in one commit with everything it decided and has not recorded yet.
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
from onefold.current import current
from onefold.errors import (
    HandlerError,
    LeaseLostError,
    ReplayError,
    StepError,
    StepLimitError,
    StoreUnavailableError,
    UncertainError,
    UnreadableSignalError,
)
from onefold.handlers.call import end_strays, in_time, refuse_strays
from onefold.handlers.context import Context, StepScope
from onefold.handlers.effects import Ledger
from onefold.handlers.environment import Environment
from onefold.handlers.lease import Held, deadline_of, stopped_from_outside
from onefold.handlers.threads import BusyError
from onefold.message.codec import fingerprint_of_call
from onefold.message.envelope import Envelope
from onefold.store import Dead, Failure, Lease, Parked, Stored, Transaction
from onefold.store.journal_lines import Line, LineKind, Note, encode
from onefold.tasks.failure_text import failure_of
from onefold.tasks.receipt import Receipt
from onefold.tasks.retry import decide
from onefold.tasks.task import Call
from onefold.transactions.buffer import put_and_record
from onefold.workflows.journal import Journal, Retried, decode_failure, decode_sent
from onefold.workflows.steps import StepFunction

logger = logging.getLogger("onefold")

R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

#: Errors that end the replay, even if the workflow's code catches them.
_FATAL = (ReplayError, UncertainError, StepLimitError, LeaseLostError, StoreUnavailableError, BusyError)

#: The branch of a gather that the code is in; the names of its steps begin with it.
branch: ContextVar[str] = ContextVar("onefold_branch", default="")


class Parking(BaseException):
    """Raised in the workflow's code when all its branches wait; no ``Exception``, so that it is not caught there."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The condition on which one branch goes on: an instant, a number of records by others, or an act of a person."""

    until: int | None = None
    awaits: int = 0
    failure: Failure | None = None


class Replay:
    """One replay of a run's code, under one claim.

    Without ``held`` it is a rehearsal: it records nothing and stops where the code asks for something new.
    """

    __slots__ = (
        "_began",
        "_commits",
        "_held",
        "_new_failures",
        "_parked",
        "_running",
        "_waits",
        "environment",
        "journal",
        "lease",
        "max_steps",
        "over",
        "parking",
    )

    def __init__(
        self,
        lease: Lease,
        journal: Journal,
        environment: Environment,
        held: Held | None = None,
        max_steps: int = limits.STEPS_MAX,
    ) -> None:
        self.lease = lease
        self.max_steps = max_steps
        self.journal = journal
        self.environment = environment
        self._held = held
        self._began = environment.clock.steady()
        self._begin()

    def _begin(self) -> None:
        """Prepare for running the code from its beginning."""
        #: The failures since the last redrive that were raised in the code.
        self._new_failures: list[BaseException] = []
        self._waits: list[Wait] = []
        #: Commits under way that record decisions; other branches wait for them, because they may act on those.
        self._commits: set[asyncio.Future[None]] = set()
        #: The number of branches that neither wait nor have ended.
        self._running = 1
        #: Whether all branches wait.  A branch that waits while others run waits for the event.
        self.parking = False
        self._parked: asyncio.Event | None = None
        #: The error that ended the replay.
        self.over: BaseException | None = None

    def noting_fatal(self) -> _Fatal:
        """Return a context manager in which a fatal error ends the replay, even if the code catches it."""
        return _Fatal(self)

    @property
    def now(self) -> int:
        """The time by the store's clock."""
        return self.lease.claimed_at + self.environment.clock.steady() - self._began

    # names

    def name(self, kind: str) -> str:
        """Return the name of the next step of this kind that the code asks for; one too many ends the replay."""
        self.raise_if_over()
        name = self.journal.name(branch.get(), kind)
        if self.journal.asked >= min(limits.STEPS_WARNED, self.max_steps) and self._held is not None:
            self._check_step_count(name)
        return name

    def _check_step_count(self, name: str) -> None:
        """Warn once of a run that has many steps, and end the replay of one that has too many."""
        asked = self.journal.asked
        if asked > self.max_steps:
            self.over = StepLimitError(self.lease.id, self.max_steps)
            raise self.over
        if asked == limits.STEPS_WARNED and not self.journal.knows(name):
            logger.warning("many_steps run_id=%s steps=%d most=%d", self.lease.id, asked, self.max_steps)

    # failures

    def note_failure(self, name: str, error: E, place: str | None = None) -> E:
        """Note a failure that is about to be raised in the code, and return it.

        ``place`` is the branch in which it is raised, if not the present one.
        """
        if self.journal.is_old(name):
            self.journal.old_failures[name] = branch.get() if place is None else place
        else:
            self._new_failures.append(error)
        return error

    async def reopen(self, error: BaseException) -> bool:
        """Forget the failures from before a redrive and begin again, if they are what made the code fail.

        Failures that the code handled, by asking for something after they were raised, are kept.
        """
        names = list(self.journal.old_failures)
        if not names or self.over is not None or self.parking or not isinstance(error, Exception):
            return False
        if any(one is new for one in _chain(error) for new in self._new_failures):
            return False
        lease, store = self.lease, self.environment.store
        # Pending decisions are dropped: they led to this failure, and the code decides anew.
        await store.record(lease, self.journal.reopen(names))
        self.journal = Journal(lease.id, await store.steps(lease.id), replay_count=lease.replay_count)
        self._begin()
        logger.info("failures_reopened run_id=%s steps=%s", lease.id, ",".join(names))
        return True

    # waiting

    def raise_if_over(self) -> None:
        """Raise if the replay is over, so that code which caught the reason does nothing more."""
        if self.over is not None:
            raise self.over
        if self.parking:
            raise Parking

    def give_up(self, error: HandlerError) -> BaseException:
        """End the replay because a person must act, and return the exception to raise; a rehearsal only stops."""
        if self._held is None:
            return self._stop()
        self.over = error
        return error

    def find(self, name: str, kind: LineKind, fingerprint: bytes) -> Line | None:
        """Return a line of the journal; one that was recorded for other arguments ends the replay."""
        try:
            return self.journal.find(name, kind, fingerprint)
        except ReplayError as error:
            self.over = error
            raise

    def begin(self, name: str) -> None:
        """Check that the code may now do something that the journal does not have; a rehearsal stops here."""
        self.raise_if_over()
        try:
            self.journal.check_new(name)
        except ReplayError as error:
            self.over = error
            raise
        if self._held is None:
            raise self._stop()

    async def wait(self, wait: Wait) -> None:
        """Let the branch wait; it does not go on in this replay."""
        self.raise_if_over()
        with self.noting_fatal():
            self.journal.check_order(branch.get())
        if self.journal.on_stored:
            # A message with a key may turn out to be a duplicate.  Recording puts the id of the message that holds the
            # key into the journal; parking would not.
            await self.record([])
        self._waits.append(wait)
        parking = self._stop()
        if not self.parking:
            self._parked = self._parked or asyncio.Event()
            await self._parked.wait()
        raise parking

    def _stop(self) -> Parking:
        """Stop one branch; if it was the last that was running, all branches wait."""
        self._running -= 1
        return self._park() if self._running <= 0 else Parking()

    def is_before(self, instant: int | None) -> bool:
        """Whether it is earlier than this instant; None is never reached."""
        # Compared with the claim first, which saves reading the clock.
        return instant is None or (instant > self.lease.claimed_at and instant > self.now)

    async def wait_until(self, instant: int | None, *, awaits: int = 0) -> None:
        """Wait unless this instant has passed; None is never reached."""
        if self.is_before(instant):
            await self.wait(Wait(instant, awaits))

    async def wait_for(self, seconds: float | None, *, awaits: int = 0, failure: Failure | None = None) -> None:
        """Wait for this long from now; None waits only for records of others."""
        until = None if seconds is None else self.now + round(seconds * MICROSECONDS)
        await self.wait(Wait(until, awaits, failure))

    def _park(self) -> Parking:
        self.parking = True
        if self._parked is not None:
            self._parked.set()
        return Parking()

    def parked(self) -> Parked:
        """Return the outcome of a replay that ended because all branches wait."""
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

    async def run_branches(self, given: Sequence[tuple[str, Awaitable[Any]]]) -> list[Any]:
        """Run these concurrently, each as the branch of its name, and return their results, or ``Raised`` errors."""
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
            # When the last one ends, the branch that waits for all of them runs again in its place.
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
                    awaitable.close()  # so that Python does not warn of one that never began
            raise
        # Ask every task: asyncio logs an error for an exception that was never retrieved.
        raised = [task.exception() for task in tasks]
        if any(isinstance(error, Parking) for error in raised):
            raise Parking
        return [task.result() for task in tasks]

    # recording

    def prepare(self, name: str, call: Call[R]) -> tuple[Envelope, Receipt[R]]:
        """Make the message that the workflow sends under this name, and the receipt for it."""
        cause = StepScope(name, 1, None, self.journal.restarts).cause(self.lease.envelope)
        return self.environment.prepare(call, cause, 0)

    async def record(self, steps: Sequence[Line], context: Context | None = None) -> list[Line]:
        """Record these lines, and everything pending, in one commit; returns the lines as the journal has them now.

        The SQL, messages and signals of a step's ``context`` are part of that commit.
        """
        self.raise_if_over()
        if self._held is None:
            raise self._stop()
        async with self.committing_pending() as (pending, sends, notes):
            lines = [*pending, *steps]
            if context is None:
                recorded = await self._commit(lines, sends, notes, None)
            else:
                recorded = await self._commit(lines, (*sends, *context.sends), (*notes, *context.notes), context)
        self.journal.add(recorded)
        return recorded[len(pending) :]

    @asynccontextmanager
    async def committing_pending(self) -> AsyncIterator[tuple[list[Line], list[Envelope], list[Note]]]:
        """Take everything pending for a commit in the block; it is pending again if that fails.

        Waits for the commits of other branches first, because what is recorded now may follow from their decisions.
        """
        while self._commits:
            await asyncio.wait(self._commits)
        with self.journal.taking_pending() as taken, self.noting_fatal():
            if not any(taken):
                yield taken
                return
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._commits.add(over)
            try:
                yield taken
            finally:
                self._commits.discard(over)
                over.set_result(None)

    async def record_pending(self) -> None:
        """Record the run's decisions, if there are new ones, before anything acts on them."""
        while self._commits:
            await asyncio.wait(self._commits)
        if self.journal.has_pending:
            await self.record([])

    async def _commit(
        self, lines: Sequence[Line], sends: Sequence[Envelope], notes: Sequence[Note], context: Context | None
    ) -> list[Line]:
        store, recorded = self.environment.store, list[Line]()
        stored: list[Stored] = []

        async def write(transaction: Transaction) -> None:
            stored.extend(await put_and_record(transaction, sends, notes))
            recorded.extend(await transaction.record(self.lease, with_stored_ids(lines, sends, stored)))

        if context is not None and context.in_transaction:
            await context.commit_with(write)
        elif sends or notes:
            async with store.transaction() as transaction:
                await write(transaction)
        else:
            return await store.record(self.lease, lines)
        self.journal.confirm(sends, stored)
        return recorded

    # steps

    async def perform(self, name: str, function: StepFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return a step's result from the journal, or call its function until it returns or has failed for good."""
        fingerprint = fingerprint_of_call(args, kwargs)
        if (known := self.find(name, LineKind.RESULT, fingerprint)) is not None:
            return function.codec.decode(known.value)
        if (failed := self.find(name, LineKind.FAILED, fingerprint)) is not None:
            raise self.note_failure(name, step_error(name, decode_failure(failed.value)))
        self.begin(name)
        tries = self.journal.tries(name)
        attempt = 1
        if tries:
            attempt += sum(retried.counted for _, retried in tries)
            step, retried = tries[-1]
            # A retry in place is recorded when its wait is over.
            if retried.delay > limits.RETRY_IN_PLACE_SECONDS:
                await self.wait_until(step.at + round(retried.delay * MICROSECONDS))
        while True:
            # Outside the ``try``: a failure here is not the step's, such as a key that belongs to another payload.
            await self.record_pending()
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
        environment, journal, held = self.environment, self.journal, self._held
        assert held is not None, "a rehearsal stops before it calls anything"
        ledger = Ledger(self.lease.id, _effects_in(journal, name), self.record, f"{name}/")
        scope = StepScope(name, attempt, ledger, journal.restarts, journal.rounds)
        held_until = partial(deadline_of, held, environment.clock)
        context = Context(
            self.lease,
            environment.store,
            environment.prepare,
            environment.resources,
            held_until,
            scope,
            held=held,
            origin=environment.origin,
        )
        call: Callable[[], Awaitable[Any]] = partial(function.call, context, args, kwargs, environment.threads)
        for middleware in reversed(environment.middleware):
            call = partial(middleware, context, call)
        token = current.set(context)
        try:
            result = await in_time(call, function.settings.timeout_seconds, name)
            await refuse_strays(context)
            context.close()
            if context.uncertain is not None:
                raise context.uncertain
            line = Line(name, LineKind.RESULT, function.codec.encode(result), fingerprint)
            (recorded,) = await self.record([line], context)
            return function.codec.decode(recorded.value)
        except BaseException as error:
            context.close()
            await end_strays(context)
            cause = await context.roll_back(error)
            if context.uncertain is not None:
                raise context.uncertain from error
            if cause is not error:
                raise cause from error
            raise
        finally:
            current.reset(token)

    async def _after_failure(
        self, name: str, attempt: int, function: StepFunction, fingerprint: bytes, error: BaseException
    ) -> bool:
        """Wait as long as the retry policy says; return whether an attempt was used up.  Raises if it was the last."""
        lease = msgspec.structs.replace(self.lease, attempt=attempt)
        outcome = decide(function.settings.retry, lease, error, now=self.now, chance=self.environment.chance)
        logger.warning(
            "step_failed run_id=%s step=%s attempt=%d delay=%s error=%s",
            self.lease.id,
            name,
            attempt,
            "-" if isinstance(outcome, Dead) else f"{outcome.delay:.1f}",
            type(error).__name__,
        )
        if isinstance(outcome, Dead):
            line = self.journal.verdict_line(name)
            self.journal.pending.append(Line(line, LineKind.FAILED, encode(outcome.failure), fingerprint))
            raise self.note_failure(name, step_error(name, outcome.failure)) from error
        in_place = outcome.delay <= limits.RETRY_IN_PLACE_SECONDS
        # A retry in place that uses up no attempt is not recorded: it may be repeated many times a minute.
        if outcome.counted or not in_place:
            line = self.journal.try_line(name, len(self.journal.tries(name)))
            retried = Retried(outcome.failure, outcome.delay, outcome.counted)
            self.journal.pending.append(Line(line, LineKind.RETRY, encode(retried)))
        if in_place:
            await self.environment.clock.sleep(outcome.delay)
        else:
            await self.wait_for(outcome.delay, failure=outcome.failure)
        return outcome.counted


@dataclass(frozen=True, slots=True)
class Raised:
    """The error that a branch raised, in the place of its result."""

    error: BaseException


class _Fatal:
    """Ends the replay with a fatal error that is raised in its block, even if the workflow's code catches it."""

    __slots__ = ("_replay",)

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, _FATAL):
            self._replay.over = error


def with_stored_ids(lines: Sequence[Line], sends: Sequence[Envelope], stored: Sequence[Stored]) -> list[Line]:
    """Return lines in which messages that turned out to be duplicates have the ids of those that hold their keys."""
    ids = {envelope.id: one.id for envelope, one in zip(sends, stored, strict=True) if envelope.id != one.id}
    return [_with_stored_id(line, ids) if ids and line.kind is LineKind.SENT else line for line in lines]


def _with_stored_id(line: Line, ids: Mapping[str, str]) -> Line:
    sent = decode_sent(line.value)
    if sent.id not in ids:
        return line
    return msgspec.structs.replace(line, value=encode(msgspec.structs.replace(sent, id=ids[sent.id])))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes and contexts."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


def step_error(name: str, failure: Failure) -> StepError:
    """Return the error that is raised in the code for a step that failed for good."""
    return StepError(name, failure.reason, failure.error_type, failure.error_message)


def _effects_in(journal: Journal, name: str) -> Callable[[], Awaitable[list[Line]]]:
    async def load() -> list[Line]:
        return journal.effects_of(name)

    return load


#: Errors for which a run is parked until a person acts, and the reasons shown for them.
FOR_A_PERSON: dict[type[HandlerError], str] = {
    ReplayError: "replay",
    UncertainError: "uncertain",
    StepLimitError: "too many steps",
    UnreadableSignalError: "unreadable signal",
}


def until_a_person_acts(lease: Lease, error: HandlerError) -> Parked:
    """Return the outcome of a message that is parked until a person acts."""
    logger.warning("parked_for_a_person message_id=%s error=%s", lease.id, error)
    return Parked(None, lease.wake, awaits=0, failure=failure_of(error, FOR_A_PERSON[type(error)]))
