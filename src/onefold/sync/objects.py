"""Entry: the objects of a ``SyncApp``: each has the verbs of the asynchronous class of its name, and waits for them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack

from onefold.events.topic import BoundTopic, Topic
from onefold.message.envelope import Envelope
from onefold.operations.dead_letters import DeadLetter
from onefold.schedules.debounce import Debounced
from onefold.schedules.register import Schedule
from onefold.store import Attempt, Failure, State
from onefold.sync.loop_thread import LoopThread
from onefold.tasks.options import SendOptions
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import BoundTask, Call, Publishable, Sendable, Task
from onefold.transactions.app_transaction import AppTransaction

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class SyncReceipt(Generic[R]):
    """``Receipt`` for code that blocks."""

    def __init__(self, receipt: Receipt[R], loop_thread: LoopThread) -> None:
        self._receipt = receipt
        self._loop_thread = loop_thread

    @property
    def id(self) -> str:
        """The id of the message; for a duplicate, of the first one."""
        return self._receipt.id

    @property
    def duplicate(self) -> bool:
        """Whether the message existed already, so that nothing was stored."""
        return self._receipt.duplicate

    @property
    def state(self) -> State:
        """The state of the message when it was sent."""
        return self._receipt.state

    def result(self, *, timeout: timedelta | float | None = None) -> R:
        """Wait for the outcome and return what the handler returned; see ``Receipt.result``."""
        return self._loop_thread.run(self._receipt.result(timeout=timeout))

    def __repr__(self) -> str:
        return repr(self._receipt)


class RunVerb(Protocol):
    """Opens the app if needed and runs one of its verbs."""

    def __call__(self, verb: Callable[[], Coroutine[Any, Any, R]], /) -> R: ...


class SyncSender(Protocol):
    """Sends a task and waits until it is stored; a ``SyncApp``."""

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]: ...


class SyncTask(Generic[P, R]):
    """A task of a ``SyncApp``: ``task.send(…)`` stores the call and returns, and a worker runs it."""

    def __init__(self, sender: SyncSender, task: Task[P, R] | BoundTask[P, R]) -> None:
        self._sender = sender
        #: The same task for asynchronous code.
        self.task = task

    @property
    def name(self) -> str:
        """The message type of its calls."""
        return self.task.name if isinstance(self.task, Task) else self.task.task.name

    def send(self, *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send one message.

        When it returns, the message is durable; inside a handler or transaction it is sent with that commit.
        A crash before that leaves nothing or one message; sending again with the same key is harmless.
        """
        return self._sender.send(self, *args, **kwargs)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and encode one call for ``send_many`` or a transaction, without sending it."""
        return self.task.call(*args, **kwargs)

    def options(self, **options: Unpack[SendOptions]) -> SyncTask[P, R]:
        """Return this task with options for its sends; options are never mixed with arguments."""
        return SyncTask(self._sender, self.task.options(**options))

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class SyncTopic(SyncTask[[T], int]):
    """A topic of a ``SyncApp``: ``order_placed.publish(order)`` returns when the event is durable."""

    def __init__(self, sender: SyncSender, topic: Topic[T] | BoundTopic[T]) -> None:
        super().__init__(sender, topic)
        self._topic = topic

    def publish(self, event: T, /) -> SyncReceipt[int]:
        """Publish one event; inside a handler or transaction it is sent with that commit.  See ``Topic.publish``."""
        return self.send(event)

    def options(self, **options: Unpack[SendOptions]) -> SyncTopic[T]:
        """Return this topic with options for its events."""
        return SyncTopic(self._sender, self._topic.options(**options))


class SyncTransaction:
    """``AppTransaction`` for code that blocks.  Made by ``app.transaction()``."""

    def __init__(self, transaction: AppTransaction, loop_thread: LoopThread) -> None:
        self._transaction = transaction
        self._loop_thread = loop_thread

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL in the store's own dialect and return its rows; its changes stay only if the transaction commits."""
        return self._loop_thread.run(self._transaction.execute(statement, *parameters))

    fetch = execute

    def send(self, task: Sendable[P, R], *args: P.args, **kwargs: P.kwargs) -> SyncReceipt[R]:
        """Send a message; it is stored only if the transaction commits."""
        return self.add(task.call(*args, **kwargs))

    def publish(self, topic: Publishable[T], event: T) -> SyncReceipt[int]:
        """Publish an event; it is stored only if the transaction commits."""
        return self.add(topic.call(event))

    def send_many(self, calls: Iterable[Call[Any]]) -> list[SyncReceipt[Any]]:
        """Send many messages; they are stored only if the transaction commits."""
        return [self.add(call) for call in calls]

    def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> None:  # noqa: A002
        """Send a run a signal if the transaction commits; two signals with the same ``id`` are one."""
        self._transaction.signal(run_id, name, value, id=id)

    def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> SyncReceipt[R]:
        """Start a run, or find the one that has its key, and send it a signal, if the transaction commits."""
        return SyncReceipt(self._transaction.signal_with_start(call, name, value, id=id), self._loop_thread)

    def add(self, call: Call[R]) -> SyncReceipt[R]:
        """Send an encoded call; called by ``task.send(…)`` inside the block."""
        return SyncReceipt(self._transaction.add(call), self._loop_thread)


