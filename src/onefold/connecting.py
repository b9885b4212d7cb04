"""Entry: what an app offers for brokers: streams to receive from, and events to relay to them."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from onefold import limits
from onefold.batch import Batch
from onefold.bridge import Intake, Relay
from onefold.clock import Clock
from onefold.context import Context
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError, TransportError
from onefold.options import TaskOptions
from onefold.publishing import EventVerbs
from onefold.reception import REFUSED, Reception
from onefold.registry import Inlet
from onefold.task import Task
from onefold.topic import Topic
from onefold.transport import Transport

logger = logging.getLogger("onefold")


class TransportVerbs(EventVerbs):
    """The part of ``App`` that is about events and brokers; see there."""

    _clock: Clock
    _chance: random.Random
    _workers: list[Any]

    def task(self, *function: Any, **settings: Any) -> Any:
        """Declare a handler."""
        raise NotImplementedError

    # declaring

    def receive(
        self,
        transport: Transport,
        source: str,
        /,
        *,
        types: Sequence[str] | None = None,
        read: Callable[[bytes], Envelope] | None = None,
    ) -> None:
        """Declare that workers take in what others publish to a stream, for the tasks and topics of this app.

        An entry is put into the store under its envelope's key and only then acknowledged, so however often it comes
        it is one message.  One of a type that is not declared here, or not among ``types``, waits an hour for a newer
        worker; then it is a dead letter, as is at once one that cannot be read or whose key has another payload.
        ``read`` reads what is not an envelope of onefold's, and raises ``EnvelopeError`` for what it cannot read.
        """
        limits.check_name("stream", source)
        if isinstance(types, str):
            raise ConfigurationError(f"types is the text {types!r}; write [{types!r}]")
        for name in types or ():
            limits.check_name("message type", name)
        if source in self._registry.inlets:
            raise ConfigurationError(f"{source!r} is received twice; once is enough, for all of its types")
        inlet = Inlet(transport, source, None if types is None else frozenset(types), read)
        if REFUSED not in self._registry.tasks:
            reception = self._reception()

            async def look_again(ctx: Context, source: str, entry: str, body: bytes, size: int) -> None:
                await reception.look_again(ctx, source, entry, body, size)

            self.task(name=REFUSED)(look_again)
        self._registry.inlets[source] = inlet
        self._registry.add_transport(transport)

    def relay(
        self, event: Topic[Any] | str, /, *, to: Transport, stream: str, **settings: Unpack[TaskOptions]
    ) -> Task[[Any], Any]:
        """Declare that every event of this name is published to a stream, under its own id and key.

        It is a subscriber like any other, with its own queue, retries and dead letters.  An event may be published
        twice, after a crash or a lost answer, and receivers know it by its key.  While the broker is away no attempt is
        used up.
        """
        name = event if isinstance(event, str) else event.name
        relay = Relay(limits.check_name("event", name), to, stream, lambda: self.store, self._clock, self._chance)

        async def publish(batch: Batch[Any]) -> None:
            await relay.publish(batch)

        settings.setdefault("name", f"{name}.to.{stream}")
        declared = self.on(event, batch=limits.BATCH_MAX, **settings)(publish)
        self._registry.add_transport(to)
        return declared

    # working

    def _reception(self) -> Reception:
        return Reception(self._registry, self.fresh_id, self._complete)

    def _intakes(self) -> list[Intake]:
        reception = self._reception()
        return [
            Intake(inlet, reception, self.store, self._clock, self._chance) for inlet in self._registry.inlets.values()
        ]

    @asynccontextmanager
    async def _open_transports(self, *, refuse: bool) -> AsyncIterator[None]:
        """Have the brokers looked at before anything is claimed; one that is away is tried again when it is needed.

        One that must not be used raises ``ConfigurationError`` if ``refuse``, and counts as away otherwise.
        """
        try:
            for transport in self._registry.transports:
                try:
                    await transport.open()
                except (TransportError, ConfigurationError) as error:
                    if refuse and isinstance(error, ConfigurationError):
                        raise
                    logger.warning("transport_failed doing=open error=%s", error)
            yield
        finally:
            # The last worker in this process closes them.
            if not self._workers:
                for transport in self._registry.transports:
                    await transport.close()
