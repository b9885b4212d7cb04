"""Stage 1, declare: what was declared, checked when it is declared.

A task is a function with a name, a way to find its key, and a policy.
It belongs to a sender, which is anything that can send a call, so this module knows nothing of apps and stores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, to_instant
from onefold.envelope import SCHEDULED, SURELY_FITS, UNKEYED, Envelope, check
from onefold.errors import ConfigurationError, EnvelopeError, seconds
from onefold.handler import Handler
from onefold.identity import KeyFunction, KeySource, derived_key, from_source
from onefold.receipt import Receipt
from onefold.retry import RetryPolicy
from onefold.schedule import Catchup
from onefold.timetable import Timetable

P = ParamSpec("P")
R = TypeVar("R")

#: What a handler does outside its own commit, as it declares it; `docs/guarantees.md` explains the letters.
Effect = Literal["T", "K", "F", "N"]


#: What a task does unless it says otherwise.
DEFAULT_RETRY = RetryPolicy()


class SendOptions(TypedDict, total=False):
    """What ``task.options(…)`` accepts."""

    #: The idempotency key, instead of the one made by the task's ``key=``.
    key: str
    #: Send it only after this long, or not before this moment.
    delay: timedelta | float
    at: datetime
    #: Coalesce triggers: while this key's window lasts, a second send is a duplicate whatever its payload.
    #: Exact on every store: the check and the write are one atomic act.
    deduplicate: str
    deduplicate_for: timedelta | float
    #: Give up this long after it became due, as a dead letter with the reason ``expired``; None keeps it for ever.
    expires: timedelta | float | None
    queue: str
    subject: str
    correlation_id: str
    causation_id: str
    ordering_key: str
    sequence: int
    trace: str
    tags: dict[str, str]
    #: What a second send does when the first one is a dead letter.
    if_dead: Literal["keep", "redrive"]


class Call(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """One call of a task, checked and encoded, not yet sent."""

    task: Task[Any, R]
    payload: bytes
    fingerprint: bytes
    key: str | None
    subject: str | None
    options: SendOptions

    def envelope(self, id_: str, *, parent: Envelope | None = None, index: int = 0) -> Envelope:
        """Make the message; ``parent`` is the one whose handler sends it, as its ``index``-th send without a key."""
        key = self.key
        if key is None:
            key = derived_key(parent.id, index) if parent is not None else f"{UNKEYED}{id_}"
        subject = self.subject or (self.task.name if self.key is None else _shortened(key))
        if self.options:
            return self._with_options(id_, key, subject, parent)
        envelope = Envelope(
            id=id_,
            message_type=self.task.name,
            schema_version=self.task.version,
            queue=self.task.queue,
            idempotency_key=key,
            correlation_id=id_ if parent is None else parent.correlation_id,
            causation_id=id_ if parent is None else parent.id,
            subject=subject,
            payload_inline=self.payload,
            fingerprint=self.fingerprint,
            trace=None if parent is None else parent.trace,
            retention=self.task.retention,
            pinned=self.task.pinned,
        )
        # What is not from the arguments was checked when the task was declared or the parent was made.
        surely_good = key.isascii() and key.isprintable() and 0 < len(key) <= limits.SUBJECT_BYTES_MAX
        surely_good = surely_good and subject.isascii() and subject.isprintable() and 0 < len(subject) <= len(key)
        return envelope if surely_good and len(self.payload) <= SURELY_FITS else check(envelope)

    def _with_options(self, id_: str, key: str, subject: str, parent: Envelope | None) -> Envelope:
        options = self.options
        expires = options.get("expires", self.task.expires)
        return check(
            Envelope(
                id=id_,
                message_type=self.task.name,
                schema_version=self.task.version,
                queue=options.get("queue", self.task.queue),
                idempotency_key=key,
                correlation_id=options.get("correlation_id") or (parent.correlation_id if parent else id_),
                causation_id=options.get("causation_id") or (parent.id if parent else id_),
                subject=subject,
                payload_inline=self.payload,
                fingerprint=self.fingerprint,
                deduplication_key=options.get("deduplicate"),
                deduplicate_for=_micros(options.get("deduplicate_for", limits.DEDUPLICATION_WINDOW)),
                ordering_key=options.get("ordering_key"),
                sequence=options.get("sequence"),
                trace=options.get("trace") or (parent.trace if parent else None),
                tags=options.get("tags"),
                delay=_micros(options.get("delay", 0)),
                due_at=to_instant(options["at"]) if "at" in options else 0,
                retention=0 if expires is None else _micros(expires),
                pinned=self.task.pinned,
            )
        )

    def __repr__(self) -> str:
        # Without the payload: what is printed or logged is no place for it.
        return f"<call of {self.task.name} key={self.key!r}>"


def _shortened(key: str) -> str:
    if len(key) <= limits.SUBJECT_BYTES_MAX // 4:
        return key  # no character has more than four bytes
    return key.encode()[: limits.SUBJECT_BYTES_MAX].decode(errors="ignore")


def _micros(duration: timedelta | float) -> int:
    return round(seconds(duration) * MICROSECONDS)


class Sender(Protocol):
    """Whoever can send a call: an app."""

    def dispatch(self, call: Call[R]) -> Coroutine[Any, Any, Receipt[R]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Everything about a task that its decorator sets."""

    name: str | None = None
    #: A template over the arguments such as ``"{order_id}:charge"``, or a function of them.
    key: KeySource | None = None
    subject: KeySource | None = None
    #: Only these arguments tell whether two sends with one key are the same work.
    fingerprint: tuple[str, ...] | None = None
    queue: str = "default"
    #: The version of the arguments; raise it when they change their meaning.
    version: int = 1
    retry: RetryPolicy = DEFAULT_RETRY
    timeout: timedelta | float | None = None
    expires: timedelta | float | None = limits.MESSAGE_RETENTION
    #: How long the key is remembered after the message ended.
    key_window: timedelta | float = limits.KEY_WINDOW
    #: ``batch`` shares commits between handlers without SQL of their own; ``now`` has the smallest window for a re-run.
    settle: Literal["batch", "now"] = "batch"
    effects: tuple[Effect, ...] | None = None
    #: A handler that neither beats nor reports progress for this long is shown and logged as stalled.
    beat_within: timedelta | float | None = None
    #: Give each run a process, which may die without harm to others.
    isolate: bool = False
    #: Give each run up to so many messages; True for the default number.
    batch: int = 0


