"""Defects of the process of isolated handlers, put back inside it when ISOLATED_MUTANT is set."""

from __future__ import annotations

from typing import Any

from onefold import child_process as spawning
from onefold.handlers import threads
from onefold.processes import isolated_main as isolated


def put_back() -> None:
    """Let forks continue, and write into the pipe of their parent."""

    def go_on(*_: Any) -> None: ...

    for module in (isolated, spawning, threads):
        module.end_fork = go_on  # type: ignore[attr-defined,assignment]
