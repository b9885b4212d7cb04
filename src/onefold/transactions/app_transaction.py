"""Stage 2, send: the caller's transaction, and the verbs that join it.

Messages sent inside it are buffered and put with its commit; a crash before that leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Generator, Iterable
from typing import Any, ParamSpec, TypeVar

from onefold.current import current
from onefold.errors import TransactionOpenError
from onefold.store import Transaction
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import Call, Publishable, Sendable
from onefold.transactions.buffer import Buffer

logger = logging.getLogger("onefold")


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class AppTransaction:
    """The caller's own rows and messages in one commit; made by ``app.transaction()``."""

    def __init__(self, transaction: Transaction, buffer: Buffer) -> None:
        self._transaction = transaction
        self._buffer = buffer

    async def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the store's own dialect and return its rows; it stays only if the transaction commits."""
        return await self._transaction.execute(statement, parameters)

    fetch = execute

    def connection(self) -> Any:
        """Return the driver's connection inside the open transaction (PostgreSQL only); do not commit it."""
        return self._transaction.connection

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> Receipt[R]:
        """Send a message that leaves only if the transaction commits."""
        return self._buffer.add(task.call(*args, **kwargs))

    def publish(self, topic: Publishable[T], event: T) -> Receipt[int]:
        """Publish an event that leaves only if the transaction commits."""
        return self._buffer.add(topic.call(event))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[Receipt[Any]]:
        """Send many messages that leave only if the transaction commits."""
        return [self._buffer.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Send a signal to a run if the transaction commits; a second one with the same ``id`` is the same signal."""
        self._buffer.add_signal(run_id, name, value, id)

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Receipt[R]:
        """Start a run, or find the one that holds its key, and signal it, if the transaction commits."""
        return self._buffer.add_start(call, name, value, id)

    def add_signal(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal; what ``await app.signal(…)`` does inside the block."""
        self._buffer.add_signal(run_id, name, value, id_)

    def add_start(self, call: Call[R], name: str, value: Any, id_: str | None) -> Receipt[R]:
        """Start or find a run and signal it; what ``await app.signal_with_start(…)`` does inside the block."""
        return self._buffer.add_start(call, name, value, id_)

    def add(self, call: Call[R]) -> Receipt[R]:
        """Send an encoded call; what ``await task.send(…)`` does inside the block."""
        return self._buffer.add(call)

    def refuse(self, verb: str) -> None:
        """Refuse a verb that commits by itself."""
        raise commits_apart(verb)


class JoinedSend(Coroutine[Any, Any, Receipt[R]]):
    """A send that has already joined an open transaction; awaiting it only returns the receipt.

    Code in a thread cannot await, so the send must not depend on it.
    """

    def __init__(self, receipt: Receipt[R]) -> None:
        self._receipt = receipt

    def __await__(self) -> Generator[Any, Any, Receipt[R]]:
        return self._receipt
        yield

    def send(self, value: Any) -> Any:
        raise StopIteration(self._receipt)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        raise kind if value is None else value

    def close(self) -> None:
        """Do nothing: the send is done."""


def commits_apart(verb: str) -> TransactionOpenError:
    """Return the error for a verb that commits by itself and was called inside an open transaction."""
    return TransactionOpenError(f"{verb} would commit apart from the open transaction; use it before or after")


def refuse_inside(verb: str) -> None:
    """Refuse a verb that commits by itself inside an open transaction: on SQLite it would wait for that one's lock."""
    if (inside := current.get()) is not None:
        inside.refuse(verb)
