"""Stage 7, handle: one process for isolated handlers, in its worker: its start, the line to it, its end.

Every frame names the run it belongs to.  A process that sends any other frame is killed: the worker could take its
next frame for the answer of another message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

from msgspec.structs import replace

from onefold import limits
from onefold.child_process import command, environment, kill_group, unnamed_file
from onefold.handlers.threads import BusyError
from onefold.isolation import frames
from onefold.isolation.frames import (
    AnsweredFrame,
    AskedFrame,
    BegunFrame,
    FailedFrame,
    Frame,
    ReadyFrame,
    ReturnedFrame,
    RunFrame,
    ToldFrame,
)
from onefold.store import Said

#: The last frames of a process that died may arrive this much later than the news of its death.
_LAST_FRAMES_SECONDS = 0.1


class CrashedError(Exception):
    """The process of a handler died; ``evidence`` is the stacks that it could still write."""

    def __init__(self, text: str, evidence: str, signal: int = 0) -> None:
        super().__init__(text)
        self.evidence = evidence
        #: The signal that killed it; 0 if none did.
        self.signal = signal


class UnfitError(BusyError):
    """A process cannot be used any more; the message it was given is not to blame."""


class IsolatedProcess:
    """One process for isolated handlers, and the line to it."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        evidence: int,
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer
        #: The descriptor of the file into which it writes its stacks when it dies; None when that is closed.
        self._evidence: int | None = evidence
        #: The number of its present run, counted from 1.
        self._run = 0
        self._loop = asyncio.get_running_loop()
        #: Its exit code, once it has ended.
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name="onefold-watcher", daemon=True).start()

    @classmethod
    async def start(cls, directory: str | None) -> IsolatedProcess:
        """Start a process and wait until it is ready.

        Raises ``BusyError`` if it cannot start, such as for want of memory, processes, threads or descriptors.
        """
        try:
            process = await cls._launch(directory)
        except (OSError, RuntimeError) as error:
            raise BusyError(f"no process for isolated handlers can be started: {error}") from error
        try:
            async with _bounded(limits.ISOLATED_START_SECONDS, "was not ready"):
                frame = await process._receive()
            if not isinstance(frame, ReadyFrame):
                raise UnfitError(f"it sent {type(frame).__name__} before it was ready")
        except (CrashedError, UnfitError) as error:
            await process.kill()
            evidence = error.evidence if isinstance(error, CrashedError) else ""
            raise BusyError(f"a process for isolated handlers did not start: {error} {evidence}".rstrip()) from error
        except BaseException:
            await process.kill()
            raise
        return process

    @classmethod
    async def _launch(cls, directory: str | None) -> IsolatedProcess:
        with contextlib.ExitStack() as undo:
            evidence = unnamed_file("onefold-evidence")
            undo.callback(os.close, evidence)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                reader, writer = await asyncio.open_connection(sock=ours)
                undo.callback(writer.close)
                popen = _spawn(theirs, evidence, directory)
            undo.callback(popen.wait)
            undo.callback(kill_group, popen.pid)
            process = cls(popen, reader, writer, evidence)
            undo.pop_all()
        return process

    @property
    def alive(self) -> bool:
        """Whether its end is not known yet."""
        return not self._ended.done()

    async def begin(self, frame: RunFrame) -> None:
        """Give the process a message, under the next number; when this returns, it has begun its run."""
        self._run += 1
        async with _bounded(limits.ISOLATED_BEGIN_SECONDS, "did not take a message"):
            await self._send(replace(frame, run=self._run))
            begun = await self._receive()
        if begun != BegunFrame(self._run):
            raise self._unexpected(begun)

    async def finish(
        self, answer: Callable[[AskedFrame], Awaitable[AnsweredFrame]], report: Callable[[Said], None]
    ) -> ReturnedFrame | FailedFrame:
        """Answer the verbs of the handler, and pass on its reports, until it returns or fails.

        Raises ``CrashedError`` when the process dies, and ``UnfitError`` when it sends a frame that is not of this run.
        """
        while True:
            frame = await self._receive()
            if not isinstance(frame, AskedFrame | ToldFrame | ReturnedFrame | FailedFrame) or frame.run != self._run:
                raise self._unexpected(frame)
            if isinstance(frame, AskedFrame):
                await self._send(await answer(frame))
            elif isinstance(frame, ToldFrame):
                report(Said(frame.percent, frame.message))
            else:
                return frame

    async def kill(self) -> None:
        """Kill the process and all it has started; one that the kernel does not end in time is left behind."""
        if self.alive and self._popen.returncode is None:
            kill_group(self._popen.pid)
        self._writer.close()
        try:
            await asyncio.wait([self._ended], timeout=limits.HANDLER_GRACE)
        finally:
            if self._evidence is not None:
                os.close(self._evidence)
                self._evidence = None

    async def dismiss(self) -> None:
        """Let the process end by itself, which it does when its line is closed."""
        self._writer.close()
        try:
            await asyncio.wait([self._ended], timeout=limits.HANDLER_GRACE)
        finally:
            await self.kill()

    # the line

    async def _send(self, frame: Frame) -> None:
        try:
            data = frames.write(frame)
        except Exception as error:
            if not isinstance(frame, AnsweredFrame):
                raise
            data = frames.write(AnsweredFrame(frame.number, None, frames.pack_error(error), frame.deadline))
        self._writer.write(data)
        # If the process has died, the next ``_receive`` raises.
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def _receive(self) -> Frame:
        try:
            length = frames.length_of(await self._reader.readexactly(frames.LENGTH.size))
            return frames.read(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._crashed() from error
        except frames.UnreadableError as error:
            raise CrashedError(f"its process wrote on its worker's line: {error}", self._read_evidence()) from error

    def _unexpected(self, frame: Frame) -> UnfitError:
        run = getattr(frame, "run", None)
        return UnfitError(f"in run {self._run} the process sent {type(frame).__name__} of run {run}")

    # its end

    async def _crashed(self) -> CrashedError:
        # A handler may have closed the line while the process lives on.
        if not (await asyncio.wait([self._ended], timeout=limits.HANDLER_GRACE))[0]:
            evidence = self._read_evidence()
            await self.kill()
            return CrashedError("its process closed its worker's line and was killed", evidence)
        code = self._ended.result()
        return CrashedError(_describe_exit(code), self._read_evidence(), max(-code, 0))

    def _read_evidence(self) -> str:
        if self._evidence is None:
            return ""
        return os.pread(self._evidence, limits.STACK_TEXT_MAX, 0).decode(errors="replace").replace("\0", "")

    def _watch(self) -> None:
        """Wait for the end, in a thread.  The line may stay open after it: a child of the process may have it."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
            # Kill all it has started.  Before ``wait`` below, because after that its number may be another group's.
            kill_group(self._popen.pid)
        code = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and the worker with it
            self._loop.call_soon_threadsafe(self._note_end, code)

    def _note_end(self, code: int) -> None:
        self._ended.set_result(code)
        self._loop.call_later(_LAST_FRAMES_SECONDS, self._writer.close)


@contextlib.asynccontextmanager
async def _bounded(seconds: float, failure: str) -> AsyncIterator[None]:
    """Raise ``UnfitError`` when the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise UnfitError(f"it {failure} within {seconds:g} s") from error


def _spawn(line: socket.socket, evidence: int, directory: str | None) -> subprocess.Popen[bytes]:
    """Start a new interpreter; a fork of this one would share its threads' locks and its connections."""
    kept = (line.fileno(), evidence)
    return subprocess.Popen(
        command("onefold.processes.isolated_main", *map(str, (os.getpid(), *kept))),
        stdin=subprocess.DEVNULL,
        pass_fds=kept,
        cwd=directory,
        env=environment(),
        # A session of its own: Ctrl-C reaches the worker only, and the whole group can be killed.
        start_new_session=True,
    )


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code} before the handler returned"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}"
