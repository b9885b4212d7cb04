"""For people: what of that which is open would break under the code at hand, told before the code is deployed.

Every message that is alive is looked at, and every run is rehearsed: its workflow is run against its journal up to the
first thing that it has not done yet.  Nothing is called, sent or written, except by code outside of steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from onefold import limits
from onefold.app import App
from onefold.envelope import Envelope
from onefold.errors import (
    CancelledMessageError,
    DeadError,
    DecodeError,
    OnefoldError,
    ReplayError,
    SignalTimeoutError,
    StepError,
)
from onefold.inside import current
from onefold.inspection import OPEN
from onefold.journal import Journal
from onefold.recurring import Schedule
from onefold.saga import Saga, SagaRun, rehearse
from onefold.status import begun_steps, cause_of
from onefold.step import Step
from onefold.store import Lease, Query, Record
from onefold.stretch import Parking, Stretch
from onefold.threads import Threads
from onefold.tools import Tools
from onefold.workflow import Run, Workflow

#: A workflow that takes longer to get through its journal waits for something that is not a step.
REHEARSAL_SECONDS_MAX = 5.0

#: With these a run ends, but not because of the code.
_ENDS = (StepError, DeadError, CancelledMessageError, SignalTimeoutError)


Kind = Literal["unknown type", "unknown version", "arguments", "journal"]
#: Called with how many more messages were looked at.
Looked = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One message, or one schedule, that this code could not handle."""

    #: Empty for a schedule, which makes messages.
    message_id: str
    message_type: str
    version: int
    kind: Kind
    detail: str
    schedule: str | None = None


async def preflight(app: App, looked: Looked | None = None) -> list[Problem]:
    """Check everything that is open against the handlers of an open app, and return what would break.

    An empty list says that this code can go on with all of it; it changes nothing.
    Messages are looked at page by page, so what is sent meanwhile may be missed; that comes from code that runs now.
    """
    found = [_of_schedule(app, one) for one in (await app.schedules()).values()]
    async for record in _open(app):
        found.append(await _of_message(app, record))
        if looked is not None:
            looked(1)
    return [problem for problem in found if problem is not None]


async def _open(app: App) -> AsyncIterator[Record]:
    after = ""
    while page := await app.find(Query(states=OPEN, after=after, limit=limits.PAGE_MAX)):
        for record in page:
            yield record
        after = page[-1].envelope.id


def _of_schedule(app: App, schedule: Schedule) -> Problem | None:
    template = schedule.record.template
    wrong = _readable(app, template)
    return _problem(template, *wrong, schedule=schedule.name) if isinstance(wrong, tuple) else None


async def _of_message(app: App, record: Record) -> Problem | None:
    envelope = record.envelope
    read = _readable(app, envelope)
    if isinstance(read, tuple):
        return _problem(envelope, *read)
    task = app._registry.handler(envelope)
    if isinstance(task, Workflow) and (steps := await app.store.steps(envelope.id)):
        wrong = await _rehearse(app, task, record, read, steps)
        return _problem(envelope, "journal", wrong) if wrong else None
    return None


def _problem(envelope: Envelope, kind: Kind, detail: str, schedule: str | None = None) -> Problem:
    id_ = envelope.id if schedule is None else ""
    return Problem(id_, envelope.message_type, envelope.schema_version, kind, detail, schedule)


def _readable(app: App, envelope: Envelope) -> dict[str, Any] | tuple[Kind, str]:
    """Return the arguments with which a handler would be called, or why none can be."""
    if envelope.message_type not in app.tasks:
        return "unknown type", "no task or workflow has this name"
    task = app._registry.handler(envelope)
    if not task.understands(envelope):
        return "unknown version", f"the code has version {task.version}"
    try:
        return task.signature.decode(envelope.payload_inline or b"")
    except DecodeError as error:
        return "arguments", str(error)


async def _rehearse(
    app: App, workflow: Workflow[Any, Any], record: Record, arguments: dict[str, Any], steps: list[Step]
) -> str | None:
    """Run a workflow against its journal and return what is wrong, if anything."""
    now = app._clock.now()
    lease = Lease(record.envelope, record.fence, 1, 0, record.replay_count, now, "preflight")
    tools = Tools(app.store, app._clock, app._chance, app._prepare, str(app.origin), None, Threads())
    if isinstance(workflow, Saga) and cause_of(steps, record.replay_count) is not None:
        return await _rehearse_undo(workflow, lease, tools, steps)
    journal = Journal(lease.id, steps, replay_count=record.replay_count)
    stretch = Stretch(lease, journal, tools)
    run = SagaRun(stretch) if isinstance(workflow, Saga) else Run(stretch)
    token = current.set(run)
    try:
        async with asyncio.timeout(REHEARSAL_SECONDS_MAX):
            await workflow.function(run, **arguments)
        stretch.refuse()
        journal.end()
    except Parking:
        pass
    except TimeoutError:
        return f"it waits for something that is not a step for more than {REHEARSAL_SECONDS_MAX:g} s"
    except Exception as error:
        return _told(stretch.over or error)
    finally:
        current.reset(token)
    return None if stretch.over is None else _told(stretch.over)


async def _rehearse_undo(saga: Saga[Any, Any], lease: Lease, tools: Tools, steps: list[Step]) -> str | None:
    """A saga that is being undone needs code that still asks for every step that was begun."""
    try:
        async with asyncio.timeout(REHEARSAL_SECONDS_MAX):
            planned = await rehearse(saga, lease, tools, steps)
    except TimeoutError:
        return f"it waits for something that is not a step for more than {REHEARSAL_SECONDS_MAX:g} s"
    except OnefoldError as error:
        return _told(error)
    missing = [line.name for line in begun_steps(steps) if line.name not in planned]
    return f"it is to undo {missing[0]}, which the code does not ask for" if missing else None


def _told(error: BaseException) -> str | None:
    if isinstance(error, _ENDS):
        return None
    if isinstance(error, ReplayError):
        return f"the code says {error.code}, the journal says {error.journal}"
    return str(error) if isinstance(error, OnefoldError) else f"it raises {type(error).__name__}: {error}"
