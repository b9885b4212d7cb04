"""The edges: what becomes of an entry that a broker delivered: a message of this app, or a letter that says why not.

A letter is an ordinary message of a type of its own, put and acknowledged like every other, so that nothing is lost and
nothing is delivered over and over.  Its handler looks at the entry again, which is why it ends as a dead letter; when
the code has learned to read it, redriving the letter takes the entry in after all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec import structs

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.codec import fingerprint_of
from onefold.context import Context
from onefold.envelope import Envelope, check, derived_key, from_json, refuse_reserved, to_json
from onefold.errors import (
    EnvelopeError,
    KeyMismatchError,
    LimitError,
    OnefoldError,
    Snooze,
    UnknownArgumentError,
)
from onefold.isolation import DecidedError
from onefold.recurring import Complete
from onefold.registry import Inlet, Registry
from onefold.retry import failure_of
from onefold.store import Dead
from onefold.task import Task
from onefold.topic import Topic
from onefold.transport import Delivery

logger = logging.getLogger("onefold")

#: Names that begin like this are onefold's own; nobody outside may send to them.
OWN = "onefold."
#: The type of the letters.
REFUSED = f"{OWN}refused"


class UnknownTypeError(EnvelopeError):
    """An entry of a type that this app does not take; a newer worker may."""


class NewerVersionError(UnknownTypeError):
    """An entry of a version that this app does not know yet, so that it cannot tell its key."""


class Reception:
    """Turns deliveries into messages of one app."""

    def __init__(self, registry: Registry, fresh_id: Callable[[], str], complete: Complete) -> None:
        self._registry = registry
        self._fresh_id = fresh_id
        self._complete = complete

    # taking in

    def admit_or_refuse(self, inlet: Inlet, delivery: Delivery) -> Envelope:
        """Return the message that a delivery is, or the letter about it."""
        if delivery.whole_size is not None:
            return self.refuse(inlet, delivery, LimitError.__name__)
        try:
            return self.admit(inlet, delivery.content)
        except Exception as error:
            # Also what a reader or an on_send of the user's own raises: the letter tells, and can be redriven.
            return self.refuse(inlet, delivery, type(error).__name__)

    def admit(self, inlet: Inlet, content: Envelope | bytes) -> Envelope:
        """Return the message that an entry is.  Raises ``EnvelopeError`` if it is none, or none for this app."""
        sent = content if isinstance(content, Envelope) else (inlet.read or from_json)(content)
        name = sent.message_type
        task = self._registry.tasks.get(name)
        wanted = inlet.types is None or name in inlet.types
        if task is None or not wanted or name.startswith(OWN):
            raise UnknownTypeError("message_type", f"{name!r} is not taken from {inlet.source!r}")
        return self._complete(_message_of(sent, self._registry.handler(sent), self._fresh_id()))

    # refusing

    def refuse(self, inlet: Inlet, delivery: Delivery, why: str) -> Envelope:
        """Return the letter about a delivery; the same one however often it is delivered."""
        content = delivery.content
        body = content if isinstance(content, bytes) else to_json(content)
        size = delivery.whole_size or len(body)
        entry = str(delivery.handle)[: limits.ID_BYTES_MAX]
        digest = fingerprint_of(f"{entry}\0".encode() + body).hex()
        letter = self._registry.tasks[REFUSED].options(subject=inlet.source)
        call = letter.call(inlet.source, entry, body[: limits.REFUSED_BYTES_MAX], size)
        key = derived_key("refused", f"{inlet.source}/{digest}")
        # As it is: an on_send that refuses it would have it delivered for ever.
        envelope = structs.replace(call, key=key).envelope(self._fresh_id())
        logger.warning("refused source=%s entry=%s error=%s message_id=%s", inlet.source, entry, why, envelope.id)
        return envelope

    async def look_again(self, ctx: Context, source: str, entry: str, body: bytes, size: int) -> None:
        """Take in an entry that was refused, or say why it stays so; the handler of the letters."""
        inlet = self._registry.inlets.get(source)
        try:
            if inlet is None:
                raise UnknownTypeError("source", f"nothing is received from {source!r} any more")
            if size > len(body):
                raise _cut_off(source, entry, body, size)
            ctx.buffer.take([self.admit(inlet, body)], ())
        except UnknownTypeError as error:
            waited = ctx.leases[0].claimed_at - ctx.message.created_at
            # A newer version is waited for until the letter expires, as it is where messages are stored.
            if isinstance(error, NewerVersionError) or waited < limits.UNKNOWN_TYPE_SECONDS * MICROSECONDS:
                raise Snooze(after=limits.UNKNOWN_TYPE_LOOK_SECONDS, reason=str(error)) from None
            raise _dead(error, "unknown type") from None
        except KeyMismatchError as error:
            raise _dead(error, "key mismatch") from None
        except EnvelopeError as error:
            raise _dead(error, "malformed") from None


def _cut_off(source: str, entry: str, body: bytes, size: int) -> LimitError:
    """Say why a letter that holds only the beginning of its entry cannot be taken in."""
    most = limits.ENVELOPE_BYTES_MAX
    too_large = f"at most {most} are allowed" if size > most else "it could not be taken in, and is too large to keep"
    return LimitError(
        "envelope",
        f"has {size} bytes; {too_large}; the first {len(body)} are kept here, and all of it is entry {entry} of "
        f"{source!r} for as long as that keeps it",
    )


def _dead(error: OnefoldError, reason: str) -> DecidedError:
    return DecidedError(type(error).__name__, str(error), Dead(failure_of(error, reason)))


def _message_of(sent: Envelope, task: Task[Any, Any], id_: str) -> Envelope:
    """Return the message that brings a foreign envelope to a task of this app.

    It has an id of its own, because ids of others may be anything.  Where it waits and for how long is this app's to
    say, and so is the key of a task that makes one from its arguments; other messages have the sender's key.
    """
    key, fingerprint = _identify(sent, task)
    return check(
        Envelope(
            id=id_,
            message_type=task.name,
            schema_version=sent.schema_version,
            queue=task.queue,
            idempotency_key=key,
            correlation_id=sent.correlation_id,
            causation_id=sent.id,
            subject=sent.subject,
            payload_inline=sent.payload_inline,
            payload_ref=sent.payload_ref,
            fingerprint=fingerprint,
            ordering_key=sent.ordering_key,
            # A number counts where the task itself has an order; elsewhere the sender's numbers mean nothing.
            sequence=sent.sequence if task.gate.is_ordered and sent.ordering_key is not None else None,
            priority=0 if sent.ordering_key is not None else task.gate.priority,
            trace=sent.trace,
            tags=sent.tags,
            occurrence=sent.occurrence,
            retention=task.retention,
            pinned=task.pinned,
            saga=task.saga,
        )
    )


def _identify(sent: Envelope, task: Task[Any, Any]) -> tuple[str, bytes]:
    """Return the key of a foreign message, and what a send of the same arguments from this app has as its fingerprint.

    A sender that may choose the key of a task with ``key=`` could have one order charged twice and keep another from
    being charged, so the key is made from the arguments here.  What has another key is refused, unless it is of an
    older version, whose sender could not know how keys are made now.
    Raises ``EnvelopeError`` where there is a key to be made, and the arguments cannot be read.
    """
    payload = sent.payload_inline or b""
    # A message that was sent without a key has its id in its place.
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
            # Of a task without a key it is no harm: its handler will not run, and the dead letter says what is wrong.
            # A topic passes on what it need not be able to read.
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
