"""Brokers in: the message that a delivered entry becomes: a message of this app, or a refusal.

A refusal is a message of the type ``onefold.refused`` that holds the entry.  It is put and acknowledged like every
other, so that the entry is not lost and not delivered again and again.  Its handler tries to admit the entry once more,
fails, and so the refusal becomes a dead letter; redriving it after the code was corrected admits the entry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec import structs

from onefold import limits
from onefold.brokers.inlets import Inlet, Inlets
from onefold.brokers.transport import Delivery
from onefold.clock import MICROSECONDS
from onefold.errors import (
    EnvelopeError,
    KeyMismatchError,
    LimitError,
    OnefoldError,
    Snooze,
    UnknownArgumentError,
)
from onefold.events.topic import Topic
from onefold.handlers.context import Context
from onefold.isolation.pool import DecidedError
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import Envelope, carried, check, derived_key, from_json, refuse_reserved, to_json
from onefold.registry import Registry
from onefold.schedules.register import Complete
from onefold.store import Dead
from onefold.tasks.failure_text import failure_of
from onefold.tasks.task import Task

logger = logging.getLogger("onefold")

#: Message types with this prefix are onefold's own; entries of brokers must not have them.
OWN = "onefold."
#: The message type of refusals.
REFUSED = f"{OWN}refused"


class UnknownTypeError(EnvelopeError):
    """An entry of a type that this app does not handle; a newer worker may."""


class NewerVersionError(UnknownTypeError):
    """An entry of a version that this app does not know yet, so that it cannot make its key."""


class Admission:
    """Turns deliveries into messages of one app."""

    def __init__(self, registry: Registry, inlets: Inlets, fresh_id: Callable[[], str], complete: Complete) -> None:
        self._registry = registry
        self._inlets = inlets
        self._fresh_id = fresh_id
        self._complete = complete

    # admitting

    def admit_or_refuse(self, inlet: Inlet, delivery: Delivery) -> Envelope:
        """Return the message of a delivery, or a refusal."""
        if delivery.whole_size is not None:
            return self.refuse(inlet, delivery, LimitError.__name__)
        try:
            return self.admit(inlet, delivery.content)
        except Exception as error:
            # Also errors of the user's read= and on_send functions: the refusal shows them and can be redriven.
            return self.refuse(inlet, delivery, type(error).__name__)

    def admit(self, inlet: Inlet, content: Envelope | bytes) -> Envelope:
        """Return the message of an entry.  Raises ``EnvelopeError`` if it is not an envelope, or not for this app."""
        sent = content if isinstance(content, Envelope) else (inlet.read or from_json)(content)
        name = sent.message_type
        task = self._registry.tasks.get(name)
        wanted = inlet.types is None or name in inlet.types
        if task is None or not wanted or name.startswith(OWN):
            raise UnknownTypeError("message_type", f"{name!r} is not received from {inlet.source!r}; declare its task")
        return self._complete(_message_of(sent, self._registry.handler(sent), self._fresh_id()))

    # refusing

    def refuse(self, inlet: Inlet, delivery: Delivery, why: str) -> Envelope:
        """Return the refusal of a delivery; its key is the same however often the entry is delivered."""
        content = delivery.content
        body = content if isinstance(content, bytes) else to_json(content)
        size = delivery.whole_size or len(body)
        entry = str(delivery.handle)[: limits.ID_BYTES_MAX]
        digest = fingerprint_of(f"{entry}\0".encode() + body).hex()
        refusal = self._registry.tasks[REFUSED].options(subject=inlet.source)
        call = refusal.call(inlet.source, entry, body[: limits.REFUSED_BYTES_MAX], size)
        key = derived_key("refused", f"{inlet.source}/{digest}")
        # Without on_send: if that raised for the refusal too, the entry would be delivered for ever.
        envelope = structs.replace(call, key=key).envelope(self._fresh_id())
        logger.warning("refused source=%s entry=%s error=%s message_id=%s", inlet.source, entry, why, envelope.id)
        return envelope

    async def admit_refused(self, ctx: Context, source: str, entry: str, body: bytes, size: int) -> None:
        """Admit an entry that was refused, or fail with the reason; the handler of refusals."""
        inlet = self._inlets.get(source)
        try:
            if inlet is None:
                raise UnknownTypeError("source", f"{source!r} is not received any more; declare it with app.receive()")
            if size > len(body):
                raise _cut_off(source, entry, body, size)
            ctx.buffer.extend([self.admit(inlet, body)], ())
        except UnknownTypeError as error:
            waited = ctx.leases[0].claimed_at - ctx.message.created_at
            # For a newer version it waits until the refusal expires, as stored messages of a newer version do.
            if isinstance(error, NewerVersionError) or waited < limits.UNKNOWN_TYPE_SECONDS * MICROSECONDS:
                raise Snooze(after=limits.UNKNOWN_TYPE_LOOK_SECONDS, reason=str(error)) from None
            raise _dead(error, "unknown type") from None
        except KeyMismatchError as error:
            raise _dead(error, "key mismatch") from None
        except EnvelopeError as error:
            raise _dead(error, "malformed") from None


def _cut_off(source: str, entry: str, body: bytes, size: int) -> LimitError:
    """Return the error of a refusal that holds only the beginning of its entry."""
    most = limits.ENVELOPE_BYTES_MAX
    too_large = f"at most {most} are allowed; send a reference to large data"
    problem = too_large if size > most else "it was refused, and is too large to keep whole"
    return LimitError(
        "envelope",
        f"has {size} bytes; {problem}; the first {len(body)} are kept here, and all of it is entry {entry} of "
        f"{source!r} until the broker drops it",
    )


def _dead(error: OnefoldError, reason: str) -> DecidedError:
    return DecidedError(type(error).__name__, str(error), Dead(failure_of(error, reason)))


def _message_of(sent: Envelope, task: Task[Any, Any], id_: str) -> Envelope:
    """Return the message for a task of this app that is made from the envelope of another sender.

    It gets a new id, because a sender's id may be any text.  Queue, retention and priority are those of the task, and
    so is the key if the task makes one from its arguments; other messages keep the sender's key.
    """
    key, fingerprint = _identify(sent, task)
    given: dict[str, Any] = {
        **carried(sent),
        "id": id_,
        "message_type": task.name,
        "queue": task.queue,
        "idempotency_key": key,
        "causation_id": sent.id,
        "fingerprint": fingerprint,
        "deduplication_key": None,
        # The sender's sequence numbers count only for a task that declares an order.
        "sequence": sent.sequence if task.gate.is_ordered and sent.ordering_key is not None else None,
        "priority": 0 if sent.ordering_key is not None else task.gate.priority,
        "retention": task.retention,
        "pinned": task.pinned,
        "saga": task.saga,
    }
    return check(Envelope(**given))


def _identify(sent: Envelope, task: Task[Any, Any]) -> tuple[str, bytes]:
    """Return the key of a message from a broker, and the fingerprint that a send by this app would have.

    If a sender could choose the key of a task with ``key=``, it could have one order charged twice, or prevent another
    from being charged; so the key is made from the arguments here.  A message with another key is refused, unless it
    has an older version, whose sender could not know how keys are made now.
    Raises ``EnvelopeError`` when a key has to be made and the arguments cannot be decoded.
    """
    payload = sent.payload_inline or b""
    # In a message that was sent without a key, the key is the id.
    own = sent.idempotency_key if sent.keyed and sent.idempotency_key != sent.id else None
    key = refuse_reserved("idempotency_key", own or sent.id)
    fingerprint, made = fingerprint_of(payload), None
    if task.has_key and not task.understands(sent):
        raise NewerVersionError(
            "schema_version", f"is {sent.schema_version}; {task.name} is known up to {task.version}"
        )
    if task.understands(sent):
        try:
            arguments = task.read(payload)
            made = task.key_of(arguments)
            fingerprint = task.fingerprint_of(arguments, payload)
        except (EnvelopeError, TypeError) as error:
            # A task without a key needs no arguments here: its message will become a dead letter that shows the error.
            # A topic copies events that it cannot decode.
            if task.has_key and not isinstance(task, Topic):
                if isinstance(error, UnknownArgumentError):
                    raise NewerVersionError(error.field, error.problem) from error
                raise (
                    error if isinstance(error, EnvelopeError) else EnvelopeError("payload_inline", str(error))
                ) from error
    if made is not None:
        if own not in (None, made) and sent.schema_version == task.version:
            raise KeyMismatchError(task.name, key, made)
        return made, fingerprint
    return key, fingerprint
