"""Entry: the app, which connects a store with the handlers declared on it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

from onefold import limits
from onefold.app.base import URL_VARIABLE as URL_VARIABLE
from onefold.app.brokers import TransportVerbs
from onefold.app.operators import OperatorVerbs
from onefold.app.workflows import WorkflowVerbs
from onefold.current import current
from onefold.errors import ConfigurationError, TransactionOpenError, seconds
from onefold.schedules.ticker import Ticker
from onefold.store import Lease, Outcome
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import Call
from onefold.transactions.app_transaction import AppTransaction, refuse_inside
from onefold.transactions.buffer import Buffer
from onefold.transactions.handler_transaction import HandlerTransaction
from onefold.transactions.send_many import put_all
from onefold.worker.dead_notice import announced
from onefold.worker.execution import Execution
from onefold.worker.settings import WorkerSettings
from onefold.worker.slots import Slots
from onefold.worker.worker import Worker
from onefold.worker.worker_list import worker_name


class App(TransportVerbs, WorkflowVerbs, OperatorVerbs):
    """Handlers, and the store that keeps their messages.

    ``App("sqlite:///shop.db")`` needs nothing else; ``App()`` reads the URL from the environment variable ONEFOLD_URL.
    Use it as ``async with app``.
    ``name`` is part of the keys that handlers give to outside providers; it is kept in the store, and an app without a
    name takes the one it finds there, or else ``app``.

    On SQLite ``driver="sqlite3"`` is for programs that open the same file with Python's ``sqlite3`` module, for
    instance through an ORM: one process must not use two SQLite libraries on one file.  ``journal="delete"`` uses no
    write-ahead log.
    """

    # sending

    async def send_many(self, calls: Iterable[Call[Any]], *, batch_key: str | None = None) -> list[Receipt[Any]]:
        """Send many calls in one commit: all of them are stored, or none.

        ``batch_key`` names the whole batch: sending it again stores nothing and returns the first receipts.
        Messages may have keys of their own too; one that belongs to another payload fails the batch.
        """
        if current.get() is not None:
            raise ConfigurationError(
                "app.send_many() has a commit of its own; inside a handler or transaction call send_many() of the "
                "context or transaction"
            )
        buffer = Buffer(self.prepare)
        stored = await put_all(self.store, buffer, calls, batch_key)
        buffer.confirm(stored)
        return buffer.receipts

    @asynccontextmanager
    async def transaction(
        self, connection: Any = None, *, timeout: timedelta | float = limits.TRANSACTION_SECONDS_MAX
    ) -> AsyncIterator[AppTransaction]:
        """Write rows and send messages in one commit.

        When the block ends, everything is durable; when it raises or the process dies, nothing was written.
        On SQLite, where other processes wait for the same lock, a block that holds it for longer than ``timeout`` is
        rolled back, and its next call raises ``TransactionTooLongError``; PostgreSQL ends idle transactions itself.
        With ``connection`` it is part of the transaction that is open there, and the owner of the connection commits.
        """
        if isinstance(current.get(), HandlerTransaction):
            raise TransactionOpenError("a handler has one commit, at its return; use ctx.execute and ctx.send in it")
        refuse_inside("transaction()")
        buffer = Buffer(self.prepare, fresh_id=self.fresh_id)
        async with self.store.transaction(connection, seconds=seconds(timeout, "timeout")) as opened:
            inside = AppTransaction(opened, buffer)
            token = current.set(inside)
            try:
                yield inside
            finally:
                current.reset(token)
                buffer.close()
            stored = await buffer.write(opened)
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
        """Run handlers in this process until ``stop_working``, and return how many messages were settled.

        With ``until_idle`` it returns when nothing is due.
        This is the embedded form, without a supervisor.  When a handler ends the process, the other messages it was
        running wait until their leases run out; and when C code holds the interpreter for longer than the lease,
        another worker takes its message over and the work is rolled back.  ``onefold worker`` survives both.
        A handler that blocks the event loop in Python keeps its message: a thread renews the lease.
        """
        settings = WorkerSettings(
            name=name or worker_name(os.getpid(), self._chance),
            queues=[queues] if isinstance(queues, str) else list(queues or self.registry.queues()),
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
        """Work as ``work`` does, with explicit settings; ``begin`` is called before the first claim.

        ``follows`` means that it replaces a worker that died: then a broker or store that must not be used now, such as
        a replica after a failover, is waited for instead of refused.
        """
        if self.store.capabilities.read_only and not follows:
            raise ConfigurationError(
                "the store is read-only, so a worker cannot claim messages: its server is a read replica, or a primary "
                "that was replaced; name the primary in the URL, or all servers with target_session_attrs=read-write"
            )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._open_transports(refuse=not follows))
            resources = await stack.enter_async_context(self.open_resources())
            execution = Execution(
                self.store,
                self.registry,
                self.clock,
                self._chance,
                self.prepare,
                str(self.origin),
                self._middleware,
                resources,
                quarantine_after,
            )
            await stack.enter_async_context(execution)
            ticker = Ticker(
                self.store, self.clock, self._chance, self.registry.recurring, self.registry.tasks, self._complete
            )
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
        """Add the messages for ``on_dead`` tasks to an outcome that is a dead letter; the supervisor calls it."""
        return announced(lease, outcome, self.registry, self.prepare)

    def stop_working(self) -> None:
        """Ask the workers of this app to finish their running handlers, hand back other messages and return."""
        for worker in self._workers:
            worker.stop()
