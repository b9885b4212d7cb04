"""Stage 7, handle: call a task's function where it belongs, within its time, and let nothing outlive it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from onefold import limits
from onefold.batch import Batch, SyncBatch
from onefold.blocking import SyncContext, SyncWork, run_in_thread
from onefold.context import Context
from onefold.errors import HandlerError
from onefold.inside import current
from onefold.task import Task
from onefold.threads import Threads
from onefold.work import Work

#: A handler with everything it needs, ready to run.
Ready = Callable[[], Awaitable[Any]]


def make_ready(task: Task[Any, Any], work: Work, arguments: Mapping[str, Any], threads: Threads) -> Ready:
    """Bind a task's function to what one run of it is given; a plain function will run in a thread."""
    handler = task.handler
    takes_work = task.takes_context or handler.batch
    if handler.is_async:
        return partial(handler.function, work, **arguments) if takes_work else partial(handler.function, **arguments)
    given = (_for_a_thread(work, threads),) if takes_work else ()
    return partial(run_in_thread, partial(handler.function, *given, **arguments), task.name, work, threads)


def _for_a_thread(work: Work, threads: Threads) -> SyncWork:
    if isinstance(work, Batch):
        return SyncBatch(work, threads)
    assert isinstance(work, Context)
    return SyncContext(work, threads)


async def end_strays(work: Work) -> list[str]:
    """Cancel the tasks that a handler started and left, and return their names."""
    strays = [task for task in work.tasks or () if not task.done()]
    if strays:
        work.cancel_tasks()
        await asyncio.wait(strays, timeout=limits.HANDLER_GRACE)
    return [f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})" for task in strays]


async def refuse_strays(work: Work) -> None:
    """End what a handler left running when it returned; its work may be half done, so the run fails."""
    if work.tasks and (names := await end_strays(work)):
        raise HandlerError(
            f"the handler returned while {len(names)} of its tasks ran, the first being {names[0]}; "
            "await what it starts, or use ctx.after() for what may come late"
        )


class _Watch:
    """A task factory that tells the run of a handler which tasks are started inside it."""

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
        if isinstance(inside, Work):
            inside.note_task(task)
        return task


@contextmanager
def watched() -> Iterator[None]:
    """Notice, on the running event loop, which tasks are started inside handlers."""
    loop = asyncio.get_running_loop()
    factory: Any = loop.get_task_factory()
    watch = factory if isinstance(factory, _Watch) else _Watch(factory)
    watch.users += 1
    ours: Any = watch
    loop.set_task_factory(ours)
    try:
        yield
    finally:
        watch.users -= 1
        # Whoever has put a factory of their own over ours keeps it.
        if not watch.users and loop.get_task_factory() is ours:
            former: Any = watch.former
            loop.set_task_factory(former)
