"""Beside the flow: threads for code that blocks, and the way from them to an event loop and back.

A thread is stopped by an exception that is raised in it at the next line of its Python code.
One that waits inside a C function does not reach that line and cannot be ended: it is abandoned and replaced.
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
from onefold.child_process import end_fork
from onefold.errors import HandlerError, HandlerTimeoutError

logger = logging.getLogger("onefold")

R = TypeVar("R")

#: The result of a call: its value, or the error it raised.
_Answer = tuple[Any, BaseException | None]


class BusyError(Exception):
    """No thread or process can be had now; the message is not to blame."""


def wait_for(coroutine: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop) -> R:
    """Run a coroutine on an event loop that runs in another thread, and wait for its result."""
    try:
        if _runs_here(loop):
            raise HandlerError("this would wait for the event loop it runs on; await the asynchronous verb instead")
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError as error:
        coroutine.close()
        raise HandlerError("the event loop is closed; call this only while the app or worker is open") from error
    except BaseException:
        coroutine.close()
        raise
    try:
        return future.result()
    except BaseException:
        # This thread may have been interrupted while it waited; then the coroutine still runs, and for nothing.
        future.cancel()
        raise


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class Threads:
    """A thread for each call that runs; idle threads are used again."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        #: Threads that did not end when they were told to.
        self.abandoned: set[threading.Thread] = set()
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, call: Callable[[], R], *, name: str = "", wake: Callable[[], None] = lambda: None) -> R:
        """Run a call in a thread, with the context variables of the caller; ``name`` is for the log.

        When the caller is cancelled, ``HandlerTimeoutError`` is raised in the thread, and ``wake`` is called, which
        must cancel the verbs on the event loop that the thread may be waiting for.
        If the call returns a value all the same, that is returned.
        If it does not end within ``HANDLER_GRACE``, its thread is abandoned.
        """
        if len(self.abandoned) >= limits.ABANDONED_THREADS_MAX:
            raise BusyError(f"{len(self.abandoned)} threads of this process hang and cannot be ended; restart it")
        self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        thread = self._idle.pop() if self._idle else self._start()
        thread.begin(_Job(contextvars.copy_context(), call, self._loop, answer))
        try:
            await self._wait_for_answer(thread, answer, wake)
        finally:
            if answer.done():
                self._idle.append(thread)
            else:
                self._abandon(thread, answer, name)
        value, error = answer.result()
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    async def _wait_for_answer(
        self, thread: _Thread, answer: asyncio.Future[_Answer], wake: Callable[[], None]
    ) -> None:
        try:
            # Unlike a plain await this does not cancel the future when the caller is cancelled.
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            thread.interrupt()
            wake()
            await asyncio.wait([answer], timeout=limits.HANDLER_GRACE)
            if not answer.done() or isinstance(answer.result()[1], HandlerTimeoutError):
                raise

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Called in one of the threads: run a coroutine on the event loop that started the thread; wait for it."""
        if self._loop is None:
            coroutine.close()
            raise HandlerError("no handler thread was started here; call this inside a handler")
        return wait_for(coroutine, self._loop)

    def close(self) -> None:
        """End the idle threads; abandoned ones end with their call, or with the process."""
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

    def _abandon(self, thread: _Thread, answer: asyncio.Future[_Answer], name: str) -> None:
        thread.finish()
        self.abandoned.add(thread)
        answer.add_done_callback(lambda _: self.abandoned.discard(thread))
        logger.warning("thread_abandoned thread=%s running=%s", thread.name, name)


class _Job:
    """One call, and the future on the event loop that gets its answer."""

    def __init__(
        self,
        context: contextvars.Context,
        call: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[_Answer],
    ) -> None:
        self._context = context
        self._call = call
        self._loop = loop
        self._answer = answer

    def run(self) -> _Answer:
        try:
            return self._context.run(self._call), None
        except BaseException as error:
            return None, error

    def deliver(self, answer: _Answer) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set, answer)
        except RuntimeError:
            return  # the event loop is closed, and the caller with it

    def _set(self, answer: _Answer) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)


class _Thread(threading.Thread):
    """Runs one job after the other.  A daemon, so that one that hangs does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        #: Guards the two below: an exception must be raised in the job it is meant for, never in the next one.
        self._guard = threading.Lock()
        self._running = False
        self._stopped = False

    def begin(self, job: _Job) -> None:
        """Run this; the thread must be free."""
        self._stopped = False
        self._jobs.put(job)

    def finish(self) -> None:
        """Let the thread end after its present job."""
        self._jobs.put(None)

    def interrupt(self) -> None:
        """Raise ``HandlerTimeoutError`` at the next line of the job's Python code; at most once per job."""
        with self._guard:
            if not self._stopped and self._running and self.ident is not None:
                _raise_in(self.ident, HandlerTimeoutError)
            self._stopped = True

    def run(self) -> None:
        process = os.getpid()
        while (job := self._jobs.get()) is not None:
            answer = self._run_job(job)
            if os.getpid() != process:
                end_fork(answer[1])
            job.deliver(answer)

    def _run_job(self, job: _Job) -> _Answer:
        answer: _Answer | None = None
        while True:
            try:
                if answer is None:
                    self._enter()
                    answer = job.run()
                self._leave()
                return answer
            except BaseException as error:  # the interruption came before the call began, or after it had ended
                answer = answer or (None, error)

    def _enter(self) -> None:
        with self._guard:
            if self._stopped:
                raise HandlerTimeoutError("it was stopped before it began")
            self._running = True

    def _leave(self) -> None:
        """End the time in which this thread can be interrupted; an exception that is pending is raised here."""
        with self._guard:
            self._running = False
        _raise_pending()


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    """Let a thread raise this exception at the next line of its Python code.

    A pending exception is never withdrawn by setting NULL: in Python 3.11 and 3.12 that leaves the interpreter's flag
    for pending exceptions set for good, so every call of every thread is slower from then on (by a third, when
    measured), and in 3.11 a thread under ``sys.settrace`` (a debugger, coverage) spins for ever.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def _raise_pending() -> None:
    """Do nothing: the interpreter raises a pending exception of this thread when a function is entered."""
