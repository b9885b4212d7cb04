"""Entry: the same verbs as the app's, for code without an event loop.

Nothing is implemented a second time: every verb runs the app's own on an event loop in a thread.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

from onefold import limits
from onefold.app import App, Lifespan, OnSend
from onefold.batch import Batch, SyncBatch
from onefold.blocking import SyncContext
from onefold.clock import Clock
from onefold.context import Context
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError
from onefold.inside import current
from onefold.inspection import DeadLetter
from onefold.portal import Portal
from onefold.receipt import Receipt
from onefold.registry import BoundTask, Call, Sendable, SendOptions, Task, TaskOptions
from onefold.store import Attempt, Counts, Failure, Query, Record, State, Store
from onefold.stretch import Middleware
from onefold.transaction import AppTransaction

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class SyncReceipt(Generic[R]):
    """``Receipt`` for code that blocks."""

    def __init__(self, receipt: Receipt[R], portal: Portal) -> None:
        self._receipt = receipt
        self._portal = portal

    @property
    def id(self) -> str:
        """The id of the message; for a duplicate, of the first one."""
        return self._receipt.id

    @property
    def duplicate(self) -> bool:
        """Whether the message was there already and nothing was stored."""
        return self._receipt.duplicate

    @property
    def state(self) -> State:
        """Where the message stood when it was sent."""
        return self._receipt.state

    def result(self, *, timeout: timedelta | float | None = None) -> R:
        """Wait for the outcome and return what the handler returned; see ``Receipt.result``."""
        return self._portal.run(self._receipt.result(timeout=timeout))

    def __repr__(self) -> str:
        return repr(self._receipt)


class SyncTask(Generic[P, R]):
    """A task of a ``SyncApp``: ``task.send(…)`` stores the call and returns, a worker makes it."""

    def __init__(self, app: SyncApp, task: Task[P, R] | BoundTask[P, R]) -> None:
        self._app = app
        #: The same task for asynchronous code.
        self.task = task

    @property
    def name(self) -> str:
        """The message type under which its calls are stored."""
        return self.task.name if isinstance(self.task, Task) else self.task.task.name

    def send(self, *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send one message.

        When it returns, the message is durable; inside a handler or transaction it leaves with its commit.
        A crash before that leaves nothing or one message; sending again with the same key is harmless.
        """
        return self._app.send(self, *args, **kwargs)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and encode one call for ``send_many`` or a transaction, without sending it."""
        return self.task.call(*args, **kwargs)

    def options(self, **options: Unpack[SendOptions]) -> SyncTask[P, R]:
        """Return this task with options for the sends that follow; they never mix with arguments."""
        return SyncTask(self._app, self.task.options(**options))

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class SyncTransaction:
    """``AppTransaction`` for code that blocks.  Made by ``app.transaction()``."""

    def __init__(self, transaction: AppTransaction, portal: Portal) -> None:
        self._transaction = transaction
        self._portal = portal

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the store's own dialect and return its rows; it stays only if the transaction commits."""
        return self._portal.run(self._transaction.execute(statement, *parameters))

    fetch = execute

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send a message that leaves only if the transaction commits."""
        return self.add(task.call(*args, **kwargs))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[SyncReceipt[Any]]:
        """Send many messages that leave only if the transaction commits."""
        return [self.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Tell a run something if the transaction commits; ``id`` makes a second one with it the same signal."""
        self._transaction.signal(run_id, name, value, id=id)

    def add(self, call: Call[R]) -> SyncReceipt[R]:
        """Send an encoded call; what ``task.send(…)`` does inside the block."""
        return SyncReceipt(self._transaction.add(call), self._portal)


class SyncDeadLetter:
    """``DeadLetter`` for code that blocks."""

    def __init__(self, letter: DeadLetter, portal: Portal) -> None:
        self._letter = letter
        self._portal = portal
        self.id = letter.id
        self.message: Envelope = letter.message
        self.failure: Failure = letter.failure
        self.replay_count = letter.replay_count
        self.crashes = letter.crashes

    def attempts(self) -> list[Attempt]:
        """Return every failed run, oldest first."""
        return self._portal.run(self._letter.attempts())

    def redrive(self, *, actor: str, reason: str) -> bool:
        """Let it run again with the same key and a full set of attempts; see ``DeadLetter.redrive``."""
        return self._portal.run(self._letter.redrive(actor=actor, reason=reason))

    def discard(self, *, actor: str, reason: str) -> bool:
        """Close it for good; its key is free again."""
        return self._portal.run(self._letter.discard(actor=actor, reason=reason))

    def as_dict(self) -> dict[str, Any]:
        """Return the letter with all that is known about its failure, ready for JSON."""
        return self._portal.run(self._letter.as_dict())

    def __repr__(self) -> str:
        return repr(self._letter)


