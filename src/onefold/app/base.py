"""Entry: the base of all verbs of an app: its store, its declarations, its clock, and sending a message."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, Literal, Self, TypeVar

from onefold.brokers.inlets import Inlets
from onefold.clock import Clock, Ids, SystemClock, system_random
from onefold.current import current
from onefold.errors import ConfigurationError, KeyReuseError
from onefold.handlers.environment import Middleware
from onefold.message.envelope import Envelope, check
from onefold.registry import Registry
from onefold.schedules.register import ScheduleRegister
from onefold.store import KEEP, PutOptions, Query, Record, Store
from onefold.store.identity import Origin, check_app_name, find_origin
from onefold.store.open import open_store
from onefold.tasks.receipt import Receipt, Source
from onefold.tasks.task import Call, Task
from onefold.transactions.app_transaction import JoinedSend, refuse_inside
from onefold.transactions.buffer import log_duplicates
from onefold.worker.worker import Worker

R = TypeVar("R")

Lifespan = Callable[[], AbstractAsyncContextManager[Any]]

#: Default of ``override(resources=…)``: the lifespan opens the resources.
AS_DECLARED: Any = object()
OnSend = Callable[[Envelope], Envelope]

#: Environment variable with the store's URL, for an app that is made without one.
URL_VARIABLE = "ONEFOLD_URL"

_REDRIVE = PutOptions(if_dead="redrive")


class AppBase:
    """The state of an app, and the functions that all of its verbs use; see ``App``."""

    def __init__(
        self,
        url: str | None = None,
        *,
        store: Store | None = None,
        name: str | None = None,
        driver: Literal["apsw", "sqlite3"] | None = None,
        journal: Literal["wal", "delete"] | None = None,
        include: Sequence[str] = (),
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._url = url
        self._name = check_app_name(name)
        self._origin: Origin | None = None
        self._given_store = store
        self._driver = driver
        self._journal = journal
        self._test_clock = clock
        self._chance = chance or system_random()
        self._use_clock(clock or _clock_of(store) or SystemClock())
        self._include = tuple(include)
        self._store: Store | None = None
        self.registry = Registry()
        self._inlets = Inlets()
        self._middleware: list[Middleware] = []
        self._on_send: list[OnSend] = []
        self._lifespan: Lifespan | None = None
        self._workers: list[Worker] = []

    # declaring

    def lifespan(self, opens: Lifespan) -> Lifespan:
        """Declare what a worker opens once and closes at its end; what it yields is ``ctx.resources`` in handlers."""
        self._lifespan = opens
        return opens

    def middleware(self, wraps: Middleware) -> Middleware:
        """Wrap every run of every handler: ``async def trace(ctx, proceed): return await proceed()``."""
        self._middleware.append(wraps)
        return wraps

    def on_send(self, changes: OnSend) -> OnSend:
        """Call a function with every message before it is stored, for instance to add tags, a trace or a tenant.

        It returns the envelope, or a changed one made with ``msgspec.structs.replace``.
        """
        self._on_send.append(changes)
        return changes

    @property
    def tasks(self) -> dict[str, Task[Any, Any]]:
        """The declared tasks by name."""
        return dict(self.registry.tasks)

    # opening

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Import the modules of ``include`` and open the store; calling it twice is harmless."""
        for module in self._include:
            importlib.import_module(module)
        if self._store is None:
            store = self._make_store()
            await store.open()
            try:
                self._origin = await find_origin(store, self._name, self._chance)
            except BaseException:
                await store.close()
                raise
            self._store = store

    async def close(self) -> None:
        """Close the store; calling it twice is harmless."""
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    async def migrate(self) -> list[str]:
        """Bring the database's schema to this version; returns the names of the migrations applied."""
        if self._store is not None:
            return await self._store.migrate()
        store = self._make_store()
        try:
            return await store.migrate()
        finally:
            await store.close()

    @property
    def url(self) -> str | None:
        """The URL of the store, from the constructor or the environment."""
        return self._url or os.environ.get(URL_VARIABLE)

    def _make_store(self) -> Store:
        if self._given_store is not None:
            return self._given_store
        url = self.url
        if not url:
            raise ConfigurationError(
                f"the app has no store: give App a URL such as sqlite:///app.db, or set {URL_VARIABLE}"
            )
        return open_store(url, clock=self._test_clock, driver=self._driver, journal=self._journal)

    @property
    def store(self) -> Store:
        """The open store."""
        if self._store is None:
            raise ConfigurationError("the app is not open; use it inside `async with app:`")
        return self._store

    @property
    def origin(self) -> Origin:
        """The identity of the open database and the app's name; both are part of every ``ctx.upstream_key``."""
        if self._store is None or self._origin is None:
            raise ConfigurationError("the app is not open; use it inside `async with app:`")
        return self._origin

    def _use_clock(self, clock: Clock) -> None:
        self.clock = clock
        self._ids = Ids(clock, self._chance)
        self._sources: dict[Task[Any, Any], Source[Any]] = {}

    @contextmanager
    def override(
        self, *, store: Store | None = None, clock: Clock | None = None, resources: Any = AS_DECLARED
    ) -> Iterator[Self]:
        """Use another store inside the block, for tests; open the app inside it.

        The app uses ``clock``, or else the clock of that store, and handlers get ``resources`` in place of what the
        lifespan would have opened.
        """
        before = self._given_store, self.clock, self._test_clock, self._lifespan
        self._given_store = store or self._given_store
        self._test_clock = clock or self._test_clock
        self._use_clock(clock or _clock_of(store) or self.clock)
        if resources is not AS_DECLARED:
            self._lifespan = lambda: nullcontext(resources)
        try:
            yield self
        finally:
            self._given_store, clock, self._test_clock, self._lifespan = before
            self._use_clock(clock)

    def open_resources(self) -> AbstractAsyncContextManager[Any]:
        """Open the lifespan, which yields the resources of handlers; None for an app without one."""
        return nullcontext() if self._lifespan is None else self._lifespan()

    # sending

    def prepare(self, call: Call[R], parent: Envelope | None, index: int) -> tuple[Envelope, Receipt[R]]:
        if self.registry.tasks.get(call.task.name) is not call.task and not self.registry.knows(call.task):
            raise ConfigurationError(
                f"{call.task.name} belongs to another app, so its message cannot be part of this commit; "
                "send it before or after, or declare the task on this app"
            )
        envelope = call.envelope(self._ids.make(), parent=parent, index=index)
        if self._on_send:
            envelope = self._complete(envelope)
        return envelope, Receipt(envelope.id, self._sources.get(call.task) or self._source(call.task))

    def fresh_id(self) -> str:
        """Return an id that no other message or signal has."""
        return self._ids.make()

    def _complete(self, envelope: Envelope) -> Envelope:
        for change in self._on_send:
            changed = change(envelope)
            if not isinstance(changed, Envelope):
                name = getattr(change, "__qualname__", repr(change))
                raise ConfigurationError(
                    f"on_send: {name} returned a {type(changed).__name__}; return the envelope, changed or not"
                )
            envelope = changed
        return check(envelope)

    def _source(self, task: Task[Any, R]) -> Source[R]:
        source = Source(task.signature.decode_result, self._find_outside, self.clock.sleep)
        return self._sources.setdefault(task, source)

    async def _find_outside(self, query: Query) -> list[Record]:
        refuse_inside("result()")
        return await self.store.find(query)

    def dispatch(self, call: Call[R]) -> Coroutine[Any, Any, Receipt[R]]:
        """Send one call; inside a handler or transaction it becomes part of that commit, even if it is not awaited."""
        inside = current.get()
        return self._put(call) if inside is None else JoinedSend(inside.add(call))

    async def _put(self, call: Call[R]) -> Receipt[R]:
        envelope, receipt = self.prepare(call, None, 0)
        (stored,) = await self.store.put([envelope], _REDRIVE if call.options.get("if_dead") == "redrive" else KEEP)
        if stored.clash:
            raise KeyReuseError(envelope.message_type, envelope.idempotency_key, stored.id)
        if stored.duplicate:
            log_duplicates([envelope], [stored])
        receipt.confirm(stored)
        return receipt

    # schedules

    def _schedule_register(self) -> ScheduleRegister:
        return ScheduleRegister(self.store, self.clock, self._chance, self._complete, self._wake_tickers)

    def _wake_tickers(self) -> None:
        for worker in self._workers:
            worker.wake_ticker()


def _clock_of(store: Store | None) -> Clock | None:
    """Return the clock of a store; the app must use the same one, because the store decides by it what is due."""
    return getattr(store, "clock", None)
