"""Stage 1, declare: a task, which is a function with a name, a key function and a policy; and its calls.

It belongs to a sender, which is anything that can send a call, so this module knows nothing of apps and stores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack

import msgspec
from msgspec.structs import asdict

from onefold import limits
from onefold.clock import MICROSECONDS, to_instant
from onefold.errors import ConfigurationError, seconds
from onefold.message.codec import Signature
from onefold.message.envelope import SURELY_FITS, UNKEYED, Envelope, check, derived_key, refuse_reserved
from onefold.message.keys import KeyFunction, KeySource, from_source
from onefold.tasks.gates import NOWHERE, Gate, Place
from onefold.tasks.handler import Handler
from onefold.tasks.options import SendOptions, TaskSettings, check_options
from onefold.tasks.receipt import Receipt

P = ParamSpec("P")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)

NO_OPTIONS: SendOptions = {}


class Call(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """One call of a task, checked and encoded, not yet sent."""

    task: Task[Any, R]
    payload: bytes
    fingerprint: bytes
    key: str | None
    subject: str | None
    options: SendOptions
    place: Place = NOWHERE

    def envelope(self, id_: str, *, parent: Envelope | None = None, index: int = 0) -> Envelope:
        """Make the message; the handler of ``parent`` sends it, as its ``index``-th send without a key."""
        key = self.key
        if key is None:
            key = derived_key("child", f"{parent.id}/{index}") if parent is not None else f"{UNKEYED}{id_}"
        subject = self.subject or (self.task.name if self.key is None else _shortened(key))
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
            saga=self.task.saga,
        )
        if self.options or self.place is not NOWHERE or self.task.gate.priority:
            return check(self._with_options(envelope))
        # The rest was checked when the task was declared or the parent was made.
        if len(self.payload) <= SURELY_FITS and _is_surely_good(key) and (subject == key or _is_surely_good(subject)):
            return envelope
        return check(envelope)

    def _with_options(self, plain: Envelope) -> Envelope:
        options = self.options
        return msgspec.structs.replace(
            plain,
            queue=options.get("queue", plain.queue),
            correlation_id=options.get("correlation_id") or plain.correlation_id,
            causation_id=options.get("causation_id") or plain.causation_id,
            deduplication_key=options.get("deduplicate"),
            deduplicate_for=_micros(options.get("deduplicate_for", limits.DEDUPLICATION_WINDOW), "deduplicate_for"),
            gate=self.place.gate,
            ordering_key=self.place.ordering_key,
            sequence=options.get("sequence"),
            priority=options.get("priority", self.task.gate.priority),
            trace=options.get("trace") or plain.trace,
            tags=options.get("tags"),
            delay=_micros(options.get("delay", 0), "delay"),
            due_at=to_instant(options["at"]) if "at" in options else 0,
            retention=retention_of(options["expires"]) if "expires" in options else plain.retention,
        )

    def __repr__(self) -> str:
        # Without the payload, which must not be printed or logged.
        return f"<call of {self.task.name} key={self.key!r}>"


def _is_surely_good(text: str) -> bool:
    """Whether it is surely valid as a key and as a subject; others are checked in full."""
    return text.isascii() and text.isprintable() and 0 < len(text) <= limits.SUBJECT_BYTES_MAX


def _shortened(key: str) -> str:
    if len(key) <= limits.SUBJECT_BYTES_MAX // 4:
        return key  # no character has more than four bytes
    return key.encode()[: limits.SUBJECT_BYTES_MAX].decode(errors="ignore")


def retention_of(expires: timedelta | float | None) -> int:
    """Return the retention of an envelope in microseconds, in which 0 means for ever, so ``expires=0`` is 1."""
    return 0 if expires is None else max(1, _micros(expires, "expires"))


def _micros(duration: timedelta | float, name: str) -> int:
    return round(seconds(duration, name) * MICROSECONDS)


class Sender(Protocol):
    """Sends calls: an app."""

    def dispatch(self, call: Call[R]) -> Coroutine[Any, Any, Receipt[R]]: ...


class Sendable(Protocol[P, R]):
    """A task, with options or without."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...


