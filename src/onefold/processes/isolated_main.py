"""The process of isolated handlers: imports them, runs one message at a time, and lets its worker do their verbs.

Started by ``onefold.isolation.process`` with the worker's process id and two descriptors: the line to the worker, and
the file for the stacks of a process that dies.  It ends with its worker, because nothing it does could be committed.
It ignores the signals that ask a program to end: its worker gets them too, and ends this process in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from onefold import limits
from onefold.app import App
from onefold.child_process import STOP_SIGNALS, end_fork, end_forks, kill_group
from onefold.clock import MICROSECONDS, SystemClock, system_random
from onefold.current import current
from onefold.errors import (
    ConfigurationError,
    HandlerError,
    LeaseLostError,
    StoreUnavailableError,
    UncertainError,
)
from onefold.handlers.call import in_time, make_ready, refuse_strays, watched
from onefold.handlers.context import Context
from onefold.handlers.progress import Pulse
from onefold.handlers.threads import Threads
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
    Verb,
)
from onefold.processes import parent_death
from onefold.store import Dead, Lease, Said
from onefold.store.journal_lines import Line
from onefold.sync import SyncApp
from onefold.sync.objects import SyncTask
from onefold.tasks.failure_text import failure_of
from onefold.tasks.retry import decide
from onefold.tasks.task import Task

_clock = SystemClock()


def main() -> None:
    """Serve the worker at the other end of the line until it closes that."""
    for number in STOP_SIGNALS:
        # A handler of its own and not SIG_IGN, which programs that a handler starts would inherit.
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)
    worker, line, evidence = (int(word) for word in sys.argv[1:4])
    parent_death.end_after(worker)
    # Processes that a handler starts must not inherit them.
    os.set_inheritable(line, False)
    os.set_inheritable(evidence, False)
    faulthandler.enable(file=evidence)
    asyncio.run(_Process(socket.socket(fileno=line)).serve())


def _do_nothing(*_: object) -> None:
    """Do nothing on a signal."""


class _Process:
    """The loop of the process: one run after the other."""

    def __init__(self, line: socket.socket) -> None:
        self._line = _Line(line)
        self._threads = Threads()
        self._resources: dict[App, Any] = {}

    async def serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(watched())
            end_forks(asyncio.get_running_loop())
            self._line.open()
            # After a run that left a thread which cannot be ended, the process ends: a new one starts clean.
            while not self._threads.abandoned and (run := await self._line.next_run()) is not None:
                self._line.send(BegunFrame(run.run))
                self._line.send(await self._run(run, stack))

    async def _run(self, run: RunFrame, stack: contextlib.AsyncExitStack) -> ReturnedFrame | FailedFrame:
        task: Task[Any, Any] | None = None
        try:
            task, app = find_task(run.module, run.task)
            if app not in self._resources:
                opened = await stack.enter_async_context(app.open_resources())
                self._resources[app] = opened
            return await self._handle(run, task, app)
        except BaseException as error:
            self._line.end_if_forked(error)
            return _failed(error, run, task)

    async def _handle(self, run: RunFrame, task: Task[Any, Any], app: App) -> ReturnedFrame:
        store: Any = _RemoteStore(self._line, run.run)
        context = _Isolated(
            run.lease,
            store,
            app.prepare,
            self._resources[app],
            lambda: self._line.deadline,
            unkeyed=run.unkeyed,
            origin=run.origin,
        )
        token = current.set(context)
        try:
            arguments = task.signature.decode(run.lease.envelope.payload_inline or b"")
            ready = make_ready(task, context, arguments, self._threads)
            result = await in_time(ready, task.timeout_seconds, task.name)
            await refuse_strays(context)
            if context.uncertain is not None:
                raise context.uncertain
            return ReturnedFrame(
                run.run, task.signature.encode_result(result), list(context.sends), list(context.notes)
            )
        except BaseException as error:
            if context.uncertain is None or error is context.uncertain:
                raise
            raise context.uncertain from error
        finally:
            context.close()
            context.send_report()
            current.reset(token)


def find_task(module: str, name: str) -> tuple[Task[Any, Any], App]:
    """Import a module and return the task of that name, found in the module or on an app in it, with its app."""
    for value in list(vars(importlib.import_module(module)).values()):
        app = value.app if isinstance(value, SyncApp) else value
        task = value.task if isinstance(value, SyncTask) else value
        if isinstance(app, App):
            task = app.tasks.get(name)
        if isinstance(task, Task) and task.name == name and isinstance(task.sender, App):
            return task, task.sender
    raise ConfigurationError(
        f"module {module} holds neither the isolated task {name} nor the app it belongs to; "
        "define one of them at the top of the module"
    )


def _failed(error: BaseException, run: RunFrame, task: Task[Any, Any] | None) -> FailedFrame:
    """Decide the outcome here, where the exception itself is at hand, and return the frame that tells the worker."""
    name, text = type(error).__name__, failure_of(error, "failed").error_message
    if isinstance(error, LeaseLostError):
        return FailedFrame(run.run, "lost", name, text)
    if isinstance(error, StoreUnavailableError):
        return FailedFrame(run.run, "unavailable", name, text)
    if isinstance(error, UncertainError):
        return FailedFrame(run.run, "uncertain", error.name, text)
    if task is None:
        return FailedFrame(run.run, "failed", name, f"{name}: {text}")
    outcome = decide(task.retry, run.lease, error, now=SystemClock().now(), chance=system_random())
    if isinstance(outcome, Dead):
        return FailedFrame(run.run, "failed", name, text, outcome.failure)
    return FailedFrame(run.run, "failed", name, text, outcome.failure, outcome.delay, outcome.counted)


class _Isolated(Context):
    """The context of an isolated handler."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._store: Any
        self._pulse = Pulse()
        self._reported_at = 0

    def after(self, function: Any, *args: Any, **kwargs: Any) -> None:
        raise HandlerError("an isolated handler has no after(): its process may be gone by then; use ctx.send()")

    def report(self, said: Said) -> None:
        """Leave a report; it is sent to the worker twice as often as the worker writes reports."""
        if self.over:
            return
        self._pulse.say(said)
        now = _clock.steady()
        if now >= self._reported_at + round(limits.REPORT_SECONDS * MICROSECONDS / 2):
            self._reported_at = now
            self.send_report()

    def send_report(self) -> None:
        """Send the latest report to the worker, if there is a new one."""
        if (said := self._pulse.take()) is not None:
            self._store.tell(said)


