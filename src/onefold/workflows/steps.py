"""Stage 7, handle: the functions that workflows call as steps: their declaration, their options and their call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypedDict, TypeVar
from weakref import WeakKeyDictionary

from onefold import limits
from onefold.errors import ConfigurationError, seconds
from onefold.handlers.context import Context
from onefold.handlers.sync_context import run_in_thread
from onefold.handlers.threads import Threads
from onefold.message.codec import ResultCodec, result_codec
from onefold.tasks.options import DEFAULT_RETRY
from onefold.tasks.retry import RetryPolicy
from onefold.tasks.task import BoundTask, Task, takes_first

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

#: The attribute in which ``app.step`` leaves the settings; the function stays an ordinary function otherwise.
_ATTRIBUTE = "__onefold_step__"


class StepOptions(TypedDict, total=False):
    """The options of ``run.options(…)`` and ``app.step(…)``, apart from ``undo``."""

    #: The name in the journal, instead of the function's.
    name: str
    #: How long one try may take.
    timeout: timedelta | float | None
    #: How often it is tried, and the pauses in between.
    retry: RetryPolicy


class CallOptions(StepOptions, total=False):
    """The options of ``run.options(…)``."""

    #: The function or task that undoes the step when its saga fails, or ``never('reason')``.
    undo: Undo


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of a step, from its declaration and from its call."""

    name: str | None = None
    timeout_seconds: float | None = None
    retry: RetryPolicy = DEFAULT_RETRY
    undo: Undo | None = None
    #: Whether ``timeout=`` was given, be it None.
    limited: bool = False

    def but(self, options: CallOptions) -> StepSettings:
        """Return these settings changed by these options; raises ``ConfigurationError`` for an unknown one."""
        changed = self
        for option, value in options.items():
            if option == "name":
                changed = replace(changed, name=limits.check_step_name("step", str(value)))
            elif option == "timeout":
                most = None if value is None else seconds(value, "timeout")  # type: ignore[arg-type]
                changed = replace(changed, timeout_seconds=most, limited=True)
            elif option == "retry" and isinstance(value, RetryPolicy):
                changed = replace(changed, retry=value)
            elif option == "undo":
                changed = replace(changed, undo=value)  # type: ignore[arg-type]
            else:
                known = "name, timeout, retry, undo"
                raise ConfigurationError(f"step option {option}={value!r} is not allowed; known: {known}")
        return changed

    def within(self, most: float) -> StepSettings:
        """Return these settings with this timeout, unless ``timeout=`` was given."""
        return self if self.limited else replace(self, timeout_seconds=most)


_PLAIN = StepSettings()


def declare(function: F, options: CallOptions) -> F:
    """Set how a function or task is called as a step; returns the function or task itself."""
    settings = _PLAIN.but(options)
    if isinstance(function, Task):
        check_command(function, settings)
    else:
        StepFunction(function, settings)
    setattr(function, _ATTRIBUTE, settings)
    return function


def check_command(task: Task[Any, Any] | BoundTask[Any, Any], settings: StepSettings) -> None:
    """Refuse options that a step which is a task cannot have."""
    name = task.task.name if isinstance(task, BoundTask) else task.name
    if isinstance(task, BoundTask) and task.bound.get("if_dead", "keep") != "keep":
        raise ConfigurationError(f"{name}: if_dead='redrive' reopens another message; send it in a step or outside")
    if settings.retry is not DEFAULT_RETRY:
        raise ConfigurationError(f"{name}: a task is retried by its own policy; give retry= to the task")
    if settings.undo is not None:
        check_undo(name, task, settings.undo)


def settings_of(function: Callable[..., Any] | Task[Any, Any] | BoundTask[Any, Any]) -> StepSettings:
    """Return the settings of a function or task as a step; the defaults if none were declared."""
    settings: StepSettings = getattr(function.task if isinstance(function, BoundTask) else function, _ATTRIBUTE, _PLAIN)
    return settings


