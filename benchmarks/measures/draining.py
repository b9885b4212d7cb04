"""S4 to S7 and S11: messages drained per second.

The clock runs from the start of the first handler until the store says that nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import harmonic_mean

from benchmarks.board import Board
from benchmarks.contender import POISON_EVERY, Mode
from benchmarks.place import Figures, Place, wait_for
from benchmarks.processes import Agent

#: The same drain without poison, as a separate series.
HEALTHY = "no poison"
_PILOT_MESSAGES = {Mode.TRANSACTIONAL: 500, Mode.WORKFLOW: 50}
_PILOT_MESSAGES_PLAIN = 5_000
_STEP = 20
_LOOK_SECONDS = 0.002
_LEFT_SECONDS_MAX = 60.0


async def with_one(place: Place) -> Figures:
    return place.figure(await _fitting(place, 1, Mode.PLAIN))


async def with_two(place: Place) -> Figures:
    return place.figure(await _fitting(place, 2, Mode.PLAIN))


async def with_own_row(place: Place) -> Figures:
    return place.figure(await _fitting(place, 1, Mode.TRANSACTIONAL))


async def with_steps(place: Place) -> Figures:
    return place.figure(await _fitting(place, 1, Mode.WORKFLOW))


async def with_poison(place: Place) -> Figures:
    """Drain messages with and without some that fail; return the rates at which the others end.

    Each side is drained twice, in both orders, because the second drain finds the disk as the first has left it.
    A drain is over before the first retry is due, so each failing message fails once.
    """
    healthy = [await _fitting(place, 1, Mode.PLAIN)]
    messages = place.known[place.row, place.contender]
    # As many healthy messages as on the other side, with the failing ones on top.
    among = messages + -(-messages // (POISON_EVERY - 1))
    poisoned = [await drain(place, 1, Mode.POISON, among) for _ in range(2)]
    healthy.append(await drain(place, 1, Mode.PLAIN, messages))
    # The harmonic mean gives the rate of both drains together.
    return {place.row: {place.contender: [harmonic_mean(poisoned)], HEALTHY: [harmonic_mean(healthy)]}}


async def _fitting(place: Place, workers: int, mode: Mode) -> float:
    """Drain as many messages as fill the time; a first short drain finds their number.

    With ``--quick`` there is no time to fill, and the short drain is the measure.
    """
    which = (place.row, place.contender)
    pilot = _PILOT_MESSAGES.get(mode, _PILOT_MESSAGES_PLAIN)
    if which not in place.known:
        rate = await drain(place, workers, mode, pilot)
        place.known[which] = _fill_time(place, rate, pilot)
        if not place.scale.drain_seconds:
            return rate
    rate = await drain(place, workers, mode, place.known[which])
    place.known[which] = _fill_time(place, rate, pilot)
    return rate


def _fill_time(place: Place, rate: float, least: int) -> int:
    return max(least, round(rate * place.scale.drain_seconds / _STEP) * _STEP)


async def drain(place: Place, workers: int, mode: Mode, messages: int) -> float:
    poisoned = -(-messages // POISON_EVERY) if mode is Mode.POISON else 0
    healthy = messages - poisoned
    async with place.sender(mode) as (sender, url):
        await sender.ask("fill", messages=messages)
        place.engine.calm(url)
        board = Board(place.directory, workers, messages)
        async with place.workers(url, board, mode) as agents:
            end = await drained(sender, board, agents, healthy, poisoned)
        board.check(healthy)
        if mode is Mode.TRANSACTIONAL:
            _check_rows(place, url, messages)
        return healthy / (end - board.started) * 1e9


def _check_rows(place: Place, url: str, messages: int) -> None:
    rows = place.engine.execute(url, "SELECT count(*) FROM effect")[0][0]
    if rows != messages:
        raise RuntimeError(f"{rows} rows of {messages} messages")


async def drained(sender: Agent, board: Board, agents: Sequence[Agent], healthy: int, poisoned: int = 0) -> int:
    """Return the time at which nothing was left; the store is not asked before every handler has run."""
    await wait_for(board, healthy, agents)
    async with asyncio.timeout(_LEFT_SECONDS_MAX):
        while True:
            asked_at, left = await sender.ask("left")
            if left <= poisoned:
                return int(asked_at)
            await asyncio.sleep(_LOOK_SECONDS)
