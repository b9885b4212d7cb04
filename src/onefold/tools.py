"""Stage 7, handle: what a worker gives to every run of a workflow."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.clock import Clock
from onefold.store import Store
from onefold.threads import Threads
from onefold.transaction import Prepare

#: Wraps every run of a handler or step: ``async def middleware(ctx, proceed): return await proceed()``.
#: For a batch ``ctx`` is the ``Batch``.
Middleware = Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Tools:
    """What every run of a worker needs, the same for all of them."""

    store: Store
    clock: Clock
    chance: random.Random
    prepare: Prepare
    #: Where keys for outside providers come from.
    origin: str
    resources: Any
    #: Where plain functions run, those of tasks and those of steps.
    threads: Threads
    middleware: Sequence[Middleware] = ()
