"""The edges: brokers in, brokers out.

In: an entry is put into the store under the key of its envelope, and only then acknowledged.  Whatever dies in between
has it delivered again, which is a duplicate put: nothing is stored, and it is acknowledged.
What cannot be put is kept in the store as well, as a message that becomes a dead letter with the entry in it.
Out: an event is published by an ordinary subscriber, with the retries, the dead letters and the inbox of any task.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import structs

from onefold import limits
from onefold.batch import Batch
from onefold.clock import Clock
from onefold.envelope import Envelope, derived_key, is_reserved
from onefold.errors import (
    ConfigurationError,
    OnefoldError,
    Snooze,
    StoreError,
    StoreUnavailableError,
    TransportUnavailableError,
)
from onefold.reception import Reception
from onefold.registry import Inlet
from onefold.store import Query, Store, Stored
from onefold.transaction import log_duplicates
from onefold.transport import Delivery, Outage, Transport

logger = logging.getLogger("onefold")


class Intake:
    """Takes in the entries of one source, for one worker; any number of them may do so at once."""

    def __init__(self, inlet: Inlet, reception: Reception, store: Store, clock: Clock, chance: random.Random) -> None:
        self._inlet = inlet
        self._reception = reception
        self._store = store
        self._clock = clock
        self._outage = Outage(clock, chance, limits.TRANSPORT_PAUSE_SECONDS, limits.TRANSPORT_PAUSE_SECONDS_MAX)

    async def run(self) -> None:
        """Take in what comes until cancelled; a broker or store that is away is waited for.

        A transport that is configured wrongly raises ``ConfigurationError``, and ends the worker.
        Nothing else does: whatever a broker answers, the worker has other work.
        """
        while True:
            taking = asyncio.ensure_future(self.take())
            try:
                await asyncio.shield(taking)
                self._outage.end()
            except asyncio.CancelledError:
                # In a task of its own, because a driver may swallow a cancellation that comes as its answer does
                # (asyncio.wait_for does before Python 3.12), and then this would go on for ever.
                taking.cancel()
                await asyncio.wait([taking])
                raise
            except ConfigurationError:
                raise
            except Exception as error:
                self._log_trouble(error)
                await self._clock.sleep(self._outage.pause())

    async def catch_up(self) -> None:
        """Take in everything that is there now, for a worker that will not stay."""
        try:
            while await self.take():
                pass
        except ConfigurationError:
            raise
        except Exception as error:
            self._log_trouble(error)

    async def take(self) -> int:
        """Take in what one pull returns, and return how much that was.

        When it returns, all of it is durable in the store, and the broker has been told so.
        A crash in the middle leaves what was not acknowledged to be delivered again.
        """
        deliveries = await self._pull()
        if not deliveries:
            return 0
        try:
            await self._put(deliveries)
        except BaseException:
            await self._give_back(deliveries)
            raise
        await self._inlet.transport.ack(deliveries)
        return len(deliveries)

    async def _pull(self) -> list[Delivery]:
        """Pull, and see it through even when the worker is stopped meanwhile: what it returns must not lie about."""
        pulling = asyncio.ensure_future(
            self._inlet.transport.pull(self._inlet.source, limit=limits.INTAKE_BATCH, lease=limits.INTAKE_LEASE)
        )
        try:
            return await asyncio.shield(pulling)
        except asyncio.CancelledError:
            await asyncio.wait([pulling])
            if not pulling.cancelled() and pulling.exception() is None:
                await self._give_back(pulling.result())
            raise

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Let others have these at once; if that fails too, they come again when their lease is over."""
        with suppress(OnefoldError):
            if deliveries:
                await self._inlet.transport.nack(deliveries, delay=0)

    async def _put(self, deliveries: Sequence[Delivery]) -> None:
        envelopes = [self._reception.admit_or_refuse(self._inlet, one) for one in deliveries]
        try:
            stored = await self._store.put(envelopes)
        except StoreUnavailableError:
            raise
        except OnefoldError as error:
            # The store does not take one of them: each by itself, so that the others are not held up.
            logger.warning("put_apart source=%s messages=%d error=%s", self._inlet.source, len(envelopes), error)
            stored = [await self._put_alone(*both) for both in zip(deliveries, envelopes, strict=True)]
        clashes = [one for one, found in zip(deliveries, stored, strict=True) if found.clash]
        if clashes:
            await self._store.put([self._reception.refuse(self._inlet, one, "key reuse") for one in clashes])
        log_duplicates(envelopes, stored)

    async def _put_alone(self, delivery: Delivery, envelope: Envelope) -> Stored:
        try:
            (stored,) = await self._store.put([envelope])
        except StoreUnavailableError:
            raise
        except OnefoldError as error:
            refused = self._reception.refuse(self._inlet, delivery, type(error).__name__)
            (stored,) = await self._store.put([refused])
        return stored

    def _log_trouble(self, error: Exception) -> None:
        word = "store_failed" if isinstance(error, StoreError) else "transport_failed"
        if self._outage.is_news(f"{type(error).__name__} {error}"):
            logger.warning("%s doing=receive source=%s error=%s", word, self._inlet.source, error)


class Relay:
    """Publishes the events of one topic; its ``publish`` is the handler of a subscriber.

    At least once: the envelope carries the event's id and key, by which a receiver knows what it has.
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
        """Publish copies of events, all in one go; while the broker is away they are put off, later and later."""
        copies = [item.message for item in batch]
        events = await self._events(copies)
        try:
            await self._transport.publish([self._outgoing(copy, events) for copy in copies])
        except (TransportUnavailableError, ConfigurationError) as error:
            # It is no message's fault, so none of them uses up an attempt.
            if self._outage.is_news(str(error)):
                logger.warning("transport_failed doing=publish stream=%s error=%s", self._stream, error)
            raise Snooze(after=self._outage.pause(), reason=str(error)) from None
        self._outage.end()
        for item in batch:
            item.done()

    async def _events(self, copies: Sequence[Envelope]) -> dict[str, Envelope]:
        """Find the events behind the copies: only they know their own key, and what caused them."""
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
            # One that has no key of its publisher's is known by its id, which stays the same however often it is sent.
            idempotency_key=id_ if is_reserved(event.idempotency_key) else event.idempotency_key,
            # Of an event that is done only the copy may have a body.
            payload_inline=copy.payload_inline,
            payload_ref=copy.payload_ref,
            deduplication_key=None,
        )


def _event_id(copy: Envelope) -> str:
    """Return the id of the event; a message that was sent to the relay by hand is an event of its own."""
    return copy.causation_id if copy.idempotency_key == derived_key("event", copy.causation_id) else copy.id
