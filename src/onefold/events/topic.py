"""Stage 1, declare: events, which are published under a name, and the tasks that subscribe to them.

A topic is a task whose handler copies its message to the subscribers; a subscriber is a task that gets such copies.
The payload of both is the event itself and not named arguments, so each function may name its parameter as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from onefold import limits
from onefold.errors import ConfigurationError
from onefold.message.codec import ResultCodec, Signature, check_json, fingerprint_of
from onefold.message.envelope import Envelope
from onefold.tasks.options import SendOptions, TaskSettings, check_options
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import BoundTask, Sender, Task

T = TypeVar("T")
R = TypeVar("R")


class EventSignature(Signature):
    """Encodes and decodes an event for a function with one parameter of any name."""

    def __init__(self, function: Callable[..., Any], *, skip: int, fingerprint: Sequence[str] | None = None) -> None:
        super().__init__(function, skip=skip, fingerprint=fingerprint)
        if len(self.names) != 1:
            raise ConfigurationError(
                f"{function.__qualname__} takes {len(self.names)} arguments; let it take one, the event"
            )
        (self._name,) = self.names
        self._event = ResultCodec(self.hints[self._name], most=limits.PAYLOAD_BYTES_MAX, field="payload_inline")

    def encode(self, arguments: Any) -> tuple[bytes, bytes]:
        data = self._event.encode(getattr(arguments, self._name))
        check_json("payload_inline", data)
        return data, fingerprint_of(data)

    def decode(self, data: bytes) -> dict[str, Any]:
        return {self._name: self._event.decode_sent(data)}


class _TopicSignature(EventSignature):
    """Encodes the events of a topic, and does not decode them: its handler copies the bytes of any version."""

    def decode(self, data: bytes) -> dict[str, Any]:
        return {}


class Topic(Task[[T], int]):
    """An event by its name: ``await order_placed.publish(order)``.  Its result is the number of its subscribers.

    The event is one message; a worker copies it to all that are subscribed then, in one commit with its outcome.
    """

    #: Its events are not decoded here, so they keep the gate that their publisher gave them.
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
        #: Whether the app only subscribes to the event and does not declare the topic.
        self.implied = implied
        super().__init__(sender, fan_out, settings)

    def _make_signature(self, fingerprint: Sequence[str] | None) -> Signature:
        def published(event: Any) -> int: ...  # type: ignore[empty-body]

        published.__annotations__["event"] = self._kind
        published.__qualname__ = self.name
        self._events = _TopicSignature(published, skip=0, fingerprint=fingerprint)
        return self._events

    def read(self, payload: bytes) -> dict[str, Any]:
        """Decode an event from a broker, as the argument that a key template can name."""
        return EventSignature.decode(self._events, payload) if self.has_key else {}

    def fingerprint_of(self, arguments: Mapping[str, Any], payload: bytes) -> bytes:
        """Return the fingerprint of the bytes, because this app may not know the event's version."""
        return fingerprint_of(payload)

    def understands(self, envelope: Envelope) -> bool:
        """Return True: a topic copies every version, and each subscriber checks whether it knows the version."""
        return True

    def publish(self, event: T, /) -> Coroutine[Any, Any, Receipt[int]]:
        """Publish one event.

        An event of the wrong type raises here, at the call.  When the awaited call returns, the event is durable, and
        each subscriber that is in the store by then will get a copy; inside a handler or transaction it is sent with
        that commit.  A crash before that leaves nothing or one event; publishing again with the same key is harmless.
        """
        return self.sender.dispatch(self.call(event))

    def options(self, **options: Unpack[SendOptions]) -> BoundTopic[T]:
        """Return this topic with options for its events."""
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
        #: The name of its event.
        self.event = limits.check_name("event", event)
        super().__init__(sender, function, settings)
        for option in ("key", "subject", "fingerprint", "ordering_key"):
            if getattr(settings, option) is not None:
                raise ConfigurationError(
                    f"{self.name}: {option}= belongs to the event and is the same for all subscribers; "
                    "give it where the topic is declared"
                )

    def _make_signature(self, fingerprint: Sequence[str] | None) -> Signature:
        return self.handler.signature(skip=int(self.takes_context), fingerprint=fingerprint, kind=EventSignature)

    def __repr__(self) -> str:
        return f"<task {self.name} on {self.event}>"
