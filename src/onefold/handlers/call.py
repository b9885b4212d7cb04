"""Stage 7, handle: call a task's function on the loop or in a thread, enforce its timeout, end the tasks it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from onefold import limits
from onefold.current import current
from onefold.errors import HandlerError, HandlerTimeoutError
from onefold.handlers.batch import Batch, SyncBatch
from onefold.handlers.context import Context
from onefold.handlers.lease import Held, is_cancelled, was_stopped
from onefold.handlers.sync_context import SyncContext, SyncHandlerTransaction, run_in_thread
from onefold.handlers.threads import Threads
from onefold.tasks.task import Task
from onefold.transactions.handler_transaction import HandlerTransaction

R = TypeVar("R")

#: A handler with everything it needs, ready to run.
Ready = Callable[[], Awaitable[Any]]


def make_ready(task: Task[Any, Any], work: HandlerTransaction, arguments: Mapping[str, Any], threads: Threads) -> Ready:
    """Bind a task's function to the context and arguments of one run; a plain function will run in a thread."""
    handler = task.handler
    takes_work = task.takes_context or handler.batch
    if handler.is_async:
        return partial(handler.function, work, **arguments) if takes_work else partial(handler.function, **arguments)
    context = (_make_sync(work, threads),) if takes_work else ()
    return partial(run_in_thread, partial(handler.function, *context, **arguments), task.name, work, threads)


def _make_sync(work: HandlerTransaction, threads: Threads) -> SyncHandlerTransaction:
    if isinstance(work, Batch):
        return SyncBatch(work, threads)
    assert isinstance(work, Context)
    return SyncContext(work, threads)


async def end_strays(work: HandlerTransaction) -> list[str]:
    """Cancel the tasks that a handler started and left running, and return their names."""
    strays = [task for task in work.tasks or () if not task.done()]
    if strays:
        work.cancel_tasks()
        await asyncio.wait(strays, timeout=limits.HANDLER_GRACE)
    return [f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})" for task in strays]


async def refuse_strays(work: HandlerTransaction) -> None:
    """Cancel the tasks that a handler left running when it returned, and fail its run: its work may be half done."""
    if work.tasks and (names := await end_strays(work)):
        raise HandlerError(
            f"the handler returned while {len(names)} of its tasks ran, the first being {names[0]}; "
            "await every task it starts, or use ctx.after() for work that may run after the commit"
        )


class _TaskFactory:
    """A task factory that notes in a handler's transaction the tasks that are started inside the handler."""

    def __init__(self, former: Any) -> None:
        self.former = former
        self.users = 0

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Future[Any]:
        task: asyncio.Task[Any] = (
            asyncio.Task(coroutine, loop=loop, **options)
            if self.former is None
            else self.former(loop, coroutine, **options)
        )
        context = options.get("context")
        inside = current.get() if context is None else context.get(current)
        if isinstance(inside, HandlerTransaction):
            inside.note_task(task)
        return task


@contextmanager
def watched() -> Iterator[None]:
    """Note, on the running event loop, which tasks are started inside handlers."""
    loop = asyncio.get_running_loop()
    present: Any = loop.get_task_factory()
    factory = present if isinstance(present, _TaskFactory) else _TaskFactory(present)
    ours: Any = factory
    factory.users += 1
    loop.set_task_factory(ours)
    try:
        yield
    finally:
        factory.users -= 1
        # A factory that was set meanwhile stays.
        if not factory.users and loop.get_task_factory() is ours:
            former: Any = factory.former
            loop.set_task_factory(former)


async def in_time(call: Callable[[], Awaitable[R]], most: float | None, name: str) -> R:
    """Await a call; raise ``HandlerTimeoutError`` after ``most`` seconds, if that is not None."""
    if most is None:
        return await call()
    try:
        async with asyncio.timeout(most) as limit:
            return await call()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise HandlerTimeoutError(
            f"{name} ran longer than {most:g} s; raise its timeout=, or divide the work"
        ) from error


async def end(work: HandlerTransaction, held_leases: Sequence[Held]) -> None:
    """Fail a handler that returned while its tasks ran, and stop one that swallowed the worker's cancellation."""
    await refuse_strays(work)
    if is_cancelled(held_leases[0]) and await was_stopped(held_leases):
        raise asyncio.CancelledError