class Sendable(Protocol[P, R]):
    """What can be sent: a task, with options or without."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...


class TaskOptions(TypedDict, total=False):
    """The same settings as keywords, for decorators that have others beside them."""

    name: str | None
    key: KeySource | None
    subject: KeySource | None
    fingerprint: tuple[str, ...] | None
    queue: str
    version: int
    retry: RetryPolicy
    timeout: timedelta | float | None
    expires: timedelta | float | None
    key_window: timedelta | float
    settle: Literal["batch", "now"]
    effects: tuple[Effect, ...] | None
    beat_within: timedelta | float | None


class Task(Generic[P, R]):
    """A handler that can be sent: ``await task.send(…)`` stores the call, a worker makes it."""

    #: Whether a message is handled by exactly the version it was sent to; several may then be declared side by side.
    pinned = False

    def __init__(self, sender: Sender, function: Callable[..., Any], settings: TaskSettings) -> None:
        self.function = function
        self.name = limits.check_name("task", settings.name or str(getattr(function, "__name__", "")))
        self.handler = Handler(self.name, function, isolate=settings.isolate, batch=settings.batch)
        if self.pinned and not self.handler.is_async:
            raise ConfigurationError(f"{self.name}: a workflow must be an async function; write `async def`")
        self.queue = limits.check_name("queue", settings.queue)
        self.takes_context = self._is_handed_something(function)
        self.signature = self.handler.signature(skip=int(self.takes_context), fingerprint=settings.fingerprint)
        self._key = self._source("key", settings.key)
        self._subject = self._source("subject", settings.subject)
        limits.check_range("version", settings.version, 1, limits.SCHEMA_VERSION_MAX)
        self.version = settings.version
        self.retry = settings.retry
        self.timeout_seconds = None if settings.timeout is None else seconds(settings.timeout)
        #: Whether it is simply called on the event loop, with nothing around it.
        self.is_direct = self.handler.is_direct and self.timeout_seconds is None
        self.expires = settings.expires
        self.retention = 0 if settings.expires is None else _micros(settings.expires)
        self.key_window = seconds(settings.key_window)
        self.settle = settings.settle
        self.effects = settings.effects
        self.beat_seconds = None if settings.beat_within is None else seconds(settings.beat_within)
        self._sender = sender
        self._check_windows()

    def _is_handed_something(self, function: Callable[..., Any]) -> bool:
        """Whether the first parameter is not an argument of the message."""
        return self.handler.takes_context

    def _source(self, what: str, source: KeySource | None) -> KeyFunction | None:
        return None if source is None else from_source(self.name, what, source, self.signature.hints)

    def _check_windows(self) -> None:
        """A key that is forgotten while its message can still come back would let the effect happen twice."""
        needed = (0.0 if self.expires is None else seconds(self.expires)) + limits.DEAD_RETENTION
        if self.key_window < needed:
            raise ConfigurationError(
                f"{self.name}: key_window is {self.key_window / limits.DAY:g} days; it must cover the message's own "
                f"time and its time as a dead letter, {needed / limits.DAY:g} days; raise it, or lower expires="
            )

    def send(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Receipt[R]]:
        """Send one message.

        Wrong arguments raise here, at the call.  When the awaited call returns, the message is durable;
        inside a handler or transaction it leaves with its commit.
        A crash before that leaves nothing or one message; sending again with the same key is harmless.
        """
        return self._sender.dispatch(self.call(*args, **kwargs))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and encode one call for ``send_many`` or a transaction, without sending it."""
        return self.make_call(args, kwargs, {})

    def options(self, **options: Unpack[SendOptions]) -> BoundTask[P, R]:
        """Return this task with options for the sends that follow; they never mix with arguments."""
        return BoundTask(self, check_options(options))

    def make_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: SendOptions) -> Call[R]:
        """Bind, check and encode arguments; everything that can be wrong with them raises here."""
        arguments = self.signature.bind(args, kwargs)
        payload, fingerprint = self.signature.encode(arguments)
        key = options.get("key") or (self._key(arguments) if self._key is not None else None)
        if key is not None and key.startswith(_RESERVED):
            raise EnvelopeError("idempotency_key", _reserved(key))
        subject = options.get("subject") or (self._subject(arguments) if self._subject is not None else None)
        return Call(self, payload, fingerprint, key, subject, options)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


