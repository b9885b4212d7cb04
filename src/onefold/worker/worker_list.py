"""Stage 6, lease: the workers of an app as entries of the register, for people; no message depends on them."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import StoreError
from onefold.store import Store
from onefold.version import __version__
from onefold.worker.settings import WorkerSettings
from onefold.worker.upkeep import Upkeep


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker at the moment ``checked_at``, as it is shown."""

    name: str
    host: str
    pid: int
    started_at: int
    version: str
    queues: list[str]
    concurrency: int
    #: ``any``, or below a supervisor ``main`` or ``probation``.
    lane: str
    #: The process id of its supervisor, if it has one.
    parent: int | None = None
    running: int
    settled: int
    checked_at: int
    #: For how many seconds its event loop had not moved.
    stalled_seconds: float = 0.0


def describe(settings: WorkerSettings, started_at: int, now: int, *, running: int, settled: int) -> WorkerRecord:
    """Describe a worker of this process, which has no supervisor."""
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
    """Make a worker's name; its random part tells a restarted process from the one before."""
    return f"{host_name()}-{pid}-{chance.getrandbits(32):08x}"


def host_name() -> str:
    """Return this machine's name, as part of a worker's name."""
    allowed = (letter if letter.isascii() and letter.isalnum() else "-" for letter in socket.gethostname().lower())
    return "".join(allowed)[:24].strip("-") or "host"


class WorkerList:
    """Writes and removes workers' entries in the register; an entry that is not renewed expires."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._versions: dict[str, int] = {}

    async def enter(self, records: Sequence[WorkerRecord]) -> None:
        """Write the entries of these workers, in one commit."""
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
                # The entry is new or had expired, or the answer to an earlier write was lost: the next write succeeds.
                known = await self._store.registered(KIND, record.name)
                self._versions[record.name] = 0 if known is None else known.version

    async def keep_entered(self, describe: Callable[[], WorkerRecord]) -> None:
        """Renew the entry of one worker until cancelled, then remove it."""
        entering = Upkeep(self._clock, "register", limits.WORKER_CHECK_SECONDS, lambda: self.enter([describe()]))
        try:
            await entering.do()
            await entering.run()
        finally:
            await self.strike(describe().name)

    async def strike(self, name: str) -> None:
        """Remove a worker's entry; one that cannot be removed now expires by itself."""
        version = self._versions.pop(name, 0)
        with suppress(StoreError):
            if not version and (known := await self._store.registered(KIND, name)):
                version = known.version  # the answer to its last write did not arrive
            if version:
                async with self._store.transaction() as transaction:
                    await transaction.register(KIND, name, None, version=version)


async def workers(store: Store) -> list[WorkerRecord]:
    """Return the workers whose entries were renewed within the last minute, by name."""
    found = await store.entries(KIND)
    return sorted((_decode(entry.value) for entry in found.values()), key=lambda record: record.name)


#: The kind of the entries in the register.
KIND = "worker"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WorkerRecord).decode
