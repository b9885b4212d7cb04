"""Time and chance: the only module that asks the machine for either.

Instants inside onefold are integers, microseconds since 1970 in UTC; people see ``datetime``.
There are two clocks because they answer two questions.
``now`` says what time it is, and may jump when somebody sets the clock; due times follow it.
``steady`` says how much time has passed since the machine started, and never jumps; leases follow it.
Everything takes its clock and its randomness as a parameter, so a whole fleet can run in a seeded simulation.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

MICROSECONDS = 1_000_000

#: CLOCK_BOOTTIME goes on while the machine sleeps and is the same in every process, unlike Python's monotonic().
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """What the time is, how much of it has passed, and waiting for it."""

    def now(self) -> int:
        """Microseconds since 1970, UTC."""
        ...

    def steady(self) -> int:
        """Microseconds since the machine started; comparable between its processes, never set back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after this long."""
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
    """Name this start of the machine: when it changes, every process that held a lease is gone."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Elsewhere the moment of boot, to ten seconds, tells one start from another well enough.
        return f"booted-{(time.time() - time.monotonic()) // 10:.0f}"


#: Random bytes are fetched for this many numbers at once, because asking for each apart costs more than using it.
_BLOCKS = 256


class SystemChance(random.SystemRandom):
    """Randomness from the operating system, fetched in blocks.

    Unlike a seeded generator it does not repeat itself after a fork: the child throws away what was fetched before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refill()
        _fetched.add(self)

    def refill(self) -> None:
        """Fetch anew, and throw away what is left."""
        self._blocks = struct.iter_unpack("16s", os.urandom(16 * _BLOCKS))

    def getrandbits(self, k: int, /) -> int:
        """Return ``k`` random bits."""
        if k > 128:
            return super().getrandbits(k)
        while True:
            # Taking the next block is one step of the interpreter, so no two threads are given the same one.
            for (block,) in self._blocks:
                return int.from_bytes(block, "big") >> (128 - k)
            self.refill()

    def random(self) -> float:
        """Return a number from 0 up to 1."""
        return self.getrandbits(53) * 2**-53


def system_random() -> random.Random:
    """Return randomness from the operating system."""
    return SystemChance()


#: What follows the time in an id, 256 times, one on a line: a count in descending order, because they are taken from
#: the end, and zeros for what is random.  So few, because a copy of the whole machine repeats those that are fetched.
_TAILS = b"".join(b"-70%02x-0000-000000000000\n" % count for count in reversed(range(256)))
_TAIL_BYTES = len(_TAILS) // 256
#: Where in a line the random digits stand; the first of them also says of which variant the id is.
_RANDOM_COLUMNS = (*range(6, 10), *range(11, 23))
_VARIANT = bytes.maketrans(b"0123456789abcdef", b"89ab" * 4)


class Ids:
    """Makes message ids: UUIDs of version 7, so that they sort by the time they were made.

    Within a millisecond they sort by a count of 4,096; the other 62 bits are random, and drawn for each id, so that one
    does not tell the next.
    No two threads are given the same one, and a forked child throws away what was fetched before.
    """

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        self._now = clock.now
        self._chance = chance
        self._head = (-1, "")
        self._tails: list[str] = []
        self._refills = 0
        _fetched.add(self)

    def make(self) -> str:
        """Return an id that no other message or signal has."""
        milliseconds = self._now() // 1000
        made_at, head = self._head
        if made_at != milliseconds:
            head = _id_head(milliseconds)
            self._head = milliseconds, head
        while True:
            try:
                # One step of the interpreter: whatever another thread does, it is given another one.
                return head + self._tails.pop()
            except IndexError:
                self.refill()

    def refill(self) -> None:
        """Fetch anew, and throw away what is left."""
        lines, width = bytearray(_TAILS), _TAIL_BYTES
        lines[2::width] = b"%x" % (self._refills % 16) * 256
        self._refills += 1
        digits = self._chance.randbytes(8 * 256).hex().encode()
        # Column by column, because that is done for all lines at the speed of C.
        for place, column in enumerate(_RANDOM_COLUMNS):
            lines[column::width] = digits[place::16]
        lines[6::width] = lines[6::width].translate(_VARIANT)
        self._tails = lines.decode().split()


_fetched: weakref.WeakSet[SystemChance | Ids] = weakref.WeakSet()


def _refill_all() -> None:
    for one in _fetched:
        one.refill()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refill_all)


def new_id(now: int, chance: random.Random) -> str:
    """Make one message id."""
    drawn = chance.getrandbits(74)
    tail = f"-7{drawn >> 62:03x}-{0x8000 | drawn >> 48 & 0x3FFF:04x}-{drawn & 0xFFFFFFFFFFFF:012x}"
    return f"{_id_head(now // 1000)}{tail}"


def _id_head(milliseconds: int) -> str:
    when = f"{milliseconds:012x}"
    return f"{when[:8]}-{when[8:]}"


def first_id(instant: int) -> str:
    """Return what sorts before every id that was made from this moment on."""
    when = f"{instant // 1000:012x}"[:12]
    return f"{when[:8]}-{when[8:]}-0000-0000-000000000000"


def to_datetime(instant: int) -> datetime:
    """Turn an instant into what people read; one that no date can say, from a damaged row, is shown as the last."""
    try:
        return datetime.fromtimestamp(instant / MICROSECONDS, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.min.replace(tzinfo=UTC) if instant < 0 else datetime.max.replace(tzinfo=UTC)


def to_instant(moment: datetime) -> int:
    """Turn an aware ``datetime`` into an instant; a naive one is refused because nobody knows what it means."""
    if not isinstance(moment, datetime):
        raise ValueError(f"a {type(moment).__name__} is no moment; write datetime(…, tzinfo=UTC)")
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone; write datetime(…, tzinfo=UTC)")
    return round(moment.timestamp() * MICROSECONDS)


@types.coroutine
def give_way() -> Generator[None, None, None]:
    """Let everything else on the event loop have its turn."""
    yield


def pause(seconds: float) -> None:
    """Block the calling thread; only for the stores' own threads, never on an event loop."""
    time.sleep(seconds)