@dataclass(frozen=True, slots=True)
class BoundTask(Generic[P, R]):
    """A task with options."""

    task: Task[P, R]
    bound: SendOptions

    def send(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Receipt[R]]:
        """Send one message with these options; see ``Task.send``."""
        return self.task._sender.dispatch(self.call(*args, **kwargs))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and encode one call with these options, without sending it."""
        return self.task.make_call(args, kwargs, self.bound)

    def options(self, **options: Unpack[SendOptions]) -> BoundTask[P, R]:
        """Add more options."""
        return replace(self, bound=check_options({**self.bound, **options}))


def check_options(options: SendOptions) -> SendOptions:
    """Refuse options that are unknown, contradict each other or lie outside their range."""
    unknown = options.keys() - SendOptions.__annotations__.keys()
    if unknown:
        raise ConfigurationError(f"unknown option {min(unknown)!r}; known: {', '.join(SendOptions.__annotations__)}")
    if "delay" in options and "at" in options:
        raise ConfigurationError("delay and at exclude each other")
    for name in ("delay", "expires"):
        if (duration := options.get(name)) is not None:
            seconds(duration)  # type: ignore[arg-type]
    for name in ("key", "subject", "correlation_id", "causation_id", "deduplicate", "ordering_key", "trace"):
        if name in options:
            limits.check_bytes(name, options[name], limits.KEY_BYTES_MAX)  # type: ignore[literal-required]
    if "at" in options:
        try:
            to_instant(options["at"])
        except ValueError as error:
            raise ConfigurationError(f"at: {error}") from error
    if "queue" in options:
        limits.check_name("queue", options["queue"])
    if "deduplicate_for" in options:
        limits.check_range(
            "deduplicate_for",
            seconds(options["deduplicate_for"]),
            limits.DEDUPLICATION_WINDOW_MIN,
            limits.DEDUPLICATION_WINDOW_MAX,
        )
    if (key := options.get("key", "-")).startswith(_RESERVED):
        raise ConfigurationError(f"the key {_reserved(key)}")
    return options


#: Keys that begin like this are given by onefold itself.
_RESERVED = (UNKEYED, SCHEDULED)


def _reserved(key: str) -> str:
    prefix = UNKEYED if key.startswith(UNKEYED) else SCHEDULED
    return f"begins with {prefix!r}, which marks messages {'without a key' if prefix is UNKEYED else 'of a schedule'}"


def takes_first(function: Callable[..., Any], kind: str, plain: str) -> bool:
    """Whether the first parameter is of this kind: by its type hint, or without one by its name."""
    for parameter in inspect.signature(function).parameters.values():
        hint = parameter.annotation
        name = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
        return name.rpartition(".")[2] == kind or (hint is parameter.empty and parameter.name == plain)
    return False


@dataclass(frozen=True, slots=True)
class Recurring:
    """A task that is sent by itself, again and again, as its code says."""

    task: Task[Any, Any]
    timetable: Timetable
    catchup: Catchup
    #: In microseconds.
    window: int | None

    def __post_init__(self) -> None:
        try:
            self.task.call()
        except (TypeError, EnvelopeError) as error:
            raise ConfigurationError(
                f"{self.task.name} recurs, so it must be callable without arguments ({error}); give them defaults, "
                "or make a schedule for one call of it with app.schedule()"
            ) from error


class Registry:
    """The tasks of one app by name; of one that has several versions, the newest."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task[Any, Any]] = {}
        self._pinned: dict[tuple[str, int], Task[Any, Any]] = {}
        #: Those of them that are told of dead letters.
        self.hooks: dict[str, Task[Any, Any]] = {}
        #: Those of them that recur.
        self.recurring: dict[str, Recurring] = {}

    def add(self, task: Task[Any, Any]) -> None:
        """Register a task; two with one name, or one name and version if it is pinned, are refused."""
        other = self.tasks.get(task.name)
        if other is not None and not (task.pinned and other.pinned):
            raise ConfigurationError(f"two tasks are named {task.name!r}; give one of them another name=")
        if task.pinned:
            if (task.name, task.version) in self._pinned:
                raise ConfigurationError(f"{task.name!r} has two versions {task.version}; give one another version=")
            self._pinned[task.name, task.version] = task
        if other is None or other.version < task.version:
            self.tasks[task.name] = task

    def handler(self, envelope: Envelope) -> Task[Any, Any]:
        """Return what handles a message."""
        return self._pinned.get((envelope.message_type, envelope.schema_version)) or self.tasks[envelope.message_type]

    def knows(self, task: Task[Any, Any]) -> bool:
        """Whether this very task was registered here."""
        return task in (self.tasks.get(task.name), self._pinned.get((task.name, task.version)))

    def queues(self) -> list[str]:
        """Return the queues the tasks are sent to."""
        return sorted({task.queue for task in (*self.tasks.values(), *self._pinned.values())}) or ["default"]

    def types(self) -> list[str]:
        """Return what can be handled here, as claims ask for it; see ``Envelope.claimed_as``."""
        # Also plainly for what is pinned: a message from elsewhere may name no version, and goes to the newest.
        return sorted([*self.tasks, *(f"{name}@{version}" for name, version in self._pinned)])
