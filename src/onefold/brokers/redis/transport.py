"""Redis streams as a transport: one entry per envelope out, a consumer group in.

An entry that its consumer has not acknowledged within its lease is claimed by the consumer that pulls next.
Acknowledgements are not fenced, so safety comes from the intake, which puts before it acknowledges.
"""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, get_args

from onefold import limits
from onefold.brokers.redis.answers import (
    FIELD,
    StreamEntry,
    deliverable,
    delivery_of,
    entries_of,
    new_entries_of,
    pending_of,
)
from onefold.brokers.redis.connection import ANSWER_SECONDS, RedisConnection, RedisRefusedError
from onefold.brokers.redis.portion import Portion
from onefold.brokers.transport import Delivery, Durability, TransportCapabilities
from onefold.clock import Clock, SystemClock, system_random
from onefold.errors import ConfigurationError, LimitError, TransportError, seconds
from onefold.message.envelope import Envelope, to_json

logger = logging.getLogger("onefold")

#: Entries written or read in one round trip.
BATCH_MAX = 500
#: A pull that waits for longer would come near the timeout of a command, and delay a worker that stops.
WAIT_SECONDS_MAX = ANSWER_SECONDS / 2
#: A consumer without entries that was idle for this long is deleted; workers that were killed leave such consumers.
CONSUMER_SECONDS = limits.DAY

_PREFIX = re.compile(r"[A-Za-z0-9:._-]{0,64}")

#: Releases entries that this consumer still has, by setting for how many milliseconds they count as idle.
#: A script, so that the check and the claim are one step: an entry that another consumer has by now stays with it.
_RELEASE = """
for place = 4, #ARGV do
    local mine = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[place], ARGV[place], 1, ARGV[2])
    if #mine > 0 then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[place], 'IDLE', ARGV[3], 'JUSTID')
    end
end
"""

#: Deletes consumers without pending entries; deleting one with entries would lose those.
#: The consumer of the given name is deleted at once, others when they were idle for the given milliseconds.
_DELETE_CONSUMERS = """
for _, one in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local found = {}
    for place = 1, #one, 2 do
        found[one[place]] = one[place + 1]
    end
    if found.pending == 0 and (found.name == ARGV[2] or found.idle > tonumber(ARGV[3])) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], found.name)
    end
end
"""


