"""Stages 7 to 9 for workflows: work that goes on where it was, after weeks of waiting or a crash.

A workflow is an ordinary message whose handler is run again from the beginning whenever the message is claimed.
What it does through its ``Run`` is journaled and not done twice; while it waits it holds no worker.
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
from onefold.children import Child, Children
from onefold.clock import to_datetime
from onefold.codec import ResultCodec, fingerprint_of_call
from onefold.context import Context
from onefold.envelope import derived_key, refuse_reserved
from onefold.errors import (
    ConfigurationError,
    HandlerError,
    SignalTimeoutError,
    TransactionOpenError,
    seconds,
)
from onefold.inside import current
from onefold.journal import Sent, due_at, encode, signal_note
from onefold.receipt import Receipt
from onefold.step import Step, StepKind
from onefold.stepping import CallOptions, StepFunction, StepSettings, check_command, settings_of
from onefold.store import State, Stored
from onefold.stretch import Raised, Stretch, Wait, branch
from onefold.task import BoundTask, Call, Task, takes_first
from onefold.topic import Publishable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class Workflow(Task[P, R]):
    """A function that can be sent, and whose runs are journaled; ``await workflow.send(…)`` starts one."""

    pinned = True

    def _is_handed_something(self, function: Callable[..., Any]) -> bool:
        if not takes_first(function, "Run", "run"):
            raise ConfigurationError(f"{self.name}: the first parameter of a workflow is its run; write `run: Run`")
        return True

    def __repr__(self) -> str:
        return f"<workflow {self.name} version {self.version}>"


class Run:
    """What a workflow receives: the only door for what it does.

    The code around it must do the same every time it is run: no clock, no chance, no calls to the outside except
    through here.  Each thing asked for is known by its name and how often that was asked for.
    """

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._journal = stretch.journal
        self.message = stretch.lease.envelope
        self.resources = stretch.tools.resources

    @property
    def _children(self) -> Children:
        return Children(self._stretch)

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
        """Call a function and keep what it returned: when the run goes on later, it is not called again.

        A function that takes a ``Context`` commits its SQL, its sends and the record of its result together.
        A crash before that commit lets it be called again; what it does to the outside belongs into ``ctx.once``.
        It is retried by its policy; when it has failed for good, ``StepError`` is raised, on every replay the same.
        A task is sent as a command, and what its handler returns is the result: as with ``child``, with a timeout.
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
        # Named now and not when it is awaited: the order of calls is what every replay has in common.
        return self._stretch.perform(self._name(function.name), function, args, kwargs)

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

    def _name(self, what: str) -> str:
        if current.get() is not self:
            raise HandlerError("a step cannot use its run: what it would record lies inside of what it records itself")
        self._stretch.refuse()
        return self._journal.name(branch.get(), what)

    # waiting

    def sleep(
        self,
        duration: timedelta | float | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
    ) -> Coroutine[Any, Any, None]:
        """Go on after this long: a ``timedelta``, a number of seconds, or days, hours and minutes.  Holds no worker."""
        length = seconds(duration or 0)
        if days or hours or minutes:
            length += seconds(timedelta(days=days, hours=hours, minutes=minutes))
        return self._sleep(self._name("sleep"), length)

    async def _sleep(self, name: str, length: float) -> None:
        stretch, journal = self._stretch, self._journal
        fingerprint = _fingerprint_of_sleep(length)
        timer = stretch.find(name, StepKind.TIMER, fingerprint)
        if timer is None:
            stretch.begin(name)
            journal.pending.append(Step(name, StepKind.TIMER, encode(length), fingerprint))
            await stretch.wait_for(length)
        elif stretch.is_before(until := due_at(timer)) and not journal.went_on(timer, branch.get()):
            await stretch.wait(Wait(until))

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
        type: Any = Any,  # noqa: A002 - what the word means here is what it means there
    ) -> Any:
        """Wait for the next signal of this name and return its value; each is given to one wait, the oldest first.

        Raises ``SignalTimeoutError`` when ``timeout`` passes first.
        """
        limits.check_step_name("signal", name)
        length = None if timeout is None else seconds(timeout)
        try:
            codec = ResultCodec(type, field=f"signal {name}")
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(f"signal {name}: its type has no JSON form: {error}") from error
        return self._signal(self._name(name), name, length, codec)

    async def _signal(self, name: str, signal: str, length: float | None, codec: ResultCodec) -> Any:
        stretch, journal = self._stretch, self._journal
        timer, taken = journal.find(name, StepKind.TIMER), journal.find(name, StepKind.TAKEN)
        if timer is None and taken is None:
            stretch.begin(name)
        with stretch.fatal:
            step = journal.take_signal(name, signal)
        if step is not None:
            return codec.decode(step.value)
        late = SignalTimeoutError(f"run {self.id}: no signal {signal!r} came in time")
        if taken is not None:
            raise stretch.failing(name, late)
        if timer is None:
            # Without a limit too: so that people see what it waits for, and a change of the code is noticed.
            journal.pending.append(Step(name, StepKind.TIMER, encode(length)))
            await stretch.wait_for(length, awaits=1)
        else:
            await stretch.wait_until(due_at(timer), awaits=1)
        journal.pending.append(Step(journal.verdict_line(name), StepKind.TAKEN, encode(None)))
        raise stretch.failing(name, late)

    # others

    def child(self, task: Task[P, R] | BoundTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Child[R]:
        """Send a task or workflow and wait for its result.

        Raises ``DeadError`` if it becomes a dead letter and ``CancelledMessageError`` if it is taken back.
        """
        return self._command(task, settings_of(task), args, kwargs)

    def send(self, task: Task[P, R] | BoundTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message and do not wait for it; it leaves, once, with what the run records next."""
        return self.add(task.call(*args, **kwargs))

    def publish(self, topic: Publishable[T], event: T) -> Receipt[int]:
        """Publish an event; it leaves, once, with what the run records next."""
        return self.add(topic.call(event))

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside a workflow."""
        if call.options.get("if_dead", "keep") != "keep":
            raise ConfigurationError("if_dead='redrive' reopens another message; send it in a step or outside")
        name = self._name(call.task.name)
        with self._stretch.fatal:
            sent = self._journal.sent(name, call.fingerprint)
        envelope, receipt = self._stretch.prepare(name, call)
        if sent is not None:
            receipt.confirm(Stored(sent.id, State.SCHEDULED))
            return receipt
        self._stretch.begin(name)
        self._journal.pending.append(Step(name, StepKind.SENT, encode(Sent(envelope.id)), call.fingerprint))
        self._journal.sends.append(envelope)
        return receipt

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside a workflow."""
        line = self._name(f"signal.{limits.check_step_name('signal', name)}")
        if self._journal.find(line, StepKind.SENT) is not None:
            return
        self._stretch.begin(line)
        id_ = derived_key("signal", f"{self.id}/{line}") if id_ is None else refuse_reserved("id", id_)
        note = signal_note(run_id, name, value, id_)
        self._journal.pending.append(Step(line, StepKind.SENT, encode(Sent(run_id, role="signal"))))
        self._journal.notes.append(note)

    def refuse(self, verb: str) -> None:
        """Refuse what would be done again on every replay."""
        raise TransactionOpenError(f"{verb} inside a workflow would be done again whenever it goes on; do it in a step")

    # several at once

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
        """Do several things at once and return their results in this order, when all are through.

        Takes steps, children, waits and coroutines that use the run; children wake the run once, when all have ended.
        If some fail, all are waited for, and the first of them in this order is raised.  With ``return_exceptions``
        nothing is raised: the exceptions of those that failed stand among the results, in their places.
        """
        try:
            self._stretch.refuse()
        except BaseException:
            for one in awaitables:
                if isinstance(one, Coroutine):
                    one.close()  # nobody will await it, and nobody is to be warned of that
            raise
        here = branch.get()
        number = self._journal.ordinal(f"{here}gather")
        return self._gather(f"{here}gather#{number}.", awaitables, return_exceptions)

    async def _gather(self, name: str, awaitables: Sequence[Awaitable[Any]], keep: bool) -> tuple[Any, ...]:
        children = [one for one in awaitables if isinstance(one, Child)]
        jobs = [(f"{name}{n}/", one) for n, one in enumerate(awaitables) if not isinstance(one, Child)]
        if jobs:
            group = [(branch.get(), self._children.results(children, name))] if children else []
            answers = await self._stretch.branches([*jobs, *group])
        else:
            answers = [await self._children.results(children, name)]
        ended = answers.pop() if children else []
        if isinstance(ended, Raised):
            raise ended.error
        # What ends the stretch is no failure of one branch, and nothing to be kept among results.
        self._stretch.refuse()
        of_children, of_others = iter(ended), iter(answers)
        results = [next(of_children if isinstance(one, Child) else of_others) for one in awaitables]
        for number, result in enumerate(results):
            if isinstance(result, Raised):
                if not (keep and isinstance(result.error, Exception)):
                    raise result.error
                results[number] = result.error
        return tuple(results)

    # time and chance

    def now(self) -> datetime:
        """The time when the run first asked; the same on every replay."""
        name = self._name("now")
        known = self._journal.find(name, StepKind.RESULT)
        if known is not None:
            return to_datetime(msgspec.json.decode(known.value, type=int))
        self._stretch.begin(name)
        instant = self._stretch.now
        self._journal.pending.append(Step(name, StepKind.RESULT, encode(instant)))
        return to_datetime(instant)

    def random(self) -> float:
        """A number from 0 to 1, the same on every replay; it follows from the run's id, so it is no secret."""
        return (int.from_bytes(self._derived("random")[:8], "big") >> 11) / (1 << 53)

    def uuid(self) -> UUID:
        """A UUID, the same on every replay; no secret either."""
        return UUID(bytes=self._derived("uuid"), version=4)

    def _derived(self, what: str) -> bytes:
        what = f"{branch.get()}{what}"
        return blake2b(f"{self.id}/{what}#{self._journal.ordinal(what)}".encode(), digest_size=16).digest()


@lru_cache(maxsize=1_024)
def _fingerprint_of_sleep(length: float) -> bytes:
    """Return a digest of how long to sleep; most runs of a workflow sleep for as long as the others."""
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
