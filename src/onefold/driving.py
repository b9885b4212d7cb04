"""Stages 7 to 9 for workflows: one claim of a run, from its journal to an outcome."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from onefold.compensation import compensate, undoing
from onefold.errors import (
    CancelledMessageError,
    ConfigurationError,
    DeadError,
    LeaseLostError,
    ReplayError,
    SignalTimeoutError,
    StepError,
    StoreUnavailableError,
    UncertainError,
)
from onefold.holding import Hold, stopped_from_outside
from onefold.inside import current
from onefold.journal import Journal, read_journal
from onefold.retry import decide, failure_of
from onefold.saga import Saga, SagaRun
from onefold.status import cause_of
from onefold.stepping import in_time
from onefold.store import Again, Dead, Done, Failure, Outcome
from onefold.stretch import Stretch, until_a_person_acts
from onefold.threads import BusyError
from onefold.tools import Tools
from onefold.workflow import Run, Workflow

logger = logging.getLogger("onefold")


async def drive(workflow: Workflow[Any, Any], hold: Hold, tools: Tools, refusal: Failure | None = None) -> Outcome:
    """Run a workflow until it waits, fails or is through, and return the outcome to be settled.

    ``refusal`` says why a saga must not go on, so that it is undone.
    Raises what the workflow raised by itself, and ``LeaseLostError`` when somebody else owns the run.
    """
    lease = hold.lease
    lines = await read_journal(tools.store, lease) if lease.journal is None else lease.journal
    if isinstance(workflow, Saga) and (cause := cause_of(lines, lease.replay_count)) is not None:
        return await compensate(workflow, hold, tools, lines, cause, refusal)
    if refusal is not None:
        return undoing(lease, refusal)
    stretch = Stretch(lease, Journal(lease.id, lines, replay_count=lease.replay_count), tools, hold)
    if isinstance(workflow, Saga):
        return await _forward(workflow, stretch)
    outcome = await _follow(workflow, stretch)
    if isinstance(outcome, Dead):
        error = outcome.failure.error_type
        logger.warning("dead message_id=%s message_type=%s error=%s", lease.id, workflow.name, error)
    return outcome


async def _forward(saga: Saga[Any, Any], stretch: Stretch) -> Outcome:
    """Let a saga go on; one that has failed for good is claimed again at once, to be undone."""
    lease, tools = stretch.lease, stretch.tools
    try:
        outcome: Outcome = await _follow(saga, stretch)
    except (LeaseLostError, StoreUnavailableError, BusyError):
        raise
    except ConfigurationError as error:
        outcome = Dead(failure_of(error, "configuration"))
    except BaseException as error:
        if stopped_from_outside(error):
            raise
        outcome = decide(saga.retry, lease, error, now=stretch.now, chance=tools.chance)
        if isinstance(outcome, Again):
            raise
    if not isinstance(outcome, Dead):
        return outcome
    return undoing(lease, outcome.failure, stretch.journal)


async def _follow(workflow: Workflow[Any, Any], stretch: Stretch) -> Outcome:
    """Run the workflow's code from its beginning; and again if it only fails because of what a redrive is to mend."""
    while True:
        try:
            return await _run(workflow, stretch)
        except BaseException as error:
            if not await stretch.reopen(error):
                return _outcome(workflow, stretch, stretch.over or error)


async def _run(workflow: Workflow[Any, Any], stretch: Stretch) -> Outcome:
    run = SagaRun(stretch) if isinstance(workflow, Saga) else Run(stretch)
    journal = stretch.journal
    token = current.set(run)
    try:
        arguments = workflow.signature.decode(stretch.lease.envelope.payload_inline or b"")
        if workflow.timeout_seconds is None:
            result = await workflow.function(run, **arguments)
        else:
            call = partial(workflow.function, run, **arguments)
            result = await in_time(call, workflow.timeout_seconds, workflow.name)
        stretch.refuse()
        journal.end()
        done = workflow.signature.encode_result(result)
        return Done(done, tuple(journal.sends), workflow.key_window, notes=tuple(journal.notes))
    finally:
        current.reset(token)


def _outcome(workflow: Workflow[Any, Any], stretch: Stretch, error: BaseException) -> Outcome:
    if stretch.parking and stretch.over is None:
        return stretch.parked()
    if isinstance(error, LeaseLostError) or stopped_from_outside(error):
        raise error
    if isinstance(error, ReplayError | UncertainError):
        return until_a_person_acts(stretch.lease, error)
    for kind, reason in _FOR_GOOD.items():
        if isinstance(error, kind):
            return Dead(failure_of(error, reason), key_window=workflow.key_window)
    raise error


#: What a workflow that does not catch it dies of at once: tried again, it would be told the same.
_FOR_GOOD: dict[type[Exception], str] = {
    StepError: "step failed",
    DeadError: "child failed",
    CancelledMessageError: "child failed",
    SignalTimeoutError: "no signal",
}
