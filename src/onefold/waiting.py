"""Entry: what a ``SyncApp`` hands out.  Each of these has the verbs of its namesake, and waits until they are done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack

from onefold.debounce import Debounced
from onefold.envelope import Envelope
from onefold.inspection import DeadLetter
from onefold.options import SendOptions
from onefold.portal import Portal
from onefold.receipt import Receipt
from onefold.recurring import Schedule
from onefold.store import Attempt, Failure, State
from onefold.task import BoundTask, Call, Sendable, Task
from onefold.topic import BoundTopic, Publishable, Topic
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


class Run(Protocol):
    """Runs a verb of an app, which is open then."""

    def __call__(self, verb: Callable[[], Coroutine[Any, Any, R]], /) -> R: ...


class SyncSender(Protocol):
    """Whoever sends a task and waits for the store: a ``SyncApp``."""

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]: ...


class SyncTask(Generic[P, R]):
    """A task of a ``SyncApp``: ``task.send(…)`` stores the call and returns, a worker makes it."""

    def __init__(self, sender: SyncSender, task: Task[P, R] | BoundTask[P, R]) -> None:
        self._sender = sender
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
        return self._sender.send(self, *args, **kwargs)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and encode one call for ``send_many`` or a transaction, without sending it."""
        return self.task.call(*args, **kwargs)

    def options(self, **options: Unpack[SendOptions]) -> SyncTask[P, R]:
        """Return this task with options for the sends that follow; they never mix with arguments."""
        return SyncTask(self._sender, self.task.options(**options))

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class SyncTopic(SyncTask[[T], int]):
    """A topic of a ``SyncApp``: ``order_placed.publish(order)`` returns when the event is durable."""

    def __init__(self, sender: SyncSender, topic: Topic[T] | BoundTopic[T]) -> None:
        super().__init__(sender, topic)
        self._topic = topic

    def publish(self, event: T, /) -> SyncReceipt[int]:
        """Publish one event; inside a handler or transaction it leaves with its commit.  See ``Topic.publish``."""
        return self.send(event)

    def options(self, **options: Unpack[SendOptions]) -> SyncTopic[T]:
        """Return this topic with options for the events that follow."""
        return SyncTopic(self._sender, self._topic.options(**options))


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

    def publish(self, topic: Publishable[T], event: T) -> SyncReceipt[int]:
        """Publish an event that leaves only if the transaction commits."""
        return self.add(topic.call(event))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[SyncReceipt[Any]]:
        """Send many messages that leave only if the transaction commits."""
        return [self.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Tell a run something if the transaction commits; ``id`` makes a second one with it the same signal."""
        self._transaction.signal(run_id, name, value, id=id)

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> SyncReceipt[R]:
        """Start a run, or find the one that holds its key, and tell it something, if the transaction commits."""
        return SyncReceipt(self._transaction.signal_with_start(call, name, value, id=id), self._portal)

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


class SyncSchedule:
    """``Schedule`` for code that blocks."""

    def __init__(self, schedule: Schedule, portal: Portal) -> None:
        #: As it was when it was asked for, or last changed through here: its timetable, next and last fire time.
        self.schedule = schedule
        self._portal = portal

    @property
    def name(self) -> str:
        """What it is known by."""
        return self.schedule.name

    @property
    def drift(self) -> timedelta | None:
        """How late the last occurrence was put."""
        return self.schedule.drift

    def preview(self, number: int = 5) -> list[datetime]:
        """Return when it will fire next if it is not paused, changed or behind."""
        return self.schedule.preview(number)

    def pause(self) -> bool:
        """Fire nothing until it is resumed; True when it was not paused."""
        return self._portal.run(self.schedule.pause())

    def resume(self) -> bool:
        """Fire again from now on; what would have fired meanwhile does not.  True when it was paused."""
        return self._portal.run(self.schedule.resume())

    def run_now(self) -> str:
        """Put a message now, out of turn, even when paused; returns its id.  The next occurrences stay as they are."""
        return self._portal.run(self.schedule.run_now())

    def remove(self) -> bool:
        """Forget it; True when it was there.  One that stands in code comes back with the next start of a worker."""
        return self._portal.run(self.schedule.remove())

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON; times are in UTC."""
        return self.schedule.as_dict()

    def __repr__(self) -> str:
        return repr(self.schedule)


class SyncDebounced(Generic[P]):
    """``Debounced`` for code that blocks."""

    def __init__(self, debounced: Debounced[P], run: Run) -> None:
        self._debounced = debounced
        self._run = run

    def trigger(self, *args: P.args, **kwargs: P.kwargs) -> datetime:
        """Ask for a message and return when it is due, unless another trigger comes before; durable then."""
        return self._run(lambda: self._debounced.trigger(*args, **kwargs))
