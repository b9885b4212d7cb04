"""Stage 7, handle: a process for each run of an isolated handler, as its worker sees it.

The handler's verbs come here as frames and are done in the worker, where the commit happens as for any other handler.
So a process that dies takes nothing with it but its own run, and how it died is written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from typing import IO, Any

import msgspec

from onefold import frames, limits
from onefold.clock import to_instant
from onefold.context import Context
from onefold.errors import HandlerError, HandlerTimeoutError, LeaseLostError, StoreUnavailableError, UncertainError
from onefold.frames import Answered, Asked, Failed, Frame, Returned, Run, Setup, Told
from onefold.retry import RetryPolicy
from onefold.step import Step
from onefold.store import Again, Dead, Failure, Lease, Said
from onefold.task import Task
from onefold.threads import BusyError

#: What a process said before it died may still be on its way when its death is known.
_LAST_WORDS_SECONDS = 0.1


class DecidedError(Exception):
    """A handler failed in its process, which has also decided what that means."""

    def __init__(self, error: str, text: str, outcome: Again | Dead) -> None:
        super().__init__(text)
        self.error = error
        self.outcome = outcome


class CrashedError(Exception):
    """The process of a handler died; ``evidence`` is what it could still write down."""

    def __init__(self, text: str, evidence: str) -> None:
        super().__init__(text)
        self.evidence = evidence


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

    async def run(self, task: Task[Any, Any], context: Context) -> Any:
        """Run a handler in a process and return its result; what it sent is in the context's buffer then.

        Whatever else happens to the run, lease loss, a stop or the end of its time, its process is killed.
        """
        async with self._room:
            process = await self._begin(_run_frame(task, context))
            try:
                finishing = process.finish(lambda asked: _answer(context, asked), context._say)
                answer = await _within_its_time(task, finishing)
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
        """Give a message to a process; one that has died meanwhile, for whatever reason, is not the message's fault."""
        while self._idle:
            process = self._idle.pop()
            try:
                await process.begin(frame)
                return process
            except CrashedError:
                await process.kill()
            except BaseException:
                await process.kill()
                raise
        process = await Process.start()
        try:
            await process.begin(frame)
        except CrashedError as error:
            await process.kill()
            raise BusyError(f"a process for isolated handlers died before it began: {error}") from error
        except BaseException:
            await process.kill()
            raise
        return process

    async def close(self) -> None:
        """End the processes; those that run a handler were killed with their run."""
        await asyncio.gather(*(process.dismiss() for process in self._idle))
        self._idle.clear()


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
    return Run(task.function.__module__, task.name, lease, unkeyed, to_instant(context.deadline), context._origin)


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


class Process:
    """One process for isolated handlers, and the line to it."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        evidence: IO[bytes],
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer
        self._evidence = evidence
        self._loop = asyncio.get_running_loop()
        #: Its exit code, once it is over.
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name="onefold-watcher", daemon=True).start()

    @classmethod
    async def start(cls) -> Process:
        """Start a process and wait until it is ready; where there is no room for one, ``BusyError`` is raised."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            evidence = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
            try:
                process = cls(_spawn(theirs, evidence), reader, writer, evidence)
            except OSError as error:
                writer.close()
                raise BusyError(f"no process can be started: {error}") from error
        try:
            await process._say(Setup(sys.path, os.environ.get("PYTHONPATH")))
            await process._hear()
        except CrashedError as error:
            await process.kill()
            raise BusyError(f"a process for isolated handlers did not start: {error} {error.evidence}") from error
        except BaseException:
            await process.kill()
            raise
        return process

    @property
    def alive(self) -> bool:
        """Whether it is not known to be over."""
        return not self._ended.done()

    async def begin(self, frame: Run) -> None:
        """Have a handler run; when this returns, the process has begun."""
        await self._say(frame)
        await self._hear()

    async def finish(
        self, answer: Callable[[Asked], Awaitable[Answered]], listen: Callable[[Said], None]
    ) -> Returned | Failed:
        """Do what the handler asks for, until it is over; raises ``CrashedError`` when the process dies."""
        while True:
            said = await self._hear()
            if isinstance(said, Asked):
                await self._say(await answer(said))
            elif isinstance(said, Told):
                listen(Said(said.percent, said.message))
            elif isinstance(said, Returned | Failed):
                return said

    async def kill(self) -> None:
        """End the process, and what it has started, at once."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._writer.close()
        await asyncio.shield(self._ended)
        self._evidence.close()

    async def dismiss(self) -> None:
        """Let the process end by itself, which it does when nobody is on the line."""
        self._writer.close()
        await asyncio.wait([self._ended], timeout=limits.HANDLER_GRACE)
        await self.kill()

    async def _say(self, frame: Frame) -> None:
        try:
            data = frames.write(frame)
        except Exception as error:
            if not isinstance(frame, Answered):
                raise
            data = frames.write(Answered(frame.number, None, frames.raised(error), frame.deadline))
        self._writer.write(data)
        # A process that dies meanwhile is noticed when it is listened to.
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def _hear(self) -> Frame:
        try:
            (length,) = frames.LENGTH.unpack(await self._reader.readexactly(frames.LENGTH.size))
            return frames.read(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._crashed() from error

    async def _crashed(self) -> CrashedError:
        # It may have closed the line and live on.
        if not (await asyncio.wait([self._ended], timeout=limits.HANDLER_GRACE))[0]:
            await self.kill()
        self._evidence.seek(0)
        evidence = self._evidence.read(limits.STACK_TEXT_MAX).decode(errors="replace").replace("\0", "")
        return CrashedError(_described(self._ended.result()), evidence)

    def _watch(self) -> None:
        """In a thread: wait for the end.  The line alone does not tell: a child of the process may keep it open."""
        code = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the event loop was closed; nobody wants to know any more
            self._loop.call_soon_threadsafe(self._over, code)

    def _over(self, code: int) -> None:
        self._ended.set_result(code)
        self._loop.call_later(_LAST_WORDS_SECONDS, self._writer.close)


def _spawn(line: socket.socket, evidence: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start an interpreter of its own; a fork of this one would share its threads' locks and its connections."""
    kept = (line.fileno(), evidence.fileno())
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "onefold.isolated", *map(str, (os.getpid(), *kept))],
        stdin=subprocess.DEVNULL,
        pass_fds=kept,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # Ctrl-C is for the worker, and whatever the handler starts is to end with it.
        start_new_session=True,
    )


def _described(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code} before the handler returned"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}"
