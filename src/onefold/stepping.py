"""Stage 7, handle: the functions that workflows call as steps, how they were declared and how they are called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypedDict, TypeVar, Unpack

from onefold import limits
from onefold.codec import ResultCodec, result_codec
from onefold.errors import ConfigurationError, HandlerTimeoutError, seconds
from onefold.options import DEFAULT_RETRY
from onefold.retry import RetryPolicy
from onefold.task import takes_first

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

#: Where a function carries what ``app.step`` said about it; it stays an ordinary function otherwise.
_ATTRIBUTE = "__onefold_step__"


class StepOptions(TypedDict, total=False):
    """What ``run.options(…)`` and ``app.step(…)`` accept."""

    #: The name in the journal, instead of the function's.
    name: str
    #: How long one try may take.
    timeout: timedelta | float | None
    #: How often it is tried, and how long is waited in between.
    retry: RetryPolicy


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Everything about a step that was said where it was declared and where it is called."""

    name: str | None = None
    timeout_seconds: float | None = None
    retry: RetryPolicy = DEFAULT_RETRY

    def but(self, options: StepOptions) -> StepSettings:
        """Return these settings with some said anew; unknown ones are refused."""
        changed = self
        for option, value in options.items():
            if option == "name":
                changed = replace(changed, name=limits.check_step_name("step", str(value)))
            elif option == "timeout":
                changed = replace(changed, timeout_seconds=None if value is None else seconds(value))  # type: ignore[arg-type]
            elif option == "retry" and isinstance(value, RetryPolicy):
                changed = replace(changed, retry=value)
            else:
                known = ", ".join(StepOptions.__annotations__)
                raise ConfigurationError(f"step option {option}={value!r} is not allowed; known: {known}")
        return changed


_PLAIN = StepSettings()


def declare(function: F, **options: Unpack[StepOptions]) -> F:
    """Write down how a function is to be called as a step; returns the function itself."""
    settings = _PLAIN.but(options)
    StepFunction(function, settings)
    setattr(function, _ATTRIBUTE, settings)
    return function


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

    async def call(self, context: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call it; a plain function runs in a thread of its own, so that it may block."""
        given = (context, *args) if self.takes_context else args
        if self._is_async:
            return await self._function(*given, **kwargs)
        return await asyncio.to_thread(self._function, *given, **kwargs)

    @property
    def codec(self) -> ResultCodec:
        """How its result is kept in the journal."""
        return self._codec


#: What is known of functions by their code, which those made anew in every run have in common.
_known: dict[Any, tuple[bool, bool, ResultCodec]] = {}


def _facts(function: Callable[..., Any]) -> tuple[bool, bool, ResultCodec]:
    """Say whether it takes a context, whether it is asynchronous, and how its result is kept."""
    code = getattr(function, "__code__", None)
    # Equal code in two files may still have other hints.
    place = None if code is None else (code.co_filename, code)
    facts = _known.get(place)
    if facts is None:
        is_async = inspect.iscoroutinefunction(function)
        codec = result_codec(function, most=limits.STEP_BYTES_MAX)
        facts = (takes_first(function, "Context", "ctx"), is_async, codec)
        if place is not None:
            _known[place] = facts
    return facts


def step_function(function: Callable[..., Any], options: StepOptions | None = None) -> StepFunction:
    """Return a function as a step, with what was said about it and what is said now."""
    settings: StepSettings = getattr(function, _ATTRIBUTE, _PLAIN)
    return StepFunction(function, settings.but(options) if options else settings)


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
