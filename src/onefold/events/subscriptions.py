"""A use of the flow: durable subscriptions, and the copying of events to the subscribers.

The subscriptions of one event are one entry of the register, changed with a compare-and-set.  A worker writes those of
its code when it starts, and only an operator removes one, so a service that is down misses no event.
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
from onefold.errors import ConfigurationError, StoreUnavailableError
from onefold.events.topic import Subscriber
from onefold.handlers.context import Context
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import Envelope, carried, derived_key
from onefold.registry import Registry
from onefold.schedules.register import Complete
from onefold.store import Store

logger = logging.getLogger("onefold")

#: The kind of the entries in the register; each is named after its event.
KIND = "subscription"
#: Attempts to write an entry; each fails only because another process has written it in between.
_ATTEMPTS_MAX = 20


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A task gets every event of this name, until the subscription is removed."""

    event: str
    #: The name of the task, which is the type of its messages.
    subscriber: str
    queue: str
    #: The highest version of the event that a worker with this task has declared.
    version: int
    #: The time after which a copy expires, in microseconds; 0 for never.
    retention: int
    #: When it was made, in microseconds since 1970.
    made_at: int
    #: The priority of its copies, unless they are ordered; 0 for the priority of the event.
    priority: int = 0

    @property
    def since(self) -> datetime:
        """When it was made: events that were copied before did not go to it."""
        return to_datetime(self.made_at)

    def as_dict(self) -> dict[str, Any]:
        """Return its fields, ready for JSON."""
        return {
            "event": self.event,
            "subscriber": self.subscriber,
            "queue": self.queue,
            "version": self.version,
            "since": self.since.isoformat(),
        }


#: The subscriptions of one event by subscriber, not decoded: a process that adds one must not drop the fields that a
#: newer version of onefold has written for the others.
Entry = Mapping[str, msgspec.Raw]

_encode = msgspec.json.Encoder(order="sorted").encode
_decode_entry = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(Subscription).decode
_decode_all = msgspec.json.Decoder(dict[str, Subscription]).decode


# reading and writing


def declared(registry: Registry, now: int) -> dict[str, list[Subscription]]:
    """Return the subscriptions that are declared in code, by event."""
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
    """Write the subscriptions that are declared in code into the register; return them as they are stored.

    One that is stored already and equal is not written.  A crash in the middle leaves some of them written.
    """
    kept: list[Subscription] = []
    for event, wanted in declared(registry, await store.now()).items():
        entry = await _change(store, event, partial(_with_all, event, wanted))
        kept += [_decode(entry[one.subscriber]) for one in wanted]
    return kept


async def keep_subscribed(store: Store, clock: Clock, registry: Registry) -> None:
    """Subscribe for a worker that starts, and try again until the store can be reached."""
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
        # While two versions of a service run side by side, workers of both restart: the newer declaration stays.
        if known is None or known.version <= one.version:
            one = one if known is None else msgspec.structs.replace(one, made_at=known.made_at)
            if one != known:
                changed[one.subscriber] = msgspec.Raw(_encode(one))
    if len(changed) > max(limits.SUBSCRIBERS_MAX, len(found)):
        raise ConfigurationError(
            f"event {event!r} would have {len(changed)} subscribers; at most {limits.SUBSCRIBERS_MAX} are allowed; "
            "let one of them publish a second event for the others"
        )
    return changed


async def _change(store: Store, event: str, change: Callable[[Entry], Entry]) -> Entry:
    """Change one entry, again if another process has changed it meanwhile.  A crash leaves the old one or the new."""
    for _ in range(_ATTEMPTS_MAX):
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
    raise StoreUnavailableError(
        f"the subscriptions of {event!r} were changed by other processes {_ATTEMPTS_MAX} times in a row; try again"
    )


# copying


async def fan_out(ctx: Context, store: Store, fresh_id: Callable[[], str], complete: Complete) -> int:
    """Copy an event to its subscribers and return how many there are; the handler of every topic.

    The copies are sent in the commit that ends the event.  Each has a key made from the event's id, so that a second
    run of the handler copies nothing twice.  The subscriptions are read after the event was claimed, and not cached,
    so every subscription that was stored before the event was published gets a copy.
    """
    entry = await store.registered(KIND, ctx.message.message_type)
    if entry is None:
        return 0
    known = _decode_all(entry.value)
    ctx.buffer.extend([complete(copy_of(ctx.message, one, fresh_id())) for one in known.values()], ())
    return len(known)


def copy_of(event: Envelope, subscription: Subscription, id_: str) -> Envelope:
    """Return the copy of an event for one subscriber."""
    given: dict[str, Any] = {
        **carried(event),
        "id": id_,
        "message_type": subscription.subscriber,
        "queue": subscription.queue,
        "idempotency_key": derived_key("event", event.id),
        "causation_id": event.id,
        "fingerprint": fingerprint_of(event.payload_inline or b""),
        # These say something of the event itself, not of its copies.
        "deduplication_key": None,
        "sequence": None,
        "occurrence": None,
        "priority": 0 if event.ordering_key is not None else subscription.priority or event.priority,
        "retention": subscription.retention,
    }
    return Envelope(**given)
