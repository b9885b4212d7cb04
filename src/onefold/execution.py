"""Stages 7 to 9: one lease, from handle through decide to settle.

Read top to bottom: refuse what must not run, read the arguments, run the handler, then either
commit its transaction together with the outcome, or hand the outcome to the caller, who settles many at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onefold import limits
from onefold.clock import Clock
from onefold.errors import HandlerTimeoutError, LeaseLostError, StoreUnavailableError
from onefold.registry import Registry, Task
from onefold.retry import decide
from onefold.store import Again, Dead, Done, Failure, Lease, Outcome, Store
from onefold.transaction import Context, Prepare, current

logger = logging.getLogger("onefold")

#: Wraps every run of a handler: ``async def middleware(ctx, proceed): return await proceed()``.
Middleware = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]

#: A message from a newer version of the code waits this long for a newer worker.
UNSUPPORTED_SECONDS = 30.0
#: The store could not take the handler's transaction: try again soon; it was not the message's fault.
UNAVAILABLE_SECONDS = 5.0


@dataclass(slots=True)
class Execution:
    """Everything a run needs, the same for all messages of a worker."""

    store: Store
    registry: Registry
    clock: Clock
    chance: random.Random
    prepare: Prepare
    middleware: Sequence[Middleware] = ()
    resources: Any = None
    #: A message with which so many workers died does not run again.
    quarantine_after: int = limits.QUARANTINE_AFTER

    async def run(self, lease: Lease, held_until: Callable[[], int]) -> Outcome | None:
        """Run one message.

        Returns the outcome still to be settled, or None when it was settled in the handler's own commit.
        Raises ``LeaseLostError`` when somebody else owns the message: then nothing was written.
        """
        if refusal := self._refuse(lease):
            return refusal
        task = self.registry.tasks[lease.envelope.message_type]
        context = Context(lease, self.store, self.prepare, self.resources, held_until)
        token = current.set(context)
        try:
            result = await self._handle(task, context, lease)
            context.close()
            done = Done(task.signature.encode_result(result), tuple(context.buffer.envelopes), task.key_window)
            if not context.in_transaction:
                return done
            await context.commit(done)
            return None
        except BaseException as error:
            context.close()
            await context.roll_back(error)
            if isinstance(error, LeaseLostError) or _stopped_by_worker(error):
                raise
            return self._decide(task, lease, error)
        finally:
            current.reset(token)

    def _refuse(self, lease: Lease) -> Outcome | None:
        """Return the outcome of a message that must not run, or None."""
        envelope = lease.envelope
        task = self.registry.tasks[envelope.message_type]
        if lease.crashes >= self.quarantine_after:
            text = f"its worker died {lease.crashes} times while it may have been running"
            failure = Failure(reason="quarantined", error_type="Crash", error_message=text)
            return Dead(failure, key_window=task.key_window, ran=False)
        if envelope.expires_at and lease.claimed_at >= envelope.expires_at:
            text = "it was not done within its time; see expires="
            failure = Failure(reason="expired", error_type="Expired", error_message=text)
            return Dead(failure, key_window=task.key_window, ran=False)
        if envelope.schema_version > task.version:
            logger.warning("unsupported_version message_id=%s message_type=%s", envelope.id, envelope.message_type)
            return Again(UNSUPPORTED_SECONDS, None, counted=False)
        return None

    async def _handle(self, task: Task[Any, Any], context: Context, lease: Lease) -> Any:
        arguments = task.signature.decode(lease.envelope.payload_inline or b"")

        async def proceed() -> Any:
            return await (task.function(context, **arguments) if task.takes_context else task.function(**arguments))

        call: Callable[[], Awaitable[Any]] = proceed
        for middleware in reversed(self.middleware):
            call = _wrapped(middleware, context, call)
        if task.timeout_seconds is None:
            return await call()
        try:
            async with asyncio.timeout(task.timeout_seconds) as limit:
                return await call()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise HandlerTimeoutError(f"{task.name} ran longer than {task.timeout_seconds:g} s") from error

    def _decide(self, task: Task[Any, Any], lease: Lease, error: BaseException) -> Outcome:
        if isinstance(error, StoreUnavailableError):
            return Again(UNAVAILABLE_SECONDS, None, counted=False)
        return self.decide_failure(task, lease, error)

    def decide_failure(self, task: Task[Any, Any], lease: Lease, error: BaseException) -> Again | Dead:
        """Decide about a message whose handler or settling failed, and log it."""
        outcome = decide(task.retry, lease, error, now=self.clock.now(), chance=self.chance)
        if isinstance(outcome, Dead):
            outcome = replace(outcome, key_window=task.key_window)
        envelope = lease.envelope
        logger.warning(
            "%s message_id=%s message_type=%s subject=%s correlation_id=%s idempotency_key=%s "
            "attempt=%d delay=%s error=%s",
            "dead" if isinstance(outcome, Dead) else "retry",
            envelope.id,
            envelope.message_type,
            envelope.subject,
            envelope.correlation_id,
            envelope.idempotency_key,
            lease.attempt,
            f"{outcome.delay:.1f}" if isinstance(outcome, Again) else "-",
            type(error).__name__,
        )
        return outcome


def _stopped_by_worker(error: BaseException) -> bool:
    """Tell a cancellation that came from outside from a handler that raised ``CancelledError`` by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _wrapped(
    middleware: Middleware, context: Context, proceed: Callable[[], Awaitable[Any]]
) -> Callable[[], Awaitable[Any]]:
    return lambda: middleware(context, proceed)
