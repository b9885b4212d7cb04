"""Stage 6, lease: workers, as they are set up, and as people find them in the register while somebody vouches for them.

The entries are for reading only: nothing about a message is ever decided by them.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import ConfigurationError, StoreError
from onefold.store import Lane, Store
from onefold.version import __version__

logger = logging.getLogger("onefold")

#: The kind of the entries in the register.
KIND = "worker"

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class WorkerSettings:
    """How one worker works; see ``app.work``."""

    name: str
    #: Names of queues; one like ``mail:2`` runs two of this queue's messages at once at most.
    queues: Sequence[str]
    concurrency: int = limits.CONCURRENCY
    lease_seconds: float = limits.LEASE
    stop_seconds: float = limits.STOP_SECONDS
    until_idle: bool = False
    lane: Lane = Lane.ANY
    #: Whether nobody watches it: then it purges and keeps its entry in the register by itself.
    alone: bool = True
    #: How many of a queue's messages may be in hand, where that is said.
    places: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        limits.check_range("concurrency", self.concurrency, 1, limits.CONCURRENCY_MAX)
        limits.check_range("lease", self.lease_seconds, limits.LEASE_MIN, limits.DAY)
        limits.check_name("worker", self.name)
        self.queues, self.places = parse_queues(self.queues)


def parse_queues(given: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Read queues as they are written for workers, ``mail:2`` or ``default``; return names, and places where given."""
    places: dict[str, int] = {}
    names: list[str] = []
    for text in given:
        name, colon, number = text.partition(":")
        names.append(limits.check_name("queue", name))
        if colon:
            if not number.isdecimal():
                raise ConfigurationError(f"queue {text!r} is not a name, or a name, a colon and a number")
            limits.check_range(f"concurrency of queue {name}", int(number), 1, limits.CONCURRENCY_MAX)
            places[name] = int(number)
    return names, places


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as people see it, at the moment ``checked_at``."""

    name: str
    host: str
    pid: int
    started_at: int
    version: str
    queues: list[str]
    concurrency: int
    #: ``any``, or what its supervisor has it for: ``main`` or ``probation``.
    lane: str
    #: The process that watches it; None when it watches itself.
    parent: int | None = None
    running: int
    settled: int
    checked_at: int
    #: For how many seconds its event loop had not moved.
    stalled_seconds: float = 0.0


_decode = msgspec.json.Decoder(WorkerRecord).decode


def describe(settings: WorkerSettings, started_at: int, now: int, *, running: int, settled: int) -> WorkerRecord:
    """Describe a worker in this process, which nobody watches."""
    return WorkerRecord(
        name=settings.name,
        host=host_name(),
        pid=os.getpid(),
        started_at=started_at,
        version=__version__,
        queues=list(settings.queues),
        concurrency=settings.concurrency,
        lane=settings.lane.name.lower(),
        running=running,
        settled=settled,
        checked_at=now,
    )


def worker_name(pid: int, chance: random.Random) -> str:
    """Name a worker; the random part tells a restarted process from its predecessor."""
    return f"{host_name()}-{pid}-{chance.getrandbits(32):08x}"


def host_name() -> str:
    """Return this machine's name, as part of a worker's name."""
    allowed = (letter if letter.isascii() and letter.isalnum() else "-" for letter in socket.gethostname().lower())
    return "".join(allowed)[:24].strip("-") or "host"


class Roll:
    """Enters workers into the register and strikes them off; an entry that is not renewed expires."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._versions: dict[str, int] = {}

    async def enter(self, records: Sequence[WorkerRecord]) -> None:
        """Write what is known of these workers, in one commit."""
        expires_at = self._clock.now() + round(limits.WORKER_ENTRY_SECONDS * MICROSECONDS)
        async with self._store.transaction() as transaction:
            written = [
                await transaction.register(
                    KIND, one.name, _encode(one), version=self._versions.get(one.name, 0), expires_at=expires_at
                )
                for one in records
            ]
        for record, mine in zip(records, written, strict=True):
            version = self._versions.get(record.name, 0)
            if mine and version:
                self._versions[record.name] = version + 1
            else:
                # It is new, or had expired, or the answer to an earlier write was lost: the next write will be right.
                known = await self._store.registered(KIND, record.name)
                self._versions[record.name] = 0 if known is None else known.version

    async def vouch(self, describe: Callable[[], WorkerRecord]) -> None:
        """Keep one worker entered until cancelled."""
        try:
            while True:
                try:
                    await self.enter([describe()])
                except StoreError as error:
                    logger.warning("store_failed doing=register error=%s", error)
                await self._clock.sleep(limits.WORKER_CHECK_SECONDS)
        finally:
            await self.strike(describe().name)

    async def strike(self, name: str) -> None:
        """Remove a worker's entry; one that cannot be removed now expires by itself."""
        version = self._versions.pop(name, 0)
        with suppress(StoreError):
            if not version and (known := await self._store.registered(KIND, name)):
                version = known.version  # whoever entered it did not wait for the answer
            if version:
                async with self._store.transaction() as transaction:
                    await transaction.register(KIND, name, None, version=version)


async def workers(store: Store) -> list[WorkerRecord]:
    """Return the workers somebody vouched for within the last minute, by name."""
    found = await store.entries(KIND)
    return sorted((_decode(entry.value) for entry in found.values()), key=lambda record: record.name)
