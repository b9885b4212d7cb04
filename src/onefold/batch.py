"""Stage 7, handle: several messages for one run of a handler, with a verdict for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar, overload

from onefold.blocking import SyncWork
from onefold.errors import Reject, Retry
from onefold.identity import upstream_key
from onefold.progress import Bearer, make_said, pulse_of
from onefold.store import Lease, Outcome, Said, Store, Transaction
from onefold.task import Task
from onefold.threads import Threads
from onefold.transaction import Prepare
from onefold.work import Work

T = TypeVar("T")

#: More than one batch can send.
_SENDS_MAX = 1 << 20


class Item(Generic[T]):
    """One message of a batch, and the handler's verdict on it; the last one given counts.

    Without a verdict it is tried again, as if it had failed.
    """

    def __init__(
        self,
        lease: Lease,
        value: T,
        encode_result: Callable[[Any], bytes],
        bearer: Bearer | None = None,
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
        self._bearer = bearer
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
        """It succeeded; the result is kept for whoever waits for it.  One that cannot be kept raises here."""
        self._verdict = self._encode_result(result)

    def retry(
        self, error: Exception | str = "the handler asked for a retry", *, after: timedelta | float | None = None
    ) -> None:
        """It failed.

        An exception is judged as if a handler of this message alone had raised it; with a text, or with ``after``,
        it is tried again while it has attempts left.
        """
        if isinstance(error, str) or after is not None:
            error = Retry(str(error), after=after)
        self._verdict = error

    def reject(self, reason: str) -> None:
        """It can never succeed: make it a dead letter."""
        self._verdict = Reject(reason)

    def progress(self, percent: float, message: str = "") -> None:
        """Say how far the work on this message is, from 0 to 100; see ``Context.progress``."""
        self._say(make_said(percent, message))

    def beat(self) -> None:
        """Say that the work on this message is moving, though there is nothing new to tell."""
        self._say(Said())

    def _say(self, said: Said) -> None:
        if self._bearer is not None:
            pulse_of(self._bearer).say(said)

    @property
    def lease(self) -> Lease:
        """The right to settle the message, for the worker."""
        return self._lease

    @property
    def verdict(self) -> bytes | Exception | None:
        """The encoded result, or what is wrong; None as long as there is no verdict."""
        return self._verdict

    def __repr__(self) -> str:
        return f"<item {self.message.id}>"


def goes_alone(task: Task[Any, Any], lease: Lease) -> bool:
    """Whether a message has a batch of its own: with its last attempt it must not die for a neighbour's fault."""
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
        """Say that the handler is moving, for every message of the batch; what is new of one, its ``Item`` tells."""
        for item in self._items:
            item.beat()

    def __repr__(self) -> str:
        return f"<batch of {len(self)}>"


class Batch(Work, _Items[T]):
    """What a batch handler receives: its messages, and one door for the effects of all of them.

    Everything done through it commits together with the outcomes of the whole batch, or not at all.
    What it sends counts as caused by its first message.
    """

    def __init__(self, items: Sequence[Item[T]], store: Store, prepare: Prepare, resources: Any) -> None:
        first = items[0]
        # What it sends without a key is numbered by fence: its first message may come back in a batch that sends more.
        super().__init__([item.lease for item in items], store, prepare, resources, first.fence * _SENDS_MAX)
        self._items = items

    @property
    def needs_transaction(self) -> bool:
        """What it sends belongs to none of its messages, so it leaves with all of their outcomes."""
        return self.in_transaction or bool(self.sends or self.notes)

    async def commit(self, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        """Put what was sent, settle and commit, all of it or nothing."""

        async def write(transaction: Transaction) -> None:
            await self.buffer.leave(transaction)
            await transaction.conclude(settlements)

        await self.commit_with(write)


class SyncBatch(SyncWork, _Items[T]):
    """``Batch`` for a handler that is a plain function and runs in a thread of its own."""

    def __init__(self, batch: Batch[T], threads: Threads) -> None:
        super().__init__(batch, threads)
        self._items = batch[:]
