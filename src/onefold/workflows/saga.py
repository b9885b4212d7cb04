"""Stages 1 and 7 for sagas: workflows in which every step declares how it is undone.

Before a step of a saga is called or sent, that is recorded.  From then on it may have had an effect, even if it fails
or the worker dies, so it is undone when the saga fails.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from onefold import limits
from onefold.current import current
from onefold.errors import ConfigurationError
from onefold.handlers.call import in_time
from onefold.handlers.environment import Environment
from onefold.handlers.lease import stopped_from_outside
from onefold.message.codec import fingerprint_of_call
from onefold.store import Failure, Lease
from onefold.store.journal_lines import UNDO_PREFIX, Line, LineKind, encode
from onefold.tasks.options import TaskSettings
from onefold.tasks.task import BoundTask, Sender, Task
from onefold.workflows.children import Child
from onefold.workflows.journal import Begun, Journal, decode_failure
from onefold.workflows.replay import Replay
from onefold.workflows.steps import Never, StepFunction, StepSettings, Undo, check_command, settings_of
from onefold.workflows.workflow import Run, Workflow

P = ParamSpec("P")
R = TypeVar("R")


class Saga(Workflow[P, R]):
    """A workflow that undoes its steps when it fails: it ends completed or compensated, or is stuck."""

    saga = True

    def __init__(self, sender: Sender, function: Callable[..., Any], settings: TaskSettings) -> None:
        super().__init__(sender, function, settings)
        for step in _steps_in(function):
            if settings_of(step).undo is None:
                raise _without_undo(self.name, _name_of(step))

    def __repr__(self) -> str:
        return f"<saga {self.name} version {self.version}>"


@dataclass(frozen=True, slots=True)
class Planned:
    """How a step that has begun is undone: its undo, and the arguments for it, which are the step's own."""

    undo: Undo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SagaRun(Run):
    """A saga's first argument: a run in which every step must declare how it is undone."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        #: The steps that the code has asked for, by name.
        self.planned: dict[str, Planned] = {}

    def _perform(
        self, function: StepFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        undo = self._undo_of(function.name, function.settings)
        limited = function.within(limits.SAGA_STEP_SECONDS)
        name = self._plan(self._name(function.name), undo, args, kwargs)
        return self._begin(name, undo, limited, args, kwargs)

    async def _begin(
        self, name: str, undo: Undo, function: StepFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record that a step is about to be called, and call it."""
        fingerprint = fingerprint_of_call(args, kwargs)
        with self._replay.noting_fatal():
            begun = self._journal.find(name, LineKind.BEGUN, fingerprint)
        if begun is None:
            self._replay.begin(name)
            await self._replay.record([_begun(name, undo, function.settings, fingerprint)])
        return await self._replay.perform(name, function, args, kwargs)

    def _command(
        self,
        task: Task[Any, Any] | BoundTask[Any, Any],
        settings: StepSettings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Child[Any]:
        check_command(task, settings)
        undo = self._undo_of(_name_of(task), settings)
        settings = settings.within(limits.SAGA_STEP_SECONDS)
        call = task.call(*args, **kwargs)
        name = self._plan(self._name(settings.name or call.task.name), undo, args, kwargs)
        begun = _begun(name, undo, settings, call.fingerprint)
        return Child(self._children, name, call, settings.timeout_seconds, begun)

    def _undo_of(self, step: str, settings: StepSettings) -> Undo:
        if settings.undo is None:
            raise _without_undo(self.message.message_type, step)
        return settings.undo

    def _plan(self, name: str, undo: Undo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        self.planned[name] = Planned(undo, args, kwargs)
        return name


async def rehearse(
    saga: Saga[Any, Any], lease: Lease, environment: Environment, lines: Sequence[Line]
) -> dict[str, Planned]:
    """Run a saga's code as far as its journal goes, without any effect, and return the undos of the steps it asks for.

    The journal does not have the arguments of steps, so only the code can tell them.  It stops at the first new step;
    errors it raises are ignored, because the cause for which the saga is undone is recorded already.
    """
    arguments = saga.signature.decode(lease.envelope.payload_inline or b"")
    journal = Journal(lease.id, [one for one in lines if not is_of_undo(one)], replay_count=lease.replay_count)
    replay = Replay(lease, journal, environment)
    run = SagaRun(replay)
    token = current.set(run)
    try:
        await in_time(lambda: saga.function(run, **arguments), saga.timeout_seconds, saga.name)
    except BaseException as error:
        if stopped_from_outside(error):
            raise
    finally:
        current.reset(token)
    if replay.over is not None:
        raise replay.over
    return run.planned


def _begun(name: str, undo: Undo, settings: StepSettings, fingerprint: bytes) -> Line:
    if isinstance(undo, Never):
        begun = Begun(None, undo.reason, settings.timeout_seconds)
    else:
        begun = Begun(_name_of(undo), None, settings.timeout_seconds)
    return Line(name, LineKind.BEGUN, encode(begun), fingerprint)


def _without_undo(saga: str, step: str) -> ConfigurationError:
    return ConfigurationError(
        f"{saga}: its step {step} has no undo; declare it with @app.step(undo=…), "
        "or with undo=never('reason') if there is nothing to undo"
    )


def _name_of(step: Any) -> str:
    """Return the name of a function or task for messages to people."""
    step = step.task if isinstance(step, BoundTask) else step
    return step.name if isinstance(step, Task) else str(getattr(step, "__name__", step))


def _steps_in(function: Callable[..., Any]) -> Iterator[Any]:
    """Return the steps that a saga's source calls by a plain name; those without an undo are refused at import.

    A step that is named otherwise, or defined later, is refused when it is called.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    run = next(iter(inspect.signature(function).parameters))
    local = set(function.__code__.co_varnames)
    known = {**function.__globals__, **_closure(function)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        of, first = node.func.value, node.args[0]
        if isinstance(of, ast.Name) and of.id == run and node.func.attr in ("step", "child"):
            step = known.get(first.id) if isinstance(first, ast.Name) and first.id not in local else None
            if callable(step) or isinstance(step, Task):
                yield step


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not defined yet
    return found


def undo_name(step: str) -> str:
    """Return the name of a step's undo in the journal."""
    return f"{UNDO_PREFIX}{step}"


def undo_line(replay_count: int) -> str:
    """Return the name of the line with the cause for which a saga is undone."""
    return f"undo#{replay_count}"


def is_of_undo(line: Line) -> bool:
    """Whether a line was written while the saga was undone."""
    return line.name.startswith(UNDO_PREFIX)


def begun_steps(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of the steps that may have had an effect, in the order in which they were begun."""
    return [line for line in lines if line.kind is LineKind.BEGUN]


def cause_of(lines: Sequence[Line], replay_count: int) -> Failure | None:
    """Return the cause for which a saga is being undone, or None if it is not.

    A saga that failed before its first step may be redriven, and then begins anew: an older cause does not count.
    """
    causes = {line.name: line for line in lines if line.kind is LineKind.UNDO}
    if begun_steps(lines):
        return next((decode_failure(line.value) for line in causes.values()), None)
    found = causes.get(undo_line(replay_count))
    return None if found is None else decode_failure(found.value)


def stuck_undos(lines: Iterable[Line]) -> list[str]:
    """Return the names of the undos that failed for good and have not succeeded since."""
    lines = list(lines)
    done = {line.name for line in lines if line.kind is LineKind.RESULT}
    names = dict.fromkeys(line.name.rpartition("!")[0] for line in lines if line.kind is LineKind.STUCK)
    return [name for name in names if name not in done]
