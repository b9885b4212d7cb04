"""Defects of the process of isolated handlers, put back inside it: it imports this when ISOLATED_MUTANT is set."""

from __future__ import annotations

from typing import Any

from onefold import isolated, spawning, threads


def put_back() -> None:
    """Let forks go on, and write on the line of their parent."""

    def go_on(*_: Any) -> None: ...

    for module in (isolated, spawning, threads):
        module.end_fork = go_on  # type: ignore[attr-defined,assignment]
