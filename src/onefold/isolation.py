"""Stage 7, handle: the processes of isolated handlers: which one runs a message, and what it asks of the worker.

The handler's verbs come here as frames and are done in the worker, where the commit happens as for any other handler.
So a process that dies takes nothing with it but its own run, and how it died is written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable
from typing import Any

import msgspec

from onefold import frames, limits
from onefold.cell import CrashedError, Process, UnfitError
from onefold.clock import to_instant
from onefold.context import Context
from onefold.errors import HandlerError, HandlerTimeoutError, LeaseLostError, StoreUnavailableError, UncertainError
from onefold.frames import Answered, Asked, Failed, Returned, Run
from onefold.retry import RetryPolicy
from onefold.spawning import STOP_SIGNALS
from onefold.step import Step
from onefold.store import Again, Dead, Failure, Lease
from onefold.task import Task
from onefold.threads import BusyError

#: A signal to a whole service may reach a handler's process a moment before its worker knows that it is to stop.
_STOP_NEWS_SECONDS = 1.0


class DecidedError(Exception):
    """A handler failed in its process, which has also decided what that means."""

    def __init__(self, error: str, text: str, outcome: Again | Dead) -> None:
        super().__init__(text)
        self.error = error
        self.outcome = outcome


def judge(policy: RetryPolicy, lease: Lease, crash: CrashedError, chance: random.Random) -> Again | Dead:
    """Return what becomes of a message whose process died: it is surely to blame, so it is not tried for long."""
    crashes = lease.crashes + 1
    text = f"{crash}; its processes have died {crashes} times" if crashes > 1 else str(crash)
    quarantined = crashes >= limits.QUARANTINE_AFTER_SUPERVISED
    failure = Failure(
        reason="quarantined" if quarantined else "crashed",
        error_type="Crash",
        error_message=text,
        stack=crash.evidence,
    )
    if quarantined:
        return Dead(failure, ran=False)
    return Again(policy.delay(crashes, chance), failure, counted=False, crashed=True)


class Processes:
    """A few processes, in each of which one message runs at a time; they are started when they are needed."""

    def __init__(self) -> None:
        self._idle: list[Process] = []
        self._room = asyncio.Semaphore(limits.ISOLATED_PROCESSES_MAX)
        self._stopping = asyncio.Event()
        # A handler on the event loop or in a thread may change it for the whole worker.
        self._directory = _working_directory()

    def stop(self) -> None:
        """Take note that the worker stops: a process that dies from now on was ended with it, by no fault of a run."""
        self._stopping.set()

    async def run(self, task: Task[Any, Any], context: Context) -> Any:
        """Run a handler in a process and return its result; what it sent is in the context's buffer then.

        Whatever else happens to the run, lease loss, a stop or the end of its time, its process is killed.
        """
        async with self._room:
            process = await self._begin(_run_frame(task, context))
            try:
                finishing = process.finish(lambda asked: _answer(context, asked), context._say)
                answer = await _within_its_time(task, finishing)
            except CrashedError as error:
                await process.kill()
                if await self._is_stopped(error):
                    raise BusyError(f"its process ended while the worker stops: {error}") from error
                raise
            except BaseException:
                await process.kill()
                raise
            self._idle.append(process)
        if isinstance(answer, Failed):
            raise _error_of(answer, context)
        if answer.sends or answer.notes:
            context.buffer.take(answer.sends, answer.notes)
        return task.signature.decode_result(answer.result)

    async def _begin(self, frame: Run) -> Process:
        """Give a message to a process; one that has died or hangs, for whatever reason, is not the message's fault."""
        while self._idle:
            process = self._idle.pop()
            try:
                await process.begin(frame)
                return process
            except (CrashedError, UnfitError):
                await process.kill()
            except BaseException:
                await process.kill()
                raise
        process = await Process.start(self._directory)
        try:
            await process.begin(frame)
        except (CrashedError, UnfitError) as error:
            await process.kill()
            raise BusyError(f"a process for isolated handlers was unfit before it began: {error}") from error
        except BaseException:
            await process.kill()
            raise
        return process

    async def _is_stopped(self, crash: CrashedError) -> bool:
        """Whether a process died because everything is stopped."""
        if crash.signal in STOP_SIGNALS:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_NEWS_SECONDS):
                    await self._stopping.wait()
        return self._stopping.is_set()

    async def close(self) -> None:
        """End the processes; those that run a handler were killed with their run."""
        await asyncio.gather(*(process.dismiss() for process in self._idle))
        self._idle.clear()


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None  # it was removed, and a new process is where this one is


async def _within_its_time(task: Task[Any, Any], run: Awaitable[Returned | Failed]) -> Returned | Failed:
    """The process itself ends its handler in time; the worker comes after it, in case it cannot."""
    seconds = None if task.timeout_seconds is None else task.timeout_seconds + limits.HARD_TIMEOUT_GRACE
    try:
        async with asyncio.timeout(seconds) as limit:
            return await run
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise HandlerTimeoutError(
            f"{task.name} ran longer than {task.timeout_seconds:g} s and did not stop; its process was killed"
        ) from error


def _run_frame(task: Task[Any, Any], context: Context) -> Run:
    lease, unkeyed = context.leases[0], context.buffer.unkeyed
    return Run(0, task.function.__module__, task.name, lease, unkeyed, to_instant(context.deadline), context._origin)


async def _answer(context: Context, asked: Asked) -> Answered:
    """Do what a handler asks for, as if it had asked here."""
    rows, error = None, None
    try:
        rows = await _do(context, asked)
    except Exception as raised:
        error = frames.raised(raised)
    return Answered(asked.number, rows, error, to_instant(context.deadline))


async def _do(context: Context, asked: Asked) -> Any:
    if asked.verb == "execute":
        return [frames.pack(row) for row in await context.execute(asked.statement, *asked.parameters)]
    if asked.verb == "fetch":
        return [frames.pack(row) for row in await context.fetch(asked.statement, *asked.parameters)]
    if asked.verb == "record":
        return await context._store.record(context.leases[0], msgspec.convert(asked.parameters, list[Step]))
    if asked.verb == "steps":
        return await context._store.steps(context.message.id)
    return await context.check()


def _error_of(answer: Failed, context: Context) -> Exception:
    if answer.kind == "lost":
        return LeaseLostError(answer.text)
    if answer.kind == "unavailable":
        return StoreUnavailableError(answer.text)
    if answer.kind == "uncertain":
        doubt = context._effects().uncertain = UncertainError(context.message.id, answer.error, "")
        doubt.args = (answer.text,)
        return doubt
    if answer.delay is not None:
        return DecidedError(answer.error, answer.text, Again(answer.delay, answer.failure, counted=answer.counted))
    if answer.failure is None:
        return HandlerError(answer.text)
    return DecidedError(answer.error, answer.text, Dead(answer.failure))
