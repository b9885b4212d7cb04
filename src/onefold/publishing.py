"""Entry: what an app offers for events: topics to publish to, tasks that subscribe, and who does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar, Unpack, overload

from onefold import limits, subscription
from onefold.batch import Batch, SyncBatch
from onefold.blocking import SyncContext
from onefold.context import Context
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError
from onefold.identity import KeySource
from onefold.options import TaskOptions, TaskSettings, task_settings
from onefold.registry import Registry
from onefold.store import Store
from onefold.subscription import Subscription
from onefold.task import Task
from onefold.topic import Subscriber, Topic
from onefold.transaction import refuse_inside

R = TypeVar("R")
T = TypeVar("T")


class EventVerbs:
    """The part of ``App`` that is about events; see there."""

    _registry: Registry

    @property
    def store(self) -> Store:
        """The open store."""
        raise NotImplementedError

    def fresh_id(self) -> str:
        """Make an id that no other message or signal has."""
        raise NotImplementedError

    def dispatch(self, call: Any) -> Any:
        """Send one call."""
        raise NotImplementedError

    def _complete(self, envelope: Envelope) -> Envelope:
        raise NotImplementedError

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
        """Declare an event by its name and the type of what it says: ``app.topic("order.placed", Order)``.

        ``key`` says which events are one, as a template over ``event`` such as ``"{event.id}"`` or a function of it;
        without one every publish is an event of its own.  Any worker that has this topic, or a subscriber to it, copies
        the event from ``queue`` to those who are subscribed.  Events with the same ``ordering_key`` are copied, and
        handled by each subscriber, in their order.  ``version`` is the event's own: a subscriber with a lower one
        leaves it to newer workers.
        """
        return self._add_topic(name, kind, task_settings({"name": name, **settings}))

    def _add_topic(self, name: str, kind: Any, settings: TaskSettings, *, implied: bool = False) -> Topic[Any]:
        async def copy(ctx: Context) -> int:
            return await subscription.fan_out(ctx, self.store, self.fresh_id, self._complete)

        topic: Topic[Any] = Topic(self, copy, kind, settings, implied=implied)
        known = self._registry.tasks.get(name)
        if isinstance(known, Topic) and known.implied:
            del self._registry.tasks[name]
        self._registry.add(topic)
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
        argument.  Each event is one piece of work for it, whose key is made from the event's id.
        The subscription is made durable when a worker with this code starts.  From then on it is sent every event,
        also while no worker of it runs, until ``unsubscribe`` removes it.
        """
        name = event if isinstance(event, str) else event.name
        known = self._registry.tasks.get(limits.check_name("event", name))
        if known is None:
            self._add_topic(name, Any, TaskSettings(name=name), implied=True)
        elif not isinstance(known, Topic):
            raise ConfigurationError(f"{name!r} is a task, not an event; give the event another name")
        declare = DeclareBatchSubscriber if settings.get("batch") else DeclareSubscriber
        return declare(self, name, task_settings(settings))

    # people

    async def subscribe(self) -> list[Subscription]:
        """Make the subscriptions of this app durable, as each of its workers does when it starts; returns them.

        For a deployment that must have them before the first event is published.  Doing it twice is harmless.
        """
        refuse_inside("subscribe()")
        return await subscription.subscribe(self.store, self._registry)

    async def subscriptions(self) -> list[Subscription]:
        """Return who subscribes to what in this store, whichever app declared it, sorted by event."""
        return await subscription.subscriptions(self.store)

    async def unsubscribe(self, event: str, subscriber: str) -> bool:
        """Remove a subscription; True when it was there.  What was copied for it stays.

        One that still stands in code comes back with the next start of a worker that has it.
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
    app._registry.add(subscriber)
    return subscriber
