"""For people: where a saga stands, read from its journal and its message.

Nothing is kept for it apart from the lines that the saga needs itself, so what is shown cannot differ from what is so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from onefold.clock import MICROSECONDS, to_datetime
from onefold.errors import HandlerTimeoutError
from onefold.journal import Begun, decode_begun, decode_ended, decode_failure, decode_retried, decode_sent
from onefold.receipt import COMPENSATED
from onefold.step import UNDO_PREFIX, Step, StepKind, asked_name
from onefold.store import Ended, Failure, Record, State

#: The type of the failure of a step that was given up because its time was over.
_TIMEOUT = HandlerTimeoutError.__name__


class SagaStatus(StrEnum):
    """Where a saga stands; the table in ``docs/how-to/sagas.md`` says how each is reached."""

    STARTED = "started"
    COMPLETING = "completing"
    COMPLETED = "completed"
    COMPENSATING = "compensating"
    COMPENSATED = "compensated"
    FAILED = "failed"
    STUCK = "stuck"


class StepStatus(StrEnum):
    """What is known of a step of a saga, or of its undo."""

    #: Its turn has not come.
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    #: It was begun, and nobody will find out what became of it.
    UNKNOWN = "unknown"
    #: An undo that has given up and waits for a person.
    STUCK = "stuck"
    #: There is no undo, by declaration.
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SagaStep:
    """One step of a saga, from the moment it was begun."""

    name: str
    status: StepStatus
    #: How often it was tried.
    attempts: int
    started_at: datetime
    completed_at: datetime | None
    #: When its only or first try is given up.
    timeout_at: datetime | None
    error: Failure | None
    #: What takes it back; None if nothing does, and then why.
    undo: str | None
    never: str | None
    #: None as long as the saga is not being undone.
    undo_status: StepStatus | None = None
    undo_attempts: int = 0
    undone_at: datetime | None = None
    undo_error: Failure | None = None


@dataclass(frozen=True, slots=True)
class SagaRecord:
    """A saga as people see it."""

    id: str
    status: SagaStatus
    #: Why it is undone or has failed, if so.
    cause: Failure | None
    steps: tuple[SagaStep, ...]


def undo_name(step: str) -> str:
    """Return the name under which a step is undone."""
    return f"{UNDO_PREFIX}{step}"


def undo_line(replay_count: int) -> str:
    """Name the line that says why a saga is undone."""
    return f"undo#{replay_count}"


def is_of_undo(line: Step) -> bool:
    """Whether a line was written while the saga was undone."""
    return line.name.startswith(UNDO_PREFIX)


def begun_steps(lines: Iterable[Step]) -> list[Step]:
    """Return the lines of the steps that may have had an effect, in the order in which they were begun."""
    return [line for line in lines if line.kind is StepKind.BEGUN]


def cause_of(lines: Sequence[Step], replay_count: int) -> Failure | None:
    """Return why a saga is being undone, or None if it is not.

    A saga that failed before anything was begun may be redriven, and then begins as if for the first time.
    """
    causes = {line.name: line for line in lines if line.kind is StepKind.UNDO}
    if begun_steps(lines):
        return next((decode_failure(line.value) for line in causes.values()), None)
    found = causes.get(undo_line(replay_count))
    return None if found is None else decode_failure(found.value)


def stuck_undos(lines: Iterable[Step]) -> list[str]:
    """Return the undos that have given up and are not through yet."""
    lines = list(lines)
    through = {line.name for line in lines if line.kind is StepKind.RESULT}
    names = dict.fromkeys(line.name.rpartition("!")[0] for line in lines if line.kind is StepKind.STUCK)
    return [name for name in names if name not in through]


# for people


def read_saga(record: Record, lines: Sequence[Step]) -> SagaRecord:
    """Return where a saga stands."""
    cause = cause_of(lines, record.replay_count)
    found = {(line.name, line.kind): line for line in lines}
    # A saga that has ended is not being undone any more; nor is one that was completed.
    undone = cause is not None and record.state is not State.DONE
    steps = tuple(_read_step(line, found, undone=undone) for line in begun_steps(lines))
    return SagaRecord(record.envelope.id, _status(record, lines, steps, cause), cause or record.failure, steps)


def _status(record: Record, lines: Sequence[Step], steps: Sequence[SagaStep], cause: Failure | None) -> SagaStatus:
    if record.state is State.DONE:
        return SagaStatus.COMPLETED
    if record.state.ended:
        compensated = record.failure is not None and record.failure.reason == COMPENSATED
        return SagaStatus.COMPENSATED if compensated else SagaStatus.FAILED
    if stuck_undos(lines):
        return SagaStatus.STUCK
    if cause is not None:
        return SagaStatus.COMPENSATING
    through = any(step.status is StepStatus.COMPLETED for step in steps)
    return SagaStatus.COMPLETING if through else SagaStatus.STARTED


def _read_step(line: Step, found: dict[tuple[str, StepKind], Step], *, undone: bool) -> SagaStep:
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


def _with_undo(step: SagaStep, begun: Begun, found: dict[tuple[str, StepKind], Step]) -> SagaStep:
    if begun.undo is None:
        return replace(step, undo_status=StepStatus.NEVER)
    name = undo_name(step.name)
    status, ended_at, error = _outcome(name, found)
    tried = any(one == name or one.startswith((f"{name}!", f"{name}/")) for one, _ in found)
    stuck = [line for (one, kind), line in found.items() if kind is StepKind.STUCK and one.startswith(f"{name}!")]
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


def _outcome(name: str, found: dict[tuple[str, StepKind], Step]) -> tuple[StepStatus, int | None, Failure | None]:
    """Return what became of a step or an undo, when, and what it failed with."""
    if (line := found.get((name, StepKind.RESULT))) is not None:
        return StepStatus.COMPLETED, line.at, None
    if (line := found.get((name, StepKind.FAILED))) is not None:
        if (name, StepKind.SENT) not in found:
            status = StepStatus.UNKNOWN if _timed_out(name, line, found) else StepStatus.FAILED
            return status, line.at, decode_failure(line.value)
        ended = decode_ended(line.value)
        status = StepStatus.FAILED if ended.state.ended else StepStatus.UNKNOWN
        return status, line.at, ended.failure
    sent = found.get((name, StepKind.SENT))
    ends = [line for (one, kind), line in found.items() if kind is StepKind.CHILD and asked_name(one) == name]
    told = [(line.at, ended) for line in ends if sent and _is_of(sent, ended := decode_ended(line.value))]
    if not told:
        return StepStatus.RUNNING, None, None
    at, ended = told[-1]
    return StepStatus.COMPLETED if ended.state is State.DONE else StepStatus.FAILED, at, ended.failure


def _timed_out(name: str, failed: Step, found: dict[tuple[str, StepKind], Step]) -> bool:
    """Whether a try of a local step was given up: what it had begun at the outside may still have happened."""
    tries = [line for (one, kind), line in found.items() if kind is StepKind.RETRY and one.startswith(f"{name}!")]
    failures = [decode_retried(line.value).failure for line in tries]
    return any(one and one.error_type.endswith(_TIMEOUT) for one in (decode_failure(failed.value), *failures))


def _is_of(sent: Step, ended: Ended) -> bool:
    """Whether an end is that of the message that was sent; one from before a restart may report too."""
    return decode_sent(sent.value).id == ended.id


def _attempts(name: str, found: dict[tuple[str, StepKind], Step]) -> int:
    return 1 + sum(kind is StepKind.RETRY and one.startswith(f"{name}!") for one, kind in found)
