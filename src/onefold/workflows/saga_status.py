"""For operators: the status of a saga, read from its journal and its message.

It is computed from the lines by which the saga itself runs, so it cannot differ from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from onefold.clock import MICROSECONDS, to_datetime
from onefold.errors import HandlerTimeoutError
from onefold.store import Ended, Failure, Record, State
from onefold.store.journal_lines import Line, LineKind, asked_name
from onefold.tasks.receipt import COMPENSATED
from onefold.workflows.journal import Begun, decode_begun, decode_ended, decode_failure, decode_retried, decode_sent
from onefold.workflows.saga import begun_steps, cause_of, stuck_undos, undo_name

#: The error type of a step that timed out.
_TIMEOUT = HandlerTimeoutError.__name__


class SagaStatus(StrEnum):
    """The status of a saga; the table in ``docs/how-to/sagas.md`` says how each is reached."""

    STARTED = "started"
    COMPLETING = "completing"
    COMPLETED = "completed"
    COMPENSATING = "compensating"
    COMPENSATED = "compensated"
    FAILED = "failed"
    STUCK = "stuck"


class StepStatus(StrEnum):
    """The status of a step of a saga, or of its undo."""

    #: Its turn has not come.
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    #: It was begun, and whether it had its effect will not be known.
    UNKNOWN = "unknown"
    #: An undo that has failed for good and waits for a person.
    STUCK = "stuck"
    #: There is no undo, by declaration.
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SagaStep:
    """One step of a saga that was begun."""

    name: str
    status: StepStatus
    #: How often it was tried.
    attempts: int
    started_at: datetime
    completed_at: datetime | None
    #: When the timeout of its first try passes.
    timeout_at: datetime | None
    error: Failure | None
    #: The name of its undo; None if it has none.
    undo: str | None
    #: Why it has none.
    never: str | None
    #: None as long as the saga is not being undone.
    undo_status: StepStatus | None = None
    undo_attempts: int = 0
    undone_at: datetime | None = None
    undo_error: Failure | None = None


@dataclass(frozen=True, slots=True)
class SagaRecord:
    """A saga with its status and steps, as ``app`` and the command line show it."""

    id: str
    status: SagaStatus
    #: Why it is undone or has failed; None if neither.
    cause: Failure | None
    steps: tuple[SagaStep, ...]


def read_saga(record: Record, lines: Sequence[Line]) -> SagaRecord:
    """Return the status and steps of a saga."""
    cause = cause_of(lines, record.replay_count)
    found = {(line.name, line.kind): line for line in lines}
    undone = cause is not None and record.state is not State.DONE
    steps = tuple(_read_step(line, found, undone=undone) for line in begun_steps(lines))
    return SagaRecord(record.envelope.id, _status(record, lines, steps, cause), cause or record.failure, steps)


def _status(record: Record, lines: Sequence[Line], steps: Sequence[SagaStep], cause: Failure | None) -> SagaStatus:
    if record.state is State.DONE:
        return SagaStatus.COMPLETED
    if record.state.ended:
        compensated = record.failure is not None and record.failure.reason == COMPENSATED
        return SagaStatus.COMPENSATED if compensated else SagaStatus.FAILED
    if stuck_undos(lines):
        return SagaStatus.STUCK
    if cause is not None:
        return SagaStatus.COMPENSATING
    completed = any(step.status is StepStatus.COMPLETED for step in steps)
    return SagaStatus.COMPLETING if completed else SagaStatus.STARTED


def _read_step(line: Line, found: dict[tuple[str, LineKind], Line], *, undone: bool) -> SagaStep:
    begun, name = decode_begun(line.value), line.name
    status, ended_at, error = _outcome(name, found)
    if status is StepStatus.RUNNING and undone:
        status = StepStatus.UNKNOWN
    timeout = None if begun.timeout is None else line.at + round(begun.timeout * MICROSECONDS)
    step = SagaStep(
        name=name,
        status=status,
        attempts=_attempts(name, found),
        started_at=to_datetime(line.at),
        completed_at=None if ended_at is None else to_datetime(ended_at),
        timeout_at=None if timeout is None else to_datetime(timeout),
        error=error,
        undo=begun.undo,
        never=begun.never,
    )
    return _with_undo(step, begun, found) if undone else step


def _with_undo(step: SagaStep, begun: Begun, found: dict[tuple[str, LineKind], Line]) -> SagaStep:
    if begun.undo is None:
        return replace(step, undo_status=StepStatus.NEVER)
    name = undo_name(step.name)
    status, ended_at, error = _outcome(name, found)
    tried = any(one == name or one.startswith((f"{name}!", f"{name}/")) for one, _ in found)
    stuck = [line for (one, kind), line in found.items() if kind is LineKind.STUCK and one.startswith(f"{name}!")]
    if status is not StepStatus.COMPLETED and stuck:
        status, error = StepStatus.STUCK, decode_failure(stuck[-1].value)
    elif not tried:
        status = StepStatus.PENDING
    return replace(
        step,
        undo_status=status,
        undo_attempts=_attempts(name, found) if tried else 0,
        undone_at=None if ended_at is None or status is not StepStatus.COMPLETED else to_datetime(ended_at),
        undo_error=error,
    )


def _outcome(name: str, found: dict[tuple[str, LineKind], Line]) -> tuple[StepStatus, int | None, Failure | None]:
    """Return the status of a step or an undo, when it ended, and its failure."""
    if (line := found.get((name, LineKind.RESULT))) is not None:
        return StepStatus.COMPLETED, line.at, None
    if (line := found.get((name, LineKind.FAILED))) is not None:
        if (name, LineKind.SENT) not in found:
            status = StepStatus.UNKNOWN if _timed_out(name, line, found) else StepStatus.FAILED
            return status, line.at, decode_failure(line.value)
        ended = decode_ended(line.value)
        status = StepStatus.FAILED if ended.state.ended else StepStatus.UNKNOWN
        return status, line.at, ended.failure
    sent = found.get((name, LineKind.SENT))
    ends = [line for (one, kind), line in found.items() if kind is LineKind.CHILD and asked_name(one) == name]
    own = [(line.at, ended) for line in ends if sent and _is_of(sent, ended := decode_ended(line.value))]
    if not own:
        return StepStatus.RUNNING, None, None
    at, ended = own[-1]
    return StepStatus.COMPLETED if ended.state is State.DONE else StepStatus.FAILED, at, ended.failure


def _timed_out(name: str, failed: Line, found: dict[tuple[str, LineKind], Line]) -> bool:
    """Whether a try of a step that is a function timed out: its call to the outside may still have had its effect."""
    tries = [line for (one, kind), line in found.items() if kind is LineKind.RETRY and one.startswith(f"{name}!")]
    failures = [decode_retried(line.value).failure for line in tries]
    return any(one and one.error_type.endswith(_TIMEOUT) for one in (decode_failure(failed.value), *failures))


def _is_of(sent: Line, ended: Ended) -> bool:
    """Whether an end is that of this message; one that was sent before a restart may report too."""
    return decode_sent(sent.value).id == ended.id


def _attempts(name: str, found: dict[tuple[str, LineKind], Line]) -> int:
    return 1 + sum(kind is LineKind.RETRY and one.startswith(f"{name}!") for one, kind in found)
