"""For people: what of that which is open would break under the code at hand, told before the code is deployed.

Every message that is alive is looked at, and every run is rehearsed: its workflow is run against its journal up to the
first thing that it has not done yet.  Nothing is called, sent or written, except by code outside of steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from onefold import limits
from onefold.app import App
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
from onefold.journal import Journal
from onefold.step import Step
from onefold.store import Lease, Query, Record, State
from onefold.stretch import Parking, Stretch
from onefold.tools import Tools
from onefold.workflow import Run, Workflow

#: A workflow that takes longer to get through its journal waits for something that is not a step.
REHEARSAL_SECONDS_MAX = 5.0

_ALIVE = (State.SCHEDULED, State.LEASED, State.PARKED)
#: With these a run ends, but not because of the code.
_ENDS = (StepError, DeadError, CancelledMessageError, SignalTimeoutError)


@dataclass(frozen=True, slots=True)
class Problem:
    """One message that this code could not handle."""

    message_id: str
    message_type: str
    version: int
    kind: Literal["unknown type", "unknown version", "arguments", "journal"]
    detail: str


async def preflight(app: App) -> list[Problem]:
    """Check everything that is open against the handlers of an open app, and return what would break.

    An empty list says that this code can go on with all of it; it changes nothing.
    """
    found = [await _problem(app, record) async for record in _open(app)]
    return [problem for problem in found if problem is not None]


async def _open(app: App) -> AsyncIterator[Record]:
    after = ""
    while page := await app.find(Query(states=_ALIVE, after=after, limit=limits.PAGE)):
        for record in page:
            yield record
        after = page[-1].envelope.id


async def _problem(app: App, record: Record) -> Problem | None:
    envelope = record.envelope

    def problem(kind: Literal["unknown type", "unknown version", "arguments", "journal"], detail: str) -> Problem:
        return Problem(envelope.id, envelope.message_type, envelope.schema_version, kind, detail)

    if envelope.message_type not in app.tasks:
        return problem("unknown type", "no task or workflow has this name")
    task = app._registry.handler(envelope)
    if envelope.schema_version > task.version or (envelope.pinned and envelope.schema_version != task.version):
        return problem("unknown version", f"the code has version {task.version}")
    try:
        arguments = task.signature.decode(envelope.payload_inline or b"")
    except DecodeError as error:
        return problem("arguments", str(error))
    if isinstance(task, Workflow) and (steps := await app.store.steps(envelope.id)):
        wrong = await _rehearse(app, task, record, arguments, steps)
        return problem("journal", wrong) if wrong else None
    return None


async def _rehearse(
    app: App, workflow: Workflow[Any, Any], record: Record, arguments: dict[str, Any], steps: list[Step]
) -> str | None:
    """Run a workflow against its journal and return what is wrong, if anything."""
    now = app._clock.now()
    lease = Lease(record.envelope, record.fence, 1, 0, record.replay_count, now, "preflight")
    journal = Journal(lease.id, steps, replay_count=record.replay_count)
    tools = Tools(app.store, app._clock, app._chance, app._prepare, None, lambda: now)
    stretch = Stretch(lease, journal, tools, dry=True)
    run = Run(stretch)
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


def _told(error: BaseException) -> str | None:
    if isinstance(error, _ENDS):
        return None
    if isinstance(error, ReplayError):
        return f"the code says {error.code}, the journal says {error.journal}"
    return str(error) if isinstance(error, OnefoldError) else f"it raises {type(error).__name__}: {error}"
