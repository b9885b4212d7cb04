"""S11 again: the rate of other messages when some end the process they run in, below the supervisor."""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks.board import Board
from benchmarks.contender import KILLERS, Mode, NotBuiltError
from benchmarks.place import Figures, Place

ROW = "S11 killers"
#: The same drain without them, as a separate series.
HARMLESS = "no killers"
_PROCESSES = 2
_MESSAGES = 10_000
_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.02
_SUPERVISED = "--processes"


async def with_killers(place: Place) -> Figures:
    """Drain the same messages twice; some of them end their process in one of the two drains."""
    if _SUPERVISED not in await _help():
        raise NotBuiltError("onefold worker has no supervisor yet")
    harmless = await _drain(place, Mode.PLAIN, 0)
    return {place.row: {place.contender: [await _drain(place, Mode.KILLER, len(KILLERS))], HARMLESS: [harmless]}}


async def _help() -> str:
    command = (sys.executable, "-m", "onefold", "worker", "--help")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


async def _drain(place: Place, mode: Mode, killers: int) -> float:
    """Return the rate of the other messages, until the last of them; one beside a killer may have run twice."""
    async with place.sender(mode) as (sender, url):
        await sender.ask("fill", messages=_MESSAGES)
        place.engine.calm(url)
        board = Board(place.directory, 0, 0)
        async with place.deployed(url, board, _MESSAGES, mode, _SUPERVISED, str(_PROCESSES)) as worker:
            async with asyncio.timeout(_SECONDS_MAX):
                while len(board.waits()) < _MESSAGES - killers:
                    worker.check()
                    await asyncio.sleep(_LOOK_SECONDS)
            return (_MESSAGES - killers) / (time.perf_counter_ns() - board.started) * 1e9
