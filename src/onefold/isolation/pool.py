"""Stage 7, handle: the processes of isolated handlers: give each a message, and do the verbs that its handler asks for.

The handler's verbs arrive as frames and are done in the worker, which commits as for any other handler.
So a process that dies loses nothing but its own run, and how it died is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable
from typing import Any

import msgspec

from onefold import limits
from onefold.child_process import STOP_SIGNALS
from onefold.clock import to_instant
from onefold.errors import HandlerError, HandlerTimeoutError, LeaseLostError, StoreUnavailableError, UncertainError
from onefold.handlers.context import Context
from onefold.handlers.environment import Environment
from onefold.handlers.threads import BusyError
from onefold.isolation import frames
from onefold.isolation.frames import AnsweredFrame, AskedFrame, FailedFrame, ReturnedFrame, RunFrame
from onefold.isolation.process import CrashedError, IsolatedProcess, UnfitError
from onefold.store import Again, Dead, Failure, Lease, Store
from onefold.store.journal_lines import Line
from onefold.tasks.retry import RetryPolicy
from onefold.tasks.task import Task

#: A signal to a whole service may reach a handler's process this much earlier than its worker.
_STOP_SIGNAL_SECONDS = 1.0


class DecidedError(Exception):
    """A handler failed in its process, which has also decided the outcome."""

    def __init__(self, error: str, text: str, outcome: Again | Dead) -> None:
        super().__init__(text)
        self.error = error
        self.outcome = outcome


def judge(policy: RetryPolicy, lease: Lease, crash: CrashedError, chance: random.Random) -> Again | Dead:
    """Return the outcome of a message after its process died: no other message ran there, so it is blamed at once."""
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


class IsolationPool:
    """A few processes, each of which runs one message at a time; they are started when they are needed."""

    def __init__(self) -> None:
        self._idle: list[IsolatedProcess] = []
        self._room = asyncio.Semaphore(limits.ISOLATED_PROCESSES_MAX)
        self._stopping = asyncio.Event()
        # Read now, because a handler on the event loop or in a thread may change the directory of the whole worker.
        self._directory = _working_directory()

    def stop(self) -> None:
        """Note that the worker stops: from now on no message is blamed for the death of its process."""
        self._stopping.set()

    async def run(self, task: Task[Any, Any], context: Context, environment: Environment) -> Any:
        """Run a handler in a process and return its result; the messages it sent are in the context's buffer then.

        If the run ends in any other way, such as a lost lease, a stop or a timeout, its process is killed.
        """
        async with self._room:
            process = await self._begin(_run_frame(task, context, environment.origin))
            try:
                finishing = process.finish(lambda asked: _answer(context, environment.store, asked), context.report)
                answer = await _within_timeout(task, finishing)
            except CrashedError as error:
                await process.kill()
                if await self._is_stopped(error):
                    raise BusyError(f"its process ended while the worker stops: {error}") from error
                raise
            except BaseException:
                await process.kill()
                raise
            self._idle.append(process)
        if isinstance(answer, FailedFrame):
            raise _error_of(answer, context)
        if answer.sends or answer.notes:
            context.buffer.extend(answer.sends, answer.notes)
        return task.signature.decode_result(answer.result)

    async def _begin(self, frame: RunFrame) -> IsolatedProcess:
        """Give a message to a process; the message is not blamed for a process that died or hangs before it began."""
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
        process = await IsolatedProcess.start(self._directory)
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
        """Whether a process died because the worker is being stopped."""
        if crash.signal in STOP_SIGNALS:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SIGNAL_SECONDS):
                    await self._stopping.wait()
        return self._stopping.is_set()

    async def close(self) -> None:
        """End the idle processes; those that ran a handler were killed with their run."""
        await asyncio.gather(*(process.dismiss() for process in self._idle))
        self._idle.clear()


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None  # it was removed; None lets a new process inherit it


async def _within_timeout(
    task: Task[Any, Any], run: Awaitable[ReturnedFrame | FailedFrame]
) -> ReturnedFrame | FailedFrame:
    """Await a run, a little longer than its timeout: the process itself ends its handler in time, if it can."""
    seconds = None if task.timeout_seconds is None else task.timeout_seconds + limits.HARD_TIMEOUT_GRACE
    try:
        async with asyncio.timeout(seconds) as limit:
            return await run
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise HandlerTimeoutError(
            f"{task.name} ran longer than {task.timeout_seconds:g} s and did not stop, so its process was killed; "
            "raise its timeout=, or divide the work"
        ) from error


def _run_frame(task: Task[Any, Any], context: Context, origin: str) -> RunFrame:
    lease, unkeyed = context.leases[0], context.buffer.unkeyed
    return RunFrame(0, task.function.__module__, task.name, lease, unkeyed, to_instant(context.deadline), origin)


async def _answer(context: Context, store: Store, asked: AskedFrame) -> AnsweredFrame:
    """Do a verb for a handler, and return the rows or the error for its process."""
    rows, error = None, None
    try:
        rows = await _do(context, store, asked)
    except Exception as raised:
        error = frames.pack_error(raised)
    return AnsweredFrame(asked.number, rows, error, to_instant(context.deadline))


async def _do(context: Context, store: Store, asked: AskedFrame) -> Any:
    if asked.verb == "execute":
        return [frames.pack(row) for row in await context.execute(asked.statement, *asked.parameters)]
    if asked.verb == "fetch":
        return [frames.pack(row) for row in await context.fetch(asked.statement, *asked.parameters)]
    if asked.verb == "record":
        return await store.record(context.leases[0], msgspec.convert(asked.parameters, list[Line]))
    if asked.verb == "steps":
        return await store.steps(context.message.id)
    return await context.check()


def _error_of(answer: FailedFrame, context: Context) -> Exception:
    if answer.kind == "lost":
        return LeaseLostError(answer.text)
    if answer.kind == "unavailable":
        return StoreUnavailableError(answer.text)
    if answer.kind == "uncertain":
        uncertain = context.ledger.uncertain = UncertainError(context.message.id, answer.error, "")
        uncertain.args = (answer.text,)
        return uncertain
    if answer.delay is not None:
        return DecidedError(answer.error, answer.text, Again(answer.delay, answer.failure, counted=answer.counted))
    if answer.failure is None:
        return HandlerError(answer.text)
    return DecidedError(answer.error, answer.text, Dead(answer.failure))
