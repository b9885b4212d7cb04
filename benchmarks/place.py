"""The place of one measure: its database, its sender and its workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.board import Board
from benchmarks.contender import BOARDS, MESSAGES, MODE, Mode
from benchmarks.contenders import launch
from benchmarks.engines import Engine
from benchmarks.processes import Agent, Launch, crew, started

_LOOK_SECONDS = 0.002

#: By row and series: the figures of one round, or of several that a measure took by itself.
Figures = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run."""

    rounds: int
    send_seconds: float
    #: 0 for drains of a few thousand messages, however short they are.
    drain_seconds: float
    latency_seconds: float
    idle_seconds: float
    kept_messages: int
    foreign_seconds: float
    parked_runs: int
    sleeping_runs: int
    #: Which part of the noise is made; how often plain messages are drained beside it, how many are sent one by one,
    #: for how long others are sent, and for how long an idle worker is watched.
    noise_share: float
    neighbour_drains: int
    neighbour_sends: int
    neighbour_seconds: float
    watch_seconds: float


FULL = Scale(
    rounds=5,
    send_seconds=0.8,
    drain_seconds=1.5,
    latency_seconds=8.0,
    idle_seconds=15.0,
    kept_messages=5_000_000,
    foreign_seconds=300.0,
    parked_runs=10_000,
    sleeping_runs=100_000,
    noise_share=1.0,
    neighbour_drains=3,
    neighbour_sends=30,
    neighbour_seconds=2.0,
    watch_seconds=6.0,
)
QUICK = Scale(
    rounds=1,
    send_seconds=0.3,
    drain_seconds=0.0,
    latency_seconds=2.5,
    idle_seconds=5.0,
    kept_messages=200_000,
    foreign_seconds=20.0,
    parked_runs=2_000,
    sleeping_runs=5_000,
    noise_share=1 / 20,
    neighbour_drains=1,
    neighbour_sends=10,
    neighbour_seconds=1.0,
    watch_seconds=3.0,
)


@dataclass(frozen=True, slots=True)
class Place:
    """One measure of one contender."""

    engine: Engine
    directory: Path
    row: str
    contender: str
    scale: Scale
    #: Results of earlier rounds, by row and contender: how many messages fill a measure.
    known: dict[tuple[str, str], int]

    @asynccontextmanager
    async def sender(self, mode: Mode = Mode.PLAIN) -> AsyncIterator[tuple[Agent, str]]:
        """Yield a sender that is connected to its own database, and the database's URL."""
        url = self.engine.create()
        try:
            async with self.sender_to(url, mode) as agent:
                yield agent, url
        finally:
            self.engine.drop(url)

    @asynccontextmanager
    async def sender_to(self, url: str, mode: Mode = Mode.PLAIN) -> AsyncIterator[Agent]:
        """Yield one more sender that is connected to the database."""
        how = self._launch(url, mode)
        async with started(how, self.directory) as agent:
            await agent.ask("setup")
            yield agent

    def workers(self, url: str, board: Board, mode: Mode = Mode.PLAIN) -> AbstractAsyncContextManager[list[Agent]]:
        """Run one worker per file of the board for the length of the block."""
        return crew(self._launch(url, mode), self.directory, board.paths)

    @asynccontextmanager
    async def deployed(
        self, url: str, board: Board, messages: int, mode: Mode = Mode.PLAIN, *options: str
    ) -> AsyncIterator[Agent]:
        """Run ``onefold worker`` as users do, for the length of the block; each of its processes joins the board."""
        command = (sys.executable, "-m", "onefold", "worker", "benchmarks.deployed:app", *options)
        about = {"ONEFOLD_URL": url, MODE: mode, BOARDS: str(board.directory), MESSAGES: str(messages)}
        async with started(Launch(command, {**self.engine.environment, **about}), self.directory) as worker:
            try:
                yield worker
            finally:
                # A graceful stop would wait for handlers, and the database is about to be dropped anyway.
                worker.kill()

    def _launch(self, url: str, mode: Mode) -> Launch:
        how = launch(self.engine.name, self.contender, mode, url)
        return Launch(how.command, {**self.engine.environment, **how.environment})

    def figure(self, value: float) -> Figures:
        return {self.row: {self.contender: [value]}}


async def wait_for(board: Board, runs: int, workers: Sequence[Agent], *, seconds: float = 60.0) -> None:
    """Return when that many handlers have started; raise if a worker dies or takes too long."""
    until = time.perf_counter() + seconds
    while board.ran < runs:
        for worker in workers:
            worker.check()
        if time.perf_counter() > until:
            raise RuntimeError(f"{board.ran} of {runs} handlers had started after {seconds:g} s")
        await asyncio.sleep(_LOOK_SECONDS)


Measure = Callable[[Place], Awaitable[Figures]]
