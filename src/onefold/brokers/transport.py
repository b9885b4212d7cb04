"""Brokers: the protocol of a transport and its records.

A transport carries envelopes between programs, at least once.  No known broker fences its acknowledgements, so
exactly-once effects cannot rest on one: a received entry is put into the store under its key before it is
acknowledged, and an outgoing one is a message of the store until it is published.
So a broker that loses data causes a delay or loses a published copy, never a message that the store has accepted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from onefold.clock import MICROSECONDS, Clock
from onefold.errors import EnvelopeError
from onefold.message.envelope import Envelope, from_json

#: The worst failure that accepted entries survive; with the third, those of the last seconds before it may be lost.
Durability = Literal["power loss", "process crash", "all but the last seconds", "nothing"]


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """Facts about a transport; those about the server are known when it is open."""

    #: Whether the broker drops an entry that is published twice.
    native_deduplication: bool
    #: Whether the broker stops delivering an entry after a number of times; if not, only the store counts attempts.
    native_retrial: bool
    #: Whether entries are delivered in the order in which they were published, with one reader and no redelivery.
    ordered: bool
    #: The longest delay that ``nack`` can ask for, in seconds; None for the lease of the pull.
    delay_max: float | None
    #: Bytes of the largest envelope, encoded.
    body_bytes_max: int
    #: The most entries that one pull returns.
    batch_max: int
    #: The worst failure that published entries survive.
    durability: Durability


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry as a broker delivered it, perhaps not for the first time."""

    source: str
    #: The transport's own id of the entry, for the acknowledgement.
    handle: Any
    #: The envelope, or the bytes if they are not an envelope.
    content: Envelope | bytes
    #: The number of deliveries, with this one; only for people to read, because brokers may lose the count.
    times: int = 1
    #: The size of an entry that is larger than an envelope may be, of which ``content`` is only the beginning.
    whole_size: int | None = None

    def __repr__(self) -> str:
        # Without the content, which may hold secrets and must not get into logs.
        return f"<delivery {self.handle} of {self.source}>"


class Transport(Protocol):
    """Carries envelopes between programs, at least once."""

    @property
    def capabilities(self) -> TransportCapabilities: ...

    async def open(self) -> None:
        """Connect and check the server; calling it twice is harmless.

        Raises ``ConfigurationError`` for a server whose settings would lose accepted entries, and
        ``TransportUnavailableError`` for one that cannot be reached now; then every other call tries again.
        A server that is found to have such settings later raises ``TransportUnavailableError`` until they are changed.
        """
        ...

    async def close(self) -> None:
        """Release all resources; calling it twice is harmless.  Entries that were not acknowledged come again."""
        ...

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """Publish envelopes in this order, each to the stream that its ``queue`` names.

        When it returns, the broker has accepted all of them.  When it raises or the process dies, any of them may have
        been published, so a repeated call may publish some twice; receivers recognise them by their keys.
        """
        ...

    async def pull(self, source: str, *, limit: int, lease: float) -> list[Delivery]:
        """Return up to ``limit`` entries that no reader has now, waiting a moment for the first.

        No other reader gets them for ``lease`` seconds; after that they are delivered again unless acknowledged.
        After a crash before or after it returns they are delivered again.
        """
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge entries, so that they are not delivered again.

        One that another reader has got meanwhile may be, which is harmless.  When this raises or the process dies, any
        of them may come again.
        """
        ...

    async def nack(self, deliveries: Sequence[Delivery], *, delay: float) -> None:
        """Release entries, to be delivered to any reader after ``delay`` seconds.

        One that another reader has got meanwhile stays with it.  When this raises or the process dies, they come again
        when their lease is over.
        """
        ...


#: Reasons of one outage that are remembered, so that each is logged once.
_REASONS_MAX = 20


class Outage:
    """The time for which a broker could not be reached, and the pause before the next attempt.

    A pause is as long as the outage so far, between a first length and a limit: so failures of many callers at once do
    not make it longer.  It is random by up to a half, so that workers that lost the broker together do not all try at
    the same moment.
    """

    def __init__(self, clock: Clock, chance: random.Random, first: float, most: float) -> None:
        self._clock = clock
        self._chance = chance
        self._first = first
        self._most = most
        self._began_at: int | None = None
        self._logged: set[str] = set()

    def is_new(self, reason: str) -> bool:
        """Whether a reason has not been given during this outage, so that a long one does not fill the log."""
        if reason in self._logged:
            return False
        if len(self._logged) < _REASONS_MAX:
            self._logged.add(reason)
        return True

    def pause(self) -> float:
        """Begin an outage, or continue it, and return the seconds to wait before the next attempt."""
        now = self._clock.steady()
        if self._began_at is None:
            self._began_at = now
        away = (now - self._began_at) / MICROSECONDS
        return min(max(away, self._first), self._most) * self._chance.uniform(0.5, 1.0)

    def end(self) -> None:
        """End the outage, because the broker has replied."""
        self._began_at = None
        self._logged.clear()


def read(body: bytes) -> Envelope | bytes:
    """Decode an envelope, or return the bytes if they are not one, for the receiver's ``read`` function."""
    try:
        return from_json(body)
    except EnvelopeError:
        return body
