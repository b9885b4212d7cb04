"""Stage 7, handle: what a worker gives to every run of a workflow."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from onefold.clock import Clock
from onefold.progress import Bearer
from onefold.store import Store
from onefold.transaction import Prepare

#: Wraps every run of a handler or step: ``async def middleware(ctx, proceed): return await proceed()``.
#: For a batch ``ctx`` is the ``Batch``.
Middleware = Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]


class Tools(msgspec.Struct, frozen=True):
    """What every run of a worker needs."""

    store: Store
    clock: Clock
    chance: random.Random
    prepare: Prepare
    resources: Any
    held_until: Callable[[], int]
    middleware: Sequence[Middleware] = ()
    bearer: Bearer | None = None
