"""A seeded event loop with virtual time, on which several processes are simulated in one thread.

Time stands still while a callback can run, and jumps to the next timer when none can.
The seed decides which of the runnable callbacks comes next, so different seeds give different interleavings
and the same seed always gives the same one.  A process is a mark in the context of its tasks:
a process that is stopped or dead is not scheduled, which code inside it can neither notice nor prevent.

It relies on private names of asyncio's base loop; ``tests/simulation`` fails at once if one of them changes.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from onefold.clock import MICROSECONDS, to_instant

#: A world that is still busy after this many callbacks is in an endless loop.
STEPS_MAX = 500_000

_EPOCH = to_instant(datetime(2030, 1, 1, tzinfo=UTC))


class Process:
    """One simulated operating system process."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: The error of its wall clock, in microseconds.
        self.skew = 0
        self.stopped = False
        self.dead = False
        #: The callbacks that would run now if the process were not stopped.
        self.waiting: list[asyncio.Handle] = []

    def __repr__(self) -> str:
        return self.name


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("onefold_process", default=None)


def current_process() -> Process | None:
    """Return the simulated process that is running."""
    return _process.get()


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs one callback at a time, chosen by ``chance``."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._virtual = 0.0
        self._tasks: list[tuple[asyncio.Task[Any], Process | None]] = []
        self._outside = contextvars.copy_context()
        self.steps = 0
        factory: Any = self._keep
        self.set_task_factory(factory)
        # Errors in tasks of dead processes are not reported; live processes report theirs through their results.
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._virtual

    def start(self, process: Process, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine, and every task it makes, as part of the process."""
        context = self._outside.copy()
        context.run(_process.set, process)
        return self.create_task(main, context=context, name=process.name)

    def later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Call back outside any process, so that the death of a process does not prevent it."""
        self.call_later(seconds, callback, *args, context=self._outside)

    def stop_process(self, process: Process, seconds: float) -> None:
        """Do not schedule the process for a while, like SIGSTOP."""
        process.stopped = True
        self.later(seconds, self.resume, process)

    def resume(self, process: Process) -> None:
        """Let a stopped process continue; a dead one stays dead."""
        if not process.dead:
            process.stopped = False
            self._ready.extend(process.waiting)
            process.waiting.clear()

    def kill_process(self, process: Process) -> None:
        """Never schedule the process again, not even its cleanup."""
        process.dead = process.stopped = True

    def unwind(self) -> None:
        """Cancel all tasks that are left and let them unwind, so that nothing of this world outlives it.

        Call it after all checks; by then the stores must refuse every call.
        """
        left = [task for task, _ in self._tasks if not task.done()]
        for task, process in self._tasks:
            task.cancel()
            if process is not None:
                process.stopped = False
                self._ready.extend(process.waiting)
                process.waiting.clear()
        if left:
            self.run_until_complete(asyncio.wait(left, timeout=1.0))
        for task, _ in self._tasks:
            # These results are never asked for, and need no warning.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if task.done() and not task.cancelled():
                task.exception()
        self.close()

    # The base class types the arguments after the function; their types do not matter here.
    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a thread's function on the loop, because threads would make the order depend on the machine."""
        future: asyncio.Future[Any] = self.create_future()
        self.call_soon(_answer, future, func, args)
        return future

    def _keep(
        self, loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(main, loop=loop, **options)
        context: contextvars.Context = options.get("context") or contextvars.copy_context()
        self._tasks.append((task, context.get(_process)))
        return task

    def _run_once(self) -> None:
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise RuntimeError(f"the simulation is still busy after {STEPS_MAX} steps")
        if not self._ready:
            self._virtual = max(self._virtual, self._next_timer())
        while self._scheduled and (self._scheduled[0].cancelled() or self._scheduled[0].when() <= self._virtual):
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                self._ready.append(timer)
        if not self._ready:
            return
        self._ready.rotate(-self._chance.randrange(len(self._ready)))
        handle: Any = self._ready.popleft()
        if handle.cancelled():
            return
        process = handle._context.get(_process)
        if process is not None and process.stopped:
            process.waiting.append(handle)
        else:
            handle._run()

    def _next_timer(self) -> float:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)._scheduled = False  # type: ignore[attr-defined]
        if not self._scheduled:
            raise RuntimeError("the simulation waits for something that can never happen")
        return self._scheduled[0].when()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when its time comes, while the base class would count it."""

    def _write_to_self(self) -> None:
        """Do nothing: there is no selector to wake."""


class SimulatedClock:
    """The clock of one process: its wall clock may be wrong, its steady clock is that of the machine."""

    def __init__(self, loop: SimulatedLoop, process: Process) -> None:
        self._loop = loop
        self._process = process

    def now(self) -> int:
        return _EPOCH + round(self._loop.time() * MICROSECONDS) + self._process.skew

    def steady(self) -> int:
        return MICROSECONDS + round(self._loop.time() * MICROSECONDS)

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(max(seconds, 0.0), _wake, future)
        try:
            await future
        finally:
            timer.cancel()


def _answer(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        value = func(*args)
    except BaseException as error:
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(value)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
