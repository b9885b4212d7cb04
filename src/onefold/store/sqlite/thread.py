"""The thread in which blocking calls run, so that a slow disk does not stop the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

Answer = TypeVar("Answer")


class Runner(Protocol):
    """Where blocking calls run."""

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Return what the call returns."""
        ...

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which tells by itself when it is done."""
        ...

    def start(self, job: Callable[[], None], late: Callable[[], None], *, seconds: float) -> bool:
        """Start a job and wait for its end; False when it takes longer, or ``seconds`` is 0: then it calls ``late``."""
        ...

    def close(self) -> None:
        """Finish what was asked."""
        ...


class InlineRunner:
    """Runs calls where they are made: no threads, so that a simulation is the same every time."""

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        return function(*args)

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def start(self, job: Callable[[], None], late: Callable[[], None], *, seconds: float) -> bool:
        job()
        return True

    def close(self) -> None:
        pass


class ThreadRunner:
    """Runs calls one after the other in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def job() -> None:
            try:
                answer, error = function(*args), None
            except BaseException as raised:
                answer, error = None, raised
            tell(loop, _answer, future, answer, error)

        self.submit(job)
        return await future

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def start(self, job: Callable[[], None], late: Callable[[], None], *, seconds: float) -> bool:
        begun, done, one_at_a_time, is_late = threading.Lock(), threading.Event(), threading.Lock(), not seconds
        begun.acquire()

        def run() -> None:
            begun.release()
            job()
            with one_at_a_time:
                done.set()
                if is_late:
                    late()

        self._jobs.put(run)
        # The caller goes on when the thread lets go of the interpreter, in its first blocking call.
        begun.acquire()
        if seconds and not done.wait(seconds):
            with one_at_a_time:
                is_late = not done.is_set()
        return not is_late

    def close(self) -> None:
        """End the thread after what was asked of it is done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    """Call back on the event loop, from another thread."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return  # the event loop was closed, and with it all that wait for the answer


def _answer(future: asyncio.Future[Any], answer: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)