class SyncDeadLetter:
    """``DeadLetter`` for code that blocks."""

    def __init__(self, letter: DeadLetter, loop_thread: LoopThread) -> None:
        self._letter = letter
        self._loop_thread = loop_thread
        self.id = letter.id
        self.message: Envelope = letter.message
        self.failure: Failure = letter.failure
        self.replay_count = letter.replay_count
        self.crashes = letter.crashes

    def attempts(self) -> list[Attempt]:
        """Return every failed run, oldest first."""
        return self._loop_thread.run(self._letter.attempts())

    def redrive(self, *, actor: str, reason: str) -> bool:
        """Let it run again with the same key and all of its attempts; see ``DeadLetter.redrive``."""
        return self._loop_thread.run(self._letter.redrive(actor=actor, reason=reason))

    def discard(self, *, actor: str, reason: str) -> bool:
        """Close it for good; its key is free again."""
        return self._loop_thread.run(self._letter.discard(actor=actor, reason=reason))

    def as_dict(self) -> dict[str, Any]:
        """Return the dead letter with its failure and attempts, ready for JSON."""
        return self._loop_thread.run(self._letter.as_dict())

    def __repr__(self) -> str:
        return repr(self._letter)


class SyncSchedule:
    """``Schedule`` for code that blocks."""

    def __init__(self, schedule: Schedule, loop_thread: LoopThread) -> None:
        #: The schedule as it was when it was read, or last changed through this object.
        self.schedule = schedule
        self._loop_thread = loop_thread

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.schedule.name

    @property
    def drift(self) -> timedelta | None:
        """The time between the last fire time and its message."""
        return self.schedule.drift

    def preview(self, number: int = 5) -> list[datetime]:
        """Return the next fire times, as if it were not paused and had no fire times to catch up on."""
        return self.schedule.preview(number)

    def pause(self) -> bool:
        """Stop firing until it is resumed; True when it was not paused."""
        return self._loop_thread.run(self.schedule.pause())

    def resume(self) -> bool:
        """Fire again from now on; fire times during the pause are dropped.  True when it was paused."""
        return self._loop_thread.run(self.schedule.resume())

    def run_now(self) -> str:
        """Put a message now, even when paused, and return its id.  The timetable is not changed."""
        return self._loop_thread.run(self.schedule.run_now())

    def remove(self) -> bool:
        """Remove it; True when it was there.  One that is declared in code comes back when the next worker starts."""
        return self._loop_thread.run(self.schedule.remove())

    def as_dict(self) -> dict[str, Any]:
        """Return its fields, ready for JSON; times are in UTC."""
        return self.schedule.as_dict()

    def __repr__(self) -> str:
        return repr(self.schedule)


class SyncDebounced(Generic[P]):
    """``Debounced`` for code that blocks."""

    def __init__(self, debounced: Debounced[P], run: RunVerb) -> None:
        self._debounced = debounced
        self._run = run

    def trigger(self, *args: P.args, **kwargs: P.kwargs) -> datetime:
        """Trigger the message and return its due time; durable when it returns.  See ``Debounced.trigger``."""
        return self._run(lambda: self._debounced.trigger(*args, **kwargs))
