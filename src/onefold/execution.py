"""Stages 7 to 9: one lease, from handle through decide to settle.

Read top to bottom: refuse what must not run, read the arguments, run the handler, then either
commit its transaction together with the outcome, or hand the outcome to the caller, who settles many at once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onefold import limits
from onefold.clock import Clock
from onefold.errors import LeaseLostError, StoreUnavailableError
from onefold.registry import Registry, Task
from onefold.retry import decide
from onefold.stepping import in_time
from onefold.store import Again, Dead, Done, Failure, Lease, Outcome, Store
from onefold.stretch import Middleware, Tools, stopped_from_outside, until_a_person_acts, wrapped
from onefold.transaction import Context, Prepare, current
from onefold.workflow import Workflow, drive

logger = logging.getLogger("onefold")

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
        task = self.registry.handler(lease.envelope)
        if refusal := self._refuse(task, lease):
            return refusal
        if isinstance(task, Workflow):
            return await self._drive(task, lease, held_until)
        context = Context(lease, self.store, self.prepare, self.resources, held_until)
        token = current.set(context)
        try:
            result = await self._handle(task, context, lease)
            context.close()
            if context.uncertain is not None:
                raise context.uncertain
            sent, told = tuple(context.buffer.envelopes), tuple(context.buffer.notes)
            done = Done(task.signature.encode_result(result), sent, task.key_window, notes=told)
            if not context.in_transaction:
                return done
            await context.commit(done)
            return None
        except BaseException as error:
            context.close()
            await context.roll_back(error)
            if isinstance(error, LeaseLostError) or stopped_from_outside(error):
                raise
            if context.uncertain is not None:
                return until_a_person_acts(lease, context.uncertain)
            return self._decide(task, lease, error)
        finally:
            current.reset(token)

    async def _drive(self, workflow: Workflow[Any, Any], lease: Lease, held_until: Callable[[], int]) -> Outcome:
        tools = Tools(self.store, self.clock, self.chance, self.prepare, self.resources, held_until, self.middleware)
        try:
            return await drive(workflow, lease, tools)
        except BaseException as error:
            if isinstance(error, LeaseLostError) or stopped_from_outside(error):
                raise
            return self._decide(workflow, lease, error)

    def _refuse(self, task: Task[Any, Any], lease: Lease) -> Outcome | None:
        """Return the outcome of a message that must not run, or None."""
        envelope = lease.envelope
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
            call = wrapped(middleware, context, call)
        return await in_time(call, task.timeout_seconds, task.name)

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