class SyncApp:
    """``App`` for code without an event loop: Django, Flask, scripts, notebooks.

    ``SyncApp("sqlite:///shop.db")`` has an app of its own; ``SyncApp(app)`` is another door to an existing one, whose
    tasks are sent with ``send``.  It opens itself with the first verb that needs the store; ``with`` closes it again.
    Safe from many threads.  A process that forks must use it only after the fork.
    """

    def __init__(
        self,
        url: str | App | None = None,
        *,
        store: Store | None = None,
        include: Sequence[str] = (),
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        #: The app itself, for asynchronous code and for workers.
        self.app = url if isinstance(url, App) else App(url, store=store, include=include, clock=clock, chance=chance)
        self._portal = Portal()
        self._closed = False

    def _run(self, verb: Callable[[], Coroutine[Any, Any, R]]) -> R:
        if self._closed:
            raise ConfigurationError("the app was closed; use `with app:` around what you do with it")

        async def opened() -> R:
            await self.app.open()
            return await verb()

        return self._portal.run(opened())

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
    def task(self, *, isolate: bool = False, **settings: Unpack[TaskOptions]) -> _Declare: ...
    @overload
    def task(self, *, batch: int, **settings: Unpack[TaskOptions]) -> _DeclareBatch: ...
    def task(self, *function: Any, **settings: Any) -> Any:
        """Declare a handler, a plain function or a coroutine function; see ``App.task``."""
        declare = (_DeclareBatch if settings.get("batch") else _Declare)(self, settings)
        return declare(*function) if function else declare

    def lifespan(self, opens: Lifespan) -> Lifespan:
        """Declare what a worker opens once and closes at the end; see ``App.lifespan``."""
        return self.app.lifespan(opens)

    def middleware(self, wraps: Middleware) -> Middleware:
        """Wrap every run of every handler, around its thread; see ``App.middleware``."""
        return self.app.middleware(wraps)

    def on_send(self, changes: OnSend) -> OnSend:
        """See and change every message before it is stored; see ``App.on_send``."""
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
        """Import what is included and open the store; calling it twice is harmless."""
        self._closed = False
        self._portal.run(self.app.open())

    def close(self) -> None:
        """Close the store and end the event loop; calling it twice is harmless."""
        self._closed = True
        if self._portal.running:
            self._portal.run(self.app.close())
            self._portal.close()

    def migrate(self) -> list[str]:
        """Bring the database's schema to this version; returns the names of the migrations applied."""
        return self._portal.run(self.app.migrate())

    @property
    def url(self) -> str | None:
        """Where the store is, from the constructor or the environment."""
        return self.app.url

    def override(self, *, store: Store) -> AbstractContextManager[App]:
        """Use another store for the length of the block, for tests; open the app inside it."""
        return self.app.override(store=store)

    # sending

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send one message of any task of the app; what ``task.send(…)`` does for the tasks declared here."""
        call = task.call(*args, **kwargs)
        inside = current.get()
        receipt = self._run(lambda: self.app.dispatch(call)) if inside is None else inside.add(call)
        return SyncReceipt(receipt, self._portal)

    def send_many(self, calls: Iterable[Call[Any]], *, batch_key: str | None = None) -> list[SyncReceipt[Any]]:
        """Send many calls in one commit: all of them are stored, or none; see ``App.send_many``."""
        receipts = self._run(lambda: self.app.send_many(calls, batch_key=batch_key))
        return [SyncReceipt(receipt, self._portal) for receipt in receipts]

    @contextmanager
    def transaction(self, connection: Any = None) -> Iterator[SyncTransaction]:
        """Write rows and send messages in one commit; see ``App.transaction``."""
        self._run(_nothing)
        with self._portal.entered(self.app.transaction(connection)) as transaction:
            token = current.set(transaction)
            try:
                yield SyncTransaction(transaction, self._portal)
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
        working = self._portal.start(
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
        """Ask the workers of this app to finish what they run, hand back the rest and return."""
        self._portal.call(self.app.stop_working)

    # people

    def dead_letters(self, *, queue: str | None = None, message_type: str | None = None) -> Iterator[SyncDeadLetter]:
        """Go through the dead letters, oldest first: ``for letter in app.dead_letters()``."""
        self._run(_nothing)
        letters = self.app.dead_letters(queue=queue, message_type=message_type)
        while (letter := self._portal.run(_next(letters))) is not None:
            yield SyncDeadLetter(letter, self._portal)

    def redrive(self, ids: Sequence[str], *, actor: str, reason: str) -> list[str]:
        """Reopen dead letters in one commit; returns the ids this call reopened."""
        return self._run(lambda: self.app.redrive(ids, actor=actor, reason=reason))

    def cancel(self, message_id: str, *, actor: str, reason: str) -> bool:
        """Take a message back; one that runs can no longer commit."""
        return self._run(lambda: self.app.cancel(message_id, actor=actor, reason=reason))

    def find(self, query: Query) -> list[Record]:
        """Return one page of messages with where they stand."""
        return self._run(lambda: self.app.find(query))

    def count(self) -> dict[str, Counts]:
        """Return, per queue, how many messages wait, run and are dead."""
        return self._run(self.app.count)


class _Declare:
    """The decorator ``app.task(…)`` returns."""

    def __init__(self, app: SyncApp, settings: dict[str, Any]) -> None:
        self._app = app
        self._settings = settings

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[SyncContext, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return SyncTask(self._app, self._app.app.task(**self._settings)(function))


class _DeclareBatch:
    """The decorator ``app.task(batch=…)`` returns."""

    def __init__(self, app: SyncApp, settings: dict[str, Any]) -> None:
        self._app = app
        self._settings = settings

    @overload
    def __call__(self, function: Callable[[Batch[T]], Awaitable[None]], /) -> SyncTask[[T], Any]: ...
    @overload
    def __call__(self, function: Callable[[SyncBatch[T]], None], /) -> SyncTask[[T], Any]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return SyncTask(self._app, self._app.app.task(**self._settings)(function))


async def _nothing() -> None:
    """Only to open the app."""


async def _next(letters: AsyncIterator[DeadLetter]) -> DeadLetter | None:
    return await anext(letters, None)
