"""Brokers out: an event is published by an ordinary subscriber, with its retries, dead letters and inbox."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from onefold import limits
from onefold.brokers.transport import Outage, Transport
from onefold.clock import Clock
from onefold.errors import ConfigurationError, Snooze, TransportUnavailableError
from onefold.handlers.batch import Batch
from onefold.message.envelope import Envelope, derived_key, is_reserved
from onefold.store import Query, Store

logger = logging.getLogger("onefold")


class Relay:
    """Publishes the events of one topic; its ``publish`` is the handler of a subscriber.

    At least once: the envelope has the event's id and key, by which a receiver recognises a duplicate.
    """

    def __init__(
        self,
        event: str,
        transport: Transport,
        stream: str,
        store: Callable[[], Store],
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self._event = event
        self._transport = transport
        self._stream = limits.check_name("stream", stream)
        self._store = store
        self._outage = Outage(clock, chance, limits.RELAY_PAUSE_SECONDS, limits.RELAY_PAUSE_SECONDS_MAX)

    async def publish(self, batch: Batch[Any]) -> None:
        """Publish copies of events in one call; while the broker cannot be reached they are snoozed ever longer."""
        copies = [item.message for item in batch]
        events = await self._events(copies)
        try:
            await self._transport.publish([self._outgoing(copy, events) for copy in copies])
        except (TransportUnavailableError, ConfigurationError) as error:
            # Snoozed and not failed: an outage of the broker must not use up the attempts of messages.
            if self._outage.is_new(str(error)):
                logger.warning("transport_failed doing=publish stream=%s error=%s", self._stream, error)
            raise Snooze(after=self._outage.pause(), reason=str(error)) from None
        self._outage.end()
        for item in batch:
            item.done()

    async def _events(self, copies: Sequence[Envelope]) -> dict[str, Envelope]:
        """Return the events of the copies, by id: a copy lacks the key of its event and the id of the event's cause."""
        found = await self._store().find(Query(ids=tuple(_event_id(copy) for copy in copies), limit=len(copies)))
        return {one.envelope.id: one.envelope for one in found}

    def _outgoing(self, copy: Envelope, events: dict[str, Envelope]) -> Envelope:
        id_ = _event_id(copy)
        event = events.get(id_, copy)
        return structs.replace(
            event,
            id=id_,
            message_type=self._event,
            queue=self._stream,
            # An event that was published without a key gets its id as key, which is the same each time it is relayed.
            idempotency_key=id_ if is_reserved(event.idempotency_key) else event.idempotency_key,
            # The body of an event that is done may have been dropped; the copy still has it.
            payload_inline=copy.payload_inline,
            payload_ref=copy.payload_ref,
            deduplication_key=None,
        )


def _event_id(copy: Envelope) -> str:
    """Return the id of the event that a message is a copy of; one sent directly to the relay is its own event."""
    return copy.causation_id if copy.idempotency_key == derived_key("event", copy.causation_id) else copy.id
