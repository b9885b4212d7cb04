"""A use of the flow: durable subscriptions, and the copying of events to those who have one.

The subscriptions of one event are one entry of the register, compared and set.  A worker writes those of its code when
it starts, and only a person removes one, so whoever is down meanwhile misses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import Clock, to_datetime
from onefold.codec import fingerprint_of
from onefold.context import Context
from onefold.envelope import Envelope, derived_key
from onefold.errors import ConfigurationError, StoreUnavailableError
from onefold.recurring import Complete
from onefold.registry import Registry
from onefold.store import Store
from onefold.topic import Subscriber

logger = logging.getLogger("onefold")

#: The kind of the entries in the register; each is named after its event.
KIND = "subscription"
#: Attempts to write an entry that others write too; each is lost only to somebody who won.
_ROUNDS_MAX = 20


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """That a task is to be sent every event of a name; there until a person removes it."""

    event: str
    #: The name of the task, which is the type of the messages it is sent.
    subscriber: str
    queue: str
    #: The highest version of the event that it understands, as far as anybody knows.
    version: int
    #: How long a copy may take before it expires, in microseconds; 0 for ever.
    retention: int
    #: Since when, in microseconds since 1970.
    made_at: int
    #: Of its copies, unless they are ordered; 0 for that of the event.
    priority: int = 0

    @property
    def since(self) -> datetime:
        """Since when it is there: events that were copied before did not go to it."""
        return to_datetime(self.made_at)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return {
            "event": self.event,
            "subscriber": self.subscriber,
            "queue": self.queue,
            "version": self.version,
            "since": self.since.isoformat(),
        }


#: By subscriber, and unread: whoever adds one must not lose what a newer version has written about the others.
Entry = Mapping[str, msgspec.Raw]

_encode = msgspec.json.Encoder(order="sorted").encode
_decode_entry = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(Subscription).decode
_decode_all = msgspec.json.Decoder(dict[str, Subscription]).decode


# keeping


def declared(registry: Registry, now: int) -> dict[str, list[Subscription]]:
    """Return the subscriptions that stand in the code, by event."""
    found: dict[str, list[Subscription]] = {}
    for task in registry.tasks.values():
        if isinstance(task, Subscriber):
            one = Subscription(
                event=task.event,
                subscriber=task.name,
                queue=task.queue,
                version=task.version,
                retention=task.retention,
                made_at=now,
                priority=task.gate.priority,
            )
            found.setdefault(task.event, []).append(one)
    return found


async def subscribe(store: Store, registry: Registry) -> list[Subscription]:
    """Bring the subscriptions that stand in the code into the register; return them as they are kept.

    What is there and says the same is left alone.  A crash in the middle leaves some of them written.
    """
    kept: list[Subscription] = []
    for event, wanted in declared(registry, await store.now()).items():
        entry = await _change(store, event, partial(_with_all, event, wanted))
        kept += [_decode(entry[one.subscriber]) for one in wanted]
    return kept


async def keep_subscribed(store: Store, clock: Clock, registry: Registry) -> None:
    """Do so for a worker that starts, however long the store is away."""
    while any(isinstance(task, Subscriber) for task in registry.tasks.values()):
        try:
            await subscribe(store, registry)
            return
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=subscribe error=%s", error)
            await clock.sleep(limits.POLL_SECONDS)


async def unsubscribe(store: Store, event: str, subscriber: str) -> bool:
    """Remove one subscription; True when it was there."""
    was: list[bool] = []

    def without(found: Entry) -> Entry:
        was.append(subscriber in found)
        return {name: one for name, one in found.items() if name != subscriber}

    await _change(store, event, without)
    return was[-1]


async def subscriptions(store: Store) -> list[Subscription]:
    """Return all subscriptions, sorted by event and subscriber."""
    entries = await store.entries(KIND)
    return [one for _, entry in sorted(entries.items()) for _, one in sorted(_decode_all(entry.value).items())]


def _with_all(event: str, wanted: Iterable[Subscription], found: Entry) -> Entry:
    changed = dict(found)
    for one in wanted:
        known = _decode(found[one.subscriber]) if one.subscriber in found else None
        # While two versions of a service run side by side, each starting now and then, the newer one has its way.
        if known is None or known.version <= one.version:
            one = one if known is None else msgspec.structs.replace(one, made_at=known.made_at)
            if one != known:
                changed[one.subscriber] = msgspec.Raw(_encode(one))
    if len(changed) > max(limits.SUBSCRIBERS_MAX, len(found)):
        raise ConfigurationError(
            f"event {event!r} would have {len(changed)} subscribers; at most {limits.SUBSCRIBERS_MAX} are allowed: "
            "let one of them pass it on to the others"
        )
    return changed


async def _change(store: Store, event: str, change: Callable[[Entry], Entry]) -> Entry:
    """Change one entry whatever others do to it meanwhile.  A crash leaves the old one or the new."""
    for _ in range(_ROUNDS_MAX):
        entry = await store.registered(KIND, event)
        found = {} if entry is None else _decode_entry(entry.value)
        wanted = change(found)
        if wanted == found:
            return wanted
        value = _encode(wanted) if wanted else None
        async with store.transaction() as transaction:
            written = await transaction.register(KIND, event, value, version=entry.version if entry else 0)
        if written:
            return wanted
    raise StoreUnavailableError(f"who subscribes to {event!r} was changed {_ROUNDS_MAX} times in a row; try again")


# copying


async def fan_out(ctx: Context, store: Store, fresh_id: Callable[[], str], complete: Complete) -> int:
    """Copy an event to its subscribers and return how many there are; the handler of every topic.

    The copies leave in the commit that ends the event.  Each has a key made from the event's id, so that a second run,
    for whatever reason, copies nothing twice.  Who is subscribed is asked after the event was claimed, and never
    remembered: every subscription that was there before the event was published is seen.
    """
    entry = await store.registered(KIND, ctx.message.message_type)
    if entry is None:
        return 0
    known = _decode_all(entry.value)
    ctx.buffer.take([complete(copy_of(ctx.message, one, fresh_id())) for one in known.values()], ())
    return len(known)


def copy_of(event: Envelope, subscription: Subscription, id_: str) -> Envelope:
    """Return the message that brings an event to one subscriber."""
    return Envelope(
        id=id_,
        message_type=subscription.subscriber,
        schema_version=event.schema_version,
        queue=subscription.queue,
        idempotency_key=derived_key("event", event.id),
        correlation_id=event.correlation_id,
        causation_id=event.id,
        subject=event.subject,
        payload_inline=event.payload_inline,
        payload_ref=event.payload_ref,
        fingerprint=fingerprint_of(event.payload_inline or b""),
        trace=event.trace,
        tags=event.tags,
        ordering_key=event.ordering_key,
        priority=0 if event.ordering_key is not None else subscription.priority or event.priority,
        retention=subscription.retention,
    )
