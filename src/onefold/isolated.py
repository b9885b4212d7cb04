"""The process of isolated handlers: imports them, runs one message at a time, and asks its worker for the rest.

Started by ``onefold.cell`` with the worker's process id and two descriptors: the line to the worker, and where to
write when all ends badly.  When the worker is gone, so is this process: nothing it does could be committed any more.
Signals that ask a program to end are the worker's business: it ends this process when the time has come.
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

from onefold import frames, limits, tether
from onefold.app import App
from onefold.clock import MICROSECONDS, SystemClock, system_random
from onefold.context import Context
from onefold.errors import (
    ConfigurationError,
    HandlerError,
    LeaseLostError,
    StoreUnavailableError,
    UncertainError,
)
from onefold.frames import Answered, Asked, Begun, Failed, Frame, Ready, Returned, Run, Told, Verb
from onefold.handling import make_ready, refuse_strays, watched
from onefold.inside import current
from onefold.progress import Pulse
from onefold.retry import decide, failure_of
from onefold.spawning import STOP_SIGNALS, end_fork, end_forks, kill_group
from onefold.step import Step
from onefold.stepping import in_time
from onefold.store import Dead, Lease, Said
from onefold.sync import SyncApp
from onefold.task import Task
from onefold.threads import Threads
from onefold.waiting import SyncTask

_clock = SystemClock()


def main() -> None:
    """Serve the worker at the other end of the line until it hangs up."""
    for number in STOP_SIGNALS:
        # Unlike a signal that is ignored, this is not passed on to programs that a handler starts.
        signal.signal(number, _leave_it_to_the_worker)
        signal.siginterrupt(number, False)
    worker, line, evidence = (int(word) for word in sys.argv[1:4])
    tether.follow(worker)
    # Neither is for the processes that a handler may start.
    os.set_inheritable(line, False)
    os.set_inheritable(evidence, False)
    faulthandler.enable(file=evidence)
    asyncio.run(_Process(socket.socket(fileno=line)).serve())


def _leave_it_to_the_worker(*_: object) -> None:
    """Do nothing about a signal."""


class _Process:
    """The loop of the process: one frame that asks for a run after the other."""

    def __init__(self, line: socket.socket) -> None:
        self._line = _Line(line)
        self._threads = Threads()
        self._resources: dict[App, Any] = {}

    async def serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(watched())
            end_forks(asyncio.get_running_loop())
            self._line.open()
            # With a thread that could not be ended it is no fit place for another message.
            while not self._threads.abandoned and (run := await self._line.next_run()) is not None:
                self._line.say(Begun(run.run))
                self._line.say(await self._run(run, stack))

    async def _run(self, run: Run, stack: contextlib.AsyncExitStack) -> Returned | Failed:
        task: Task[Any, Any] | None = None
        try:
            task, app = find_task(run.module, run.task)
            if app not in self._resources:
                opened = None if app._lifespan is None else await stack.enter_async_context(app._lifespan())
                self._resources[app] = opened
            return await self._handle(run, task, app)
        except BaseException as error:
            self._line.end_if_forked(error)
            return _failed(error, run, task)

    async def _handle(self, run: Run, task: Task[Any, Any], app: App) -> Returned:
        store: Any = _Remote(self._line, run.run)
        context = _Isolated(
            run.lease,
            store,
            app._prepare,
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
            return Returned(run.run, task.signature.encode_result(result), list(context.sends), list(context.notes))
        except BaseException as error:
            if context.uncertain is None or error is context.uncertain:
                raise
            raise context.uncertain from error
        finally:
            context.close()
            context.pass_on()
            current.reset(token)


def find_task(module: str, name: str) -> tuple[Task[Any, Any], App]:
    """Import a module and return the task of that name, which it holds itself or on an app it holds."""
    for value in list(vars(importlib.import_module(module)).values()):
        app = value.app if isinstance(value, SyncApp) else value
        task = value.task if isinstance(value, SyncTask) else value
        if isinstance(app, App):
            task = app.tasks.get(name)
        if isinstance(task, Task) and task.name == name and isinstance(task._sender, App):
            return task, task._sender
    raise ConfigurationError(f"module {module} holds neither the isolated task {name} nor the app it belongs to")


def _failed(error: BaseException, run: Run, task: Task[Any, Any] | None) -> Failed:
    """Decide here, where the exception itself is at hand; the worker is told what it means."""
    name, text = type(error).__name__, failure_of(error, "failed").error_message
    if isinstance(error, LeaseLostError):
        return Failed(run.run, "lost", name, text)
    if isinstance(error, StoreUnavailableError):
        return Failed(run.run, "unavailable", name, text)
    if isinstance(error, UncertainError):
        return Failed(run.run, "uncertain", error.name, text)
    if task is None:
        return Failed(run.run, "failed", name, f"{name}: {text}")
    outcome = decide(task.retry, run.lease, error, now=SystemClock().now(), chance=system_random())
    if isinstance(outcome, Dead):
        return Failed(run.run, "failed", name, text, outcome.failure)
    return Failed(run.run, "failed", name, text, outcome.failure, outcome.delay, outcome.counted)


class _Isolated(Context):
    """The context of an isolated handler."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._store: Any
        self._pulse = Pulse()
        self._said_at = 0

    def after(self, function: Any, *args: Any, **kwargs: Any) -> None:
        raise HandlerError("an isolated handler has nothing after its commit: its process may be gone; use ctx.send()")

    def _say(self, said: Said) -> None:
        """Pass it on now and then; the worker writes no more often."""
        if self.over:
            return
        self._pulse.say(said)
        now = _clock.steady()
        if now >= self._said_at + round(limits.REPORT_SECONDS * MICROSECONDS / 2):
            self._said_at = now
            self.pass_on()

    def pass_on(self) -> None:
        """Tell the worker what is new, if anything."""
        if (said := self._pulse.take()) is not None:
            self._store.tell(said)


