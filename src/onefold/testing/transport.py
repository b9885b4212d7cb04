"""A broker in memory, for tests of programs that receive and relay; like real brokers it forgets and repeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from onefold import limits
from onefold.brokers.transport import Delivery, TransportCapabilities, read
from onefold.clock import give_way
from onefold.errors import TransportUnavailableError
from onefold.message.envelope import Envelope, to_json


@dataclass(slots=True)
class _Entry:
    body: bytes
    times: int = 0
    held: bool = False
    acked: bool = False


class MemoryTransport:
    """Keeps published messages until they are acknowledged; they are lost with the process.

    While ``away`` is set every call fails as if the broker could not be reached; ``calls`` counts the calls made.
    Leases do not run out by themselves: ``expire`` ends them all, so that unacknowledged messages are delivered again.
    """

    def __init__(self) -> None:
        self.away = False
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._streams: defaultdict[str, list[_Entry]] = defaultdict(list)

    @property
    def capabilities(self) -> TransportCapabilities:
        return TransportCapabilities(
            native_deduplication=False,
            native_retrial=False,
            ordered=True,
            delay_max=0.0,
            body_bytes_max=limits.ENVELOPE_BYTES_MAX,
            batch_max=limits.INTAKE_BATCH,
            durability="nothing",
        )

    async def open(self) -> None:
        """See ``Transport.open``."""
        await self._answer("open")

    async def close(self) -> None:
        """See ``Transport.close``."""

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """See ``Transport.publish``."""
        await self._answer("publish")
        for one in envelopes:
            self.add(one.queue, to_json(one))

    async def pull(self, source: str, *, limit: int, lease: float) -> list[Delivery]:
        """See ``Transport.pull``.  Returns at once."""
        await self._answer("pull")
        found: list[Delivery] = []
        for place, entry in enumerate(self._streams[source]):
            if not (entry.held or entry.acked) and len(found) < limit:
                entry.held = True
                entry.times += 1
                found.append(Delivery(source, place, read(entry.body), entry.times))
        return found

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """See ``Transport.ack``."""
        await self._answer("ack")
        for one in deliveries:
            self._streams[one.source][one.handle].acked = True

    async def nack(self, deliveries: Sequence[Delivery], *, delay: float) -> None:
        """See ``Transport.nack``.  The messages come again at once."""
        await self._answer("nack")
        for one in deliveries:
            self._streams[one.source][one.handle].held = False

    async def _answer(self, call: str) -> None:
        self.calls[call] += 1
        await give_way()
        if self.away:
            raise TransportUnavailableError("the broker in memory is away")

    # for tests

    def add(self, stream: str, body: bytes) -> None:
        """Add an entry of any kind."""
        self._streams[stream].append(_Entry(body))

    def expire(self) -> None:
        """Let every lease run out."""
        for entries in self._streams.values():
            for entry in entries:
                entry.held = False

    def bodies(self, stream: str) -> list[bytes]:
        """Return the body of every message ever published to a stream, in order."""
        return [entry.body for entry in self._streams[stream]]

    def waiting(self, stream: str) -> int:
        """Return how many entries of a stream are not acknowledged."""
        return sum(not entry.acked for entry in self._streams[stream])
