"""The edges: what a broker promises, in onefold's own records.

A transport carries envelopes between programs, at least once and no better.  No broker that is known fences its
acknowledgements, so nothing here decides whether an effect happens: what comes in is put into the store under its key
before it is acknowledged, and what goes out is a message of the store until it is published.
A broker that loses data therefore costs time or an unpublished copy, never a message that the store has accepted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from onefold.clock import MICROSECONDS, Clock
from onefold.envelope import Envelope, from_json
from onefold.errors import EnvelopeError

#: The worst that what was accepted survives; of the third, what came in the last seconds before it may be lost.
Durability = Literal["power loss", "process crash", "all but the last seconds", "nothing"]


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """Facts about a transport, not wishes; those about the server are known when it is open."""

    #: It recognises what was published twice by itself.
    native_deduplication: bool
    #: It gives up by itself on what was delivered too often; if not, only the store counts attempts.
    native_retrial: bool
    #: What is published in order is delivered in order, as long as one worker reads and nothing comes again.
    ordered: bool
    #: The longest delay that ``nack`` can ask for, in seconds; None for the lease of the pull.
    delay_max: float | None
    #: The largest envelope, encoded.
    body_bytes_max: int
    #: How much one pull returns at most.
    batch_max: int
    #: The worst that published entries survive.
    durability: Durability


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry as a broker delivered it, perhaps not for the first time."""

    source: str
    #: What the transport acknowledges it by; means nothing to others.
    handle: Any
    #: The envelope, or the bytes that are none.
    content: Envelope | bytes
    #: How often it was delivered, this time included; brokers forget it, so it is for people.
    times: int = 1
    #: How many bytes the entry has, when it has more than an envelope may and ``content`` is only its beginning.
    whole_size: int | None = None

    def __repr__(self) -> str:
        # Without the content: what is printed or logged is no place for it.
        return f"<delivery {self.handle} of {self.source}>"


class Transport(Protocol):
    """Carries envelopes; see the module's docstring for what that means."""

    @property
    def capabilities(self) -> TransportCapabilities: ...

    async def open(self) -> None:
        """Connect and look at the server; calling it twice is harmless.

        Raises ``ConfigurationError`` for a server that would lose what it accepts, and ``TransportUnavailableError``
        for one that cannot be asked now; then every other call tries again.  A server that is found to lose what it
        accepts later, by any other call, is unavailable until it does not.
        """
        ...

    async def close(self) -> None:
        """Let go of every resource; calling it twice is harmless.  What was not acknowledged comes again."""
        ...

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """Hand over envelopes, each to the place that its ``queue`` names, in this order.

        When it returns, the broker has accepted all of them.  When it raises or the process dies, any of them may be
        there, so whoever repeats it publishes some twice; their keys tell receivers.
        """
        ...

    async def pull(self, source: str, *, limit: int, lease: float) -> list[Delivery]:
        """Return up to ``limit`` entries that nobody has, waiting a moment for the first.

        They are not given to others for ``lease`` seconds; then they are, unless they were acknowledged.
        A crash before or after it returns leaves them to be delivered again.
        """
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Have these not delivered again; one that was given to somebody else meanwhile may be, and does no harm.

        When it raises or the process dies, any of them may come again.
        """
        ...

    async def nack(self, deliveries: Sequence[Delivery], *, delay: float) -> None:
        """Have these delivered again after ``delay`` seconds, to whoever asks; what others have by now stays theirs.

        When it raises or the process dies, they come again when their lease is over.
        """
        ...


#: Different reasons for one outage that are remembered, so that each is logged once.
_TEXTS_MAX = 20


class Outage:
    """For how long a broker has been away, and after which pause to ask it again.

    A pause is as long again as it has been away, from a first up to a limit: so many who notice at once make it no
    longer.  And it is never the same for two of them, because all lost the same broker at the same moment.
    """

    def __init__(self, clock: Clock, chance: random.Random, first: float, most: float) -> None:
        self._clock = clock
        self._chance = chance
        self._first = first
        self._most = most
        self._began_at: int | None = None
        self._told: set[str] = set()

    def is_news(self, text: str) -> bool:
        """Whether this has not been said since the broker was last well; an outage of hours is not logged for hours."""
        if text in self._told:
            return False
        if len(self._told) < _TEXTS_MAX:
            self._told.add(text)
        return True

    def pause(self) -> float:
        """It is away: return the seconds to wait now."""
        now = self._clock.steady()
        if self._began_at is None:
            self._began_at = now
        away = (now - self._began_at) / MICROSECONDS
        return min(max(away, self._first), self._most) * self._chance.uniform(0.5, 1.0)

    def end(self) -> None:
        """It has answered."""
        self._began_at = None
        self._told.clear()


def read(body: bytes) -> Envelope | bytes:
    """Return the envelope that the bytes are, or else the bytes: what they are is for the receiver to judge."""
    try:
        return from_json(body)
    except EnvelopeError:
        return body
