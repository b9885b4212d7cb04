"""Entry: the verbs of an app for brokers: streams to receive from, and events to relay to them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from onefold import limits
from onefold.app.events import EventVerbs
from onefold.brokers.admission import REFUSED, Admission
from onefold.brokers.inlets import Inlet
from onefold.brokers.intake import Intake
from onefold.brokers.relay import Relay
from onefold.brokers.transport import Transport
from onefold.errors import ConfigurationError, TransportError
from onefold.events.topic import Topic
from onefold.handlers.batch import Batch
from onefold.handlers.context import Context
from onefold.message.envelope import Envelope
from onefold.tasks.options import TaskOptions
from onefold.tasks.task import Task

logger = logging.getLogger("onefold")


class TransportVerbs(EventVerbs):
    """The part of ``App`` that is about events and brokers; see there."""

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
        """Declare that workers receive the entries of a stream, for the tasks and topics of this app.

        An entry is put into the store under its envelope's key and only then acknowledged, so it becomes one message
        however often it comes.  An entry of a type that is not declared here, or not among ``types``, waits an hour for
        a newer worker and then becomes a dead letter; one that cannot be decoded, or whose key has another payload,
        becomes one at once.
        ``read`` decodes entries that are not onefold's envelopes, and raises ``EnvelopeError`` if it cannot.
        """
        limits.check_name("stream", source)
        if isinstance(types, str):
            raise ConfigurationError(f"types is the text {types!r}; write [{types!r}]")
        for name in types or ():
            limits.check_name("message type", name)
        if source in self._inlets:
            raise ConfigurationError(f"stream {source!r} is received twice; declare it once, with all of its types")
        inlet = Inlet(transport, source, None if types is None else frozenset(types), read)
        if REFUSED not in self.registry.tasks:
            admission = self._admission()

            async def admit_refused(ctx: Context, source: str, entry: str, body: bytes, size: int) -> None:
                await admission.admit_refused(ctx, source, entry, body, size)

            self.task(name=REFUSED)(admit_refused)
        self._inlets.add(inlet)

    def relay(
        self, event: Topic[Any] | str, /, *, to: Transport, stream: str, **settings: Unpack[TaskOptions]
    ) -> Task[[Any], Any]:
        """Declare that every event of this name is published to a stream, with its id and key.

        The relay is a subscriber like any other, with its own queue, retries and dead letters.  An event may be
        published twice, after a crash or a lost reply; receivers recognise it by its key.  While the broker cannot be
        reached no attempt is used up.
        """
        name = event if isinstance(event, str) else event.name
        relay = Relay(limits.check_name("event", name), to, stream, lambda: self.store, self.clock, self._chance)

        async def publish(batch: Batch[Any]) -> None:
            await relay.publish(batch)

        settings.setdefault("name", f"{name}.to.{stream}")
        declared = self.on(event, batch=limits.BATCH_MAX, **settings)(publish)
        self._inlets.add_transport(to)
        return declared

    # working

    def _admission(self) -> Admission:
        return Admission(self.registry, self._inlets, self.fresh_id, self._complete)

    def _intakes(self) -> list[Intake]:
        admission = self._admission()
        return [Intake(inlet, admission, self.store, self.clock, self._chance) for inlet in self._inlets.values()]

    @asynccontextmanager
    async def _open_transports(self, *, refuse: bool) -> AsyncIterator[None]:
        """Open the brokers before anything is claimed; one that cannot be reached is tried again when it is needed.

        A broker whose settings would lose messages raises ``ConfigurationError`` if ``refuse``, and is otherwise tried
        again like one that cannot be reached.
        """
        try:
            for transport in self._inlets.transports:
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
                for transport in self._inlets.transports:
                    await transport.close()
