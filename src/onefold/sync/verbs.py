"""Entry: the verbs of ``App`` that ``SyncApp`` passes on unchanged: for operators, events, schedules and workflows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from onefold import limits
from onefold.app import App
from onefold.app.workflows import DeclareStep, WorkflowOptions
from onefold.brokers.transport import Transport
from onefold.errors import ConfigurationError
from onefold.events.subscriptions import Subscription
from onefold.events.topic import Topic
from onefold.handlers.context import Context
from onefold.handlers.effects import LedgerEntry
from onefold.handlers.sync_context import SyncContext
from onefold.message.envelope import Envelope
from onefold.message.keys import KeySource
from onefold.operations.chain import Chain
from onefold.operations.dead_letters import DeadGroup, DeadLetter
from onefold.operations.history import Chronicle
from onefold.operations.preflight import Advance, Problem
from onefold.schedules.plan import Catchup
from onefold.store import Counts, Progress, Query, Record
from onefold.store.journal_lines import Line
from onefold.sync.loop_thread import LoopThread
from onefold.sync.objects import SyncDeadLetter, SyncDebounced, SyncReceipt, SyncSchedule, SyncTask, SyncTopic
from onefold.tasks.options import TaskOptions
from onefold.tasks.task import Call, Sendable, Task
from onefold.worker.dead_notice import DeadNotice
from onefold.workflows.saga_status import SagaRecord
from onefold.workflows.steps import Never, StepOptions
from onefold.workflows.workflow import Run

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: A task that gets a notice of every dead letter.
SyncHook = SyncTask[[DeadNotice], R]


class SyncVerbs:
    """The part of ``SyncApp`` that only passes on; the verbs are described in ``App``."""

    #: The app itself, for asynchronous code and for workers.
    app: App
    _loop_thread: LoopThread

    def _run(self, verb: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Open the app if needed, run one of its verbs and return the result."""
        raise NotImplementedError

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send one message of any task of the app."""
        raise NotImplementedError

    # operators

    def dead_letters(self, *, queue: str | None = None, message_type: str | None = None) -> Iterator[SyncDeadLetter]:
        """Iterate over the dead letters, oldest first: ``for letter in app.dead_letters()``."""
        letters = self._run(lambda: _dead_letters(self.app, queue, message_type))
        while (letter := self._loop_thread.run(_next(letters))) is not None:
            yield SyncDeadLetter(letter, self._loop_thread)

    def dead_groups(self, *, queue: str | None = None) -> list[DeadGroup]:
        """Return the number of dead letters of each type and kind of error, and since when; the largest first."""
        return self._run(lambda: self.app.dead_groups(queue=queue))

    def redrive(self, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
        """Reopen one or several dead letters in one commit; returns the ids that this call reopened."""
        return self._run(lambda: self.app.redrive(ids, actor=actor, reason=reason))

    def cancel(self, message_id: str, *, actor: str, reason: str) -> bool:
        """Cancel a message; one that runs can no longer commit, and its handler is cancelled; see ``App.cancel``."""
        return self._run(lambda: self.app.cancel(message_id, actor=actor, reason=reason))

    def progress(self, message_id: str) -> Progress | None:
        """Return the progress that a message's handler last reported; see ``App.progress``."""
        return self._run(lambda: self.app.progress(message_id))

    def chain(self, message_id: str) -> Chain | None:
        """Return what caused a message and what it caused, as a tree; see ``App.chain``."""
        return self._run(lambda: self.app.chain(message_id))

    def find(self, query: Query) -> list[Record]:
        """Return one page of messages with their states."""
        return self._run(lambda: self.app.find(query))

    def count(self) -> dict[str, Counts]:
        """Return, per queue, the numbers of messages that wait, that run and that are dead."""
        return self._run(self.app.count)

    def preflight(self, advance: Advance | None = None) -> list[Problem]:
        """Return what of all that is open would break under the handlers of this app; see ``App.preflight``."""
        return self._run(lambda: self.app.preflight(advance))

    @overload
    def on_dead(self, function: Callable[[Context, DeadNotice], Awaitable[R]], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, function: Callable[[SyncContext, DeadNotice], R], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, function: Callable[[DeadNotice], Awaitable[R]], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, function: Callable[[DeadNotice], R], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, **settings: Unpack[TaskOptions]) -> SyncDeclare: ...
    def on_dead(self, *function: Any, **settings: Any) -> Any:
        """Declare a task that gets a notice of every dead letter; see ``App.on_dead``."""
        declare = SyncDeclare(self, self.app.on_dead(**settings))
        return declare(*function) if function else declare

    # events

    @overload
    def topic(
        self,
        name: str,
        kind: type[T],
        /,
        *,
        key: KeySource | None = None,
        subject: KeySource | None = None,
        ordering_key: KeySource | None = None,
        priority: int = 0,
        queue: str = "default",
        version: int = 1,
        expires: timedelta | float | None = limits.MESSAGE_RETENTION,
        key_window: timedelta | float = limits.KEY_WINDOW,
    ) -> SyncTopic[T]: ...
    @overload
    def topic(
        self,
        name: str,
        /,
        *,
        key: KeySource | None = None,
        subject: KeySource | None = None,
        ordering_key: KeySource | None = None,
        priority: int = 0,
        queue: str = "default",
        version: int = 1,
        expires: timedelta | float | None = limits.MESSAGE_RETENTION,
        key_window: timedelta | float = limits.KEY_WINDOW,
    ) -> SyncTopic[Any]: ...
    def topic(self, name: str, kind: Any = Any, /, **settings: Any) -> Any:
        """Declare an event by its name and the type of its data; see ``App.topic``."""
        return SyncTopic(self, self.app.topic(name, kind, **settings))

    @overload
    def on(
        self, event: Topic[Any] | SyncTopic[Any] | str, /, *, isolate: bool = False, **settings: Unpack[TaskOptions]
    ) -> SyncDeclare: ...
    @overload
    def on(
        self, event: Topic[Any] | SyncTopic[Any] | str, /, *, batch: int, **settings: Unpack[TaskOptions]
    ) -> SyncDeclare: ...
    def on(self, event: Topic[Any] | SyncTopic[Any] | str, /, **settings: Any) -> Any:
        """Declare a task that is sent a copy of every event of this name; see ``App.on``."""
        return SyncDeclare(self, self.app.on(event if isinstance(event, str) else event.name, **settings))

    def receive(
        self,
        transport: Transport,
        source: str,
        /,
        *,
        types: Sequence[str] | None = None,
        read: Callable[[bytes], Envelope] | None = None,
    ) -> None:
        """Declare that workers receive the entries of a stream; see ``App.receive``."""
        self.app.receive(transport, source, types=types, read=read)

    def relay(
        self, event: Topic[Any] | SyncTopic[Any] | str, /, *, to: Transport, stream: str, **settings: Any
    ) -> None:
        """Declare that every event of this name is published to a stream; see ``App.relay``."""
        self.app.relay(event if isinstance(event, str) else event.name, to=to, stream=stream, **settings)

    def subscribe(self) -> list[Subscription]:
        """Make the subscriptions of this app durable, as each of its workers does when it starts; returns them."""
        return self._run(self.app.subscribe)

    def subscriptions(self) -> list[Subscription]:
        """Return all subscriptions in this store, also those of other apps, sorted by event."""
        return self._run(self.app.subscriptions)

    def unsubscribe(self, event: str, subscriber: str) -> bool:
        """Remove a subscription; True when it was there.  See ``App.unsubscribe``."""
        return self._run(lambda: self.app.unsubscribe(event, subscriber))

    # recurring

    def recurring(
        self,
        expression: str | None = None,
        /,
        *,
        timezone: str = "UTC",
        every: timedelta | float | None = None,
        mode: Literal["rate", "delay"] | None = None,
        anchor: datetime | None = None,
        catchup: Catchup | None = None,
        window: timedelta | float | None = None,
        isolate: bool = False,
        **settings: Unpack[TaskOptions],
    ) -> SyncDeclare:
        """Declare a task that workers send by a timetable, once per fire time; see ``App.recurring``."""
        declare = self.app.recurring(
            expression,
            timezone=timezone,
            every=every,
            mode=mode,
            anchor=anchor,
            catchup=catchup,
            window=window,
            isolate=isolate,
            **settings,
        )
        return SyncDeclare(self, declare)

    def schedule(
        self,
        call: Call[Any],
        expression: str | None = None,
        /,
        *,
        name: str,
        timezone: str = "UTC",
        every: timedelta | float | None = None,
        mode: Literal["rate", "delay"] | None = None,
        anchor: datetime | None = None,
        catchup: Catchup | None = None,
        window: timedelta | float | None = None,
    ) -> SyncSchedule:
        """Make a schedule at run time, or change the one of this name; see ``App.schedule``."""
        made = self._run(
            lambda: self.app.schedule(
                call,
                expression,
                name=name,
                timezone=timezone,
                every=every,
                mode=mode,
                anchor=anchor,
                catchup=catchup,
                window=window,
            )
        )
        return SyncSchedule(made, self._loop_thread)

    def unschedule(self, name: str) -> bool:
        """Remove a schedule; True when it was there."""
        return self._run(lambda: self.app.unschedule(name))

    def schedules(self) -> dict[str, SyncSchedule]:
        """Return the schedules by name, with their last and next fire times."""
        return {name: SyncSchedule(one, self._loop_thread) for name, one in self._run(self.app.schedules).items()}

    def debounce(
        self,
        task: Task[P, Any] | SyncTask[P, Any],
        *,
        key: KeySource,
        wait: timedelta | float,
        at_most: timedelta | float,
    ) -> SyncDebounced[P]:
        """Collect triggers of a task into one message; see ``App.debounce``."""
        plain = task.task if isinstance(task, SyncTask) else task
        if not isinstance(plain, Task):
            raise ConfigurationError(f"{task!r} has options; give debounce() the task without options")
        return SyncDebounced(self.app.debounce(plain, key=key, wait=wait, at_most=at_most), self._run)

    # workflows

    @overload
    def workflow(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def workflow(self, **settings: Unpack[WorkflowOptions]) -> SyncDeclareWorkflow: ...
    def workflow(self, *function: Any, **settings: Any) -> Any:
        """Declare a workflow, which is a coroutine function; see ``App.workflow``."""
        declare = SyncDeclareWorkflow(self, self.app.workflow(**settings))
        return declare(*function) if function else declare

    @overload
    def saga(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def saga(self, **settings: Unpack[WorkflowOptions]) -> SyncDeclareWorkflow: ...
    def saga(self, *function: Any, **settings: Any) -> Any:
        """Declare a saga, which is a coroutine function; see ``App.saga``."""
        declare = SyncDeclareWorkflow(self, self.app.saga(**settings))
        return declare(*function) if function else declare

    @overload
    def step(self, function: F, /) -> F: ...
    @overload
    def step(self, *, undo: Task[P, Any], **options: Unpack[StepOptions]) -> DeclareStep[P]: ...
    @overload
    def step(self, *, undo: Never, **options: Unpack[StepOptions]) -> Callable[[F], F]: ...
    @overload
    def step(
        self, *, undo: Callable[Concatenate[Context, P], Awaitable[object]], **options: Unpack[StepOptions]
    ) -> DeclareStep[P]: ...
    @overload
    def step(self, *, undo: Callable[P, object], **options: Unpack[StepOptions]) -> DeclareStep[P]: ...
    @overload
    def step(self, **options: Unpack[StepOptions]) -> Callable[[F], F]: ...
    def step(self, *function: Any, **options: Any) -> Any:
        """Declare how ``run.step`` calls a function; see ``App.step``."""
        return self.app.step(*function, **options)

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> bool:  # noqa: A002
        """Send a run a signal; the run continues if it waits for it.  See ``App.signal``."""
        return self._run(lambda: self.app.signal(run_id, name, value, id=id))

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> SyncReceipt[R]:
        """Start a run unless one has its key already, and send it a signal; see ``App.signal_with_start``."""
        receipt = self._run(lambda: self.app.signal_with_start(call, name, value, id=id))
        return SyncReceipt(receipt, self._loop_thread)

    def journal(self, run_id: str) -> list[Line]:
        """Return the journal of a run: what it has done, in the order in which it was recorded."""
        return self._run(lambda: self.app.journal(run_id))

    def chronicle(self, run_id: str, *, depth: int = limits.CHRONICLE_DEPTH) -> Chronicle | None:
        """Return a run, or any message, as a tree for people; see ``App.chronicle``."""
        return self._run(lambda: self.app.chronicle(run_id, depth=depth))

    def ledger(self, message_id: str) -> list[LedgerEntry]:
        """Return the effects that a message's handler has begun with ``once``, and the outcome of each if known."""
        return self._run(lambda: self.app.ledger(message_id))

    def resolve(
        self, message_id: str, name: str, *, happened: bool, value: Any = None, actor: str, reason: str
    ) -> bool:
        """Record whether an uncertain effect happened; the message runs again.  See ``App.resolve``."""
        return self._run(
            lambda: self.app.resolve(message_id, name, happened=happened, value=value, actor=actor, reason=reason)
        )

    def drop_signal(self, run_id: str, name: str, id: str, *, actor: str, reason: str) -> bool:  # noqa: A002
        """Remove a signal from a run's mailbox; see ``App.drop_signal``."""
        return self._run(lambda: self.app.drop_signal(run_id, name, id, actor=actor, reason=reason))

    def replace_signal(
        self,
        run_id: str,
        name: str,
        id: str,  # noqa: A002
        value: Any,
        *,
        actor: str,
        reason: str,
    ) -> bool:
        """Change the value of a signal in a run's mailbox; see ``App.replace_signal``."""
        return self._run(lambda: self.app.replace_signal(run_id, name, id, value, actor=actor, reason=reason))

    def saga_status(self, run_id: str) -> SagaRecord | None:
        """Return the status of a saga and of each of its steps; None if there is no such saga."""
        return self._run(lambda: self.app.saga_status(run_id))

    def resume(self, run_id: str, *, actor: str, reason: str) -> bool:
        """Let a parked message run now."""
        return self._run(lambda: self.app.resume(run_id, actor=actor, reason=reason))

    def restart(self, run_id: str, *, from_step: str, actor: str, reason: str) -> list[Line]:
        """Restart a run from a step and return the lines that were removed; see ``App.restart``."""
        return self._run(lambda: self.app.restart(run_id, from_step=from_step, actor=actor, reason=reason))


class SyncDeclare:
    """The decorator ``app.task(…)`` and ``app.recurring(…)`` return."""

    def __init__(self, app: SyncVerbs, declare: Callable[[Any], Task[Any, Any]]) -> None:
        self._app = app
        self._declare = declare

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[SyncContext, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return SyncTask(self._app, self._declare(function))


class SyncDeclareWorkflow:
    """The decorator ``app.workflow(…)`` returns."""

    def __init__(self, app: SyncVerbs, declare: Callable[[Any], Task[Any, Any]]) -> None:
        self._app = app
        self._declare = declare

    def __call__(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> SyncTask[P, R]:
        return SyncTask(self._app, self._declare(function))


async def _dead_letters(app: App, queue: str | None, message_type: str | None) -> AsyncIterator[DeadLetter]:
    return app.dead_letters(queue=queue, message_type=message_type)


async def _next(letters: AsyncIterator[DeadLetter]) -> DeadLetter | None:
    return await anext(letters, None)
