"""Stages 7 to 9: one lease, or a batch of them, from handle through decide to settle.

Read top to bottom: refuse a message that must not run, decode its arguments, run the handler, then either commit its
transaction together with the outcome, or return the outcome to the caller, which settles many at once.
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
from onefold.clock import Clock
from onefold.current import current, outside
from onefold.errors import (
    HandlerError,
    LeaseLostError,
    SequenceGapError,
    SessionLostError,
    StoreUnavailableError,
    TransactionEndedError,
    UnknownArgumentError,
)
from onefold.handlers.batch import Batch, Item
from onefold.handlers.call import Ready, end, end_strays, in_time, make_ready, watched
from onefold.handlers.context import Context
from onefold.handlers.environment import Environment, Middleware
from onefold.handlers.lease import Held, deadline_of, raise_if_stopped
from onefold.handlers.progress import Pulse
from onefold.handlers.threads import BusyError, Threads
from onefold.isolation.pool import DecidedError, IsolationPool, judge
from onefold.isolation.process import CrashedError
from onefold.registry import Registry
from onefold.store import Again, Dead, Done, Failure, HandBack, Lease, Outcome, Store
from onefold.tasks.retry import blame, decide
from onefold.tasks.task import Task
from onefold.transactions.buffer import Prepare
from onefold.transactions.handler_transaction import HandlerTransaction
from onefold.worker.dead_notice import announced
from onefold.worker.refusals import refuse, wait_for_newer
from onefold.workflows.activation import drive
from onefold.workflows.compensation import undoing
from onefold.workflows.replay import until_a_person_acts
from onefold.workflows.workflow import Workflow

logger = logging.getLogger("onefold")

#: The pause before another try when the store, a thread or a process was not available; no attempt is used up.
UNAVAILABLE_SECONDS = 5.0

Settlements = list[tuple[Lease, Outcome]]
Decided = TypeVar("Decided", bound=Outcome)


@dataclass(slots=True)
class Execution:
    """Runs the messages of one worker, within ``async with``."""

    store: Store
    registry: Registry
    clock: Clock
    chance: random.Random
    prepare: Prepare
    #: Part of the keys for outside providers: the identity of the database and the name of the app.
    origin: str
    middleware: Sequence[Middleware] = ()
    resources: Any = None
    #: Crashes of a message's workers after which it does not run again.
    quarantine_after: int = limits.QUARANTINE_AFTER
    threads: Threads = field(default_factory=Threads)
    processes: IsolationPool = field(default_factory=IsolationPool)
    _environment: Environment = field(init=False)
    _late: set[asyncio.Task[None]] = field(default_factory=set)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._environment = Environment(
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
        for task in self._late:
            task.cancel()
        await self.finish_late()
        self.threads.close()
        await self.processes.close()

    # one message

    async def run(self, held: Held) -> Outcome | None:
        """Run one message.

        Returns the outcome still to be settled, or None when it was settled in the handler's own commit.
        Raises ``LeaseLostError`` when another claim owns the message: then nothing was written.
        """
        lease = held.lease
        task = self.registry.handler(lease.envelope)
        refusal = self._refuse(task, lease)
        if isinstance(task, Workflow) and (refusal is None or (task.saga and isinstance(refusal, Dead))):
            return await self._drive(task, held, None if refusal is None else refusal.failure)
        if refusal is not None:
            return refusal
        held_until = partial(deadline_of, held, self.clock)
        context = Context(lease, self.store, self.prepare, self.resources, held_until, held=held, origin=self.origin)
        if task.beat_seconds is not None:
            # The start counts as the first beat, so that a handler that never beats is reported as stalled.
            held.pulse = Pulse(self.clock.steady())
            held.pulse.beat()
        token = current.set(context)
        try:
            result = await self._begin(task, context, task.signature.decode(lease.envelope.payload_inline or b""))
            await end(context, (held,))
            context.close()
            if context.uncertain is not None:
                raise context.uncertain
            data = task.signature.encode_result(result)
            done = Done(data, context.sends, task.key_window, notes=context.notes)
            if not (context.needs_transaction or context.late):
                return done
            await self._commit(context, [(lease, done)])
            return None
        except BaseException as error:
            error = await self._undo(context, error, (held,))
            if context.uncertain is not None:
                return until_a_person_acts(lease, context.uncertain)
            return self._decide(task, lease, error)
        finally:
            current.reset(token)

    async def _drive(self, workflow: Workflow[Any, Any], held: Held, refusal: Failure | None) -> Outcome:
        try:
            outcome = await drive(workflow, held, self._environment, refusal)
            return self.announce(held.lease, outcome) if isinstance(outcome, Dead) else outcome
        except BaseException as error:
            await raise_if_stopped((held,), error)
            return self._decide(workflow, held.lease, error)

    def _refuse(self, task: Task[Any, Any], lease: Lease) -> Outcome | None:
        """Return the outcome of a message that must not run, or None."""
        refusal = refuse(task, lease, self.quarantine_after)
        if isinstance(refusal, SequenceGapError):
            return self.decide_failure(task, lease, refusal)
        return None if refusal is None else self.announce(lease, refusal)

    # a batch

    async def run_batch(self, held_leases: Sequence[Held]) -> Settlements:
        """Run several messages of one task together.

        Returns the outcomes still to be settled; those left out were settled in the handler's own commit.
        Raises ``LeaseLostError`` when another claim owns one of the messages: then nothing was written for any.
        """
        settled: Settlements = []
        items: list[Item[Any]] = []
        if not held_leases:
            return settled
        task = self.registry.handler(held_leases[0].lease.envelope)
        for held in held_leases:
            lease = held.lease
            if refusal := self._refuse(task, lease):
                settled.append((lease, refusal))
                continue
            try:
                value = task.signature.decode(lease.envelope.payload_inline or b"")["value"]
            except Exception as error:
                settled.append((lease, self._decide(task, lease, error)))
            else:
                items.append(Item(lease, value, task.signature.encode_result, held, origin=self.origin))
        return settled + (await self._run_items(task, items, held_leases) if items else [])

    async def _run_items(
        self, task: Task[Any, Any], items: list[Item[Any]], held_leases: Sequence[Held]
    ) -> Settlements:
        batch = Batch(items, self.store, self.prepare, self.resources)
        token = current.set(batch)
        try:
            await self._begin(task, batch, {})
            await end(batch, held_leases)
            batch.close()
            missing = HandlerError("the batch handler returned without a verdict on this message")
            outcomes: Settlements = [(item.lease, self._judge(task, item, missing)) for item in items]
            if not (batch.needs_transaction or batch.late):
                return outcomes
            await self._commit(batch, outcomes)
            return []
        except BaseException as error:
            undone = batch.needs_transaction
            error = await self._undo(batch, error, held_leases)
            ended = isinstance(error, TransactionEndedError)
            if ended or (undone and all(isinstance(item.verdict, bytes) for item in items)):
                # No message has failed by itself; if all were handed back, they would fail together for ever.
                return [(item.lease, self._decide(task, item.lease, error)) for item in items]
            return [(item.lease, self._judge(task, item, error, undone=undone)) for item in items]
        finally:
            current.reset(token)

    def _judge(self, task: Task[Any, Any], item: Item[Any], error: BaseException, *, undone: bool = False) -> Outcome:
        """Turn a verdict into an outcome; a message without one has failed with ``error``."""
        verdict = item.verdict
        if isinstance(verdict, bytes):
            # Its work was rolled back together with that of the failed ones.
            return HandBack() if undone else Done(verdict, (), task.key_window)
        return self._decide(task, item.lease, error if verdict is None else verdict)

    # steps of both

    def _begin(self, task: Task[Any, Any], work: HandlerTransaction, arguments: Mapping[str, Any]) -> Awaitable[Any]:
        """Return the call of the handler, within its middleware and its timeout, still to be awaited."""
        ready: Ready = make_ready(task, work, arguments, self.threads)
        seconds = task.timeout_seconds
        if isinstance(work, Context) and task.handler.isolate:
            # The pool applies the timeout, so that waiting for a free process does not count.
            ready, seconds = partial(self.processes.run, task, work, self._environment), None
        for middleware in reversed(self.middleware):
            ready = partial(middleware, work, ready)
        return in_time(ready, seconds, task.name)

    async def _commit(self, work: HandlerTransaction, outcomes: Settlements) -> None:
        """Settle in a commit of the handler's own, then start what it put off until after it."""
        if work.needs_transaction:
            await work.commit(outcomes)
        elif not all(await self.store.settle(outcomes)):
            raise LeaseLostError(f"message {outcomes[0][0].id} was taken over; its outcome was not recorded")
        for function in work.late:
            late = asyncio.get_running_loop().create_task(_run_late(function, outcomes[0][0]), context=outside())
            self._late.add(late)
            late.add_done_callback(self._late.discard)

    async def _undo(self, work: HandlerTransaction, error: BaseException, held_leases: Sequence[Held]) -> BaseException:
        """Roll back the work of a failed handler; return the error that decides about its message.

        Raises when there is nothing to decide, because the run was stopped or another claim owns the message.
        """
        work.close()
        if work.tasks:
            await end_strays(work)
        if work.in_transaction:
            error = await work.roll_back(error)
        await raise_if_stopped(held_leases, error)
        return error

    def _decide(self, task: Task[Any, Any], lease: Lease, error: BaseException) -> Outcome:
        if isinstance(error, StoreUnavailableError) and not isinstance(error, SessionLostError):
            return Again(UNAVAILABLE_SECONDS, None, counted=False)
        if isinstance(error, UnknownArgumentError):
            return wait_for_newer(lease, str(error))
        if isinstance(error, BusyError):
            logger.warning("busy message_id=%s message_type=%s reason=%s", lease.id, task.name, str(error))
            return Again(UNAVAILABLE_SECONDS, None, counted=False)
        return self.decide_failure(task, lease, error)

    def decide_failure(self, task: Task[Any, Any], lease: Lease, error: BaseException) -> Outcome:
        """Decide about a message whose handler or settling failed, and log it."""
        kind = type(error).__name__
        if isinstance(error, DecidedError):
            outcome, kind = error.outcome, error.error
        elif isinstance(error, CrashedError):
            outcome, kind = judge(task.retry, lease, error, self.chance), "Crash"
        elif isinstance(error, SessionLostError):
            outcome = blame(lease, error, self.quarantine_after, delay=UNAVAILABLE_SECONDS)
        else:
            outcome = decide(task.retry, lease, error, now=self.clock.now(), chance=self.chance)
        envelope = lease.envelope
        logger.warning(
            "%s message_id=%s message_type=%s subject=%s correlation_id=%s idempotency_key=%s attempt=%d delay=%s "
            "error=%s",
            "retry" if isinstance(outcome, Again) else "dead",
            envelope.id,
            envelope.message_type,
            envelope.subject,
            envelope.correlation_id,
            envelope.idempotency_key,
            lease.attempt,
            f"{outcome.delay:.1f}" if isinstance(outcome, Again) else "-",
            kind,
        )
        if isinstance(outcome, Again):
            return outcome
        outcome = replace(outcome, key_window=task.key_window)
        if task.saga:
            # It was its settling that failed, which may be so again: not at once.
            return undoing(lease, outcome.failure, delay=UNAVAILABLE_SECONDS)
        return self.announce(lease, outcome)

    def announce(self, lease: Lease, outcome: Decided) -> Decided:
        """Add the messages to the hooks for dead letters, if the outcome is one."""
        return announced(lease, outcome, self.registry, self.prepare)

    # after the commit

    async def finish_late(self) -> None:
        """Wait for all work that handlers put off until after their commit."""
        while self._late:
            await asyncio.wait(self._late)


async def _run_late(function: Callable[[], Awaitable[object]], lease: Lease) -> None:
    try:
        await function()
    except Exception as error:
        logger.warning("late_work_failed message_id=%s error=%s", lease.id, type(error).__name__)
