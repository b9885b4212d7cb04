"""The interface of a contender, and the message that all of them send.

Peers import this in environments of their own, so it needs nothing but Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol

from benchmarks.board import Tally

#: Called by a drain once it is connected; returns when all workers may begin.
Ready = Callable[[], None]

#: In measures with poison, one message in this many fails: 5 %.
POISON_EVERY = 20
#: In measures with killers, the messages that end the process of their worker.
KILLERS = (100, 1_100, 2_100)
#: Recorded steps of a workflow.
STEPS = 5

#: The environment variables of ``benchmarks.deployed``.
MODE, BOARDS, MESSAGES = "BENCH_MODE", "BENCH_BOARDS", "BENCH_MESSAGES"


class Mode(StrEnum):
    """The work of the handler."""

    PLAIN = "plain"
    #: It writes one row, in the commit that ends the message.
    TRANSACTIONAL = "transactional"
    #: It records five steps, each durable before the next begins.
    WORKFLOW = "workflow"
    #: It is a workflow that waits: for a signal, or for time.
    PARKED = "parked"
    #: It raises for one message in twenty.
    POISON = "poison"
    #: It never returns.
    WAITING = "waiting"
    #: It ends its process for one message in some thousands.
    KILLER = "killer"
    #: It does nothing, beside tasks whose messages are noise.
    NOISY = "noisy"
    #: The same, and its messages are shared out among very many queues.
    QUEUES = "queues"
    #: It is one of the tasks with the smallest possible messages.
    SMALL = "small"


class NotBuiltError(Exception):
    """The library has no such feature yet."""


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

    One instance either sends and watches, or drains in a process of its own; both are given the same URL and mode.
    """

    def __init__(self, url: str, mode: Mode) -> None: ...

    async def setup(self) -> None:
        """Make the schema in an empty database and connect."""
        ...

    async def enqueue_one(self, job: Job) -> None:
        """Store one message; durable when it returns."""
        ...

    async def enqueue_many(self, jobs: list[Job]) -> None:
        """Store many messages, in one commit if the library can."""
        ...

    async def left(self) -> int:
        """Return how many messages have not ended, according to the store."""
        ...

    async def drain(self, tally: Tally, ready: Ready) -> None:
        """Work for ever, counting every run of the handler; the process is killed from outside."""
        ...
