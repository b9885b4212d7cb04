"""Stage 7, handle: several messages for one run of a handler, with a verdict for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar, overload

from onefold.errors import Reject, Retry
from onefold.handlers.lease import Held
from onefold.handlers.progress import make_said
from onefold.handlers.sync_context import SyncHandlerTransaction
from onefold.handlers.threads import Threads
from onefold.message.keys import upstream_key
from onefold.store import Lease, Outcome, Said, Store, Transaction
from onefold.tasks.task import Task
from onefold.transactions.buffer import Prepare
from onefold.transactions.handler_transaction import HandlerTransaction

T = TypeVar("T")

#: Numbers reserved for the messages of one batch; more than it can send (``SEND_MANY_MAX``).
_NUMBERS_PER_BATCH = 1 << 20


class Item(Generic[T]):
    """One message of a batch, and the handler's verdict on it; the last one given counts.

    Without a verdict it counts as failed and is tried again.
    """

    def __init__(
        self,
        lease: Lease,
        value: T,
        encode_result: Callable[[Any], bytes],
        held: Held | None = None,
        *,
        origin: str,
    ) -> None:
        self.value = value
        self.message = lease.envelope
        #: This run's number, counted from 1.
        self.attempt = lease.attempt
        #: Rises with every owner of the message; for outside stores that refuse a lower one.
        self.fence = lease.fence
        self._lease = lease
        self._held = held
        self._origin = origin
        self._encode_result = encode_result
        self._verdict: bytes | Exception | None = None

    @property
    def idempotency_key(self) -> str:
        """The stable name of the work this message asks for."""
        return self.message.idempotency_key

    def upstream_key(self, effect: str) -> str:
        """Return a key for an outside provider: the same on every retry and redrive of this work."""
        return upstream_key(self._origin, self.message.scope, self.idempotency_key, effect)

    def done(self, result: Any = None) -> None:
        """Mark it as done and keep the result for ``Receipt.result()``; raises for one that cannot be encoded."""
        self._verdict = self._encode_result(result)

    def retry(
        self, error: Exception | str = "the handler asked for a retry", *, after: timedelta | float | None = None
    ) -> None:
        """Mark it as failed.

        An exception counts as if a handler of this message alone had raised it.
        With a text, or with ``after``, the message is tried again while it has attempts left.
        """
        if isinstance(error, str) or after is not None:
            error = Retry(str(error), after=after)
        self._verdict = error

    def reject(self, reason: str) -> None:
        """Mark it as one that can never succeed: it becomes a dead letter."""
        self._verdict = Reject(reason)

    def progress(self, percent: float, message: str = "") -> None:
        """Report how far the work on this message is, from 0 to 100; see ``Context.progress``."""
        self._report(make_said(percent, message))

    def beat(self) -> None:
        """Report that the work on this message is moving, with no new percentage."""
        self._report(Said())

    def _report(self, said: Said) -> None:
        if self._held is not None:
            self._held.get_pulse().say(said)

    @property
    def lease(self) -> Lease:
        """The lease by which the worker settles the message."""
        return self._lease

    @property
    def verdict(self) -> bytes | Exception | None:
        """The encoded result, or the error; None while there is no verdict."""
        return self._verdict

    def __repr__(self) -> str:
        return f"<item {self.message.id}>"


def goes_alone(task: Task[Any, Any], lease: Lease) -> bool:
    """Whether a message gets a batch of its own: on its last attempt a neighbour's failure must not make it dead."""
    return 1 < lease.attempt >= task.retry.max_attempts


class _Items(Sequence[Item[T]]):
    """The messages of a batch, in the order in which they were due."""

    _items: Sequence[Item[T]]

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Item[T]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item[T]]: ...
    def __getitem__(self, index: int | slice) -> Item[T] | Sequence[Item[T]]:
        return self._items[index]

    def beat(self) -> None:
        """Report that the handler is moving, for every message of the batch; ``Item.progress`` reports on one."""
        for item in self._items:
            item.beat()

    def __repr__(self) -> str:
        return f"<batch of {len(self)}>"


class Batch(HandlerTransaction, _Items[T]):
    """The argument of a batch handler: its messages, and the verbs whose effects commit with all of them.

    Everything done through it commits together with the outcomes of the whole batch, or not at all.
    Messages it sends have the first message of the batch as their cause.
    """

    def __init__(self, items: Sequence[Item[T]], store: Store, prepare: Prepare, resources: Any) -> None:
        first = items[0]
        # Messages sent without a key are keyed by the cause's id and a number.  The cause may come back as the first
        # of a batch with other neighbours, which sends other messages: numbers that begin at the fence never repeat.
        super().__init__([item.lease for item in items], store, prepare, resources, first.fence * _NUMBERS_PER_BATCH)
        self._items = items

    @property
    def needs_transaction(self) -> bool:
        """Also when it sent something: that belongs to no single message, so it leaves with all outcomes at once."""
        return self.in_transaction or bool(self.sends or self.notes)

    async def commit(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        """Put the messages that were sent, settle and commit, all of it or nothing."""

        async def write(transaction: Transaction) -> None:
            await self.buffer.write(transaction)
            await transaction.conclude(settlements)

        await self.commit_with(write)


class SyncBatch(SyncHandlerTransaction, _Items[T]):
    """``Batch`` for a handler that is a plain function and runs in a thread of its own."""

    def __init__(self, batch: Batch[T], threads: Threads) -> None:
        super().__init__(batch, threads)
        self._items = batch[:]
