"""What takes part in a benchmark, and the message everybody sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from benchmarks.board import Tally

#: Called by a drain once it is connected; returns when all workers may begin.
Ready = Callable[[], None]


class Job(NamedTuple):
    """A payload of about 100 bytes."""

    seq: int
    t0: int
    to: str
    template: str


def make_job(seq: int) -> Job:
    return Job(seq, time.perf_counter_ns(), "user-000123@example.com", "welcome")


class Contender(Protocol):
    """A queue under test: the library, a raw loop, or a peer.

    One instance either sends and watches, or drains in a worker process of its own; both are given the same URL.
    """

    name: str
    #: Workers drain with a handler that writes one row in the commit that ends the message.
    transactional: bool

    async def setup(self, url: str) -> None:
        """Make the schema in an empty database and connect."""
        ...

    async def enqueue_one(self, job: Job) -> None:
        """Store one message; durable when it returns."""
        ...

    async def enqueue_many(self, jobs: list[Job]) -> None:
        """Store many messages in one commit."""
        ...

    async def left(self) -> int:
        """How many messages have not reached their end, as the store itself says."""
        ...

    async def close(self) -> None: ...

    async def drain(self, url: str, tally: Tally, ready: Ready) -> None:
        """Work for ever, counting every run of the handler; the process is ended from outside."""
        ...
