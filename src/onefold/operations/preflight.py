"""For operators: the open messages that this code could not handle, listed before it is deployed.

Every message that has not ended is checked, and every run is rehearsed: its workflow is run against its journal up to
the first step that has not been done.  Nothing is called, sent or written, except by code outside of steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from onefold import limits
from onefold.current import current
from onefold.errors import (
    CancelledMessageError,
    DeadError,
    DecodeError,
    OnefoldError,
    ReplayError,
    SignalTimeoutError,
    StepError,
)
from onefold.handlers.environment import Environment
from onefold.message.envelope import Envelope
from onefold.operations.runs import OPEN
from onefold.registry import Registry
from onefold.schedules.register import Schedule
from onefold.store import Lease, Query, Record, Store
from onefold.store.journal_lines import Line
from onefold.workflows.journal import Journal
from onefold.workflows.replay import Parking, Replay
from onefold.workflows.saga import Saga, SagaRun, begun_steps, cause_of, rehearse
from onefold.workflows.workflow import Run, Workflow

#: A workflow that takes longer to replay its journal waits for something that is not a step.
REHEARSAL_SECONDS_MAX = 5.0

#: Errors with which a run ends for reasons other than the code.
_ENDS = (StepError, DeadError, CancelledMessageError, SignalTimeoutError)


Kind = Literal["unknown type", "unknown version", "arguments", "journal"]
#: Called with the number of messages that were checked since the last call.
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One message, or one schedule, that this code could not handle."""

    #: Empty for a schedule, whose messages would have the problem.
    message_id: str
    message_type: str
    version: int
    kind: Kind
    detail: str
    schedule: str | None = None


async def preflight(
    registry: Registry, environment: Environment, schedules: Iterable[Schedule], advance: Advance | None = None
) -> list[Problem]:
    """Check all that is open against the declared handlers, and return what would break; see ``App.preflight``."""
    found = [_of_schedule(registry, schedule) for schedule in schedules]
    async for record in _open(environment.store):
        found.append(await _of_message(registry, environment, record))
        if advance is not None:
            advance(1)
    return [problem for problem in found if problem is not None]


async def _open(store: Store) -> AsyncIterator[Record]:
    after = ""
    while page := await store.find(Query(states=OPEN, after=after, limit=limits.PAGE_MAX)):
        for record in page:
            yield record
        after = page[-1].envelope.id


def _of_schedule(registry: Registry, schedule: Schedule) -> Problem | None:
    template = schedule.record.template
    wrong = _readable(registry, template)
    return _problem(template, *wrong, schedule=schedule.name) if isinstance(wrong, tuple) else None


async def _of_message(registry: Registry, environment: Environment, record: Record) -> Problem | None:
    envelope = record.envelope
    read = _readable(registry, envelope)
    if isinstance(read, tuple):
        return _problem(envelope, *read)
    task = registry.handler(envelope)
    if isinstance(task, Workflow) and (steps := await environment.store.steps(envelope.id)):
        wrong = await _rehearse(environment, task, record, read, steps)
        return _problem(envelope, "journal", wrong) if wrong else None
    return None


def _problem(envelope: Envelope, kind: Kind, detail: str, schedule: str | None = None) -> Problem:
    id_ = envelope.id if schedule is None else ""
    return Problem(id_, envelope.message_type, envelope.schema_version, kind, detail, schedule)


def _readable(registry: Registry, envelope: Envelope) -> dict[str, Any] | tuple[Kind, str]:
    """Return the arguments with which a handler would be called, or why none can be."""
    if envelope.message_type not in registry.tasks:
        return "unknown type", "no task or workflow has this name"
    task = registry.handler(envelope)
    if not task.understands(envelope):
        return "unknown version", f"the code has version {task.version}"
    try:
        return task.signature.decode(envelope.payload_inline or b"")
    except DecodeError as error:
        return "arguments", str(error)


async def _rehearse(
    environment: Environment, workflow: Workflow[Any, Any], record: Record, arguments: dict[str, Any], steps: list[Line]
) -> str | None:
    """Run a workflow against its journal and return the problem, if there is one."""
    now = environment.clock.now()
    lease = Lease(record.envelope, record.fence, 1, 0, record.replay_count, now, "preflight")
    if isinstance(workflow, Saga) and cause_of(steps, record.replay_count) is not None:
        return await _rehearse_undo(workflow, lease, environment, steps)
    journal = Journal(lease.id, steps, replay_count=record.replay_count)
    replay = Replay(lease, journal, environment)
    run = SagaRun(replay) if isinstance(workflow, Saga) else Run(replay)
    token = current.set(run)
    try:
        async with asyncio.timeout(REHEARSAL_SECONDS_MAX):
            await workflow.function(run, **arguments)
        replay.raise_if_over()
        journal.check_end()
    except Parking:
        pass
    except TimeoutError:
        return f"it waits for something that is not a step for more than {REHEARSAL_SECONDS_MAX:g} s"
    except Exception as error:
        return _problem_text(replay.over or error)
    finally:
        current.reset(token)
    return None if replay.over is None else _problem_text(replay.over)


async def _rehearse_undo(saga: Saga[Any, Any], lease: Lease, environment: Environment, steps: list[Line]) -> str | None:
    """Check that the code of a saga that is being undone still has every step that was begun."""
    try:
        async with asyncio.timeout(REHEARSAL_SECONDS_MAX):
            planned = await rehearse(saga, lease, environment, steps)
    except TimeoutError:
        return f"it waits for something that is not a step for more than {REHEARSAL_SECONDS_MAX:g} s"
    except OnefoldError as error:
        return _problem_text(error)
    missing = [line.name for line in begun_steps(steps) if line.name not in planned]
    return f"it has to undo {missing[0]}, a step that the code does not take" if missing else None


def _problem_text(error: BaseException) -> str | None:
    """Describe the error of a rehearsal; None if it ends the run for reasons other than the code."""
    if isinstance(error, _ENDS):
        return None
    if isinstance(error, ReplayError):
        return f"the code says {error.code}, the journal says {error.journal}"
    return str(error) if isinstance(error, OnefoldError) else f"it raises {type(error).__name__}: {error}"