class RedisTransport:
    """Publishes to Redis streams and reads them as one of the consumers of a group.

    ``group`` names the service that reads: each group gets every entry, once among all of its workers.
    ``prefix`` is put before the name of every stream on the server, such as ``shop:``.
    ``max_entries`` keeps streams about that long by removing the oldest entries, also unread ones; without it nothing
    is removed.  A server that would lose accepted entries is refused, unless ``allow_volatile``.  ``durability`` is
    for a server that does not show its settings: the durability that its operator states.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str | None = None,
        prefix: str = "",
        max_entries: int | None = None,
        allow_volatile: bool = False,
        durability: Durability | None = None,
        wait: timedelta | float = limits.PULL_WAIT_SECONDS,
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        chance = chance or system_random()
        if not _PREFIX.fullmatch(prefix):
            raise ConfigurationError(
                f"prefix {prefix!r} is not allowed: use up to 64 letters, digits, ':', '.', '_', '-'"
            )
        if max_entries is not None:
            limits.check_range("max_entries", max_entries, limits.STREAM_ENTRIES_MIN, limits.INTEGER_MAX)
        if durability not in (None, *get_args(Durability)[:-1]):
            raise ConfigurationError(f"durability is {durability!r}; it is one of {get_args(Durability)[:-1]}")
        self._group = None if group is None else limits.check_name("group", group)
        self._prefix = prefix
        self._max_entries = max_entries
        limits.check_range("wait", seconds(wait, "wait"), 0.001, WAIT_SECONDS_MAX)
        self._wait = round(seconds(wait) * 1000)
        self._connection = RedisConnection(
            url, clock=clock or SystemClock(), chance=chance, allow_volatile=allow_volatile, stated=durability
        )
        self._consumer = f"{os.getpid()}-{chance.getrandbits(64):016x}"
        #: For each source that was pulled: the lease of the last pull, and the number of entries to request at once.
        self._leases: dict[str, float] = {}
        self._portions: dict[str, Portion] = {}

    @property
    def capabilities(self) -> TransportCapabilities:
        return TransportCapabilities(
            native_deduplication=False,
            native_retrial=False,
            ordered=True,
            delay_max=None,
            body_bytes_max=limits.ENVELOPE_BYTES_MAX,
            batch_max=BATCH_MAX,
            durability=self._connection.durability,
        )

    async def open(self) -> None:
        """See ``Transport.open``."""
        await self._connection.open()

    async def close(self) -> None:
        """See ``Transport.close``."""
        for source in tuple(self._leases):
            with suppress(TransportError, ConfigurationError):
                await self._delete_consumers(source, self._consumer)
        self._leases.clear()
        self._portions.clear()
        await self._connection.close()

    # out

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """See ``Transport.publish``."""
        written = [(self._stream(one.queue), _bounded(to_json(one))) for one in envelopes]
        for start in range(0, len(written), BATCH_MAX):
            await self._add(written[start : start + BATCH_MAX])

    async def _add(self, written: Sequence[tuple[str, bytes]]) -> None:
        async def add(client: Any) -> None:
            async with client.pipeline(transaction=False) as pipeline:
                for stream, body in written:
                    pipeline.xadd(stream, {FIELD: body}, maxlen=self._max_entries)
                answers = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer

        await self._connection.call(add)

    # in

    async def pull(self, source: str, *, limit: int, lease: float) -> list[Delivery]:
        """See ``Transport.pull``.  Entries whose lease is over come before new ones."""
        stream, limit = self._stream(source), min(limit, BATCH_MAX)
        if source not in self._leases:
            await self._make_group(source)
        self._leases[source] = lease
        try:
            return await self._claim(source, stream, limit) or await self._read(source, stream, limit)
        except RedisRefusedError as error:
            if not error.reply.startswith("NOGROUP"):
                raise
            # The stream was removed, or the server has lost it; the next pull makes the group again.
            logger.warning("stream_missing stream=%s group=%s", stream, self._group)
            del self._leases[source]
            return []
        except TransportError:
            # The reply may have been too large to be read in time, so begin again with one entry.
            self._portions.pop(source, None)
            raise

    async def _claim(self, source: str, stream: str, limit: int) -> list[Delivery]:
        """Take over entries whose consumer has not acknowledged them within the lease.

        Their consumer may have run out of memory while it read them, so the first request is for one entry.
        """
        group, consumer, idle = self._readers(), self._consumer, round(self._leases[source] * 1000)

        async def look(client: Any) -> dict[str, int]:
            return pending_of(await client.xpending_range(stream, group, "-", "+", limit, idle=idle))

        async def claim(client: Any, ids: list[str]) -> tuple[list[StreamEntry], bool]:
            entries = entries_of(await client.xclaim(stream, group, consumer, idle, ids))
            missing = set(ids).difference(entry.id for entry in entries)
            # A missing entry was removed from the stream, or another consumer has claimed or acknowledged it meanwhile.
            return entries, any([not await client.xrange(stream, id_, id_, count=1) for id_ in missing])

        times = await self._connection.call(look)
        ids, portion, found = list(times), Portion(), list[Delivery]()
        while ids and portion.has_room:
            wanted, ids = ids[: portion.count], ids[portion.count :]
            entries, removed = await self._connection.call(claim, wanted)
            if removed:
                logger.warning("entries_removed_unread stream=%s group=%s; see max_entries", stream, group)
            found += await self._delivered(source, entries, portion, times)
        return found

    async def _read(self, source: str, stream: str, limit: int) -> list[Delivery]:
        """Read entries that no consumer has, in portions that grow up to the limit."""
        group, portion, found = self._readers(), self._portions.setdefault(source, Portion()), list[Delivery]()

        async def read_new(client: Any, count: int, wait: int | None) -> list[StreamEntry]:
            found = await client.xreadgroup(group, self._consumer, {stream: ">"}, count=count, block=wait)
            return new_entries_of(found)

        portion.begin()
        while len(found) < limit and portion.has_room:
            count, wait = min(portion.count, limit - len(found)), None if found else self._wait
            entries = await self._connection.call(read_new, count, wait)
            found += await self._delivered(source, entries, portion, {})
            if len(entries) < count:
                break
        return found

    async def _delivered(
        self, source: str, entries: Sequence[StreamEntry], portion: Portion, times: Mapping[str, int]
    ) -> list[Delivery]:
        portion.learn([entry.size for entry in entries])
        fit, dropped = deliverable(entries)
        found = [delivery_of(source, entry, times.get(entry.id, 0) + 1) for entry in fit]
        if dropped:
            with suppress(RedisRefusedError):
                # If scripts are forbidden, these entries come again when their lease is over.
                await self._release(source, [entry.id for entry in dropped], 0.0)
        return found

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """See ``Transport.ack``.  The entries stay in their stream, for other groups and for operators."""
        for source, handles in _by_source(deliveries):
            await self._on(source, "xack", self._readers(), *handles)

    async def nack(self, deliveries: Sequence[Delivery], *, delay: float) -> None:
        """See ``Transport.nack``.  A delay is at most as long as the lease they were pulled with."""
        for source, handles in _by_source(deliveries):
            await self._release(source, handles, delay)

    async def _release(self, source: str, handles: Sequence[str], delay: float) -> None:
        lease = self._leases.get(source, limits.INTAKE_LEASE)
        idle = round(max(0.0, lease - delay) * 1000)
        await self._run_script(_RELEASE, source, self._consumer, idle, *handles)

    async def _make_group(self, source: str) -> None:
        """Make the group unless it exists; it reads from the first entry, also those published before it was made."""
        try:
            await self._on(source, "xgroup_create", self._readers(), "0", True)
        except RedisRefusedError as error:
            if not error.reply.startswith("BUSYGROUP"):
                raise
            with suppress(RedisRefusedError):
                # If scripts are forbidden, idle consumers stay, which costs a little memory.
                await self._delete_consumers(source, "")

    async def _delete_consumers(self, source: str, name: str) -> None:
        await self._run_script(_DELETE_CONSUMERS, source, name, round(CONSUMER_SECONDS * 1000))

    async def _run_script(self, script: str, source: str, *arguments: object) -> None:
        stream, group = self._stream(source), self._readers()
        await self._connection.call(lambda client: client.eval(script, 1, stream, group, *arguments))

    async def _on(self, source: str, command: str, *arguments: object) -> None:
        stream = self._stream(source)
        await self._connection.call(lambda client: getattr(client, command)(stream, *arguments))

    def _stream(self, name: str) -> str:
        return self._prefix + limits.check_name("stream", name)

    def _readers(self) -> str:
        if self._group is None:
            raise ConfigurationError(
                "reading a stream needs a group: RedisTransport(url, group='billing'), with the same name for all "
                "workers of one service"
            )
        return self._group

    def __repr__(self) -> str:
        return f"<RedisTransport {self._connection.server}>"


def _bounded(body: bytes) -> bytes:
    if len(body) > limits.ENVELOPE_BYTES_MAX:
        raise LimitError(
            "envelope",
            f"has {len(body)} bytes; at most {limits.ENVELOPE_BYTES_MAX} are allowed; send a reference to large data",
        )
    return body


def _by_source(deliveries: Iterable[Delivery]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for one in deliveries:
        found.setdefault(one.source, []).append(one.handle)
    return list(found.items())