class StepFunction:
    """One function as a step, checked when it is made."""

    __slots__ = ("_codec", "_function", "_is_async", "name", "settings", "takes_context")

    def __init__(self, function: Callable[..., Any], settings: StepSettings) -> None:
        self._function = function
        self.settings = settings
        self.name = limits.check_step_name("step", settings.name or str(getattr(function, "__name__", "")))
        self.takes_context, self._is_async, self._codec = _facts(function)
        if self.takes_context and not self._is_async:
            raise ConfigurationError(f"{self.name}: a step that takes a Context must be an async function")
        if settings.undo is not None:
            check_undo(self.name, function, settings.undo)

    def within(self, most: float) -> StepFunction:
        """Return this function with this timeout, unless ``timeout=`` was given."""
        return StepFunction(self._function, self.settings.within(most))

    async def call(self, context: Context, args: tuple[Any, ...], kwargs: Mapping[str, Any], threads: Threads) -> Any:
        """Call it; a plain function runs in one of the worker's threads, so it may block."""
        if self._is_async:
            given = (context, *args) if self.takes_context else args
            return await self._function(*given, **kwargs)
        return await run_in_thread(partial(self._function, *args, **kwargs), self.name, context, threads)

    @property
    def codec(self) -> ResultCodec:
        """The codec that writes its result into the journal."""
        return self._codec


#: The facts of each function that still exists; finding them takes 30 µs.  Keyed by the function and not by its code:
#: functions made by one decorator or factory share their code and have different signatures.
_known: WeakKeyDictionary[Callable[..., Any], tuple[bool, bool, ResultCodec]] = WeakKeyDictionary()


def _facts(function: Callable[..., Any]) -> tuple[bool, bool, ResultCodec]:
    """Return whether it takes a context, whether it is asynchronous, and the codec of its result."""
    try:
        known = _known.get(function)
    except TypeError:  # a callable object that cannot be hashed or weakly referenced
        return _find_facts(function)
    if known is None:
        known = _known[function] = _find_facts(function)
    return known


def _find_facts(function: Callable[..., Any]) -> tuple[bool, bool, ResultCodec]:
    codec = result_codec(function, most=limits.STEP_BYTES_MAX)
    return takes_first(function, "Context", "ctx"), inspect.iscoroutinefunction(function), codec


@dataclass(frozen=True, slots=True)
class Never:
    """Declares that a step has no undo, and why; made by ``never``."""

    reason: str


def never(reason: str) -> Never:
    """Declare that a step of a saga has no undo: ``@app.step(undo=never("a mail cannot be taken back"))``."""
    return Never(limits.check_bytes("reason", reason, limits.ERROR_TEXT_MAX))


#: A function that is called as a step, a task that is sent as a command, or the reason why there is no undo.
Undo = Callable[..., Any] | Task[..., Any] | Never


def check_undo(name: str, step: Callable[..., Any] | Task[..., Any] | BoundTask[..., Any], undo: Undo) -> None:
    """Refuse an undo that does not take the same arguments as its step."""
    if isinstance(undo, Never):
        return
    if not (isinstance(undo, Task) or callable(undo)):
        raise ConfigurationError(f"{name}: undo={undo!r} is no function, task or never('reason')")
    taken, given = _parameters(undo), _parameters(step)
    if taken != given:
        raise ConfigurationError(
            f"{name}: its undo takes ({', '.join(taken)}), but the step takes ({', '.join(given)}); "
            "an undo gets the arguments of its step, so give it the same parameters"
        )


def _parameters(taker: Callable[..., Any] | Task[..., Any] | BoundTask[..., Any]) -> list[str]:
    """Return the parameters after the context, each as text with its kind and whether it has a default."""
    task = taker.task if isinstance(taker, BoundTask) else taker
    function = task.function if isinstance(task, Task) else task
    handed = task.takes_context if isinstance(task, Task) else takes_first(function, "Context", "ctx")
    found = list(inspect.signature(function).parameters.values())[int(handed) :]
    signs: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        signs.get(one.kind, "")
        + one.name
        + ("=" if one.default is not one.empty else "")
        + (" by name" if one.kind is keyword else "")
        for one in found
    ]
