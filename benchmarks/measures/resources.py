"""S9 and S13: the cost of a worker while it is idle, and while it holds very many messages."""

from __future__ import annotations

import asyncio

from benchmarks.board import Board
from benchmarks.contender import Mode
from benchmarks.engines import Engine, Postgres
from benchmarks.place import Figures, Place, wait_for
from benchmarks.processes import Agent
from onefold import limits

STATEMENTS = "S9 statements"
RUNNING = 10_000
#: As many at once as one process runs at most.
_CONCURRENCY = limits.CONCURRENCY_MAX
_SETTLE_SECONDS = 2.0
_START_SECONDS_MAX = 20.0
_BYTES_PER_MEGABYTE = 1_000_000


async def idle(place: Place) -> Figures:
    """Let a worker that has worked wait for more messages."""
    async with place.sender() as (sender, url):
        await sender.ask("fill", messages=1)
        return await settled_idle(place, url, Mode.PLAIN, STATEMENTS)


async def settled_idle(place: Place, url: str, mode: Mode, statements_row: str) -> Figures:
    """Measure the processor time of a worker that has become idle, and the statements it sends to the server."""
    engine, seconds = place.engine, place.scale.idle_seconds
    if isinstance(engine, Postgres):
        engine.log_statements(url)
    board = Board(place.directory, 0, 0)
    async with place.deployed(url, board, 1, mode) as worker:
        await wait_for(board, 1, [worker])
        await asyncio.sleep(_SETTLE_SECONDS)
        cpu, statements = _cpu_seconds(worker), _statements(engine)
        await asyncio.sleep(seconds)
        worker.check()
        cpu, statements = _cpu_seconds(worker) - cpu, _statements(engine) - statements
    figures = place.figure(100 * cpu / seconds)
    if isinstance(engine, Postgres):
        figures[statements_row] = {place.contender: [statements / seconds]}
    return figures


def _statements(engine: Engine) -> int:
    return engine.logged_statements() if isinstance(engine, Postgres) else 0


def _cpu_seconds(worker: Agent) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in worker.tree())


async def memory(place: Place) -> Figures:
    """Let a worker run very many waiting handlers, and measure the memory of its largest process."""
    async with place.sender(Mode.WAITING) as (sender, url):
        await sender.ask("fill", messages=RUNNING)
        board = Board(place.directory, 0, 0)
        many = ("--processes", str(RUNNING // _CONCURRENCY), "--concurrency", str(_CONCURRENCY))
        async with place.deployed(url, board, RUNNING, Mode.WAITING, *many) as worker:
            await wait_for(board, RUNNING, [worker], seconds=_START_SECONDS_MAX)
            board.check(RUNNING)
            # The supervisor is one more, smaller process.
            most = max(process.memory_info().rss for process in worker.tree())
    return place.figure(most / _BYTES_PER_MEGABYTE)