class _Remote:
    """As much of a store as the work of a handler needs, at the other end of the line."""

    def __init__(self, line: _Line, run: int) -> None:
        self._line = line
        self._run = run

    @contextlib.asynccontextmanager
    async def transaction(self, *, seconds: float | None = None) -> AsyncIterator[_Remote]:
        """The transaction itself is the worker's: it begins with the first statement there, and is ended there."""
        yield self

    @property
    def connection(self) -> Any:
        raise ConfigurationError("an isolated handler has no connection of the driver's; use ctx.execute()")

    def tell(self, said: Said) -> None:
        self._line.say(Told(self._run, said.percent, said.message))

    async def execute(self, statement: str, parameters: Sequence[Any]) -> Any:
        return await self._line.ask(self._run, "execute", statement, parameters)

    async def fetch(self, statement: str, parameters: Sequence[Any]) -> Any:
        return await self._line.ask(self._run, "fetch", statement, parameters)

    async def extend(self, leases: Sequence[Lease], *, lease: float) -> list[bool]:
        await self._line.ask(self._run, "check")
        return [True]

    async def record(self, lease: Lease, steps: Sequence[Step]) -> list[Step]:
        written = await self._line.ask(
            self._run, "record", "", [msgspec.to_builtins(step, builtin_types=(bytes,)) for step in steps]
        )
        return msgspec.convert(written, list[Step])

    async def steps(self, message_id: str) -> list[Step]:
        return msgspec.convert(await self._line.ask(self._run, "steps"), list[Step])


class _Line:
    """The line to the worker.  A thread listens, so that the end of the worker is heard whatever the handler does."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._process = os.getpid()
        self._saying = threading.Lock()
        self._runs: asyncio.Queue[Run | None] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._busy = False
        self._loop: asyncio.AbstractEventLoop
        #: When the lease runs out, as the worker last said.
        self.deadline = 0

    def open(self) -> None:
        """Say that all is set up, and listen."""
        self._loop = asyncio.get_running_loop()
        self.say(Ready())
        threading.Thread(target=self._listen, name="onefold-line", daemon=True).start()

    async def next_run(self) -> Run | None:
        """Wait for the next message; None when there will be no more."""
        return await self._runs.get()

    def say(self, frame: Frame) -> None:
        """Say something to the worker; only this process does, never a fork of it."""
        self.end_if_forked()
        data = frames.write(frame)
        if isinstance(frame, Returned | Failed):
            self._busy = False
        # A handler in a thread says how far it is from there; frames must not get into each other.
        with self._saying:
            self._line.sendall(data)

    def end_if_forked(self, error: BaseException | None = None) -> None:
        """End this process if it is a fork of the one that the worker has started; tell what brought it back."""
        if os.getpid() != self._process:
            end_fork(error)

    async def ask(self, run: int, verb: Verb, statement: str = "", parameters: Sequence[Any] = ()) -> Any:
        """Have the worker do something, and return the rows."""
        self._count += 1
        self.say(Asked(run, self._count, verb, statement, [frames.pack(value) for value in parameters]))
        answer = self._asked[self._count] = self._loop.create_future()
        return await answer

    def _listen(self) -> None:
        try:
            while (frame := self._hear()) is not None:
                self._busy = True
                self._loop.call_soon_threadsafe(self._arrive, frame)
        finally:
            if self._busy:
                # With what the handler has started; this process leads their group.
                kill_group(os.getpid())
        self._loop.call_soon_threadsafe(self._runs.put_nowait, None)

    def _hear(self) -> Frame | None:
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

    def _arrive(self, frame: Frame) -> None:
        if isinstance(frame, Run):
            self.deadline = frame.deadline
            self._runs.put_nowait(frame)
        elif isinstance(frame, Answered):
            self.deadline = frame.deadline
            answer = self._asked.pop(frame.number)
            if answer.done():
                return
            if frame.error is None:
                answer.set_result(frame.rows)
            else:
                answer.set_exception(frames.rebuilt(frame.error))
