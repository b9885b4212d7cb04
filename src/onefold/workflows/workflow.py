"""Stages 7 to 9 for workflows: handlers that continue where they were, after weeks of waiting or a crash.

A workflow is an ordinary message; its handler is run again from the beginning whenever the message is claimed.
Steps that it does through ``Run`` are journaled and not repeated; while it waits it holds no worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

import msgspec

from onefold import limits
from onefold.clock import to_datetime
from onefold.current import current
from onefold.errors import (
    ConfigurationError,
    DecodeError,
    HandlerError,
    SignalTimeoutError,
    TransactionOpenError,
    UnreadableSignalError,
    seconds,
)
from onefold.handlers.context import Context
from onefold.message.codec import ResultCodec, fingerprint_of_call
from onefold.message.envelope import derived_key, refuse_reserved
from onefold.store import State, Stored
from onefold.store.journal_lines import Line, LineKind, encode, signal_note
from onefold.tasks.options import TaskSettings
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import BoundTask, Call, Publishable, Sender, Task, takes_first
from onefold.transactions.buffer import is_keyed, refuse_task
from onefold.workflows.children import Child, Children
from onefold.workflows.journal import Sent, due_at
from onefold.workflows.replay import Raised, Replay, Wait, branch
from onefold.workflows.steps import CallOptions, StepFunction, StepSettings, check_command, settings_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class Workflow(Task[P, R]):
    """A function that can be sent, with a journal for each run; ``await workflow.send(…)`` starts a run."""

    pinned = True

    def __init__(self, sender: Sender, function: Callable[..., Any], settings: TaskSettings) -> None:
        super().__init__(sender, function, settings)
        #: How many steps a run may have before it is parked for a person.
        self.max_steps = limits.STEPS_MAX if settings.max_steps is None else settings.max_steps
        limits.check_range("max_steps", self.max_steps, 1, limits.STEPS_RAISED_MAX)

    def _is_handed_something(self, function: Callable[..., Any]) -> bool:
        if not takes_first(function, "Run", "run"):
            raise ConfigurationError(f"{self.name}: the first parameter of a workflow is its run; write `run: Run`")
        return True

    def __repr__(self) -> str:
        return f"<workflow {self.name} version {self.version}>"


class Run:
    """A workflow's first argument, through which it does everything that must not be repeated.

    The workflow's code must do the same every time it is run: no clock, no randomness and no calls to the outside
    except through this object.  Each step is known by its name and how often that was asked for.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._journal = replay.journal
        self.message = replay.lease.envelope
        self.resources = replay.environment.resources

    @property
    def _children(self) -> Children:
        return Children(self._replay)

    @property
    def id(self) -> str:
        """The id of the run, which is its message's."""
        return self.message.id

    # steps

    @overload
    def step(self, function: Task[P, R] | BoundTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Child[R]: ...
    @overload
    def step(
        self, function: Callable[Concatenate[Context, P], Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(
        self, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def step(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function and record its result: when the run goes on later, it is not called again.

        A function that takes a ``Context`` commits its SQL, its sends and the record of its result together.
        After a crash before that commit it is called again, so calls to the outside belong into ``ctx.once``.
        It is retried by its policy; when it has failed for good, ``StepError`` is raised, on every replay the same.
        A task is sent as a command, and its handler's result is the step's: as with ``child``, with a timeout.
        """
        return self._step(function, None, args, kwargs)

    def options(self, **options: Unpack[CallOptions]) -> BoundRun:
        """Return this run with a name, timeout, retry policy or undo for the step that follows."""
        return BoundRun(self, options)

    def _step(
        self, function: Any, options: CallOptions | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Awaitable[Any]:
        settings = settings_of(function)
        settings = settings.but(options) if options else settings
        if isinstance(function, Task | BoundTask):
            return self._command(function, settings, args, kwargs)
        return self._perform(StepFunction(function, settings), args, kwargs)

    def _perform(
        self, function: StepFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        # Named now and not when it is awaited: only the order of the calls is the same in every replay.
        return self._replay.perform(self._name(function.name), function, args, kwargs)

    def _command(
        self,
        task: Task[Any, Any] | BoundTask[Any, Any],
        settings: StepSettings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Child[Any]:
        check_command(task, settings)
        call = task.call(*args, **kwargs)
        return Child(self._children, self._name(settings.name or call.task.name), call, settings.timeout_seconds)

    def _name(self, kind: str) -> str:
        if current.get() is not self:
            raise HandlerError(
                "a step cannot use its run: a step inside a step cannot be recorded; call it in the workflow itself"
            )
        return self._replay.name(kind)

    # waiting

    def sleep(
        self,
        duration: timedelta | float | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
    ) -> Coroutine[Any, Any, None]:
        """Go on after this time: a ``timedelta``, a number of seconds, or days, hours and minutes.  Holds no worker."""
        length = seconds(0 if duration is None else duration, "sleep")
        for unit, count, name in ((86_400, days, "days"), (3_600, hours, "hours"), (60, minutes, "minutes")):
            if count != 0:
                length = seconds(length + unit * seconds(count, name), "sleep")
        return self._sleep(self._name("sleep"), length)

    async def _sleep(self, name: str, length: float) -> None:
        replay, journal = self._replay, self._journal
        fingerprint = _fingerprint_of_sleep(length)
        timer = replay.find(name, LineKind.TIMER, fingerprint)
        if timer is None:
            replay.begin(name)
            journal.pending.append(Line(name, LineKind.TIMER, encode(length), fingerprint))
            await replay.wait_for(length)
        elif replay.is_before(until := due_at(timer)) and not journal.went_on(timer, branch.get()):
            await replay.wait(Wait(until))

    @overload
    def signal(
        self, name: str, *, timeout: timedelta | float | None = None, type: type[R]
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def signal(self, name: str, *, timeout: timedelta | float | None = None) -> Coroutine[Any, Any, Any]: ...
    def signal(
        self,
        name: str,
        *,
        timeout: timedelta | float | None = None,
        type: Any = Any,  # noqa: A002 - it means the same as the builtin
    ) -> Any:
        """Wait for the next signal of this name and return its value; each is given to one wait, the oldest first.

        Raises ``SignalTimeoutError`` when ``timeout`` passes first.
        """
        limits.check_step_name("signal", name)
        length = None if timeout is None else seconds(timeout, "timeout")
        try:
            codec = ResultCodec(type, field=f"signal {name}")
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(f"signal {name}: its type has no JSON form: {error}") from error
        return self._signal(self._name(name), name, length, codec)

    async def _signal(self, name: str, signal: str, length: float | None, codec: ResultCodec) -> Any:
        replay, journal = self._replay, self._journal
        timer, taken = journal.find(name, LineKind.TIMER), journal.find(name, LineKind.TAKEN)
        if timer is None and taken is None:
            replay.begin(name)
        with replay.noting_fatal():
            step = journal.take_signal(name, signal)
        if step is not None:
            try:
                return codec.decode(step.value)
            except DecodeError as error:
                id_ = step.name.removeprefix(f"{signal}/")
                raise replay.give_up(UnreadableSignalError(self.id, signal, id_, error.problem)) from error
        timed_out = SignalTimeoutError(f"run {self.id}: no signal {signal!r} came within its timeout=")
        if taken is not None:
            raise replay.note_failure(name, timed_out)
        if timer is None:
            # Also for a wait without a timeout: operators see it, and a change of the code is noticed.
            journal.pending.append(Line(name, LineKind.TIMER, encode(length)))
            await replay.wait_for(length, awaits=1)
        else:
            await replay.wait_until(due_at(timer), awaits=1)
        journal.pending.append(Line(journal.verdict_line(name), LineKind.TAKEN, encode(None)))
        raise replay.note_failure(name, timed_out)

    # other messages

    def child(self, task: Task[P, R] | BoundTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Child[R]:
        """Send a task or workflow and wait for its result.

        Raises ``DeadError`` if it becomes a dead letter and ``CancelledMessageError`` if it is cancelled.
        """
        return self._command(task, settings_of(task), args, kwargs)

    def send(self, task: Task[P, R] | BoundTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message and do not wait for it; it leaves, once, with the next commit of the run."""
        return self.add(task.call(*args, **kwargs))

    def publish(self, topic: Publishable[T], event: T) -> Receipt[int]:
        """Publish an event; it leaves, once, with the next commit of the run."""
        return self.add(topic.call(event))

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside a workflow."""
        if call.options.get("if_dead", "keep") != "keep":
            raise ConfigurationError("if_dead='redrive' reopens another message; send it in a step or outside")
        name = self._name(call.task.name)
        with self._replay.noting_fatal():
            sent = self._journal.sent(name, call.fingerprint)
        envelope, receipt = self._replay.prepare(name, call)
        if sent is not None:
            receipt.confirm(Stored(sent.id, State.SCHEDULED))
            return receipt
        self._replay.begin(name)
        self._journal.pending.append(Line(name, LineKind.SENT, encode(Sent(envelope.id)), call.fingerprint))
        self._journal.sends.append(envelope)
        if is_keyed(call):
            receipt.withhold()
            self._journal.on_stored[envelope.id] = receipt.confirm
        return receipt

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Receipt[R]:
        """Start a run, or find the one that holds its key, and signal it, with the next commit of this run."""
        return self.add_start(call, name, value, id)

    def add_start(self, call: Call[R], name: str, value: Any, id_: str | None) -> Receipt[R]:
        """Start or find a run and signal it; what ``await app.signal_with_start(…)`` does in a workflow."""
        refuse_task(call)
        receipt, journal = self.add(call), self._journal
        count = len(journal.notes)
        # If the journal has both already, ``add_signal`` sends nothing, and the id it is given does not matter.
        self.add_signal(journal.sends[-1].id if journal.sends else "-", name, value, id_)
        journal.notes[count:] = [msgspec.structs.replace(note, started=True) for note in journal.notes[count:]]
        return receipt

    def add_signal(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside a workflow."""
        line = self._name(f"signal.{limits.check_step_name('signal', name)}")
        if self._journal.find(line, LineKind.SENT) is not None:
            return
        self._replay.begin(line)
        id_ = derived_key("signal", f"{self.id}/{line}") if id_ is None else refuse_reserved("id", id_)
        note = signal_note(run_id, name, value, id_)
        self._journal.pending.append(Line(line, LineKind.SENT, encode(Sent(run_id, role="signal"))))
        self._journal.notes.append(note)

    def refuse(self, verb: str) -> None:
        """Refuse a verb that commits by itself: every replay would repeat it."""
        raise TransactionOpenError(f"{verb} inside a workflow would be repeated by every replay; do it in a step")

    # concurrent steps

    @overload
    def gather(
        self, one: Awaitable[A], two: Awaitable[B], /, *, return_exceptions: Literal[False] = False
    ) -> Coroutine[Any, Any, tuple[A, B]]: ...
    @overload
    def gather(
        self, one: Awaitable[A], two: Awaitable[B], /, *, return_exceptions: Literal[True]
    ) -> Coroutine[Any, Any, tuple[A | Exception, B | Exception]]: ...
    @overload
    def gather(
        self, one: Awaitable[A], two: Awaitable[B], three: Awaitable[C], /, *, return_exceptions: Literal[False] = False
    ) -> Coroutine[Any, Any, tuple[A, B, C]]: ...
    @overload
    def gather(
        self, one: Awaitable[A], two: Awaitable[B], three: Awaitable[C], /, *, return_exceptions: Literal[True]
    ) -> Coroutine[Any, Any, tuple[A | Exception, B | Exception, C | Exception]]: ...
    @overload
    def gather(
        self, /, *awaitables: Awaitable[R], return_exceptions: Literal[False] = False
    ) -> Coroutine[Any, Any, tuple[R, ...]]: ...
    @overload
    def gather(
        self, /, *awaitables: Awaitable[R], return_exceptions: Literal[True]
    ) -> Coroutine[Any, Any, tuple[R | Exception, ...]]: ...
    def gather(self, /, *awaitables: Awaitable[Any], return_exceptions: bool = False) -> Any:
        """Do several things concurrently and return their results in this order, when all have ended.

        Takes steps, children, waits and coroutines that use the run; children wake the run once, when all have ended.
        If some fail, all are waited for, and the first failure in this order is raised.  With ``return_exceptions``
        nothing is raised: the exceptions are in the places of the results.
        """
        try:
            self._replay.raise_if_over()
        except BaseException:
            for one in awaitables:
                if isinstance(one, Coroutine):
                    one.close()  # so that Python does not warn that it was never awaited
            raise
        here = branch.get()
        number = self._journal.ordinal(f"{here}gather")
        return self._gather(f"{here}gather#{number}.", awaitables, return_exceptions)

    async def _gather(self, name: str, awaitables: Sequence[Awaitable[Any]], keep: bool) -> tuple[Any, ...]:
        children = [one for one in awaitables if isinstance(one, Child)]
        jobs = [(f"{name}{n}/", one) for n, one in enumerate(awaitables) if not isinstance(one, Child)]
        if jobs:
            group = [(branch.get(), self._children.results(children, name))] if children else []
            answers = await self._replay.run_branches([*jobs, *group])
        else:
            answers = [await self._children.results(children, name)]
        ended = answers.pop() if children else []
        if isinstance(ended, Raised):
            raise ended.error
        # An error that ends the replay is not the failure of one branch, so it is never among the results.
        self._replay.raise_if_over()
        of_children, of_others = iter(ended), iter(answers)
        results = [next(of_children if isinstance(one, Child) else of_others) for one in awaitables]
        for number, result in enumerate(results):
            if isinstance(result, Raised):
                if not (keep and isinstance(result.error, Exception)):
                    raise result.error
                results[number] = result.error
        return tuple(results)

    # time and randomness

    def now(self) -> datetime:
        """The time of the run's first call; the same on every replay."""
        name = self._name("now")
        known = self._journal.find(name, LineKind.RESULT)
        if known is not None:
            return to_datetime(msgspec.json.decode(known.value, type=int))
        self._replay.begin(name)
        instant = self._replay.now
        self._journal.pending.append(Line(name, LineKind.RESULT, encode(instant)))
        return to_datetime(instant)

    def random(self) -> float:
        """A number from 0 to 1, the same on every replay; it is computed from the run's id, so it is no secret."""
        return (int.from_bytes(self._derived("random")[:8], "big") >> 11) / (1 << 53)

    def uuid(self) -> UUID:
        """A UUID, the same on every replay; it is computed from the run's id, so it is no secret."""
        return UUID(bytes=self._derived("uuid"), version=4)

    def _derived(self, kind: str) -> bytes:
        kind = f"{branch.get()}{kind}"
        return blake2b(f"{self.id}/{kind}#{self._journal.ordinal(kind)}".encode(), digest_size=16).digest()


@lru_cache(maxsize=1_024)
def _fingerprint_of_sleep(length: float) -> bytes:
    """Return a digest of the length; cached, because most runs of a workflow sleep equally long."""
    return fingerprint_of_call((length,), {})


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A run with options for a step."""

    run: Run
    bound: CallOptions

    @overload
    def step(self, function: Task[P, R] | BoundTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Child[R]: ...
    @overload
    def step(
        self, function: Callable[Concatenate[Context, P], Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(
        self, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def step(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function with these options; see ``Run.step``."""
        return self.run._step(function, self.bound, args, kwargs)

    def child(self, task: Task[P, R] | BoundTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Child[R]:
        """Send a task or workflow with these options and wait for its result; see ``Run.child``."""
        return self.run._command(task, settings_of(task).but(self.bound), args, kwargs)
