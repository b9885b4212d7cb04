"""Entry: the declaration of an app's tasks, recurring and debounced ones, and those for dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from onefold.app.base import AppBase
from onefold.handlers.batch import Batch, SyncBatch
from onefold.handlers.context import Context
from onefold.handlers.sync_context import SyncContext
from onefold.message.keys import KeySource
from onefold.schedules.debounce import Debounced
from onefold.schedules.plan import Catchup
from onefold.schedules.register import Recurring, check_policy
from onefold.schedules.timetable import make_timetable
from onefold.tasks.options import TaskOptions, TaskSettings, task_settings
from onefold.tasks.task import Task
from onefold.worker.dead_notice import DeadNotice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: A task that gets a notice of every dead letter.
Hook = Task[[DeadNotice], R]


class TaskVerbs(AppBase):
    """The part of ``App`` that declares tasks; see there."""

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
        """Declare a handler; its signature and options are checked here.

        ``key`` names the work, as a template over the arguments or a function of them:
        two sends with the same key are the same work, and its effect happens once while the key is kept
        (exact on both stores).  Without a key, every send is new work.
        A coroutine function runs on the event loop, any other one in a thread; with ``isolate`` in a process of its
        own, whose death harms no other message.  With ``batch`` it gets up to that many messages at once.
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
        """Declare a task that workers send by a timetable: once per fire time, on however many machines they run.

        ``expression`` is a cron expression in a time zone.  Or ``every`` is an interval: with ``mode="rate"`` it fires
        at fixed times counted from ``anchor`` (1970), with ``mode="delay"`` that long after the last run has ended.
        ``catchup`` is for fire times that passed while no worker ran: ``skip`` (the default) drops them, ``last`` sends
        one message for the latest, ``all`` one for each that is not older than ``window``.
        Its arguments need defaults; it can be sent like other tasks too.  Fire times are met to about a second.
        """
        timetable = make_timetable(expression, timezone=timezone, every=every, mode=mode, anchor=anchor)
        policy = check_policy(timetable, catchup, window)
        settled = task_settings({"isolate": isolate, **settings})
        return Declare(self, settled, lambda task: Recurring(task, timetable, *policy))

    def debounce(
        self, task: Task[P, Any], *, key: KeySource, wait: timedelta | float, at_most: timedelta | float
    ) -> Debounced[P]:
        """Collect triggers of a task into one message: ``await quiet.trigger(…)`` instead of ``task.send(…)``.

        Triggers with the same ``key`` are collected.  The message is sent when none has come for ``wait``, at the
        latest ``at_most`` after the first, with the arguments of the last.  With ``at_most`` equal to ``wait`` it is
        sent that long after the first trigger.
        """
        debounced = Debounced(task, lambda: self.store, self.prepare, key=key, wait=wait, at_most=at_most)

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
        """Declare a task that gets a notice of every dead letter: ``async def alert(letter: DeadNotice)``.

        The notice is a message sent in the commit that makes the dead letter, so it is durable and retried like any
        other.  The dead letter stays, whether the notice is handled or not; no notice is sent of dead notices.
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
        self._app.registry.add(task)
        if self._hook:
            self._app.registry.hooks[task.name] = task
        if recurring is not None:
            self._app.registry.recurring[task.name] = recurring
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
