"""Stage 7, handle: one process for isolated handlers, as its worker sees it: its start, the line to it, its end.

Every frame names the run it belongs to.  A process that says anything else is ended: what it says next could be
taken for the answer of another message.
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

from onefold import frames, limits
from onefold.frames import Answered, Asked, Begun, Failed, Frame, Ready, Returned, Run, Told
from onefold.spawning import command, environment, kill_group, unnamed_file
from onefold.store import Said
from onefold.threads import BusyError

#: What a process said before it died may still be on its way when its death is known.
_LAST_WORDS_SECONDS = 0.1


class CrashedError(Exception):
    """The process of a handler died; ``evidence`` is what it could still write down."""

    def __init__(self, text: str, evidence: str, signal: int = 0) -> None:
        super().__init__(text)
        self.evidence = evidence
        #: The signal it died of; 0 when it died of none.
        self.signal = signal


class UnfitError(BusyError):
    """A process cannot be used any more, for no fault of the message it was given."""


class Process:
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
        #: The descriptor of the file in which it writes down how it dies; None when it was closed.
        self._evidence: int | None = evidence
        self._run = 0
        self._loop = asyncio.get_running_loop()
        #: Its exit code, once it is over.
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name="onefold-watcher", daemon=True).start()

    @classmethod
    async def start(cls, directory: str | None) -> Process:
        """Start a process and wait until it is ready.

        Where there is no room for one, for want of memory, processes, threads or descriptors, ``BusyError`` is raised.
        """
        try:
            process = await cls._launch(directory)
        except (OSError, RuntimeError) as error:
            raise BusyError(f"no process for isolated handlers can be started: {error}") from error
        try:
            async with _bounded(limits.ISOLATED_START_SECONDS, "was not ready"):
                said = await process._hear()
            if not isinstance(said, Ready):
                raise UnfitError(f"it said {type(said).__name__} before it was ready")
        except (CrashedError, UnfitError) as error:
            await process.kill()
            evidence = error.evidence if isinstance(error, CrashedError) else ""
            raise BusyError(f"a process for isolated handlers did not start: {error} {evidence}".rstrip()) from error
        except BaseException:
            await process.kill()
            raise
        return process

    @classmethod
    async def _launch(cls, directory: str | None) -> Process:
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
        """Whether it is not known to be over."""
        return not self._ended.done()

    async def begin(self, frame: Run) -> None:
        """Have a handler run, under the next number; when this returns, the process has begun."""
        self._run += 1
        async with _bounded(limits.ISOLATED_BEGIN_SECONDS, "did not take a message"):
            await self._say(replace(frame, run=self._run))
            said = await self._hear()
        if said != Begun(self._run):
            raise self._out_of_turn(said)

    async def finish(
        self, answer: Callable[[Asked], Awaitable[Answered]], listen: Callable[[Said], None]
    ) -> Returned | Failed:
        """Do what the handler asks for, until it is over.

        Raises ``CrashedError`` when the process dies, and ``UnfitError`` when it says what is not of this run.
        """
        while True:
            said = await self._hear()
            if not isinstance(said, Asked | Told | Returned | Failed) or said.run != self._run:
                raise self._out_of_turn(said)
            if isinstance(said, Asked):
                await self._say(await answer(said))
            elif isinstance(said, Told):
                listen(Said(said.percent, said.message))
            else:
                return said

    async def kill(self) -> None:
        """End the process, and what it has started, at once; one that the kernel cannot end yet is left behind."""
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
            length = frames.length_of(await self._reader.readexactly(frames.LENGTH.size))
            return frames.read(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._crashed() from error
        except frames.UnreadableError as error:
            raise CrashedError(f"its process wrote on its worker's line: {error}", self._written()) from error

    def _out_of_turn(self, said: Frame) -> UnfitError:
        run = getattr(said, "run", None)
        return UnfitError(f"in run {self._run} the process said {type(said).__name__} of run {run}")

    # its end

    async def _crashed(self) -> CrashedError:
        # It may have closed the line and live on.
        if not (await asyncio.wait([self._ended], timeout=limits.HANDLER_GRACE))[0]:
            evidence = self._written()
            await self.kill()
            return CrashedError("its process closed its worker's line and was killed", evidence)
        code = self._ended.result()
        return CrashedError(_described(code), self._written(), max(-code, 0))

    def _written(self) -> str:
        if self._evidence is None:
            return ""
        return os.pread(self._evidence, limits.STACK_TEXT_MAX, 0).decode(errors="replace").replace("\0", "")

    def _watch(self) -> None:
        """In a thread: wait for the end.  The line alone does not tell: a child of the process may keep it open."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
            # What it has started ends with it.  As long as it is not waited for, its number belongs to no other group.
            kill_group(self._popen.pid)
        code = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the event loop was closed; the end concerns nothing any more
            self._loop.call_soon_threadsafe(self._over, code)

    def _over(self, code: int) -> None:
        self._ended.set_result(code)
        self._loop.call_later(_LAST_WORDS_SECONDS, self._writer.close)


@contextlib.asynccontextmanager
async def _bounded(seconds: float, what: str) -> AsyncIterator[None]:
    """Bound what a process is to do by itself: one that does not is unfit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise UnfitError(f"it {what} within {seconds:g} s") from error


def _spawn(line: socket.socket, evidence: int, directory: str | None) -> subprocess.Popen[bytes]:
    """Start an interpreter of its own; a fork of this one would share its threads' locks and its connections."""
    kept = (line.fileno(), evidence)
    return subprocess.Popen(
        command("onefold.isolated", *map(str, (os.getpid(), *kept))),
        stdin=subprocess.DEVNULL,
        pass_fds=kept,
        cwd=directory,
        env=environment(),
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
