"""Time and randomness: the only module that asks the machine for either.

Instants inside onefold are integers, microseconds since 1970 in UTC; users see ``datetime``.
There are two clocks because they answer two questions.
``now`` is the time of day, and jumps when the machine's clock is set; due times follow it.
``steady`` is the time since the machine started, and never jumps; leases follow it.
Everything takes its clock and its randomness as a parameter, so many workers can run in one seeded simulation.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
import types
import weakref
from collections.abc import Generator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from onefold.errors import ConfigurationError

MICROSECONDS = 1_000_000

#: CLOCK_BOOTTIME goes on while the machine sleeps and is the same in every process, unlike Python's monotonic().
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """The time of day, the time that has passed, and waiting."""

    def now(self) -> int:
        """Microseconds since 1970, UTC."""
        ...

    def steady(self) -> int:
        """Microseconds since the machine started; never set back, and the same in all of its processes."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for this long."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> int:
        return time.time_ns() // 1000

    def steady(self) -> int:
        if _BOOTTIME is None:
            return time.monotonic_ns() // 1000
        return time.clock_gettime_ns(_BOOTTIME) // 1000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def boot_id() -> str:
    """Return the id of this start of the machine; after another start no process that held a lease is left."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Systems without /proc: the time of the start, in steps of ten seconds, because it is known only roughly.
        return f"booted-{(time.time() - time.monotonic()) // 10:.0f}"


#: Random bytes are fetched for this many numbers at once, because a system call costs more than using one number.
_BLOCKS = 256


class SystemChance(random.SystemRandom):
    """Randomness from the operating system, fetched in blocks.

    It does not repeat itself after a fork: the child discards the bytes that its parent had fetched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refill()
        _sources.add(self)

    def refill(self) -> None:
        """Fetch new bytes, and discard those that are left."""
        self._blocks = struct.iter_unpack("16s", os.urandom(16 * _BLOCKS))

    def getrandbits(self, k: int, /) -> int:
        """Return ``k`` random bits."""
        if k > 128:
            return super().getrandbits(k)
        while True:
            # The iterator gives out a block in one step of the interpreter, so no two threads get the same one.
            for (block,) in self._blocks:
                return int.from_bytes(block, "big") >> (128 - k)
            self.refill()

    def random(self) -> float:
        """Return a number from 0 up to 1."""
        return self.getrandbits(53) * 2**-53


def system_random() -> random.Random:
    """Return randomness from the operating system."""
    return SystemChance()


#: The part of an id after its time, 256 times, one on a line: a count in descending order, because they are taken from
#: the end, and zeros in place of the random digits.  No more than 256, because a snapshot of a virtual machine that is
#: started twice gives out those that were prepared twice.
_TAILS = b"".join(b"-70%02x-0000-000000000000\n" % count for count in reversed(range(256)))
_TAIL_BYTES = len(_TAILS) // 256
#: The columns of a line that hold random digits; the first of them also holds the variant of the UUID.
_RANDOM_COLUMNS = (*range(6, 10), *range(11, 23))
_VARIANT = bytes.maketrans(b"0123456789abcdef", b"89ab" * 4)


class Ids:
    """Makes message ids: UUIDs of version 7, so that they sort by the time they were made.

    Within a millisecond they sort by a count of 4,096; the other 62 bits are random for each id, so that one id does
    not help to guess the next.
    No two threads get the same id, and a forked child discards those that its parent had prepared.
    """

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        self._now = clock.now
        self._chance = chance
        self._head = (-1, "")
        self._tails: list[str] = []
        self._refills = 0
        _sources.add(self)

    def make(self) -> str:
        """Return an id that no other message or signal has."""
        milliseconds = self._now() // 1000
        made_at, head = self._head
        if made_at != milliseconds:
            head = _id_head(milliseconds)
            self._head = milliseconds, head
        while True:
            try:
                # pop() is one step of the interpreter, so no two threads get the same one.
                return head + self._tails.pop()
            except IndexError:
                self.refill()

    def refill(self) -> None:
        """Prepare new ids, and discard those that are left."""
        lines, width = bytearray(_TAILS), _TAIL_BYTES
        lines[2::width] = b"%x" % (self._refills % 16) * 256
        self._refills += 1
        digits = self._chance.randbytes(8 * 256).hex().encode()
        # By columns, because a slice assignment fills one column of all lines in C.
        for place, column in enumerate(_RANDOM_COLUMNS):
            lines[column::width] = digits[place::16]
        lines[6::width] = lines[6::width].translate(_VARIANT)
        self._tails = lines.decode().split()


#: All sources that fetch ahead, so that a forked child can refill them.
_sources: weakref.WeakSet[SystemChance | Ids] = weakref.WeakSet()


def _refill_all() -> None:
    for source in _sources:
        source.refill()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refill_all)


def new_id(now: int, chance: random.Random) -> str:
    """Return one message id."""
    drawn = chance.getrandbits(74)
    tail = f"-7{drawn >> 62:03x}-{0x8000 | drawn >> 48 & 0x3FFF:04x}-{drawn & 0xFFFFFFFFFFFF:012x}"
    return f"{_id_head(now // 1000)}{tail}"


def _id_head(milliseconds: int) -> str:
    when = f"{milliseconds:012x}"
    return f"{when[:8]}-{when[8:]}"


def first_id(instant: int) -> str:
    """Return a text that sorts before every id made at or after this instant."""
    when = f"{instant // 1000:012x}"[:12]
    return f"{when[:8]}-{when[8:]}-0000-0000-000000000000"


def to_datetime(instant: int) -> datetime:
    """Turn an instant into a ``datetime``; one out of range, from a damaged row, becomes the first or the last."""
    try:
        return datetime.fromtimestamp(instant / MICROSECONDS, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.min.replace(tzinfo=UTC) if instant < 0 else datetime.max.replace(tzinfo=UTC)


def to_instant(moment: datetime) -> int:
    """Turn an aware ``datetime`` into an instant; a naive one is refused because its time zone would be a guess."""
    if not isinstance(moment, datetime):
        raise ValueError(f"a {type(moment).__name__} is not a datetime; write datetime(…, tzinfo=UTC)")
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone; write datetime(…, tzinfo=UTC)")
    return round(moment.timestamp() * MICROSECONDS)


@types.coroutine
def give_way() -> Generator[None, None, None]:
    """Let the other tasks of the event loop run once."""
    yield


def pause(seconds: float) -> None:
    """Block the calling thread; only for the stores' own threads, since it would block an event loop."""
    time.sleep(seconds)


@lru_cache(maxsize=256)
def zone_of(name: str) -> tzinfo:
    """Return a time zone by its IANA name."""
    if name == "UTC":
        return UTC  # works without a time zone database
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, ZoneInfoNotFoundError) as error:  # zoneinfo refuses a bad name with any of the three
        raise ConfigurationError(
            f"timezone {name!r} is not known here; write an IANA name such as Europe/Berlin, "
            "and install the package tzdata where the system has no time zones"
        ) from error
