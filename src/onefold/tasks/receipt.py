"""Stage 5, rest: the receipt of a send, with the message's id and its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import msgspec

from onefold.errors import (
    CancelledMessageError,
    DeadError,
    ResultTimeoutError,
    SagaError,
    StoreError,
    TransactionOpenError,
    seconds,
)
from onefold.store import Failure, Query, Record, State, Stored

R = TypeVar("R")

#: The pause between looks for a result, doubling from the first figure up to the second.
_LOOK_SECONDS_FIRST, _LOOK_SECONDS_MAX = 0.005, 0.25

#: The reason of a dead saga whose steps were all undone.
COMPENSATED = "compensated"

Find = Callable[[Query], Awaitable[list[Record]]]
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Source(Generic[R]):
    """Finds and decodes results for all receipts of one task."""

    decode: Callable[[bytes], R]
    find: Find
    sleep: Sleep


def dead_error(message_id: str, failure: Failure) -> DeadError:
    """Return the error that ``result()`` raises for a dead letter."""
    kind = SagaError if failure.reason == COMPENSATED else DeadError
    return kind(message_id, failure.reason, failure.error_type, failure.error_message)


class Receipt(msgspec.Struct, Generic[R], gc=False, eq=False):
    """Proof that a message was stored, or that it already was.

    Inside a transaction ``duplicate`` and ``state`` are known after the commit, and so is the id of a message with a
    key: until then another message may hold that key, and then this one is never stored.
    ``gc=False``, because bulk sends make many and none can be part of a cycle.
    """

    _id: str | None
    _source: Source[R]
    _stored: Stored | None = None

    @property
    def id(self) -> str:
        """The id of the message; for a duplicate, of the first one."""
        if self._stored is not None:
            return self._stored.id
        if self._id is None:
            raise TransactionOpenError(
                "the message has a key, which may belong to another message, so its id is known after the commit; "
                "read it then, keep the key instead of the id, or send a signal to a run with signal_with_start()"
            )
        return self._id

    def withhold(self) -> None:
        """Make ``id`` unavailable before the commit: the message has a key, and another one may hold it."""
        self._id = None

    @property
    def duplicate(self) -> bool:
        """Whether the message already existed and nothing was stored."""
        return self._known().duplicate

    @property
    def state(self) -> State:
        """The state of the message when it was sent."""
        return self._known().state

    def _known(self) -> Stored:
        if self._stored is None:
            raise TransactionOpenError("whether the message is a duplicate is known after the commit")
        return self._stored

    def confirm(self, stored: Stored) -> None:
        """Record the answer of the store; called once, after the commit."""
        self._stored = stored

    async def result(self, *, timeout: timedelta | float | None = None) -> R:
        """Wait for the outcome and return what the handler returned.

        Raises ``DeadError`` if the message is a dead letter, ``SagaError`` if it is a saga that failed and was undone,
        ``CancelledMessageError`` if it was cancelled or discarded, and ``ResultTimeoutError`` when ``timeout`` passes
        first; the message goes on then.
        """
        self._known()
        left = None if timeout is None else seconds(timeout, "timeout")
        pause = _LOOK_SECONDS_FIRST
        while True:
            if record := await self._ended():
                return self._outcome(record)
            if left is not None and left <= 0:
                raise ResultTimeoutError(f"message {self.id} has no outcome yet; it is still alive")
            pause = min(pause, left) if left is not None else pause
            await self._source.sleep(pause)
            left = None if left is None else left - pause
            pause = min(pause * 2, _LOOK_SECONDS_MAX)

    async def _ended(self) -> Record | None:
        found = await self._source.find(Query(ids=(self.id,)))
        if not found or (found[0].state is State.DONE and found[0].result is None):
            raise StoreError(f"message {self.id} is no longer kept; its key window is over")
        return found[0] if found[0].state.ended else None

    def _outcome(self, record: Record) -> R:
        if record.state is State.DONE and record.result is not None:
            return self._source.decode(record.result)
        if record.state is State.DEAD and record.failure is not None:
            raise dead_error(self.id, record.failure)
        raise CancelledMessageError(f"message {self.id} was {record.state.name.lower()}; it has no result")

    def __repr__(self) -> str:
        if self._stored is None:
            return f"<receipt {self._id or 'of a message that is not stored yet'}>"
        return f"<receipt {self.id}{' (duplicate)' if self._stored.duplicate else ''}>"
