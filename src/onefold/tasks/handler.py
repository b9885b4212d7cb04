"""Stage 1, declare: the kind of a handler's function, its first parameter, and where it runs.

A coroutine function runs on the event loop, any other function in a thread; either may have a process of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

from onefold import limits
from onefold.errors import ConfigurationError
from onefold.message.codec import Signature

#: Names of types that the first parameter may have: of a coroutine function, and of a plain function.
_GIVEN = {True: ("Context", "Batch"), False: ("SyncContext", "SyncBatch")}


class Handler:
    """A function as it was declared; raises for one that cannot be a handler."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        isolate: bool = False,
        batch: int = 0,
    ) -> None:
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        #: Whether each run has its own process.
        self.isolate = isolate
        #: The most messages of one run; 0 for a handler of single messages.
        self.batch = limits.BATCH_DEFAULT if batch is True else int(batch)
        self._name = name
        if not callable(function):
            raise ConfigurationError(f"{name}: a handler is a function, not a {type(function).__name__}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(f"{name}: a handler that yields never returns; write `return`, or send messages")
        first = _first_of(function, ctx="Context" if self.is_async else "SyncContext")
        self._refuse_the_other_kind(first)
        self._check_batch(first)
        if isolate:
            self._check_isolated()
        self.takes_context = first in ("Context", "SyncContext")

    def signature(
        self, *, skip: int, fingerprint: Sequence[str] | None, kind: type[Signature] = Signature
    ) -> Signature:
        """Return how messages are encoded and decoded; the first ``skip`` parameters are not arguments of theirs."""
        if self.batch:
            return kind(_one_argument(self.function), skip=0, fingerprint=fingerprint)
        return kind(self.function, skip=skip, fingerprint=fingerprint)

    def _refuse_the_other_kind(self, first: str | None) -> None:
        if first in _GIVEN[not self.is_async]:
            right = _GIVEN[self.is_async][_GIVEN[not self.is_async].index(first)]
            kind = "an async handler awaits its verbs" if self.is_async else "a handler in a thread cannot await"
            raise ConfigurationError(f"{self._name}: {kind}: annotate its first parameter as {right}, not {first}")

    def _check_batch(self, first: str | None) -> None:
        takes_batch = first in ("Batch", "SyncBatch")
        if takes_batch and not self.batch:
            raise ConfigurationError(f"{self._name} takes a {first}; declare it with batch=, such as batch=10")
        if not self.batch:
            return
        limits.check_range("batch", self.batch, 1, limits.BATCH_MAX)
        right = "Batch" if self.is_async else "SyncBatch"
        if not takes_batch or len(inspect.signature(self.function).parameters) != 1:
            raise ConfigurationError(f"{self._name}: a batch handler takes exactly one parameter, a {right}[…]")
        if self.isolate:
            raise ConfigurationError(f"{self._name}: batch and isolate exclude each other; one process, one message")

    def _check_isolated(self) -> None:
        """Refuse a handler that its process could not import."""
        module, place = self.function.__module__, self.function.__qualname__
        if module == "__main__":
            raise ConfigurationError(
                f"{self._name}: an isolated handler is imported by its process, which cannot import the main program; "
                "declare it in a module of its own"
            )
        if "<locals>" in place:
            raise ConfigurationError(
                f"{self._name}: an isolated handler is imported by its process, which cannot find {place}; "
                "declare it at the top of its module"
            )


def _first_of(function: Callable[..., Any], *, ctx: str) -> str | None:
    """Return the name of the first parameter's type; without a hint a parameter named ``ctx`` is the context."""
    for parameter in inspect.signature(function).parameters.values():
        hint = parameter.annotation
        if hint is parameter.empty:
            return ctx if parameter.name == "ctx" else None
        hint = hint if isinstance(hint, str) else getattr(getattr(hint, "__origin__", hint), "__name__", "")
        return str(hint.partition("[")[0].rpartition(".")[2])
    return None


def _one_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature of one message of a batch handler."""

    def one(value: Any) -> Any: ...

    try:
        given = next(iter(get_type_hints(function).values()), Any)
    except NameError as error:
        raise ConfigurationError(f"{function.__qualname__}: a type hint cannot be found: {error}") from error
    one.__annotations__ = {"value": next(iter(get_args(given)), Any), "return": Any}
    one.__qualname__ = function.__qualname__
    return one
