"""Entry: the app joins a store and the handlers declared on it."""

from __future__ import annotations

import importlib
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

from onefold import limits
from onefold.announcing import announced
from onefold.bulk import put_all
from onefold.clock import Clock, Ids, SystemClock, system_random
from onefold.connecting import TransportVerbs
from onefold.declaring import TaskVerbs
from onefold.envelope import Envelope, check
from onefold.errors import ConfigurationError, KeyReuseError, TransactionOpenError, seconds
from onefold.execution import Execution
from onefold.fleet import WorkerSettings, worker_name
from onefold.inside import current
from onefold.operating import OperatorVerbs
from onefold.origin import Origin, check_app_name, find_origin
from onefold.receipt import Receipt, Source
from onefold.recurring import Keeper
from onefold.registry import Registry
from onefold.running import WorkflowVerbs
from onefold.slots import Slots
from onefold.store import KEEP, Lease, Outcome, PutOptions, Query, Record, Store
from onefold.stores import open_store
from onefold.task import Call, Task
from onefold.ticker import Ticker
from onefold.tools import Middleware
from onefold.transaction import AppTransaction, Buffer, JoinedSend, log_duplicates, refuse_inside
from onefold.work import Work
from onefold.worker import Worker

logger = logging.getLogger("onefold")

R = TypeVar("R")

Lifespan = Callable[[], AbstractAsyncContextManager[Any]]

#: For an override that leaves the resources of handlers to the lifespan.
AS_DECLARED: Any = object()
OnSend = Callable[[Envelope], Envelope]

#: Where the store's URL is looked for when the app is made without one.
URL_VARIABLE = "ONEFOLD_URL"

_REDRIVE = PutOptions(if_dead="redrive")


