"""Beside the flow: an event loop in a thread of its own, for code that has none."""

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
from onefold.threads import wait_for

R = TypeVar("R")


class _LeftError(Exception):
    """Ends what a ``with`` block holds open when the block raised; nobody sees it."""


class Portal:
    """Runs coroutines for threads that block; the event loop starts with the first one.

    Safe from many threads at once, and refused after a fork: the loop's thread is not in the child.
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
        """Run a coroutine on the loop and return what comes of it."""
        try:
            loop = self._running()
        except BaseException:
            coroutine.close()
            raise
        try:
            return wait_for(coroutine, loop)
        except concurrent.futures.CancelledError as error:
            raise StoreError("the app was closed meanwhile") from error

    def start(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run a coroutine on the loop without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon, if there is one."""
        if self._loop is not None:
            self._running().call_soon_threadsafe(function)

    def close(self) -> None:
        """End the event loop; whoever still waits for something on it is told so."""
        with self._starting:
            loop, self._loop = self._loop, None
            if loop is not None and self._process == os.getpid():
                loop.call_soon_threadsafe(self._stop.set)
                # What ignores its cancellation keeps the loop from ending, and ends with the program.
                self._thread.join(limits.HARD_TIMEOUT_GRACE)

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[R]) -> Iterator[R]:
        """Hold an asynchronous context manager open for the length of a ``with`` block.

        One task enters and leaves it, as its context variables and time limits want it.
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
                return  # the caller was interrupted before this began
            async with manager as entered:
                value.set_result(entered)
                if not await leave:
                    raise _LeftError

        def decide(normally: bool) -> None:
            if not leave.done():
                leave.set_result(normally)
            if not value.done() and task is not None:
                task.cancel()  # it may be entering for ever

        # An exception can strike anywhere here, out of a handler of signals: nothing may stay open.
        try:
            holding = self.start(hold())
            either: list[concurrent.futures.Future[Any]] = [value, holding]
            concurrent.futures.wait(either, return_when=concurrent.futures.FIRST_COMPLETED)
            if not value.done():
                holding.result()  # it could not be entered, and raises why
            yield value.result()
            loop.call_soon_threadsafe(decide, True)
            holding.result()
        except BaseException:
            with suppress(RuntimeError):  # the loop is closed, and has ended what it held
                loop.call_soon_threadsafe(decide, False)
            if holding is not None and value.done():
                # How it ends is decided, and the caller must find it ended.
                concurrent.futures.wait([holding])
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop, self._process = self._start_loop(), os.getpid()
            elif self._process != os.getpid():
                raise StoreError(
                    "this app was used before a fork, and its thread is not in the child; "
                    "use it for the first time after the fork"
                )
            return self._loop

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        # A daemon: a program that ends without closing its app must not wait for ever.
        self._thread = threading.Thread(target=self._run_loop, args=(started,), name="onefold-loop", daemon=True)
        try:
            self._thread.start()
            return started.result()
        except (OSError, RuntimeError) as error:
            raise StoreUnavailableError(f"no event loop can be started in a thread: {error}") from error
        except BaseException:
            # Interrupted: a loop that was not handed over ends at once.
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
            # The loop needs descriptors of its own; what keeps it from starting is for the caller.
            started.set_exception(error)

    async def _serve(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        self._stop = asyncio.Event()
        if started.set_running_or_notify_cancel():
            started.set_result(asyncio.get_running_loop())
            await self._stop.wait()
