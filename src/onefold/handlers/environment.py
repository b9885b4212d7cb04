"""Stage 7, handle: the objects that all runs of one worker share."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.clock import Clock
from onefold.handlers.threads import Threads
from onefold.store import Store
from onefold.transactions.buffer import Prepare

#: Wraps every run of a handler or step: ``async def middleware(ctx, proceed): return await proceed()``.
#: For a batch ``ctx`` is the ``Batch``.
Middleware = Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Environment:
    """The objects that all runs of one worker share."""

    store: Store
    clock: Clock
    chance: random.Random
    prepare: Prepare
    #: The database and the app, as a part of every upstream key; see ``onefold.store.identity``.
    origin: str
    #: The value that the app's lifespan yielded for this worker.
    resources: Any
    #: Runs plain functions, of tasks and of steps.
    threads: Threads
    middleware: Sequence[Middleware] = ()
