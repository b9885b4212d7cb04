"""Entry: the verbs of ``App`` for code without an event loop.

Nothing is implemented a second time: each verb runs that of ``App`` on an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from onefold import limits
from onefold.app import App
from onefold.app.base import AS_DECLARED, Lifespan, OnSend
from onefold.clock import Clock
from onefold.current import current
from onefold.errors import ConfigurationError
from onefold.handlers.batch import Batch, SyncBatch
from onefold.handlers.context import Context
from onefold.handlers.environment import Middleware
from onefold.handlers.sync_context import SyncContext
from onefold.store import Store
from onefold.store.identity import Origin
from onefold.sync.loop_thread import LoopThread
from onefold.sync.objects import SyncReceipt, SyncTask, SyncTransaction
from onefold.sync.verbs import SyncDeclare, SyncVerbs
from onefold.tasks.options import TaskOptions
from onefold.tasks.task import Call, Sendable, Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class SyncApp(SyncVerbs):
    """``App`` for code without an event loop: Django, Flask, scripts, notebooks.

    ``SyncApp("sqlite:///shop.db")`` makes an app; ``SyncApp(app)`` uses an existing one, whose tasks are sent with
    ``send``.  The first verb that needs the store opens it, and ``with`` closes it.
    It can be used from many threads.  A process that forks must use it only after the fork.
    """

    def __init__(
        self,
        url: str | App | None = None,
        *,
        store: Store | None = None,
        name: str | None = None,
        driver: Literal["apsw", "sqlite3"] | None = None,
        journal: Literal["wal", "delete"] | None = None,
        include: Sequence[str] = (),
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        if isinstance(url, App):
            self.app = url
        else:
            self.app = App(
                url,
                store=store,
                name=name,
                driver=driver,
                journal=journal,
                include=include,
                clock=clock,
                chance=chance,
            )
        self._loop_thread = LoopThread()
        self._closed = False
        self._opening = asyncio.Lock()

    def _run(self, verb: Callable[[], Coroutine[Any, Any, R]]) -> R:
        if self._closed:
            raise ConfigurationError("the app was closed; use it inside `with app:`")

        async def opened() -> R:
            await self._open()
            return await verb()

        return self._loop_thread.run(opened())

    async def _open(self) -> None:
        # Several threads may make the first call at once, and the app opens one store.
        async with self._opening:
            await self.app.open()

    # declaring

    @overload
    def task(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[SyncContext, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, *, isolate: bool = False, **settings: Unpack[TaskOptions]) -> SyncDeclare: ...
    @overload
    def task(self, *, batch: int, **settings: Unpack[TaskOptions]) -> _DeclareBatch: ...
    def task(self, *function: Any, **settings: Any) -> Any:
        """Declare a handler, a plain function or a coroutine function; see ``App.task``."""
        declare = SyncDeclare(self, self.app.task(**settings))
        return declare(*function) if function else declare

    def lifespan(self, opens: Lifespan) -> Lifespan:
        """Declare what a worker opens once and closes at its end, on its event loop; see ``App.lifespan``."""
        return self.app.lifespan(opens)

    def middleware(self, wraps: Middleware) -> Middleware:
        """Wrap every run of every handler, on the worker's event loop; see ``App.middleware``."""
        return self.app.middleware(wraps)

    def on_send(self, changes: OnSend) -> OnSend:
        """Call a function with every message before it is stored; see ``App.on_send``."""
        return self.app.on_send(changes)

    @property
    def tasks(self) -> dict[str, Task[Any, Any]]:
        """The declared tasks by name."""
        return self.app.tasks

    # opening

    def __enter__(self) -> SyncApp:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Import the modules of ``include`` and open the store; calling it twice is harmless."""
        self._closed = False
        self._loop_thread.run(self._open())

    def close(self) -> None:
        """Close the store and end the event loop; calling it twice is harmless."""
        self._closed = True
        if self._loop_thread.running:
            self._loop_thread.run(self.app.close())
            self._loop_thread.close()
            self._opening = asyncio.Lock()  # the old one is bound to the event loop that was closed

    def migrate(self) -> list[str]:
        """Bring the database's schema to this version; returns the names of the migrations applied."""
        return self._loop_thread.run(self.app.migrate())

    @property
    def url(self) -> str | None:
        """The URL of the store, from the constructor or the environment."""
        return self.app.url

    @property
    def origin(self) -> Origin:
        """The identity of the open database and the app's name; both are part of every ``ctx.upstream_key``."""
        return self.app.origin

    def override(
        self, *, store: Store | None = None, clock: Clock | None = None, resources: Any = AS_DECLARED
    ) -> AbstractContextManager[App]:
        """Use another store, clock or ``resources`` inside the block, for tests; see ``App.override``."""
        return self.app.override(store=store, clock=clock, resources=resources)

    # sending

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send one message of any task of the app; tasks that are declared here also have ``task.send(…)``."""
        call = task.call(*args, **kwargs)
        inside = current.get()
        receipt = self._run(lambda: self.app.dispatch(call)) if inside is None else inside.add(call)
        return SyncReceipt(receipt, self._loop_thread)

    def send_many(self, calls: Iterable[Call[Any]], *, batch_key: str | None = None) -> list[SyncReceipt[Any]]:
        """Send many calls in one commit: all of them are stored, or none; see ``App.send_many``."""
        made = list(calls)  # here and not on the event loop, because an iterator runs the caller's code
        receipts = self._run(lambda: self.app.send_many(made, batch_key=batch_key))
        return [SyncReceipt(receipt, self._loop_thread) for receipt in receipts]

    @contextmanager
    def transaction(
        self, connection: Any = None, *, timeout: timedelta | float = limits.TRANSACTION_SECONDS_MAX
    ) -> Iterator[SyncTransaction]:
        """Write rows and send messages in one commit; see ``App.transaction``."""
        self._run(_nothing)
        with self._loop_thread.entered(self.app.transaction(connection, timeout=timeout)) as transaction:
            token = current.set(transaction)
            try:
                yield SyncTransaction(transaction, self._loop_thread)
            finally:
                current.reset(token)

    # working

    def work(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int = limits.CONCURRENCY,
        lease: timedelta | float = limits.LEASE,
        stop_after: timedelta | float = limits.STOP_SECONDS,
        name: str | None = None,
        until_idle: bool = False,
    ) -> int:
        """Run handlers in this process and return how many messages were settled; see ``App.work``.

        Ctrl-C stops it gracefully before it is raised; a second one stops the waiting.
        """
        self._run(_nothing)
        working = self._loop_thread.start(
            self.app.work(
                queues=queues,
                concurrency=concurrency,
                lease=lease,
                stop_after=stop_after,
                name=name,
                until_idle=until_idle,
            )
        )
        try:
            return working.result()
        except KeyboardInterrupt:
            self.stop_working()
            working.result()
            raise

    def stop_working(self) -> None:
        """Ask the workers of this app to finish their running handlers, hand back other messages and return."""
        self._loop_thread.call(self.app.stop_working)


class _DeclareBatch:
    """The decorator ``app.task(batch=…)`` returns, as type checkers see it."""

    @overload
    def __call__(self, function: Callable[[Batch[T]], Awaitable[None]], /) -> SyncTask[[T], Any]: ...
    @overload
    def __call__(self, function: Callable[[SyncBatch[T]], None], /) -> SyncTask[[T], Any]: ...
    def __call__(self, function: Any, /) -> Any:
        raise NotImplementedError


async def _nothing() -> None:
    """Do nothing; running it opens the app."""
