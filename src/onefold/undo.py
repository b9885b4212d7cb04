"""Stage 1, declare: what takes back a step of a saga.

An undo takes what its step takes, because what the step returned may never have become known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onefold import limits
from onefold.errors import ConfigurationError
from onefold.task import BoundTask, Task, takes_first


@dataclass(frozen=True, slots=True)
class Never:
    """Says that a step has no undo, and why; made by ``never``."""

    reason: str


def never(reason: str) -> Never:
    """Say that a step of a saga needs no undo: ``@app.step(undo=never("a mail cannot be taken back"))``."""
    return Never(limits.check_bytes("reason", reason, limits.ERROR_TEXT_MAX))


#: A function that is called as a step, a task that is sent as a command, or the reason why there is neither.
Undo = Callable[..., Any] | Task[..., Any] | Never


def check_undo(name: str, step: Callable[..., Any] | Task[..., Any] | BoundTask[..., Any], undo: Undo) -> None:
    """Refuse an undo that could not be given what its step was given."""
    if isinstance(undo, Never):
        return
    if not (isinstance(undo, Task) or callable(undo)):
        raise ConfigurationError(f"{name}: undo={undo!r} is no function, task or never('reason')")
    taken, given = _parameters(undo), _parameters(step)
    if taken != given:
        raise ConfigurationError(
            f"{name}: its undo takes ({', '.join(taken)}), but it is given what the step is given: ({', '.join(given)})"
        )


def _parameters(taker: Callable[..., Any] | Task[..., Any] | BoundTask[..., Any]) -> list[str]:
    """Return the parameters that are arguments, each with its kind and whether it may be left out."""
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
