"""S8: the time from the sending call to the start of the handler in another process, under a light load."""

from __future__ import annotations

import statistics

from benchmarks.board import Board
from benchmarks.place import Figures, Place, wait_for
from benchmarks.processes import Agent

PER_SECOND = 20
P95 = "S8 p95"
#: Messages sent beforehand at the same rate, because connections are cold and workers are still starting.
_WARM_UP = 20


async def under_light_load(place: Place) -> Figures:
    messages = round(place.scale.latency_seconds * PER_SECOND)
    async with place.sender() as (sender, url):
        board = Board(place.directory, 1, _WARM_UP + messages)
        async with place.workers(url, board) as agents:
            await _send(sender, board, agents[0], _WARM_UP, first=-_WARM_UP)
            await _send(sender, board, agents[0], messages, first=0)
        board.check(_WARM_UP + messages)
        milliseconds = [wait / 1e6 for seq, wait in board.waits().items() if seq >= 0]
    cuts = statistics.quantiles(milliseconds, n=20, method="inclusive")
    return {place.row: {place.contender: [cuts[9]]}, P95: {place.contender: [cuts[18]]}}


async def _send(sender: Agent, board: Board, worker: Agent, messages: int, *, first: int) -> None:
    """Send at the given rate, and wait until all of them have run."""
    before = board.ran
    await sender.ask("pace", messages=messages, per_second=PER_SECOND, batch=1, first=first)
    await wait_for(board, before + messages, [worker])
