"""Entry: how an app's tasks are declared, those that recur or are told of dead letters among them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from onefold.announcing import DeadNotice
from onefold.batch import Batch, SyncBatch
from onefold.blocking import SyncContext
from onefold.context import Context
from onefold.debounce import Debounced
from onefold.identity import KeySource
from onefold.options import TaskOptions, TaskSettings, task_settings
from onefold.recurring import check_policy
from onefold.registry import Recurring, Registry
from onefold.schedule import Catchup
from onefold.store import Store
from onefold.task import Task
from onefold.timetable import make_timetable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: A task that is told of dead letters.
Hook = Task[[DeadNotice], R]


class TaskVerbs:
    """The part of ``App`` that declares tasks; see there."""

    _registry: Registry

    @property
    def store(self) -> Store:
        """The open store."""
        raise NotImplementedError

    def dispatch(self, call: Any) -> Any:
        """Send one call."""
        raise NotImplementedError

    def _prepare(self, call: Any, parent: Any, index: int) -> Any:
        raise NotImplementedError

    @overload
    def task(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[SyncContext, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, *, isolate: bool = False, **settings: Unpack[TaskOptions]) -> Declare: ...
    @overload
    def task(self, *, batch: int, **settings: Unpack[TaskOptions]) -> DeclareBatch: ...
    def task(self, *function: Any, **settings: Any) -> Any:
        """Declare a handler; everything about it that can be checked is checked here.

        ``key`` says what the work is, as a template over the arguments or a function of them:
        two sends with the same key are one piece of work, and its effect happens once while the key is kept
        (exact on both stores).  Without one, every send is a piece of work of its own.
        A coroutine function runs on the event loop, any other one in a thread; with ``isolate`` in a process, which
        may die without harm to others.  With ``batch`` it gets up to so many messages at once.
        """
        declare = (DeclareBatch if settings.get("batch") else Declare)(self, task_settings(settings))
        return declare(*function) if function else declare

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
        """Declare a task that is sent by itself: once per fire time, on however many machines workers run.

        ``expression`` is a cron expression in a time zone; or ``every`` an interval, with ``mode="rate"`` at fixed
        times counted from ``anchor`` (1970), or with ``mode="delay"`` so long after the last run has ended.
        ``catchup`` says what becomes of fire times at which no worker was there: ``skip`` (the default) drops them,
        ``last`` sends one for the latest, ``all`` sends each, none older than ``window``.
        It can be sent by hand too, so its arguments need defaults.  Fire times are kept to about a second.
        """
        timetable = make_timetable(expression, timezone=timezone, every=every, mode=mode, anchor=anchor)
        policy = check_policy(timetable, catchup, window)
        settled = task_settings({"isolate": isolate, **settings})
        return Declare(self, settled, lambda task: Recurring(task, timetable, *policy))

    def debounce(
        self, task: Task[P, Any], *, key: KeySource, wait: timedelta | float, at_most: timedelta | float
    ) -> Debounced[P]:
        """Declare that triggers of a task become one message: ``await quiet.trigger(…)`` instead of ``task.send(…)``.

        Triggers with the same ``key`` belong together.  The message is sent when none has come for ``wait``, at the
        latest ``at_most`` after the first, with the arguments of the last.  With ``at_most`` equal to ``wait`` the time
        does not move and the newest arguments win.
        """
        debounced = Debounced(task, lambda: self.store, self._prepare, key=key, wait=wait, at_most=at_most)

        async def carry(ctx: Context, name: str) -> None:
            await debounced.carry(ctx, name)

        debounced.carrier = self.task(name=f"{task.name}.debounced", queue=task.queue, expires=None)(carry)
        return debounced

    @overload
    def on_dead(self, function: Callable[[Context, DeadNotice], Awaitable[R]], /) -> Hook[R]: ...
    @overload
    def on_dead(self, function: Callable[[SyncContext, DeadNotice], R], /) -> Hook[R]: ...
    @overload
    def on_dead(self, function: Callable[[DeadNotice], Awaitable[R]], /) -> Hook[R]: ...
    @overload
    def on_dead(self, function: Callable[[DeadNotice], R], /) -> Hook[R]: ...
    @overload
    def on_dead(self, **settings: Unpack[TaskOptions]) -> Declare: ...
    def on_dead(self, *function: Any, **settings: Any) -> Any:
        """Declare a task that is told of every dead letter: ``async def alert(letter: DeadNotice)``.

        Its message leaves in the commit that makes the letter, so it is durable and retried like any other.
        Whatever becomes of it, the letter stays; of its own dead letters nobody is told.
        """
        declare = Declare(self, task_settings(settings), hook=True)
        return declare(*function) if function else declare


class Declare:
    """The decorator ``app.task(…)`` returns."""

    def __init__(
        self,
        app: TaskVerbs,
        settings: TaskSettings,
        recurs: Callable[[Task[Any, Any]], Recurring] | None = None,
        *,
        hook: bool = False,
    ) -> None:
        self._hook = hook
        self._app = app
        self._settings = settings
        self._recurs = recurs

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[SyncContext, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        task: Task[Any, Any] = Task(self._app, function, self._settings)
        recurring = None if self._recurs is None else self._recurs(task)
        self._app._registry.add(task)
        if self._hook:
            self._app._registry.hooks[task.name] = task
        if recurring is not None:
            self._app._registry.recurring[task.name] = recurring
        return task


class DeclareBatch:
    """The decorator ``app.task(batch=…)`` returns."""

    def __init__(self, app: TaskVerbs, settings: TaskSettings) -> None:
        self._declare = Declare(app, settings)

    @overload
    def __call__(self, function: Callable[[Batch[T]], Awaitable[None]], /) -> Task[[T], Any]: ...
    @overload
    def __call__(self, function: Callable[[SyncBatch[T]], None], /) -> Task[[T], Any]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return self._declare(function)
