"""R1 and R2: the cost of waiting runs, and the rate at which very many runs continue that are due at once."""

from __future__ import annotations

import time

from benchmarks.board import Board
from benchmarks.contender import Mode
from benchmarks.measures.draining import drain
from benchmarks.measures.resources import settled_idle
from benchmarks.place import Figures, Place, wait_for

STATEMENTS = "R1 statements"
#: As many plain messages, drained in the same minute, as a separate series.
PLAIN = "plain drain"
#: One due time for all, long ago.
_SAME_INSTANT = 1_000_000
_SECONDS_MAX = 300.0


async def parked(place: Place) -> Figures:
    """Let a worker wait beside runs that all wait for a signal."""
    async with place.sender(Mode.PARKED) as (sender, url):
        await sender.ask("special", name="park", messages=place.scale.parked_runs, seconds=None, first=1)
        # A run that does not wait shows that the worker has started.
        await sender.ask("special", name="send_awake", seq=0)
        return await settled_idle(place, url, Mode.PARKED, STATEMENTS)


async def sleeping(place: Place) -> Figures:
    """Let sleeping runs all be due at the same instant; the clock runs until the last has continued."""
    runs = place.scale.sleeping_runs
    plain = await drain(place, 1, Mode.PLAIN, runs)
    async with place.sender(Mode.PARKED) as (sender, url):
        await sender.ask("special", name="park", within=_SECONDS_MAX, messages=runs, seconds=0.0)
        table = "onefold.delivery" if place.engine.name == "postgres" else "onefold_delivery"
        place.engine.execute(url, f"UPDATE {table} SET due_at = {_SAME_INSTANT}")
        place.engine.calm(url)
        board = Board(place.directory, 1, runs)
        async with place.workers(url, board, Mode.PARKED) as agents:
            await wait_for(board, runs, agents, seconds=_SECONDS_MAX)
            rate = runs / (time.perf_counter_ns() - board.started) * 1e9
        board.check(runs)
    return {place.row: {place.contender: [rate], PLAIN: [plain]}}