class App(TaskVerbs, TransportVerbs, WorkflowVerbs, OperatorVerbs):
    """Handlers and the store their messages rest in.

    ``App("sqlite:///shop.db")`` needs nothing else; ``App()`` reads the URL from the environment variable ONEFOLD_URL.
    Use it as ``async with app``.
    ``name`` is part of the keys that handlers give to outside providers; it is kept in the store, and an app without a
    name takes the one it finds there, or else ``app``.

    On SQLite ``driver="sqlite3"`` is for programs that open the same file with the interpreter's own module, such as an
    ORM does: one process must not use two SQLite libraries on one file.  ``journal="delete"`` does without the
    write-ahead log.
    """

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
        self._go_by(clock or _clock_of(store) or SystemClock())
        self._include = tuple(include)
        self._store: Store | None = None
        self._registry = Registry()
        self._middleware: list[Middleware] = []
        self._on_send: list[OnSend] = []
        self._lifespan: Lifespan | None = None
        self._workers: list[Worker] = []

    # declaring

    def lifespan(self, opens: Lifespan) -> Lifespan:
        """Declare what a worker opens once and closes at the end; handlers find what it yields in ``ctx.resources``."""
        self._lifespan = opens
        return opens

    def middleware(self, wraps: Middleware) -> Middleware:
        """Wrap every run of every handler: ``async def trace(ctx, proceed): return await proceed()``."""
        self._middleware.append(wraps)
        return wraps

    def on_send(self, changes: OnSend) -> OnSend:
        """See, and with ``msgspec.structs.replace`` change, every message before it is stored: tags, trace, tenant."""
        self._on_send.append(changes)
        return changes

    @property
    def tasks(self) -> dict[str, Task[Any, Any]]:
        """The declared tasks by name."""
        return dict(self._registry.tasks)

    # opening

    async def __aenter__(self) -> App:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Import what is included and open the store; calling it twice is harmless."""
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
        """Where the store is, from the constructor or the environment."""
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
            raise ConfigurationError("the app is not open; use `async with app:` around what you do with it")
        return self._store

    @property
    def origin(self) -> Origin:
        """The identity of the open database and the app's name, which are part of every ``ctx.upstream_key``."""
        if self._store is None or self._origin is None:
            raise ConfigurationError("the app is not open; use `async with app:` around what you do with it")
        return self._origin

    def _go_by(self, clock: Clock) -> None:
        self._clock = clock
        self._ids = Ids(clock, self._chance)
        self._sources: dict[Task[Any, Any], Source[Any]] = {}

    @contextmanager
    def override(
        self, *, store: Store | None = None, clock: Clock | None = None, resources: Any = AS_DECLARED
    ) -> Iterator[App]:
        """Use another store for the length of the block, for tests; open the app inside it.

        The app goes by ``clock``, or else by the clock of that store, and handlers find ``resources`` instead of what
        the lifespan would have opened.
        """
        before = self._given_store, self._clock, self._test_clock, self._lifespan
        self._given_store = store or self._given_store
        self._test_clock = clock or self._test_clock
        self._go_by(clock or _clock_of(store) or self._clock)
        if resources is not AS_DECLARED:
            self._lifespan = lambda: nullcontext(resources)
        try:
            yield self
        finally:
            self._given_store, clock, self._test_clock, self._lifespan = before
            self._go_by(clock)

    def _open_resources(self) -> AbstractAsyncContextManager[Any]:
        """What a worker opens for its handlers; None for an app without a lifespan."""
        return nullcontext() if self._lifespan is None else self._lifespan()

    # sending

    def _prepare(self, call: Call[R], parent: Envelope | None, index: int) -> tuple[Envelope, Receipt[R]]:
        if self._registry.tasks.get(call.task.name) is not call.task and not self._registry.knows(call.task):
            raise ConfigurationError(
                f"{call.task.name} belongs to another app, so its message cannot join this commit; "
                "send it before or after, or declare the task on this app"
            )
        envelope = call.envelope(self._ids.make(), parent=parent, index=index)
        if self._on_send:
            envelope = self._complete(envelope)
        return envelope, Receipt(envelope.id, self._sources.get(call.task) or self._source(call.task))

    def fresh_id(self) -> str:
        """Make an id that no other message or signal has."""
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
        source = Source(task.signature.decode_result, self._find_outside, self._clock.sleep)
        return self._sources.setdefault(task, source)

    async def _find_outside(self, query: Query) -> list[Record]:
        refuse_inside("result()")
        return await self.store.find(query)

    def dispatch(self, call: Call[R]) -> Coroutine[Any, Any, Receipt[R]]:
        """Send one call; inside a handler or transaction it joins that commit, at once, instead of leaving now."""
        inside = current.get()
        return self._put(call) if inside is None else JoinedSend(inside.add(call))

    async def _put(self, call: Call[R]) -> Receipt[R]:
        envelope, receipt = self._prepare(call, None, 0)
        (stored,) = await self.store.put([envelope], _REDRIVE if call.options.get("if_dead") == "redrive" else KEEP)
        if stored.clash:
            raise KeyReuseError(envelope.message_type, envelope.idempotency_key, stored.id)
        if stored.duplicate:
            log_duplicates([envelope], [stored])
        receipt.confirm(stored)
        return receipt

    async def send_many(self, calls: Iterable[Call[Any]], *, batch_key: str | None = None) -> list[Receipt[Any]]:
        """Send many calls in one commit: all of them are stored, or none.

        ``batch_key`` names the whole batch: sending it again stores nothing and returns the first receipts.
        Messages may have keys of their own too; one that belongs to another payload fails the batch.
        """
        if current.get() is not None:
            raise ConfigurationError(
                "inside a handler or transaction use its own send_many, so that it joins the commit"
            )
        buffer = Buffer(self._prepare)
        stored = await put_all(self.store, buffer, calls, batch_key)
        buffer.confirm(stored)
        return buffer.receipts

    @asynccontextmanager
    async def transaction(
        self, connection: Any = None, *, timeout: timedelta | float = limits.TRANSACTION_SECONDS_MAX
    ) -> AsyncIterator[AppTransaction]:
        """Write rows and send messages in one commit.

        When the block ends, everything is durable; when it raises or the process dies, nothing has happened.
        On SQLite, where other processes wait for the same lock, a block that keeps it for longer than ``timeout`` is
        rolled back, and what it does next raises ``TransactionTooLongError``; PostgreSQL ends idle transactions itself.
        With ``connection`` it joins the transaction that is open there, and its owner commits.
        """
        if isinstance(current.get(), Work):
            raise TransactionOpenError("a handler has one commit, at its return: use ctx.execute and ctx.send")
        refuse_inside("transaction()")
        buffer = Buffer(self._prepare, fresh_id=self.fresh_id)
        async with self.store.transaction(connection, seconds=seconds(timeout, "timeout")) as opened:
            inside = AppTransaction(opened, buffer)
            token = current.set(inside)
            try:
                yield inside
            finally:
                current.reset(token)
                buffer.close()
            stored = await buffer.leave(opened)
        buffer.confirm(stored)

    # working

    async def work(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int = limits.CONCURRENCY,
        lease: timedelta | float = limits.LEASE,
        stop_after: timedelta | float = limits.STOP_SECONDS,
        name: str | None = None,
        until_idle: bool = False,
    ) -> int:
        """Run handlers in this process and return how many messages were settled.

        Works until ``stop_working``; with ``until_idle``, until nothing is due.
        This is the embedded form.  It cannot survive what its process does not: a handler that ends the process takes
        its neighbours with it until their leases run out, and C code that holds the interpreter for longer than the
        lease loses its message to another worker, its work being rolled back.  ``onefold worker`` survives both.
        A handler that blocks the event loop in Python keeps its message: a thread renews it.
        """
        settings = WorkerSettings(
            name=name or worker_name(os.getpid(), self._chance),
            queues=[queues] if isinstance(queues, str) else list(queues or self._registry.queues()),
            concurrency=concurrency,
            lease_seconds=seconds(lease, "lease"),
            stop_seconds=seconds(stop_after, "stop_after"),
            until_idle=until_idle,
        )
        return await self.work_as(settings)

    async def work_as(
        self,
        settings: WorkerSettings,
        *,
        slots: Slots | None = None,
        begin: Callable[[Worker], None] | None = None,
        quarantine_after: int = limits.QUARANTINE_AFTER,
        follows: bool = False,
    ) -> int:
        """Work as ``work`` does, with everything said; ``begin`` is called when all is open and nothing is claimed.

        ``follows`` says that it replaces a worker, so that a broker that must not be used is waited for.
        """
        if self.store.capabilities.read_only and not follows:
            raise ConfigurationError(
                "the store takes no writes, so a worker could do nothing: its server is a read replica, or a primary "
                "that was replaced; name the primary in the URL, or all servers with target_session_attrs=read-write"
            )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._open_transports(refuse=not follows))
            resources = await stack.enter_async_context(self._open_resources())
            execution = Execution(
                self.store,
                self._registry,
                self._clock,
                self._chance,
                self._prepare,
                str(self.origin),
                self._middleware,
                resources,
                quarantine_after,
            )
            await stack.enter_async_context(execution)
            ticker = Ticker(self.store, self._clock, self._chance, self._registry, self._complete)
            worker = Worker(execution, settings, slots, ticker, self._intakes())
            self._workers.append(worker)
            try:
                if begin is not None:
                    begin(worker)
                await worker.run()
            finally:
                self._workers.remove(worker)
            return worker.done

    def announce(self, lease: Lease, outcome: Outcome) -> Outcome:
        """Add to a dead letter what tells of it; for whoever settles messages of this app."""
        return announced(lease, outcome, self._registry, self._prepare)

    def stop_working(self) -> None:
        """Ask the workers of this app to finish what they run, hand back the rest and return."""
        for worker in self._workers:
            worker.stop()

    def _keeper(self) -> Keeper:
        return Keeper(self.store, self._clock, self._chance, self._complete, self._wake_tickers)

    def _wake_tickers(self) -> None:
        for worker in self._workers:
            worker.wake_ticker()


def _clock_of(store: Store | None) -> Clock | None:
    """Return the clock of a store, which decides what is due, so that the app and it do not differ."""
    return getattr(store, "clock", None)
