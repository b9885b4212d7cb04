"""Stage 7, handle: the functions that workflows call as steps, how they were declared and how they are called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypedDict, TypeVar
from weakref import WeakKeyDictionary

from onefold import limits
from onefold.blocking import run_in_thread
from onefold.codec import ResultCodec, result_codec
from onefold.context import Context
from onefold.errors import ConfigurationError, HandlerTimeoutError, seconds
from onefold.options import DEFAULT_RETRY
from onefold.retry import RetryPolicy
from onefold.task import BoundTask, Task, takes_first
from onefold.threads import Threads
from onefold.undo import Undo, check_undo

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

#: Where a function carries what ``app.step`` said about it; it stays an ordinary function otherwise.
_ATTRIBUTE = "__onefold_step__"


class StepOptions(TypedDict, total=False):
    """What ``run.options(…)`` and ``app.step(…)`` accept, beside ``undo``."""

    #: The name in the journal, instead of the function's.
    name: str
    #: How long one try may take.
    timeout: timedelta | float | None
    #: How often it is tried, and how long is waited in between.
    retry: RetryPolicy


class CallOptions(StepOptions, total=False):
    """What ``run.options(…)`` accepts."""

    #: What takes the step back when its saga fails.
    undo: Undo


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Everything about a step that was said where it was declared and where it is called."""

    name: str | None = None
    timeout_seconds: float | None = None
    retry: RetryPolicy = DEFAULT_RETRY
    undo: Undo | None = None
    #: Whether a timeout was said, if only that there is none.
    limited: bool = False

    def but(self, options: CallOptions) -> StepSettings:
        """Return these settings with some said anew; unknown ones are refused."""
        changed = self
        for option, value in options.items():
            if option == "name":
                changed = replace(changed, name=limits.check_step_name("step", str(value)))
            elif option == "timeout":
                most = None if value is None else seconds(value)  # type: ignore[arg-type]
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
        """Return these settings with a timeout, unless something was said about it."""
        return self if self.limited else replace(self, timeout_seconds=most)


_PLAIN = StepSettings()


def declare(function: F, options: CallOptions) -> F:
    """Write down how a function or task is to be called as a step; returns the function or task itself."""
    settings = _PLAIN.but(options)
    if isinstance(function, Task):
        check_command(function, settings)
    else:
        StepFunction(function, settings)
    setattr(function, _ATTRIBUTE, settings)
    return function


def check_command(task: Task[Any, Any] | BoundTask[Any, Any], settings: StepSettings) -> None:
    """Refuse what a step that is a task cannot have."""
    name = task.task.name if isinstance(task, BoundTask) else task.name
    if isinstance(task, BoundTask) and task.bound.get("if_dead", "keep") != "keep":
        raise ConfigurationError(f"{name}: if_dead='redrive' reopens another message; send it in a step or outside")
    if settings.retry is not DEFAULT_RETRY:
        raise ConfigurationError(f"{name}: a task is retried by its own policy; give retry= to the task")
    if settings.undo is not None:
        check_undo(name, task, settings.undo)


def settings_of(function: Callable[..., Any] | Task[Any, Any] | BoundTask[Any, Any]) -> StepSettings:
    """Return what was said about a function or task as a step."""
    settings: StepSettings = getattr(function.task if isinstance(function, BoundTask) else function, _ATTRIBUTE, _PLAIN)
    return settings


class StepFunction:
    """One function as a step; everything about it that can be checked is checked here."""

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
        """Return this function with a timeout, unless something was said about it."""
        return StepFunction(self._function, self.settings.within(most))

    async def call(self, context: Context, args: tuple[Any, ...], kwargs: Mapping[str, Any], threads: Threads) -> Any:
        """Call it; a plain function runs in one of the worker's threads, as that of a task does, so it may block."""
        if self._is_async:
            given = (context, *args) if self.takes_context else args
            return await self._function(*given, **kwargs)
        return await run_in_thread(partial(self._function, *args, **kwargs), self.name, context, threads)

    @property
    def codec(self) -> ResultCodec:
        """How its result is kept in the journal."""
        return self._codec


#: What is known of functions that are still there.  Not by their code: what one decorator or one factory makes has one
#: code and many signatures, and those of a function that is made anew in every run take 30 µs to find again.
_known: WeakKeyDictionary[Callable[..., Any], tuple[bool, bool, ResultCodec]] = WeakKeyDictionary()


def _facts(function: Callable[..., Any]) -> tuple[bool, bool, ResultCodec]:
    """Say whether it takes a context, whether it is asynchronous, and how its result is kept."""
    try:
        known = _known.get(function)
    except TypeError:  # an object that can be called, but neither hashed nor referred to weakly
        return _find_facts(function)
    if known is None:
        known = _known[function] = _find_facts(function)
    return known


def _find_facts(function: Callable[..., Any]) -> tuple[bool, bool, ResultCodec]:
    codec = result_codec(function, most=limits.STEP_BYTES_MAX)
    return takes_first(function, "Context", "ctx"), inspect.iscoroutinefunction(function), codec


async def in_time(call: Callable[[], Awaitable[R]], most: float | None, name: str) -> R:
    """Await a call, for a limited time if there is a limit."""
    if most is None:
        return await call()
    try:
        async with asyncio.timeout(most) as limit:
            return await call()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise HandlerTimeoutError(f"{name} ran longer than {most:g} s") from error
