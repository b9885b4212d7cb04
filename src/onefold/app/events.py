"""Entry: the verbs of an app for events: topics to publish to, tasks that subscribe, and the subscriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar, Unpack, overload

from onefold import limits
from onefold.app.tasks import TaskVerbs
from onefold.errors import ConfigurationError
from onefold.events import subscriptions as subscription
from onefold.events.subscriptions import Subscription
from onefold.events.topic import Subscriber, Topic
from onefold.handlers.batch import Batch, SyncBatch
from onefold.handlers.context import Context
from onefold.handlers.sync_context import SyncContext
from onefold.message.keys import KeySource
from onefold.tasks.options import TaskOptions, TaskSettings, task_settings
from onefold.tasks.task import Task
from onefold.transactions.app_transaction import refuse_inside

R = TypeVar("R")
T = TypeVar("T")


class EventVerbs(TaskVerbs):
    """The part of ``App`` that is about events; see there."""

    # declaring

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
    ) -> Topic[T]: ...
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
    ) -> Topic[Any]: ...
    def topic(self, name: str, kind: Any = Any, /, **settings: Any) -> Any:
        """Declare an event by its name and the type of its data: ``app.topic("order.placed", Order)``.

        ``key`` is a template over ``event`` such as ``"{event.id}"``, or a function of it: two publishes with the same
        key are one event, and without a key each is a new one.  Any worker that has this topic, or a subscriber to it,
        copies events from ``queue`` to the subscribers.  Events with the same ``ordering_key`` are copied, and handled
        by each subscriber, in their order.  ``version`` is the version of the event's data: a subscriber with a lower
        one leaves the event to newer workers.
        """
        return self._add_topic(name, kind, task_settings({"name": name, **settings}))

    def _add_topic(self, name: str, kind: Any, settings: TaskSettings, *, implied: bool = False) -> Topic[Any]:
        async def copy(ctx: Context) -> int:
            return await subscription.fan_out(ctx, self.store, self.fresh_id, self._complete)

        topic: Topic[Any] = Topic(self, copy, kind, settings, implied=implied)
        known = self.registry.tasks.get(name)
        if isinstance(known, Topic) and known.implied:
            del self.registry.tasks[name]
        self.registry.add(topic)
        return topic

    @overload
    def on(
        self, event: Topic[T], /, *, isolate: bool = False, **settings: Unpack[TaskOptions]
    ) -> DeclareSubscriber[T]: ...
    @overload
    def on(self, event: Topic[T], /, *, batch: int, **settings: Unpack[TaskOptions]) -> DeclareBatchSubscriber[T]: ...
    @overload
    def on(
        self, event: str, /, *, isolate: bool = False, **settings: Unpack[TaskOptions]
    ) -> DeclareSubscriber[Any]: ...
    @overload
    def on(self, event: str, /, *, batch: int, **settings: Unpack[TaskOptions]) -> DeclareBatchSubscriber[Any]: ...
    def on(self, event: Topic[Any] | str, /, **settings: Any) -> Any:
        """Declare a task that is sent a copy of every event of this name: ``@app.on("order.placed")``.

        It is a task like any other, with its own queue, retries and dead letters, and takes the event as its one
        argument.  The key of its message is made from the event's id.
        The subscription is made durable when a worker with this code starts.  From then on every event is copied for
        it, also while no worker with this code runs, until ``unsubscribe`` removes it.
        """
        name = event if isinstance(event, str) else event.name
        known = self.registry.tasks.get(limits.check_name("event", name))
        if known is None:
            self._add_topic(name, Any, TaskSettings(name=name), implied=True)
        elif not isinstance(known, Topic):
            raise ConfigurationError(f"{name!r} is a task, not an event; give the event another name")
        declare = DeclareBatchSubscriber if settings.get("batch") else DeclareSubscriber
        return declare(self, name, task_settings(settings))

    # operators

    async def subscribe(self) -> list[Subscription]:
        """Make the subscriptions of this app durable, as each of its workers does when it starts; returns them.

        For a deployment that needs them before the first event is published.  Calling it twice is harmless.
        """
        refuse_inside("subscribe()")
        return await subscription.subscribe(self.store, self.registry)

    async def subscriptions(self) -> list[Subscription]:
        """Return all subscriptions in this store, also those of other apps, sorted by event."""
        return await subscription.subscriptions(self.store)

    async def unsubscribe(self, event: str, subscriber: str) -> bool:
        """Remove a subscription; True when it was there.  Events that were copied for it stay.

        One that is still declared in code comes back when the next worker with that code starts.
        """
        refuse_inside("unsubscribe()")
        return await subscription.unsubscribe(self.store, event, subscriber)


class DeclareSubscriber(Generic[T]):
    """The decorator ``app.on(…)`` returns."""

    def __init__(self, app: EventVerbs, event: str, settings: TaskSettings) -> None:
        self._app = app
        self._event = event
        self._settings = settings

    @overload
    def __call__(self, function: Callable[[Context, T], Awaitable[R]], /) -> Task[[T], R]: ...
    @overload
    def __call__(self, function: Callable[[SyncContext, T], R], /) -> Task[[T], R]: ...
    @overload
    def __call__(self, function: Callable[[T], Awaitable[R]], /) -> Task[[T], R]: ...
    @overload
    def __call__(self, function: Callable[[T], R], /) -> Task[[T], R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return _add_subscriber(self._app, self._event, function, self._settings)


class DeclareBatchSubscriber(Generic[T]):
    """The decorator ``app.on(…, batch=…)`` returns."""

    def __init__(self, app: EventVerbs, event: str, settings: TaskSettings) -> None:
        self._app = app
        self._event = event
        self._settings = settings

    @overload
    def __call__(self, function: Callable[[Batch[T]], Awaitable[None]], /) -> Task[[T], Any]: ...
    @overload
    def __call__(self, function: Callable[[SyncBatch[T]], None], /) -> Task[[T], Any]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return _add_subscriber(self._app, self._event, function, self._settings)


def _add_subscriber(
    app: EventVerbs, event: str, function: Callable[..., Any], settings: TaskSettings
) -> Task[Any, Any]:
    subscriber: Subscriber[Any, Any] = Subscriber(app, event, function, settings)
    app.registry.add(subscriber)
    return subscriber
