"""Beside the flow: an event loop in a thread, for code that has no event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, TypeVar

from onefold import limits
from onefold.errors import StoreError, StoreUnavailableError
from onefold.handlers.threads import wait_for

R = TypeVar("R")


class _LeftError(Exception):
    """Raised inside an asynchronous context manager to end it after the ``with`` block has raised."""


class LoopThread:
    """Runs coroutines for threads that block; the event loop starts with the first one.

    It can be used from many threads at once, but not after a fork, because the child does not have the loop's thread.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event
        self._thread: threading.Thread
        self._process = 0

    @property
    def running(self) -> bool:
        """Whether the event loop was started, and not closed since."""
        return self._loop is not None

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and return its result."""
        try:
            loop = self._running()
        except BaseException:
            coroutine.close()
            raise
        try:
            return wait_for(coroutine, loop)
        except concurrent.futures.CancelledError as error:
            raise StoreError("the app was closed during the call; call it before close()") from error

    def start(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run a coroutine on the loop without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon, if there is one."""
        if self._loop is not None:
            self._running().call_soon_threadsafe(function)

    def close(self) -> None:
        """End the event loop; calls that still wait for it raise ``StoreError``."""
        with self._starting:
            loop, self._loop = self._loop, None
            if loop is not None and self._process == os.getpid():
                loop.call_soon_threadsafe(self._stop.set)
                # Bounded, because a task that ignores its cancellation keeps the loop from ending.
                self._thread.join(limits.HARD_TIMEOUT_GRACE)

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[R]) -> Iterator[R]:
        """Hold an asynchronous context manager open during a ``with`` block.

        One task enters and leaves it, because context variables and ``asyncio.timeout`` belong to a task.
        """
        loop = self._running()
        value: concurrent.futures.Future[R] = concurrent.futures.Future()
        leave: asyncio.Future[bool] = loop.create_future()
        holding: concurrent.futures.Future[None] | None = None
        task: asyncio.Task[None] | None = None

        async def hold() -> None:
            nonlocal task
            task = asyncio.current_task()
            if leave.done():
                return  # the caller was interrupted before this task began
            async with manager as entered:
                value.set_result(entered)
                if not await leave:
                    raise _LeftError

        def decide(normally: bool) -> None:
            if not leave.done():
                leave.set_result(normally)
            if not value.done() and task is not None:
                task.cancel()  # entering may take for ever

        # A signal handler, such as that of Ctrl-C, can raise at any line here; the manager must be left all the same.
        try:
            holding = self.start(hold())
            either: list[concurrent.futures.Future[Any]] = [value, holding]
            concurrent.futures.wait(either, return_when=concurrent.futures.FIRST_COMPLETED)
            if not value.done():
                holding.result()  # raises the error of entering
            yield value.result()
            loop.call_soon_threadsafe(decide, True)
            holding.result()
        except BaseException:
            with suppress(RuntimeError):  # the loop was closed, which has ended the task
                loop.call_soon_threadsafe(decide, False)
            if holding is not None and value.done():
                # The block has failed; wait until the manager has been left, so that the caller finds it closed.
                concurrent.futures.wait([holding])
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop, self._process = self._start_loop(), os.getpid()
            elif self._process != os.getpid():
                raise StoreError(
                    "this app was used before a fork, and the child does not have the thread of its event loop; "
                    "use it for the first time after the fork"
                )
            return self._loop

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        # A daemon thread, so that a program that ends without closing its app does not wait for it.
        self._thread = threading.Thread(target=self._run_loop, args=(started,), name="onefold-loop", daemon=True)
        try:
            self._thread.start()
            return started.result()
        except (OSError, RuntimeError) as error:
            raise StoreUnavailableError(f"no event loop can be started in a thread: {error}") from error
        except BaseException:
            # Interrupted: the loop has no owner yet, so end it.
            if not started.cancel():
                started.result().call_soon_threadsafe(self._stop.set)
            raise

    def _run_loop(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            # The loop could not start, for instance for want of file descriptors; the caller gets the error.
            started.set_exception(error)

    async def _serve(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        self._stop = asyncio.Event()
        if started.set_running_or_notify_cancel():
            started.set_result(asyncio.get_running_loop())
            await self._stop.wait()
