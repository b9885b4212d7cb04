"""Stages 1 and 7 for sagas: workflows whose every step says how it is undone.

Before a step of a saga is called or sent, the journal says so.  A step that has begun may have had an effect, whatever
became of it afterwards, so from that line on it belongs to what is undone when the saga fails.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from onefold import limits
from onefold.children import Child
from onefold.codec import fingerprint_of_call
from onefold.errors import ConfigurationError
from onefold.holding import stopped_from_outside
from onefold.inside import current
from onefold.journal import Begun, Journal, encode
from onefold.options import TaskSettings
from onefold.status import is_of_undo
from onefold.step import Step, StepKind
from onefold.stepping import StepFunction, StepSettings, check_command, in_time, settings_of
from onefold.store import Lease
from onefold.stretch import Stretch
from onefold.task import BoundTask, Sender, Task
from onefold.tools import Tools
from onefold.undo import Never, Undo
from onefold.workflow import Run, Workflow

P = ParamSpec("P")
R = TypeVar("R")


class Saga(Workflow[P, R]):
    """A workflow that is undone when it fails: it ends completed or compensated, or is stuck and says so."""

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
    """How a step that has begun is undone: what takes it back, and what it is given."""

    undo: Undo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SagaRun(Run):
    """What a saga receives: a run whose steps must say how they are undone."""

    def __init__(self, stretch: Stretch) -> None:
        super().__init__(stretch)
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
        """Write down that a step is about to be called, and call it."""
        fingerprint = fingerprint_of_call(args, kwargs)
        with self._stretch.fatal:
            begun = self._journal.find(name, StepKind.BEGUN, fingerprint)
        if begun is None:
            self._stretch.begin(name)
            await self._stretch.record([_begun(name, undo, function.settings, fingerprint)])
        return await self._stretch.perform(name, function, args, kwargs)

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


async def rehearse(saga: Saga[Any, Any], lease: Lease, tools: Tools, lines: Sequence[Step]) -> dict[str, Planned]:
    """Run a saga's code as far as its journal goes, doing nothing, and return what it asked for.

    Only the code knows what each step was given.  Where it would do something new it stops; what it raises is not
    asked, because it is known already why the saga is undone.
    """
    arguments = saga.signature.decode(lease.envelope.payload_inline or b"")
    journal = Journal(lease.id, [one for one in lines if not is_of_undo(one)], replay_count=lease.replay_count)
    stretch = Stretch(lease, journal, tools)
    run = SagaRun(stretch)
    token = current.set(run)
    try:
        await in_time(lambda: saga.function(run, **arguments), saga.timeout_seconds, saga.name)
    except BaseException as error:
        if stopped_from_outside(error):
            raise
    finally:
        current.reset(token)
    if stretch.over is not None:
        raise stretch.over
    return run.planned


def _begun(name: str, undo: Undo, settings: StepSettings, fingerprint: bytes) -> Step:
    if isinstance(undo, Never):
        begun = Begun(None, undo.reason, settings.timeout_seconds)
    else:
        begun = Begun(_name_of(undo), None, settings.timeout_seconds)
    return Step(name, StepKind.BEGUN, encode(begun), fingerprint)


def _without_undo(saga: str, step: str) -> ConfigurationError:
    return ConfigurationError(
        f"{saga}: its step {step} says nothing about how it is undone; declare it with @app.step(undo=…), "
        "or with undo=never('reason') if there is nothing to undo"
    )


def _name_of(step: Any) -> str:
    """Return the name by which people know a function or a task."""
    step = step.task if isinstance(step, BoundTask) else step
    return step.name if isinstance(step, Task) else str(getattr(step, "__name__", step))


def _steps_in(function: Callable[..., Any]) -> Iterator[Any]:
    """Return the steps that a saga's source names plainly, so that one without an undo is refused at import.

    What is named otherwise, or defined only later, is refused when it is called.
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
