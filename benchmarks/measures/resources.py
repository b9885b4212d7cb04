"""S9 and S13: what a worker costs while it does nothing, and while it holds very many messages."""

from __future__ import annotations

import asyncio

import psutil

from benchmarks.board import Board
from benchmarks.contender import Mode
from benchmarks.engines import Postgres
from benchmarks.place import Figures, Place, wait_for

STATEMENTS = "S9 statements"
RUNNING = 10_000
_SETTLE_SECONDS = 2.0
_START_SECONDS_MAX = 20.0
_BYTES_PER_MEGABYTE = 1_000_000


async def idle(place: Place) -> Figures:
    """Let a worker that has worked wait for more; measure its processor time, and the statements the server is sent."""
    engine = place.engine
    async with place.sender() as (sender, url):
        if isinstance(engine, Postgres):
            engine.log_statements(url)
        board = Board(place.directory, 1, 1)
        async with place.workers(url, board) as (worker,):
            await sender.ask("fill", messages=1)
            await wait_for(board, 1, [worker])
            await asyncio.sleep(_SETTLE_SECONDS)
            cpu, statements = _cpu_seconds(worker.pid), _statements(place)
            await asyncio.sleep(place.scale.idle_seconds)
            cpu, statements = _cpu_seconds(worker.pid) - cpu, _statements(place) - statements
    figures = place.figure(100 * cpu / place.scale.idle_seconds)
    if isinstance(engine, Postgres):
        figures[STATEMENTS] = {place.contender: [statements / place.scale.idle_seconds]}
    return figures


def _statements(place: Place) -> int:
    return place.engine.logged_statements() if isinstance(place.engine, Postgres) else 0


async def memory(place: Place) -> Figures:
    """Let one worker run very many handlers that wait; measure the memory of its process."""
    async with place.sender(Mode.WAITING) as (sender, url):
        await sender.ask("fill", messages=RUNNING)
        board = Board(place.directory, 1, RUNNING)
        async with place.workers(url, board, Mode.WAITING) as (worker,):
            await wait_for(board, RUNNING, [worker], seconds=_START_SECONDS_MAX)
            board.check(RUNNING)
            return place.figure(_resident_bytes(worker.pid) / _BYTES_PER_MEGABYTE)


def _tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_seconds(pid: int) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _tree(pid))


def _resident_bytes(pid: int) -> int:
    return sum(process.memory_info().rss for process in _tree(pid))
