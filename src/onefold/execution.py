"""Stages 7 to 9: one lease, or a batch of them, from handle through decide to settle.

Read top to bottom: refuse what must not run, read the arguments, run the handler, then either
commit its transaction together with the outcome, or hand the outcome to the caller, who settles many at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from onefold import limits
from onefold.announcing import announced
from onefold.batch import Batch, Item
from onefold.clock import Clock
from onefold.compensation import undoing
from onefold.context import Context
from onefold.driving import drive
from onefold.errors import (
    HandlerError,
    LeaseLostError,
    SequenceGapError,
    SessionLostError,
    StoreUnavailableError,
    TransactionEndedError,
)
from onefold.handling import Ready, end_strays, make_ready, watched
from onefold.holding import Hold, deadline_of, end, is_cancelled, raise_if_stopped
from onefold.inside import current, outside
from onefold.isolation import CrashedError, DecidedError, Processes, judge
from onefold.progress import Pulse
from onefold.refusing import refuse
from onefold.registry import Registry
from onefold.retry import blame, decide
from onefold.stepping import in_time
from onefold.store import Again, Dead, Done, Failure, HandBack, Lease, Outcome, Store
from onefold.stretch import until_a_person_acts
from onefold.task import Task
from onefold.threads import BusyError, Threads
from onefold.tools import Middleware, Tools
from onefold.transaction import Prepare
from onefold.work import Work
from onefold.workflow import Workflow

logger = logging.getLogger("onefold")

#: The store, or the place to run the handler, was not to be had: try again soon; it was not the message's fault.
UNAVAILABLE_SECONDS = 5.0

#: What the log says of a failure.
_FAILED = (
    "%s message_id=%s message_type=%s subject=%s correlation_id=%s idempotency_key=%s attempt=%d delay=%s error=%s"
)

#: How records are made unless somebody has replaced it.
_MAKE_RECORD = logging.Logger.makeRecord

Settlements = list[tuple[Lease, Outcome]]
Decided = TypeVar("Decided", bound=Outcome)


@dataclass(slots=True)
class Execution:
    """Everything a run needs, the same for all messages of a worker.  Use it as ``async with``."""

    store: Store
    registry: Registry
    clock: Clock
    chance: random.Random
    prepare: Prepare
    #: Where keys for outside providers come from.
    origin: str
    middleware: Sequence[Middleware] = ()
    resources: Any = None
    #: A message with which so many workers died does not run again.
    quarantine_after: int = limits.QUARANTINE_AFTER
    threads: Threads = field(default_factory=Threads)
    processes: Processes = field(default_factory=Processes)
    _tools: Tools = field(init=False)
    _late: set[asyncio.Task[None]] = field(default_factory=set)
    _unlogged: list[tuple[Lease, Again | Dead, str]] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._tools = Tools(
            self.store,
            self.clock,
            self.chance,
            self.prepare,
            self.origin,
            self.resources,
            self.threads,
            self.middleware,
        )

    async def __aenter__(self) -> Execution:
        self._stack.enter_context(watched())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()
        self.log_failures()
        for task in self._late:
            task.cancel()
        await self.finish_late()
        self.threads.close()
        await self.processes.close()

    # one message

    async def run(self, hold: Hold) -> Outcome | None:
        """Run one message.

        Returns the outcome still to be settled, or None when it was settled in the handler's own commit.
        Raises ``LeaseLostError`` when somebody else owns the message: then nothing was written.
        """
        lease = hold.lease
        task = self.registry.handler(lease.envelope)
        refusal = self._refuse(task, lease)
        if isinstance(task, Workflow) and (refusal is None or (task.saga and isinstance(refusal, Dead))):
            return await self._drive(task, hold, None if refusal is None else refusal.failure)
        if refusal is not None:
            return refusal
        held_until = partial(deadline_of, hold, self.clock)
        context = Context(lease, self.store, self.prepare, self.resources, held_until, bearer=hold, origin=self.origin)
        if task.beat_seconds is not None:
            # Its beginning is the first sign of life, so that one which never gives another is seen to stall.
            hold.pulse = Pulse(self.clock.steady())
            hold.pulse.beat()
        token = current.set(context)
        try:
            result = await self._begin(task, context, task.signature.decode(lease.envelope.payload_inline or b""))
            if context.tasks or is_cancelled(hold):
                await end(context, (hold,))
            context.close()
            if context.uncertain is not None:
                raise context.uncertain
            data = task.signature.encode_result(result)
            if context.buffered is None:
                done = Done(data, (), task.key_window)
            else:
                done = Done(data, context.sends, task.key_window, notes=context.notes)
            if not (context.needs_transaction or context.late):
                return done
            await self._commit(context, [(lease, done)])
            return None
        except BaseException as error:
            context.close()
            # Most have nothing to be taken back, and need not wait for it.
            if context.tasks or context.in_transaction or is_cancelled(hold) or isinstance(error, LeaseLostError):
                error = await self._undo(context, error, (hold,))
            if context.uncertain is not None:
                return until_a_person_acts(lease, context.uncertain)
            return self._decide(task, lease, error)
        finally:
            current.reset(token)

    async def _drive(self, workflow: Workflow[Any, Any], hold: Hold, refusal: Failure | None) -> Outcome:
        try:
            outcome = await drive(workflow, hold, self._tools, refusal)
            return self.announce(hold.lease, outcome) if isinstance(outcome, Dead) else outcome
        except BaseException as error:
            await raise_if_stopped((hold,), error)
            return self._decide(workflow, hold.lease, error)

    def _refuse(self, task: Task[Any, Any], lease: Lease) -> Outcome | None:
        """Return the outcome of a message that must not run, or None."""
        refusal = refuse(task, lease, self.quarantine_after)
        if isinstance(refusal, SequenceGapError):
            return self.decide_failure(task, lease, refusal)
        return None if refusal is None else self.announce(lease, refusal)

    # a batch

    async def run_batch(self, holds: Sequence[Hold]) -> Settlements:
        """Run several messages of one task together.

        Returns the outcomes still to be settled; those left out were settled in the handler's own commit.
        Raises ``LeaseLostError`` when somebody else owns one of the messages: then nothing was written for any.
        """
        settled: Settlements = []
        items: list[Item[Any]] = []
        if not holds:
            return settled
        task = self.registry.handler(holds[0].lease.envelope)
        for hold in holds:
            lease = hold.lease
            if refusal := self._refuse(task, lease):
                settled.append((lease, refusal))
                continue
            try:
                value = task.signature.decode(lease.envelope.payload_inline or b"")["value"]
            except Exception as error:
                settled.append((lease, self._decide(task, lease, error)))
            else:
                items.append(Item(lease, value, task.signature.encode_result, hold, origin=self.origin))
        return settled + (await self._run_items(task, items, holds) if items else [])

    async def _run_items(self, task: Task[Any, Any], items: list[Item[Any]], holds: Sequence[Hold]) -> Settlements:
        batch = Batch(items, self.store, self.prepare, self.resources)
        token = current.set(batch)
        try:
            await self._begin(task, batch, {})
            await end(batch, holds)
            batch.close()
            missing = HandlerError("the batch handler returned without a verdict on this message")
            outcomes: Settlements = [(item.lease, self._judge(task, item, missing)) for item in items]
            if not (batch.needs_transaction or batch.late):
                return outcomes
            await self._commit(batch, outcomes)
            return []
        except BaseException as error:
            undone = batch.needs_transaction
            error = await self._undo(batch, error, holds)
            ended = isinstance(error, TransactionEndedError)
            if ended or (undone and all(isinstance(item.verdict, bytes) for item in items)):
                # Nothing else is to blame; were they all handed back, it would go on like this for ever.
                return [(item.lease, self._decide(task, item.lease, error)) for item in items]
            return [(item.lease, self._judge(task, item, error, undone=undone)) for item in items]
        finally:
            current.reset(token)

    def _judge(self, task: Task[Any, Any], item: Item[Any], error: BaseException, *, undone: bool = False) -> Outcome:
        """Turn a verdict into an outcome; ``error`` is what a message without one has failed with."""
        verdict = item.verdict
        if isinstance(verdict, bytes):
            # What was done for it was rolled back with the rest, for no fault of its own.
            return HandBack() if undone else Done(verdict, (), task.key_window)
        return self._decide(task, item.lease, error if verdict is None else verdict)

    # the steps they share

    def _begin(self, task: Task[Any, Any], work: Work, arguments: Mapping[str, Any]) -> Awaitable[Any]:
        """Call the handler, with what wraps it and within its time; what is returned is still to be awaited."""
        if task.is_direct and not self.middleware:
            result: Awaitable[Any] = (
                task.function(work, **arguments) if task.takes_context else task.function(**arguments)
            )
            return result
        ready: Ready = make_ready(task, work, arguments, self.threads)
        seconds = task.timeout_seconds
        if isinstance(work, Context) and task.handler.isolate:
            # The process keeps the time: waiting for one is not the handler's.
            ready, seconds = partial(self.processes.run, task, work), None
        for middleware in reversed(self.middleware):
            ready = partial(middleware, work, ready)
        return in_time(ready, seconds, task.name)

    async def _commit(self, work: Work, outcomes: Settlements) -> None:
        """Settle in a commit of the handler's own, and begin what comes after it."""
        self.log_failures()
        if work.needs_transaction:
            await work.commit(outcomes)
        elif not all(await self.store.settle(outcomes)):
            raise LeaseLostError(f"message {outcomes[0][0].id} was taken over; its outcome was not recorded")
        for function in work.late:
            late = asyncio.get_running_loop().create_task(_run_late(function, outcomes[0][0]), context=outside())
            self._late.add(late)
            late.add_done_callback(self._late.discard)

    async def _undo(self, work: Work, error: BaseException, holds: Sequence[Hold]) -> BaseException:
        """Take back what a failed handler did and return what its failure means.

        Raises when there is nothing to be decided about its message.
        """
        work.close()
        if work.tasks:
            await end_strays(work)
        if work.in_transaction:
            error = await work.roll_back(error)
        await raise_if_stopped(holds, error)
        return error

    def _decide(self, task: Task[Any, Any], lease: Lease, error: BaseException) -> Outcome:
        if isinstance(error, StoreUnavailableError) and not isinstance(error, SessionLostError):
            return Again(UNAVAILABLE_SECONDS, None, counted=False)
        if isinstance(error, BusyError):
            logger.warning("busy message_id=%s message_type=%s error=%s", lease.id, task.name, error)
            return Again(UNAVAILABLE_SECONDS, None, counted=False)
        return self.decide_failure(task, lease, error)

    def decide_failure(self, task: Task[Any, Any], lease: Lease, error: BaseException) -> Outcome:
        """Decide about a message whose handler or settling failed; ``log_failures`` tells of it."""
        kind = type(error).__name__
        if isinstance(error, DecidedError):
            outcome, kind = error.outcome, error.error
        elif isinstance(error, CrashedError):
            outcome, kind = judge(task.retry, lease, error, self.chance), "Crash"
        elif isinstance(error, SessionLostError):
            outcome = blame(lease, error, self.quarantine_after, delay=UNAVAILABLE_SECONDS)
        else:
            outcome = decide(task.retry, lease, error, now=self.clock.now(), chance=self.chance)
        if isinstance(outcome, Again):
            self._unlogged.append((lease, outcome, kind))
            return outcome
        outcome = replace(outcome, key_window=task.key_window)
        self._unlogged.append((lease, outcome, kind))
        if task.saga:
            # It was its settling that failed, which may be so again: not at once.
            return undoing(lease, outcome.failure, delay=UNAVAILABLE_SECONDS)
        return self.announce(lease, outcome)

    def log_failures(self) -> None:
        """Log what has failed since the last time; called before anything is settled.

        Lines that are written together cost less than half of what each would cost between two handlers.
        """
        if self._unlogged:
            failed, self._unlogged = self._unlogged, []
            if logger.isEnabledFor(logging.WARNING):
                _log(failed)

    def announce(self, lease: Lease, outcome: Decided) -> Decided:
        """Let those be told who want to know of dead letters."""
        return announced(lease, outcome, self.registry, self.prepare)

    # what comes after the commit

    async def finish_late(self) -> None:
        """Wait for everything that handlers have put off until after their commit."""
        while self._late:
            await asyncio.wait(self._late)


