"""G1 and G2: the cost of lines, for messages that stand in them and for those that do not."""

from __future__ import annotations

import asyncio
import time

from benchmarks.board import Board
from benchmarks.measures.draining import drained
from benchmarks.place import Figures, Place

#: The same drain without any line, as a separate series.
WITHOUT = "no lines"
HOT = 50_000
LINES = 10_000
PER_LINE = 2
_MESSAGES = 5_000
_SECONDS_MAX = 120.0
_LOOK_SECONDS = 0.01


async def beside_a_long_line(place: Place) -> Figures:
    """Drain messages without a line, alone and beside one very long line, whose messages have numbers below zero."""
    which = (place.row, place.contender)
    messages = place.known.get(which, _MESSAGES)
    without = await _drain_beside(place, messages, hot=0)
    place.known[which] = max(_MESSAGES, round(without * place.scale.drain_seconds))
    return _figures(place, await _drain_beside(place, messages, hot=HOT), without)


async def in_many_lines(place: Place) -> Figures:
    """Drain the same messages without a line, and in very many short ones."""
    without = await _drain_all(place, lines=0)
    return _figures(place, await _drain_all(place, lines=LINES), without)


def _figures(place: Place, figure: float, without: float) -> Figures:
    return {place.row: {place.contender: [figure], WITHOUT: [without]}}


async def _drain_beside(place: Place, messages: int, *, hot: int) -> float:
    async with place.sender() as (sender, url):
        if hot:
            await sender.ask("special", name="fill_lines", messages=hot, lines=1, first=-hot)
        await sender.ask("fill", messages=messages)
        place.engine.calm(url)
        board = Board(place.directory, 1, messages + hot)
        async with place.workers(url, board) as agents, asyncio.timeout(_SECONDS_MAX):
            while board.ran < messages or sum(seq >= 0 for seq in board.waits()) < messages:
                agents[0].check()
                await asyncio.sleep(_LOOK_SECONDS)
            return messages / (time.perf_counter_ns() - board.started) * 1e9


async def _drain_all(place: Place, *, lines: int) -> float:
    messages = LINES * PER_LINE
    async with place.sender() as (sender, url):
        if lines:
            await sender.ask("special", name="fill_lines", messages=messages, lines=lines, first=0)
        else:
            await sender.ask("fill", messages=messages)
        place.engine.calm(url)
        board = Board(place.directory, 1, messages)
        async with place.workers(url, board) as agents:
            end = await drained(sender, board, agents, messages)
        board.check(messages)
        return messages / (end - board.started) * 1e9
