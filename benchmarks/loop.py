"""Runs every process of the benchmark on uvloop where that is installed, as a worker in production does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any, TypeVar

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]

Answer = TypeVar("Answer")

NAME = "asyncio" if uvloop is None else f"uvloop {version('uvloop')}"


def run(main: Coroutine[Any, Any, Answer]) -> Answer:
    with asyncio.Runner(loop_factory=None if uvloop is None else uvloop.new_event_loop) as runner:
        return runner.run(main)