async def _run_late(function: Callable[[], Awaitable[object]], lease: Lease) -> None:
    try:
        await function()
    except Exception as error:
        logger.warning("late_work_failed message_id=%s error=%s", lease.id, type(error).__name__)


def _log(failed: Sequence[tuple[Lease, Again | Dead, str]]) -> None:
    """Log failures as ``logger.warning`` does, without looking for the caller on the stack for each of them."""
    # Most of a record is the same for all that are written together, unless somebody makes records of their own.
    shared: dict[str, Any] | None = None
    ordinary = logging.getLogRecordFactory() is logging.LogRecord and type(logger).makeRecord is _MAKE_RECORD
    for lease, outcome, error in failed:
        envelope = lease.envelope
        said = (
            "dead" if isinstance(outcome, Dead) else "retry",
            envelope.id,
            envelope.message_type,
            envelope.subject,
            envelope.correlation_id,
            envelope.idempotency_key,
            lease.attempt,
            f"{outcome.delay:.1f}" if isinstance(outcome, Again) else "-",
            error,
        )
        if shared is None or not ordinary:
            record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, _FAILED, said, None, "log_failures")
            # Taken before anybody handles it, who may change it.
            shared = record.__dict__.copy()
        else:
            record = logging.LogRecord.__new__(logging.LogRecord)
            record.__dict__ = {**shared, "args": said}
        logger.handle(record)
