"""The measures: each gives messages per second of one contender in a database of its own."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.board import Board
from benchmarks.contender import Contender, make_job
from benchmarks.contenders import make_contender
from benchmarks.crew import Crew, hired
from benchmarks.engines import Engine
from benchmarks.worker import PLAIN, TRANSACTIONAL

#: Messages sent before the clock starts: connections, prepared statements, caches.
WARM_UP = 50
SENDERS = 100
BULK = 1_000
_LOOK_SECONDS = 0.002
_DRAIN_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how one measure is taken."""

    engine: Engine
    directory: Path
    contender: str
    seconds: float
    #: Messages to drain; sending goes by the clock alone.
    messages: int = 0


@asynccontextmanager
async def _sender(place: Place, *, transactional: bool = False) -> AsyncIterator[tuple[Contender, str]]:
    url = place.engine.create()
    contender = make_contender(place.engine.name, place.contender, transactional=transactional)
    try:
        await contender.setup(url)
        yield contender, url
    finally:
        await contender.close()
        place.engine.drop(url)
        gc.collect()


# sending


async def send_one_by_one(place: Place) -> float:
    return await _send_concurrently(place, 1)


async def send_from_many(place: Place) -> float:
    return await _send_concurrently(place, SENDERS)


async def _send_concurrently(place: Place, senders: int) -> float:
    async with _sender(place) as (contender, _):
        numbers = itertools.count()
        for seq in itertools.islice(numbers, WARM_UP):
            await contender.enqueue_one(make_job(seq))
        start = time.perf_counter()
        until = start + place.seconds
        sent = await asyncio.gather(*(_send_until(until, contender, numbers) for _ in range(senders)))
        return sum(sent) / (time.perf_counter() - start)


async def _send_until(until: float, contender: Contender, numbers: Iterator[int]) -> int:
    sent = 0
    while time.perf_counter() < until:
        await contender.enqueue_one(make_job(next(numbers)))
        sent += 1
    return sent


async def send_in_bulk(place: Place) -> float:
    async with _sender(place) as (contender, _):
        await contender.enqueue_many([make_job(seq) for seq in range(WARM_UP)])
        start, sent = time.perf_counter(), 0
        while time.perf_counter() < start + place.seconds:
            first = WARM_UP + sent
            await contender.enqueue_many([make_job(seq) for seq in range(first, first + BULK)])
            sent += BULK
        return sent / (time.perf_counter() - start)


# draining


async def drain_with_one(place: Place) -> float:
    return await _drain(place, workers=1, transactional=False)


async def drain_with_two(place: Place) -> float:
    return await _drain(place, workers=2, transactional=False)


async def drain_transactional(place: Place) -> float:
    return await _drain(place, workers=1, transactional=True)


async def _drain(place: Place, *, workers: int, transactional: bool) -> float:
    async with _sender(place, transactional=transactional) as (contender, url):
        await _fill(contender, place.messages)
        place.engine.calm(url)
        board = Board(place.directory / "board", workers)
        mode = TRANSACTIONAL if transactional else PLAIN
        who = (place.engine.name, place.contender, mode, url, str(board.path))
        async with hired(workers, place.directory, *who) as crew:
            crew.begin()
            end = await _drained(contender, board, crew, place.messages)
        if board.ran != place.messages or (transactional and place.engine.effects(url) != place.messages):
            raise RuntimeError(f"{board.ran} runs and {place.engine.effects(url)} rows for {place.messages} messages")
        return place.messages / (end - board.started) * 1e9


async def _fill(contender: Contender, messages: int) -> None:
    for start in range(0, messages, BULK):
        await contender.enqueue_many([make_job(seq) for seq in range(start, min(start + BULK, messages))])


async def _drained(contender: Contender, board: Board, crew: Crew, messages: int) -> int:
    """Return the moment at which nothing was left; the store is not asked before every handler has run."""
    async with asyncio.timeout(_DRAIN_SECONDS_MAX):
        while board.ran < messages:
            crew.check()
            await asyncio.sleep(_LOOK_SECONDS)
        while True:
            asked_at = time.perf_counter_ns()
            if await contender.left() <= 0:
                return asked_at
            await asyncio.sleep(_LOOK_SECONDS)
