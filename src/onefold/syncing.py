"""Entry: the verbs of an app that a ``SyncApp`` passes on as they are: for people, schedules and workflows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from onefold import limits
from onefold.announcing import DeadNotice
from onefold.app import App
from onefold.blocking import SyncContext
from onefold.chain import Chain
from onefold.chronicle import Chronicle
from onefold.context import Context
from onefold.effects import LedgerEntry
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError
from onefold.identity import KeySource
from onefold.inspection import DeadGroup, DeadLetter
from onefold.options import TaskOptions
from onefold.portal import Portal
from onefold.running import DeclareStep, WorkflowOptions
from onefold.schedule import Catchup
from onefold.status import SagaRecord
from onefold.step import Step
from onefold.stepping import StepOptions
from onefold.store import Counts, Progress, Query, Record
from onefold.subscription import Subscription
from onefold.task import Call, Sendable, Task
from onefold.topic import Topic
from onefold.transport import Transport
from onefold.undo import Never
from onefold.waiting import SyncDeadLetter, SyncDebounced, SyncReceipt, SyncSchedule, SyncTask, SyncTopic
from onefold.workflow import Run

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: A task that is told of dead letters.
SyncHook = SyncTask[[DeadNotice], R]


class SyncVerbs:
    """The part of ``SyncApp`` that only passes on; see ``App`` for what each of them does."""

    #: The app itself, for asynchronous code and for workers.
    app: App
    _portal: Portal

    def _run(self, verb: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a verb of the app, which is open then, and return what comes of it."""
        raise NotImplementedError

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send one message of any task of the app."""
        raise NotImplementedError

    # people

    def dead_letters(self, *, queue: str | None = None, message_type: str | None = None) -> Iterator[SyncDeadLetter]:
        """Go through the dead letters, oldest first: ``for letter in app.dead_letters()``."""
        letters = self._run(lambda: _dead_letters(self.app, queue, message_type))
        while (letter := self._portal.run(_next(letters))) is not None:
            yield SyncDeadLetter(letter, self._portal)

    def dead_groups(self, *, queue: str | None = None) -> list[DeadGroup]:
        """Return how many dead letters there are of each type and kind of error, and since when; the most first."""
        return self._run(lambda: self.app.dead_groups(queue=queue))

    def redrive(self, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
        """Reopen dead letters in one commit; returns the ids this call reopened."""
        return self._run(lambda: self.app.redrive(ids, actor=actor, reason=reason))

    def cancel(self, message_id: str, *, actor: str, reason: str) -> bool:
        """Take a message back; one that runs can no longer commit, and its handler is cancelled; see ``App.cancel``."""
        return self._run(lambda: self.app.cancel(message_id, actor=actor, reason=reason))

    def progress(self, message_id: str) -> Progress | None:
        """Return how far a message is, as its handler last said; see ``App.progress``."""
        return self._run(lambda: self.app.progress(message_id))

    def chain(self, message_id: str) -> Chain | None:
        """Return what caused a message and what came of it, as a tree; see ``App.chain``."""
        return self._run(lambda: self.app.chain(message_id))

    def find(self, query: Query) -> list[Record]:
        """Return one page of messages with where they stand."""
        return self._run(lambda: self.app.find(query))

    def count(self) -> dict[str, Counts]:
        """Return, per queue, how many messages wait, run and are dead."""
        return self._run(self.app.count)

    @overload
    def on_dead(self, function: Callable[[Context, DeadNotice], Awaitable[R]], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, function: Callable[[SyncContext, DeadNotice], R], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, function: Callable[[DeadNotice], Awaitable[R]], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, function: Callable[[DeadNotice], R], /) -> SyncHook[R]: ...
    @overload
    def on_dead(self, **settings: Unpack[TaskOptions]) -> Declare: ...
    def on_dead(self, *function: Any, **settings: Any) -> Any:
        """Declare a task that is told of every dead letter; see ``App.on_dead``."""
        declare = Declare(self, self.app.on_dead(**settings))
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
        """Declare an event by its name and the type of what it says; see ``App.topic``."""
        return SyncTopic(self, self.app.topic(name, kind, **settings))

    @overload
    def on(
        self, event: Topic[Any] | SyncTopic[Any] | str, /, *, isolate: bool = False, **settings: Unpack[TaskOptions]
    ) -> Declare: ...
    @overload
    def on(
        self, event: Topic[Any] | SyncTopic[Any] | str, /, *, batch: int, **settings: Unpack[TaskOptions]
    ) -> Declare: ...
    def on(self, event: Topic[Any] | SyncTopic[Any] | str, /, **settings: Any) -> Any:
        """Declare a task that is sent a copy of every event of this name; see ``App.on``."""
        return Declare(self, self.app.on(event if isinstance(event, str) else event.name, **settings))

    def receive(
        self,
        transport: Transport,
        source: str,
        /,
        *,
        types: Sequence[str] | None = None,
        read: Callable[[bytes], Envelope] | None = None,
    ) -> None:
        """Declare that workers take in what others publish to a stream; see ``App.receive``."""
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
        """Return who subscribes to what in this store, whichever app declared it, sorted by event."""
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
    ) -> Declare:
        """Declare a task that is sent by itself, once per fire time; see ``App.recurring``."""
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
        return Declare(self, declare)

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
        return SyncSchedule(made, self._portal)

    def unschedule(self, name: str) -> bool:
        """Forget a schedule; True when it was there."""
        return self._run(lambda: self.app.unschedule(name))

    def schedules(self) -> dict[str, SyncSchedule]:
        """Return the schedules by name, with when they fired and will fire."""
        return {name: SyncSchedule(one, self._portal) for name, one in self._run(self.app.schedules).items()}

    def debounce(
        self,
        task: Task[P, Any] | SyncTask[P, Any],
        *,
        key: KeySource,
        wait: timedelta | float,
        at_most: timedelta | float,
    ) -> SyncDebounced[P]:
        """Declare that triggers of a task become one message; see ``App.debounce``."""
        plain = task.task if isinstance(task, SyncTask) else task
        if not isinstance(plain, Task):
            raise ConfigurationError(f"{task!r} has options; debounce the task itself")
        return SyncDebounced(self.app.debounce(plain, key=key, wait=wait, at_most=at_most), self._run)

    # workflows

    @overload
    def workflow(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def workflow(self, **settings: Unpack[WorkflowOptions]) -> DeclareWorkflow: ...
    def workflow(self, *function: Any, **settings: Any) -> Any:
        """Declare a workflow, which is a coroutine function; see ``App.workflow``."""
        declare = DeclareWorkflow(self, self.app.workflow(**settings))
        return declare(*function) if function else declare

    @overload
    def saga(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def saga(self, **settings: Unpack[WorkflowOptions]) -> DeclareWorkflow: ...
    def saga(self, *function: Any, **settings: Any) -> Any:
        """Declare a saga, which is a coroutine function; see ``App.saga``."""
        declare = DeclareWorkflow(self, self.app.saga(**settings))
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
        """Say how a function is to be called by ``run.step``; see ``App.step``."""
        return self.app.step(*function, **options)

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> bool:  # noqa: A002
        """Tell a run something; it goes on if it waits for that.  See ``App.signal``."""
        return self._run(lambda: self.app.signal(run_id, name, value, id=id))

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> SyncReceipt[R]:
        """Start a run unless one holds its key, and tell it something; see ``App.signal_with_start``."""
        receipt = self._run(lambda: self.app.signal_with_start(call, name, value, id=id))
        return SyncReceipt(receipt, self._portal)

    def journal(self, run_id: str) -> list[Step]:
        """Return what a run has done, in the order in which it was written down."""
        return self._run(lambda: self.app.journal(run_id))

    def chronicle(self, run_id: str, *, depth: int = limits.CHRONICLE_DEPTH) -> Chronicle | None:
        """Return a run, or any message, as people read it; see ``App.chronicle``."""
        return self._run(lambda: self.app.chronicle(run_id, depth=depth))

    def ledger(self, message_id: str) -> list[LedgerEntry]:
        """Return the effects that a message's handler has begun with ``once``, and what is known of them."""
        return self._run(lambda: self.app.ledger(message_id))

    def resolve(
        self, message_id: str, name: str, *, happened: bool, value: Any = None, actor: str, reason: str
    ) -> bool:
        """Say what became of an uncertain effect; the message, parked because of it, runs again."""
        return self._run(
            lambda: self.app.resolve(message_id, name, happened=happened, value=value, actor=actor, reason=reason)
        )

    def drop_signal(self, run_id: str, name: str, id: str, *, actor: str, reason: str) -> bool:  # noqa: A002
        """Take a signal out of a run's mailbox; see ``App.drop_signal``."""
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
        """Give a signal in a run's mailbox another value; see ``App.replace_signal``."""
        return self._run(lambda: self.app.replace_signal(run_id, name, id, value, actor=actor, reason=reason))

    def saga_status(self, run_id: str) -> SagaRecord | None:
        """Return where a saga stands, with each of its steps; None if there is no such saga."""
        return self._run(lambda: self.app.saga_status(run_id))

    def resume(self, run_id: str, *, actor: str, reason: str) -> bool:
        """Let a parked message run now."""
        return self._run(lambda: self.app.resume(run_id, actor=actor, reason=reason))

    def restart(self, run_id: str, *, from_step: str, actor: str, reason: str) -> list[Step]:
        """Make a run go back: the named step and everything after it is done again.  Returns what was forgotten."""
        return self._run(lambda: self.app.restart(run_id, from_step=from_step, actor=actor, reason=reason))


class Declare:
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


class DeclareWorkflow:
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
