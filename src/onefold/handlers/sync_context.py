"""Stage 7, handle: the verbs of ``Context`` for a handler that is a plain function and runs in a thread.

Nothing is implemented twice: each verb runs that of ``Context`` on the worker's event loop and waits for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from onefold.errors import HandlerError
from onefold.handlers.context import Context
from onefold.handlers.effects import Happened, NotHappened
from onefold.handlers.threads import Threads
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import Call, Publishable, Sendable
from onefold.transactions.handler_transaction import HandlerTransaction

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class SyncHandlerTransaction:
    """The verbs of a handler that runs in a thread; each returns when it is done."""

    def __init__(self, work: HandlerTransaction, threads: Threads) -> None:
        #: The value that the app's lifespan yielded for this worker.
        self.resources = work.resources
        self._work = work
        self._threads = threads

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the handler's transaction, which begins with the first call.

        Its changes commit together with the message's outcome, or are rolled back with everything else.
        """
        return self._threads.wait(self._work.execute(statement, *parameters))

    def fetch(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Read without beginning a transaction; once one is open, read inside it."""
        return self._threads.wait(self._work.fetch(statement, *parameters))

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message that leaves only if this handler succeeds."""
        return self._work.send(task, *args, **kwargs)

    def publish(self, topic: Publishable[T], event: T) -> Receipt[int]:
        """Publish an event that leaves only if this handler succeeds."""
        return self._work.publish(topic, event)

    def send_many(self, calls: Iterable[Call[Any]]) -> list[Receipt[Any]]:
        """Send many messages that leave only if this handler succeeds."""
        return self._work.send_many(calls)

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Send a signal to a run, which leaves only if this handler succeeds."""
        self._work.signal(run_id, name, value, id=id)

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Receipt[R]:
        """Start a run, or find the one that holds its key, and signal it, if this handler succeeds."""
        return self._work.signal_with_start(call, name, value, id=id)

    def after(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``function(…)`` in a thread after the commit, for work that may be missed.

        Best effort: it runs once at most, not at all if the handler fails or the process dies, and its errors are
        only logged.  A graceful stop waits for it.  For work that must happen, ``send`` a message.
        """
        self._work.after(self._threads.run, partial(function, *args, **kwargs))

    def check(self) -> None:
        """Raise ``LeaseLostError`` if another worker owns the message now, so that no more work is wasted on it."""
        self._threads.wait(self._work.check())

    @property
    def in_transaction(self) -> bool:
        """Whether the handler's transaction has begun, even if it was ended for being open too long."""
        return self._work.in_transaction


class SyncContext(SyncHandlerTransaction):
    """``Context`` for a handler that is a plain function and runs in a thread."""

    def __init__(self, context: Context, threads: Threads) -> None:
        super().__init__(context, threads)
        self._context = context
        self.message = context.message
        #: This run's number, counted from 1.
        self.attempt = context.attempt
        #: Rises with every owner of the message; for outside stores that refuse a lower one.
        self.fence = context.fence

    @property
    def idempotency_key(self) -> str:
        """The stable name of the work this message asks for."""
        return self._context.idempotency_key

    @property
    def scheduled_for(self) -> datetime | None:
        """The time this run was meant for, in its schedule's time zone; None when it was sent by hand."""
        return self._context.scheduled_for

    @property
    def missed(self) -> int:
        """How many earlier fire times had no run of their own; this run stands in for them."""
        return self._context.missed

    @property
    def deadline(self) -> datetime:
        """When the lease runs out unless it is renewed, which the worker does while it lives."""
        return self._context.deadline

    def upstream_key(self, effect: str) -> str:
        """Return a key for an outside provider: the same on every retry and redrive of this work."""
        return self._context.upstream_key(effect)

    def once(
        self,
        name: str,
        call: Callable[[], R],
        *,
        reconcile: Callable[[], Happened[R] | NotHappened] | None = None,
        provider_keeps_keys_for: timedelta | float | None = None,
    ) -> R:
        """Make a call to the outside whose effect must not happen twice; see ``Context.once``."""
        probe = None if reconcile is None else self._in_thread(reconcile)
        once = self._context.once(
            name, self._in_thread(call), reconcile=probe, provider_keeps_keys_for=provider_keeps_keys_for
        )
        return self._threads.wait(once)

    def progress(self, percent: float, message: str = "") -> None:
        """Report how far the work is, from 0 to 100; see ``Context.progress``."""
        self._context.progress(percent, message)

    def beat(self) -> None:
        """Report that the handler is moving, with no new percentage."""
        self._context.beat()

    def checkpoint(self, value: Any) -> None:
        """Record how far the work got, for the next run of this message; see ``Context.checkpoint``."""
        self._threads.wait(self._context.checkpoint(value))

    def last_checkpoint(self) -> Any:
        """Return the value of the last checkpoint of this message, by any of its runs; None if there is none."""
        return self._threads.wait(self._context.last_checkpoint())

    def _in_thread(self, call: Callable[[], R]) -> Callable[[], Awaitable[R]]:
        """Let a call run in a thread of its own; keeps its return annotation, by which its result is encoded."""

        @wraps(call)
        async def run() -> R:
            return await self._threads.run(call)

        return run


async def run_in_thread(call: Callable[[], Any], name: str, work: HandlerTransaction, threads: Threads) -> Any:
    """Run a plain function, of a task or a step, in a thread."""
    result = await threads.run(call, name=f"{name} {work.leases[0].id}", wake=work.cancel_tasks)
    if inspect.isawaitable(result):
        if isinstance(result, Coroutine):
            result.close()
        raise HandlerError(f"{name} is a plain function and returned an awaitable; declare it with `async def`")
    return result