class _RemoteStore:
    """The methods of a store that a handler's context needs, done by the worker at the other end of the line."""

    def __init__(self, line: _Line, run: int) -> None:
        self._line = line
        self._run = run

    @contextlib.asynccontextmanager
    async def transaction(self, *, seconds: float | None = None) -> AsyncIterator[_RemoteStore]:
        """Do nothing: the worker begins the transaction with the first statement, and ends it."""
        yield self

    @property
    def connection(self) -> Any:
        raise ConfigurationError("an isolated handler has no connection of the driver's; use ctx.execute()")

    def tell(self, said: Said) -> None:
        self._line.send(ToldFrame(self._run, said.percent, said.message))

    async def execute(self, statement: str, parameters: Sequence[Any]) -> Any:
        return await self._line.ask(self._run, "execute", statement, parameters)

    async def fetch(self, statement: str, parameters: Sequence[Any]) -> Any:
        return await self._line.ask(self._run, "fetch", statement, parameters)

    async def extend(self, leases: Sequence[Lease], *, lease: float) -> list[bool]:
        await self._line.ask(self._run, "check")
        return [True]

    async def record(self, lease: Lease, steps: Sequence[Line]) -> list[Line]:
        written = await self._line.ask(
            self._run, "record", "", [msgspec.to_builtins(step, builtin_types=(bytes,)) for step in steps]
        )
        return msgspec.convert(written, list[Line])

    async def steps(self, message_id: str) -> list[Line]:
        return msgspec.convert(await self._line.ask(self._run, "steps"), list[Line])


class _Line:
    """The line to the worker.  A thread reads it, so that its end is noticed while a handler blocks the loop."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._runs: asyncio.Queue[RunFrame | None] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._busy = False
        self._loop: asyncio.AbstractEventLoop
        #: When the lease runs out, from the worker's last frame.
        self.deadline = 0

    def open(self) -> None:
        """Tell the worker that this process is ready, and begin to read."""
        self._loop = asyncio.get_running_loop()
        self.send(ReadyFrame())
        threading.Thread(target=self._read_frames, name="onefold-line", daemon=True).start()

    async def next_run(self) -> RunFrame | None:
        """Wait for the next message; None when the worker has closed the line."""
        return await self._runs.get()

    def send(self, frame: Frame) -> None:
        """Send a frame to the worker; a fork of this process sends none and ends instead."""
        self.end_if_forked()
        data = frames.write(frame)
        if isinstance(frame, ReturnedFrame | FailedFrame):
            self._busy = False
        # A handler in a thread reports progress from that thread; frames must not be interleaved.
        with self._sending:
            self._line.sendall(data)

    def end_if_forked(self, error: BaseException | None = None) -> None:
        """End this process if it is a fork of the one that the worker started; see ``end_fork`` about ``error``."""
        if os.getpid() != self._process:
            end_fork(error)

    async def ask(self, run: int, verb: Verb, statement: str = "", parameters: Sequence[Any] = ()) -> Any:
        """Let the worker do a verb, and return the rows."""
        self._count += 1
        self.send(AskedFrame(run, self._count, verb, statement, [frames.pack(value) for value in parameters]))
        answer = self._asked[self._count] = self._loop.create_future()
        return await answer

    def _read_frames(self) -> None:
        try:
            while (frame := self._read_frame()) is not None:
                self._busy = True
                self._loop.call_soon_threadsafe(self._take, frame)
        finally:
            if self._busy:
                # Kill this process and all that its handler started: it leads their group.
                kill_group(os.getpid())
        self._loop.call_soon_threadsafe(self._runs.put_nowait, None)

    def _read_frame(self) -> Frame | None:
        head = self._read(frames.LENGTH.size)
        return None if head is None else frames.read(self._read(frames.length_of(head)) or b"")

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            with contextlib.suppress(ConnectionError):
                if part := self._line.recv(min(size - len(data), 1 << 20)):
                    data += part
                    continue
            return None
        return bytes(data)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, RunFrame):
            self.deadline = frame.deadline
            self._runs.put_nowait(frame)
        elif isinstance(frame, AnsweredFrame):
            self.deadline = frame.deadline
            answer = self._asked.pop(frame.number)
            if answer.done():
                return
            if frame.error is None:
                answer.set_result(frame.rows)
            else:
                answer.set_exception(frames.unpack_error(frame.error))