class Task(Generic[P, R]):
    """A handler that can be sent: ``await task.send(…)`` stores the call, a worker runs it."""

    #: Whether a message is handled only by the version it was sent to; several may then be declared side by side.
    pinned = False
    #: Whether its steps are undone when it fails.
    saga = False
    #: Whether a message that was sent before the task had a gate waits at it like the others.
    adopts = True

    def __init__(self, sender: Sender, function: Callable[..., Any], settings: TaskSettings) -> None:
        self.function = function
        self.name = limits.check_name("task", settings.name or str(getattr(function, "__name__", "")))
        self.handler = Handler(self.name, function, isolate=settings.isolate, batch=settings.batch)
        if self.pinned and not self.handler.is_async:
            raise ConfigurationError(f"{self.name}: a workflow must be an async function; write `async def`")
        if settings.max_steps is not None and not self.pinned:
            raise ConfigurationError(f"{self.name}: max_steps= is for workflows and sagas; a task has no steps")
        self.queue = limits.check_name("queue", settings.queue)
        self.takes_context = self._is_handed_something(function)
        self.signature = self._make_signature(settings.fingerprint)
        self._key = self._source("key", settings.key)
        self._subject = self._source("subject", settings.subject)
        self.gate = Gate(self.name, settings, self.signature.hints)
        limits.check_range("version", settings.version, 1, limits.SCHEMA_VERSION_MAX)
        self.version = settings.version
        self.retry = settings.retry
        self.timeout_seconds = None if settings.timeout is None else seconds(settings.timeout, "timeout")
        self.expires = settings.expires
        self.retention = retention_of(settings.expires)
        self.key_window = seconds(settings.key_window, "key_window")
        self.settle = settings.settle
        self.effects = settings.effects
        self.beat_seconds = None if settings.beat_within is None else seconds(settings.beat_within, "beat_within")
        self.sender = sender
        self._check_windows()

    def _is_handed_something(self, function: Callable[..., Any]) -> bool:
        """Whether the first parameter is not an argument of the message."""
        return self.handler.takes_context

    def _make_signature(self, fingerprint: Sequence[str] | None) -> Signature:
        return self.handler.signature(skip=int(self.takes_context), fingerprint=fingerprint)

    @property
    def has_key(self) -> bool:
        """Whether its messages have a key that is made from their arguments."""
        return self._key is not None

    def key_of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the key of a message with these arguments; None if the task has none."""
        return None if self._key is None else refuse_reserved("idempotency_key", self._key(arguments))

    def read(self, payload: bytes) -> dict[str, Any]:
        """Decode arguments from another program, with defaults for missing ones."""
        return asdict(self.signature.bind((), self.signature.decode(payload)))

    def fingerprint_of(self, arguments: Mapping[str, Any], payload: bytes) -> bytes:
        """Return the fingerprint of a message with these arguments, which were decoded from this payload."""
        return self.signature.encode(self.signature.bind((), arguments))[1]

    def understands(self, envelope: Envelope) -> bool:
        """Whether this code can handle the version of a message."""
        version = envelope.schema_version
        return version == self.version if envelope.pinned else version <= self.version

    def _source(self, what: str, source: KeySource | None) -> KeyFunction | None:
        return None if source is None else from_source(self.name, what, source, self.signature.hints)

    def _check_windows(self) -> None:
        """Refuse a key window that ends while the message can still run: its effect could happen twice."""
        lives = 0.0 if self.expires is None else seconds(self.expires, "expires")
        needed = lives + limits.DEAD_RETENTION + limits.KEY_MARGIN
        if self.key_window < needed:
            raise ConfigurationError(
                f"{self.name}: key_window is {self.key_window / limits.DAY:g} days; it must cover the message's own "
                f"time, its time as a dead letter and two days more, {needed / limits.DAY:g} days; raise it, or lower "
                "expires="
            )

    def send(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Receipt[R]]:
        """Send one message.

        Wrong arguments raise here, at the call.  When the awaited call returns, the message is durable;
        inside a handler or transaction it leaves with its commit.
        A crash before that leaves nothing or one message; sending again with the same key is harmless.
        """
        return self.sender.dispatch(self.make_call(args, kwargs, NO_OPTIONS))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and encode one call for ``send_many`` or a transaction, without sending it."""
        return self.make_call(args, kwargs, NO_OPTIONS)

    def options(self, **options: Unpack[SendOptions]) -> BoundTask[P, R]:
        """Return this task with options for the sends that follow; they never mix with arguments."""
        return BoundTask(self, check_options(options))

    def make_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: SendOptions) -> Call[R]:
        """Bind, check and encode arguments; raises for those that are wrong."""
        bound = self.signature.bind(args, kwargs)
        payload, fingerprint = self.signature.encode(bound)
        arguments = asdict(bound)
        key, subject = options.get("key"), options.get("subject")
        if key is None:
            key = self.key_of(arguments)
        if subject is None and self._subject is not None:
            subject = self._subject(arguments)
        place = self._place(arguments, options) if options or self.gate.is_for_all else NOWHERE
        return Call(self, payload, fingerprint, key, subject, options, place)

    def _place(self, arguments: Mapping[str, Any], options: SendOptions) -> Place:
        place = self.gate.find(arguments, options.get("ordering_key"), options.get("priority", 0))
        if "sequence" in options and place.ordering_key is None:
            raise ConfigurationError(f"{self.name}: a sequence numbers the messages of one ordering_key; give that too")
        return place

    def __repr__(self) -> str:
        return f"<task {self.name}>"


@dataclass(frozen=True, slots=True)
class BoundTask(Generic[P, R]):
    """A task with options."""

    task: Task[P, R]
    bound: SendOptions

    def send(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Receipt[R]]:
        """Send one message with these options; see ``Task.send``."""
        return self.task.sender.dispatch(self.call(*args, **kwargs))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and encode one call with these options, without sending it."""
        return self.task.make_call(args, kwargs, self.bound)

    def options(self, **options: Unpack[SendOptions]) -> BoundTask[P, R]:
        """Add more options."""
        return replace(self, bound=check_options({**self.bound, **options}))


def takes_first(function: Callable[..., Any], kind: str, plain: str) -> bool:
    """Whether the first parameter is of this kind: by its type hint, or without one by its name."""
    for parameter in inspect.signature(function).parameters.values():
        hint = parameter.annotation
        name = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
        return name.rpartition(".")[2] == kind or (hint is parameter.empty and parameter.name == plain)
    return False


class Publishable(Protocol[T_contra]):
    """A topic, with options or without, of an ``App`` or a ``SyncApp``."""

    def call(self, event: T_contra, /) -> Call[int]: ...

    def publish(self, event: T_contra, /) -> Any: ...
