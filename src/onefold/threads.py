"""Beside the flow: threads for code that blocks, and the way from them to an event loop and back.

A thread that is told to stop gets an exception raised in it, wherever its Python code is.
One that does not react, because it waits inside a C function, cannot be ended: it is left behind and replaced.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

from onefold import limits
from onefold.errors import HandlerError, HandlerTimeoutError
from onefold.spawning import end_fork

logger = logging.getLogger("onefold")

R = TypeVar("R")

#: What came of a call: its value, or the error it raised.
_Answer = tuple[Any, BaseException | None]


class BusyError(Exception):
    """Nothing can be run now, for no fault of what was to be run."""


def wait_for(coroutine: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> R:
    """Run a coroutine on an event loop that runs in another thread, and wait for what comes of it."""
    try:
        if asyncio.events._get_running_loop() is loop:
            raise HandlerError("this would wait for the event loop it runs on; await the asynchronous verb instead")
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError as error:
        coroutine.close()
        raise HandlerError("the event loop is over, so nothing can be asked of it any more") from error
    except BaseException:
        coroutine.close()
        raise
    try:
        return future.result()
    except BaseException:
        # It may be the waiting that was interrupted; then nobody wants the answer any more.
        future.cancel()
        raise


class Threads:
    """As many threads as calls run at once; a thread that is free is used again."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        #: Threads that did not end when they were told to.
        self.abandoned: set[threading.Thread] = set()
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, call: Callable[[], R], *, what: str = "", wake: Callable[[], None] = lambda: None) -> R:
        """Run a call in a thread, with the context variables of the caller.

        When the caller is cancelled, ``HandlerTimeoutError`` is raised in the thread, and ``wake`` is to end what it
        may be waiting for on the event loop.  A value it returns nevertheless is returned.
        When it does not come to an end within ``HANDLER_GRACE`` it is abandoned.
        """
        if len(self.abandoned) >= limits.ABANDONED_THREADS_MAX:
            raise BusyError(f"{len(self.abandoned)} threads of this process hang and cannot be ended")
        self._loop = asyncio.get_running_loop()
        over: asyncio.Future[_Answer] = self._loop.create_future()
        thread = self._idle.pop() if self._idle else self._start()
        thread.begin(_Job(contextvars.copy_context(), call, self._loop, over))
        try:
            await self._until_over(thread, over, wake)
        finally:
            if over.done():
                self._idle.append(thread)
            else:
                self._abandon(thread, over, what)
        value, error = over.result()
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    async def _until_over(self, thread: _Thread, over: asyncio.Future[_Answer], wake: Callable[[], None]) -> None:
        try:
            # Unlike a plain await this leaves the future alone when the caller is cancelled.
            await asyncio.wait([over])
        except asyncio.CancelledError:
            thread.interrupt()
            wake()
            await asyncio.wait([over], timeout=limits.HANDLER_GRACE)
            if not over.done() or isinstance(over.result()[1], HandlerTimeoutError):
                raise

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """In one of the threads: run a coroutine on the event loop that started it, and wait for it."""
        if self._loop is None:
            coroutine.close()
            raise HandlerError("no thread was started here")
        return wait_for(coroutine, self._loop)

    def close(self) -> None:
        """End the threads that are free; those that were abandoned end when their call does, or with the process."""
        while self._idle:
            self._idle.pop().finish()

    def _start(self) -> _Thread:
        self._count += 1
        thread = _Thread(f"onefold-handler-{self._count}")
        try:
            thread.start()
        except RuntimeError as error:
            raise BusyError(f"no thread can be started: {error}") from error
        return thread

    def _abandon(self, thread: _Thread, over: asyncio.Future[_Answer], what: str) -> None:
        thread.finish()
        self.abandoned.add(thread)
        over.add_done_callback(lambda _: self.abandoned.discard(thread))
        logger.warning("thread_abandoned thread=%s running=%s", thread.name, what)


class _Job:
    """One call and the place where its answer is waited for."""

    def __init__(
        self,
        context: contextvars.Context,
        call: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        over: asyncio.Future[_Answer],
    ) -> None:
        self._context = context
        self._call = call
        self._loop = loop
        self._over = over

    def run(self) -> _Answer:
        try:
            return self._context.run(self._call), None
        except BaseException as error:
            return None, error

    def tell(self, answer: _Answer) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set, answer)
        except RuntimeError:
            return  # the event loop was closed; nobody waits for the answer any more

    def _set(self, answer: _Answer) -> None:
        if not self._over.done():
            self._over.set_result(answer)


class _Thread(threading.Thread):
    """Runs one job after the other.  A daemon, so that one that hangs does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        #: Guards the two below: an exception must strike the job it is meant for, never the next one.
        self._guard = threading.Lock()
        self._running = False
        self._stopped = False

    def begin(self, job: _Job) -> None:
        """Run this; the thread must be free."""
        self._stopped = False
        self._jobs.put(job)

    def finish(self) -> None:
        """Let the thread end after what it runs."""
        self._jobs.put(None)

    def interrupt(self) -> None:
        """Raise ``HandlerTimeoutError`` in what runs, as soon as its Python code goes on; once per job at most."""
        with self._guard:
            if not self._stopped and self._running and self.ident is not None:
                _raise_in(self.ident, HandlerTimeoutError)
            self._stopped = True

    def run(self) -> None:
        process = os.getpid()
        while (job := self._jobs.get()) is not None:
            answer = self._answer(job)
            if os.getpid() != process:
                end_fork(answer[1])
            job.tell(answer)

    def _answer(self, job: _Job) -> _Answer:
        answer: _Answer | None = None
        while True:
            try:
                if answer is None:
                    self._enter()
                    answer = job.run()
                self._leave()
                return answer
            except BaseException as error:  # it struck when the call was over, or came before it began
                answer = answer or (None, error)

    def _enter(self) -> None:
        with self._guard:
            if self._stopped:
                raise HandlerTimeoutError("it was stopped before it began")
            self._running = True

    def _leave(self) -> None:
        """Let no exception be raised in this thread any more; one that is on its way is raised here at the latest."""
        with self._guard:
            self._running = False
        _raise_pending()


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    """Have a thread raise this as soon as it runs Python code.

    It is never taken back by setting NULL: in Python 3.11 and 3.12 that leaves the interpreter's flag for pending
    exceptions up for good, so every call of every thread is slower from then on (by a third, when measured), and in
    3.11 a thread under ``sys.settrace`` (a debugger, coverage) spins for ever.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def _raise_pending() -> None:
    """Do nothing: the interpreter raises a pending exception of this thread when a function is entered."""
