"""Redis streams as a transport: one entry per envelope out, a consumer group in.

An entry that its consumer has not acknowledged within its lease is claimed by whoever asks next.
Acknowledgements are not fenced, so this proves nothing by itself: the bridge puts before it acknowledges.
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
from onefold.clock import Clock, SystemClock, system_random
from onefold.envelope import Envelope, to_json
from onefold.errors import ConfigurationError, LimitError, TransportError, seconds
from onefold.transport import Delivery, Durability, TransportCapabilities
from onefold.transports.redis.answers import (
    FIELD,
    Entry,
    deliverable,
    delivery_of,
    entries_of,
    new_entries_of,
    pending_of,
)
from onefold.transports.redis.link import ANSWER_SECONDS, Link, RefusedError
from onefold.transports.redis.portion import Portion

logger = logging.getLogger("onefold")

#: Entries written in one round trip, and read in one.
BATCH_MAX = 500
#: A pull that waits for longer looks like a server that does not answer, and holds up a worker that stops.
WAIT_SECONDS_MAX = ANSWER_SECONDS / 2
#: A consumer that holds nothing and was not heard of for this long is forgotten; killed workers leave them behind.
CONSUMER_SECONDS = limits.DAY

_PREFIX = re.compile(r"[A-Za-z0-9:._-]{0,64}")

#: Gives entries up that are still this consumer's, so that they look idle for so many milliseconds.
#: Asking and claiming are one act: an entry that another consumer has by now must stay with it.
_GIVE_UP = """
for place = 4, #ARGV do
    local mine = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[place], ARGV[place], 1, ARGV[2])
    if #mine > 0 then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[place], 'IDLE', ARGV[3], 'JUSTID')
    end
