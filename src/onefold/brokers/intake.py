"""Brokers in: the entries of a stream become messages of the store.

An entry is put into the store under the key of its envelope, and only then acknowledged.  If the worker dies in
between, the entry is delivered again; putting it is a duplicate that stores nothing, and then it is acknowledged.
An entry that cannot be put is kept in the store too, in a message that becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress

from onefold import limits
from onefold.brokers.admission import Admission
from onefold.brokers.inlets import Inlet
from onefold.brokers.transport import Delivery, Outage
from onefold.clock import Clock
from onefold.errors import (
    ConfigurationError,
    OnefoldError,
    StoreError,
    StoreUnavailableError,
)
from onefold.message.envelope import Envelope
from onefold.store import Store, Stored
from onefold.transactions.buffer import log_duplicates

logger = logging.getLogger("onefold")


class Intake:
    """Takes in the entries of one source, for one worker; any number of workers may do so at once."""

    def __init__(self, inlet: Inlet, admission: Admission, store: Store, clock: Clock, chance: random.Random) -> None:
        self._inlet = inlet
        self._admission = admission
        self._store = store
        self._clock = clock
        self._outage = Outage(clock, chance, limits.TRANSPORT_PAUSE_SECONDS, limits.TRANSPORT_PAUSE_SECONDS_MAX)

    async def run(self) -> None:
        """Take in entries until cancelled; wait and try again when the broker or the store cannot be reached.

        Only a transport that is configured wrongly raises, with ``ConfigurationError``, which ends the worker.
        All other errors are logged, because the worker also has messages that do not come from this broker.
        """
        while True:
            taking = asyncio.ensure_future(self.take())
            try:
                await asyncio.shield(taking)
                self._outage.end()
            except asyncio.CancelledError:
                # take() is a task of its own, because a driver may swallow a cancellation that comes together with the
                # reply (asyncio.wait_for does before Python 3.12), and then this loop would never end.
                taking.cancel()
                await asyncio.wait([taking])
                raise
            except ConfigurationError:
                raise
            except Exception as error:
                self._log_failure(error)
                await self._clock.sleep(self._outage.pause())

    async def catch_up(self) -> None:
        """Take in all entries that are there now, for a worker that returns when it is idle."""
        try:
            while await self.take():
                pass
        except ConfigurationError:
            raise
        except Exception as error:
            self._log_failure(error)

    async def take(self) -> int:
        """Take in the entries of one pull and return their number.

        When it returns, all of them are durable in the store and acknowledged.
        After a crash in the middle, those that were not acknowledged are delivered again.
        """
        deliveries = await self._pull()
        if not deliveries:
            return 0
        try:
            await self._put(deliveries)
        except BaseException:
            await self._release(deliveries)
            raise
        await self._inlet.transport.ack(deliveries)
        return len(deliveries)

    async def _pull(self) -> list[Delivery]:
        """Pull; when cancelled meanwhile, wait for the pull to end and release its entries for other workers."""
        pulling = asyncio.ensure_future(
            self._inlet.transport.pull(self._inlet.source, limit=limits.INTAKE_BATCH, lease=limits.INTAKE_LEASE)
        )
        try:
            return await asyncio.shield(pulling)
        except asyncio.CancelledError:
            await asyncio.wait([pulling])
            if not pulling.cancelled() and pulling.exception() is None:
                await self._release(pulling.result())
            raise

    async def _release(self, deliveries: Sequence[Delivery]) -> None:
        """Release entries for other workers at once; if that fails, they come again when their lease is over."""
        with suppress(OnefoldError):
            if deliveries:
                await self._inlet.transport.nack(deliveries, delay=0)

    async def _put(self, deliveries: Sequence[Delivery]) -> None:
        envelopes = [self._admission.admit_or_refuse(self._inlet, one) for one in deliveries]
        try:
            stored = await self._store.put(envelopes)
        except StoreUnavailableError:
            raise
        except OnefoldError as error:
            # The store refuses one of them; put each by itself, so that the others are stored.
            logger.warning("put_apart source=%s messages=%d error=%s", self._inlet.source, len(envelopes), error)
            stored = [await self._put_alone(*both) for both in zip(deliveries, envelopes, strict=True)]
        clashes = [one for one, found in zip(deliveries, stored, strict=True) if found.clash]
        if clashes:
            await self._store.put([self._admission.refuse(self._inlet, one, "key reuse") for one in clashes])
        log_duplicates(envelopes, stored)

    async def _put_alone(self, delivery: Delivery, envelope: Envelope) -> Stored:
        try:
            (stored,) = await self._store.put([envelope])
        except StoreUnavailableError:
            raise
        except OnefoldError as error:
            refused = self._admission.refuse(self._inlet, delivery, type(error).__name__)
            (stored,) = await self._store.put([refused])
        return stored

    def _log_failure(self, error: Exception) -> None:
        event = "store_failed" if isinstance(error, StoreError) else "transport_failed"
        if self._outage.is_new(f"{type(error).__name__} {error}"):
            logger.warning("%s doing=receive source=%s error=%s", event, self._inlet.source, error)
