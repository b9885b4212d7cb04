"""Stage 1, declare: events, which are published under a name, and the tasks that subscribe to them.

A topic is a task whose handler copies its message to the subscribers; a subscriber is a task that is sent such copies.
Both carry the event itself as their payload, not a list of arguments: what one of them calls it concerns no other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar, Unpack

from onefold import limits
from onefold.codec import ResultCodec, Signature, check_json, fingerprint_of
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError
from onefold.options import SendOptions, TaskSettings, check_options
from onefold.receipt import Receipt
from onefold.task import BoundTask, Call, Sender, Task

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R = TypeVar("R")


class Publishable(Protocol[T_contra]):
    """What can be published to: a topic, with options or without, of an ``App`` or a ``SyncApp``."""

    def call(self, event: T_contra, /) -> Call[int]: ...

    def publish(self, event: T_contra, /) -> Any: ...


class EventSignature(Signature):
    """How an event is written and read by a function with one parameter, whatever that is called."""

    def __init__(self, function: Callable[..., Any], *, skip: int, fingerprint: Sequence[str] | None = None) -> None:
        super().__init__(function, skip=skip, fingerprint=fingerprint)
        if len(self.names) != 1:
            raise ConfigurationError(
                f"{function.__qualname__} takes {len(self.names)} arguments; a subscriber takes the event and no more"
            )
        (self._name,) = self.names
        self._event = ResultCodec(self.hints[self._name], most=limits.PAYLOAD_BYTES_MAX, field="payload_inline")

    def encode(self, arguments: Any) -> tuple[bytes, bytes]:
        data = self._event.encode(getattr(arguments, self._name))
        check_json("payload_inline", data)
        return data, fingerprint_of(data)

    def decode(self, data: bytes) -> dict[str, Any]:
        return {self._name: self._event.decode_sent(data)}


class _Unread(EventSignature):
    """How a topic's events are written; its handler copies them as they are, whatever version of them it knows."""

    def decode(self, data: bytes) -> dict[str, Any]:
        return {}


class Topic(Task[[T], int]):
    """An event by its name: ``await order_placed.publish(order)``.  Its result is the number of its subscribers.

    The event is one message; a worker copies it to everybody who is subscribed then, in one commit with its outcome.
    """

    #: What it says is not read here, so its gate is the publisher's to say.
    adopts = False

    def __init__(
        self,
        sender: Sender,
        fan_out: Callable[..., Any],
        kind: Any,
        settings: TaskSettings,
        *,
        implied: bool = False,
    ) -> None:
        self._kind = kind
        #: It was not declared: somebody only subscribes to it here.
        self.implied = implied
        super().__init__(sender, fan_out, settings)

    def _make_signature(self, fingerprint: Sequence[str] | None) -> Signature:
        def published(event: Any) -> int: ...  # type: ignore[empty-body]

        published.__annotations__["event"] = self._kind
        published.__qualname__ = self.name
        self._events = _Unread(published, skip=0, fingerprint=fingerprint)
        return self._events

    def read(self, payload: bytes) -> dict[str, Any]:
        """Return the event that bytes from elsewhere stand for, by the name that a key template knows it by."""
        return EventSignature.decode(self._events, payload) if self.has_key else {}

    def fingerprint_of(self, arguments: Mapping[str, Any], payload: bytes) -> bytes:
        """An event is what its bytes are, whatever version of it is known here."""
        return fingerprint_of(payload)

    def understands(self, envelope: Envelope) -> bool:
        """It copies every version, and the subscribers look whether they know it."""
        return True

    def publish(self, event: T, /) -> Coroutine[Any, Any, Receipt[int]]:
        """Publish one event.

        A wrong one raises here, at the call.  When the awaited call returns, the event is durable, and each of the
        subscribers that the store knows by then will be sent its copy; inside a handler or transaction it leaves with
        its commit.  A crash before that leaves nothing or one event; publishing again with the same key is harmless.
        """
        return self._sender.dispatch(self.call(event))

    def options(self, **options: Unpack[SendOptions]) -> BoundTopic[T]:
        """Return this topic with options for the events that follow."""
        return BoundTopic(self, check_options(options))

    def __repr__(self) -> str:
        return f"<topic {self.name}>"


class BoundTopic(BoundTask[[T], int]):
    """A topic with options."""

    __slots__ = ()

    def publish(self, event: T, /) -> Coroutine[Any, Any, Receipt[int]]:
        """Publish one event with these options; see ``Topic.publish``."""
        return self.send(event)

    def options(self, **options: Unpack[SendOptions]) -> BoundTopic[T]:
        """Add more options."""
        return BoundTopic(self.task, check_options({**self.bound, **options}))


class Subscriber(Task[[T], R]):
    """A task that is sent a copy of every event of one topic, each with a key made from the event's id."""

    def __init__(self, sender: Sender, event: str, function: Callable[..., Any], settings: TaskSettings) -> None:
        #: The name of what it subscribes to.
        self.event = limits.check_name("event", event)
        super().__init__(sender, function, settings)
        for option in ("key", "subject", "fingerprint", "ordering_key"):
            if getattr(settings, option) is not None:
                raise ConfigurationError(
                    f"{self.name}: {option}= is the event's own, and the same for all subscribers; "
                    "say it where the topic is declared"
                )

    def _make_signature(self, fingerprint: Sequence[str] | None) -> Signature:
        return self.handler.signature(skip=int(self.takes_context), fingerprint=fingerprint, kind=EventSignature)

    def __repr__(self) -> str:
        return f"<task {self.name} on {self.event}>"