end
"""

#: Forgets consumers that hold nothing: with one that does, its entries would be forgotten too.
#: A name given is forgotten at once, others when they have been idle for so many milliseconds.
_FORGET = """
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

    ``group`` names the service that reads: each group is given every entry, once among all of its workers.
    ``prefix`` stands before the name of every stream on the server, such as ``shop:``.
    ``max_entries`` keeps streams about that long; what nobody had read by then is lost to its readers, so without it
    nothing is removed.  A server that would lose what it has accepted is refused, unless ``allow_volatile``;
    ``durability`` says what its owner vouches for where the server does not let itself be asked.
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
        self._link = Link(
            url, clock=clock or SystemClock(), chance=chance, allow_volatile=allow_volatile, said=durability
        )
        self._consumer = f"{os.getpid()}-{chance.getrandbits(64):016x}"
        #: Of each source that was pulled, the lease last asked for, and how many entries to ask for at once.
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
            durability=self._link.durability,
        )

    async def open(self) -> None:
        """See ``Transport.open``."""
        await self._link.open()

    async def close(self) -> None:
        """See ``Transport.close``."""
        for source in tuple(self._leases):
            with suppress(TransportError, ConfigurationError):
                await self._forget_consumers(source, self._consumer)
        self._leases.clear()
        self._portions.clear()
        await self._link.close()

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

        await self._link.call(add)

    # in

    async def pull(self, source: str, *, limit: int, lease: float) -> list[Delivery]:
        """See ``Transport.pull``.  What was left behind comes before what is new."""
        stream, limit = self._stream(source), min(limit, BATCH_MAX)
        if source not in self._leases:
            await self._make_group(source)
        self._leases[source] = lease
        try:
            return await self._claim(source, stream, limit) or await self._read(source, stream, limit)
        except RefusedError as error:
            if not error.said.startswith("NOGROUP"):
                raise
            # The stream was removed, or the server has forgotten it: it begins anew.
            logger.warning("stream_missing stream=%s group=%s", stream, self._group)
            del self._leases[source]
            return []
        except TransportError:
            # Perhaps the answer was too much to be read in time.
            self._portions.pop(source, None)
            raise

    async def _claim(self, source: str, stream: str, limit: int) -> list[Delivery]:
        """Take over entries whose consumer has not acknowledged them within the lease.

        Their consumer may have died of reading them, so they are read one by one at first.
        """
        group, consumer, idle = self._readers(), self._consumer, round(self._leases[source] * 1000)

        async def look(client: Any) -> dict[str, int]:
            return pending_of(await client.xpending_range(stream, group, "-", "+", limit, idle=idle))

        async def claim(client: Any, ids: list[str]) -> tuple[list[Entry], bool]:
            entries = entries_of(await client.xclaim(stream, group, consumer, idle, ids))
            missing = set(ids).difference(entry.id for entry in entries)
            # One that is still in the stream has been claimed or acknowledged by another consumer meanwhile.
            return entries, any([not await client.xrange(stream, id_, id_, count=1) for id_ in missing])

        times = await self._link.call(look)
        ids, portion, found = list(times), Portion(), list[Delivery]()
        while ids and portion.has_room:
            asked, ids = ids[: portion.count], ids[portion.count :]
            entries, removed = await self._link.call(claim, asked)
            if removed:
                logger.warning("entries_removed_unread stream=%s group=%s; see max_entries", stream, group)
            found += await self._delivered(source, entries, portion, times)
        return found

    async def _read(self, source: str, stream: str, limit: int) -> list[Delivery]:
        """Read entries that no consumer has, in portions that grow until one is all that was asked for."""
        group, portion, found = self._readers(), self._portions.setdefault(source, Portion()), list[Delivery]()

        async def read_new(client: Any, count: int, wait: int | None) -> list[Entry]:
            found = await client.xreadgroup(group, self._consumer, {stream: ">"}, count=count, block=wait)
            return new_entries_of(found)

        portion.begin()
        while len(found) < limit and portion.has_room:
            count, wait = min(portion.count, limit - len(found)), None if found else self._wait
            entries = await self._link.call(read_new, count, wait)
            found += await self._delivered(source, entries, portion, {})
            if len(entries) < count:
                break
        return found

    async def _delivered(
        self, source: str, entries: Sequence[Entry], portion: Portion, times: Mapping[str, int]
    ) -> list[Delivery]:
        portion.learn([entry.size for entry in entries])
        fit, starved = deliverable(entries)
        found = [delivery_of(source, entry, times.get(entry.id, 0) + 1) for entry in fit]
        if starved:
            with suppress(RefusedError):
                # Where scripts are forbidden they come again when their lease is over.
                await self._give_up(source, [entry.id for entry in starved], 0.0)
        return found

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """See ``Transport.ack``.  The entries stay in their stream, for other groups and for people."""
        for source, handles in _by_source(deliveries):
            await self._on(source, "xack", self._readers(), *handles)

    async def nack(self, deliveries: Sequence[Delivery], *, delay: float) -> None:
        """See ``Transport.nack``.  A delay is at most as long as the lease they were pulled with."""
        for source, handles in _by_source(deliveries):
            await self._give_up(source, handles, delay)

    async def _give_up(self, source: str, handles: Sequence[str], delay: float) -> None:
        lease = self._leases.get(source, limits.INTAKE_LEASE)
        idle = round(max(0.0, lease - delay) * 1000)
        await self._run_script(_GIVE_UP, source, self._consumer, idle, *handles)

    async def _make_group(self, source: str) -> None:
        """Have the group there, reading the stream from its beginning: what was published before it came counts too."""
        try:
            await self._on(source, "xgroup_create", self._readers(), "0", True)
        except RefusedError as error:
            if not error.said.startswith("BUSYGROUP"):
                raise
            with suppress(RefusedError):
                # Scripts may be forbidden; then idle consumers stay, which costs a little memory.
                await self._forget_consumers(source, "")

    async def _forget_consumers(self, source: str, name: str) -> None:
        await self._run_script(_FORGET, source, name, round(CONSUMER_SECONDS * 1000))

    async def _run_script(self, script: str, source: str, *arguments: object) -> None:
        stream, group = self._stream(source), self._readers()
        await self._link.call(lambda client: client.eval(script, 1, stream, group, *arguments))

    async def _on(self, source: str, command: str, *arguments: object) -> None:
        stream = self._stream(source)
        await self._link.call(lambda client: getattr(client, command)(stream, *arguments))

    def _stream(self, name: str) -> str:
        return self._prefix + limits.check_name("stream", name)

    def _readers(self) -> str:
        if self._group is None:
            raise ConfigurationError(
                "whoever reads a stream says for whom: RedisTransport(url, group='billing'), the same for all workers "
                "of one service"
            )
        return self._group

    def __repr__(self) -> str:
        return f"<RedisTransport {self._link.server}>"


def _bounded(body: bytes) -> bytes:
    if len(body) > limits.ENVELOPE_BYTES_MAX:
        raise LimitError("envelope", f"has {len(body)} bytes; at most {limits.ENVELOPE_BYTES_MAX} are allowed")
    return body


def _by_source(deliveries: Iterable[Delivery]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for one in deliveries:
        found.setdefault(one.source, []).append(one.handle)
    return list(found.items())
