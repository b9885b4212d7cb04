"""Stages 7 to 9 for workflows: one claim of a run, from its journal to an outcome."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from onefold.current import current
from onefold.errors import (
    CancelledMessageError,
    ConfigurationError,
    DeadError,
    LeaseLostError,
    ReplayError,
    SignalTimeoutError,
    StepError,
    StepLimitError,
    StoreUnavailableError,
    UncertainError,
    UnknownArgumentError,
    UnreadableSignalError,
)
from onefold.handlers.call import in_time
from onefold.handlers.environment import Environment
from onefold.handlers.lease import Held, stopped_from_outside
from onefold.handlers.threads import BusyError
from onefold.store import Again, Dead, Done, Failure, Outcome, read_journal
from onefold.tasks.failure_text import failure_of
from onefold.tasks.retry import decide
from onefold.workflows.compensation import compensate, undoing
from onefold.workflows.journal import Journal
from onefold.workflows.replay import Replay, until_a_person_acts
from onefold.workflows.saga import Saga, SagaRun, cause_of
from onefold.workflows.workflow import Run, Workflow

logger = logging.getLogger("onefold")


async def drive(
    workflow: Workflow[Any, Any], held: Held, environment: Environment, refusal: Failure | None = None
) -> Outcome:
    """Run a workflow until it waits, fails or returns, and return the outcome to be settled.

    ``refusal`` is the reason why a saga must not go on, so that it is undone.
    Raises the errors of the workflow's own code, and ``LeaseLostError`` when another worker owns the run.
    """
    lease = held.lease
    lines = await read_journal(environment.store, lease) if lease.journal is None else lease.journal
    if isinstance(workflow, Saga) and (cause := cause_of(lines, lease.replay_count)) is not None:
        return await compensate(workflow, held, environment, lines, cause, refusal)
    if refusal is not None:
        return undoing(lease, refusal)
    replay = Replay(
        lease, Journal(lease.id, lines, replay_count=lease.replay_count), environment, held, workflow.max_steps
    )
    if isinstance(workflow, Saga):
        return await _drive_saga(workflow, replay)
    outcome = await _replay_until_settled(workflow, replay)
    if isinstance(outcome, Dead):
        error = outcome.failure.error_type
        logger.warning("dead message_id=%s message_type=%s error=%s", lease.id, workflow.name, error)
    return outcome


async def _drive_saga(saga: Saga[Any, Any], replay: Replay) -> Outcome:
    """Let a saga go on; one that has failed for good is claimed again at once, to be undone."""
    lease, environment = replay.lease, replay.environment
    try:
        outcome: Outcome = await _replay_until_settled(saga, replay)
    except (LeaseLostError, StoreUnavailableError, UnknownArgumentError, BusyError):
        raise
    except ConfigurationError as error:
        outcome = Dead(failure_of(error, "configuration"))
    except BaseException as error:
        if stopped_from_outside(error):
            raise
        outcome = decide(saga.retry, lease, error, now=replay.now, chance=environment.chance)
        if isinstance(outcome, Again):
            raise
    if not isinstance(outcome, Dead):
        return outcome
    return undoing(lease, outcome.failure, replay.journal)


async def _replay_until_settled(workflow: Workflow[Any, Any], replay: Replay) -> Outcome:
    """Run the workflow's code from its beginning, and again if only failures from before a redrive made it fail."""
    while True:
        try:
            return await _run(workflow, replay)
        except BaseException as error:
            if not await replay.reopen(error):
                return _outcome(workflow, replay, replay.over or error)


async def _run(workflow: Workflow[Any, Any], replay: Replay) -> Outcome:
    run = SagaRun(replay) if isinstance(workflow, Saga) else Run(replay)
    journal = replay.journal
    token = current.set(run)
    try:
        arguments = workflow.signature.decode(replay.lease.envelope.payload_inline or b"")
        if workflow.timeout_seconds is None:
            result = await workflow.function(run, **arguments)
        else:
            call = partial(workflow.function, run, **arguments)
            result = await in_time(call, workflow.timeout_seconds, workflow.name)
        replay.raise_if_over()
        journal.check_end()
        data = workflow.signature.encode_result(result)
        return Done(data, tuple(journal.sends), workflow.key_window, notes=tuple(journal.notes))
    finally:
        current.reset(token)


def _outcome(workflow: Workflow[Any, Any], replay: Replay, error: BaseException) -> Outcome:
    if replay.parking and replay.over is None:
        return replay.parked()
    if isinstance(error, LeaseLostError) or stopped_from_outside(error):
        raise error
    if isinstance(error, ReplayError | UncertainError | StepLimitError | UnreadableSignalError):
        return until_a_person_acts(replay.lease, error)
    for kind, reason in _FINAL.items():
        if isinstance(error, kind):
            return Dead(failure_of(error, reason), key_window=workflow.key_window)
    raise error


#: Errors that make a workflow which does not catch them a dead letter at once, and the reasons shown: they come from
#: the journal, so every retry would raise them again.
_FINAL: dict[type[Exception], str] = {
    StepError: "step failed",
    DeadError: "child failed",
    CancelledMessageError: "child failed",
    SignalTimeoutError: "no signal",
}
