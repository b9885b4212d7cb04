"""One process of a contender: ``python -m benchmarks.agent MODULE:CLASS MODE URL``.

It reads commands as lines of JSON from its standard input, answers each with one line, and ends with its input, so
that no worker outlives the process that measures it.  ``peers/agent.mjs`` does the same in JavaScript.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from benchmarks.board import Tally
from benchmarks.contender import Contender, Mode, make_job
from benchmarks.loop import run

#: Messages sent before the clock starts, to warm up connections, prepared statements and caches.
WARM_UP = 50
#: Messages per call of a bulk send.
BULK = 1_000


class Agent:
    """The commands of a contender's process; each method is the command of that name."""

    def __init__(self, contender: Contender, wires: Wires) -> None:
        self._contender = contender
        self._wires = wires

    async def setup(self) -> None:
        await self._contender.setup()

    async def send(self, *, senders: int, seconds: float) -> float:
        """Send one by one from some senders at once; return messages per second."""
        numbers = itertools.count()
        for seq in itertools.islice(numbers, WARM_UP):
            await self._contender.enqueue_one(make_job(seq))
        start = time.perf_counter()
        sent = await asyncio.gather(*(self._send_until(start + seconds, numbers) for _ in range(senders)))
        return sum(sent) / (time.perf_counter() - start)

    async def _send_until(self, until: float, numbers: Iterator[int]) -> int:
        sent = 0
        while time.perf_counter() < until:
            await self._contender.enqueue_one(make_job(next(numbers)))
            sent += 1
        return sent

    async def bulk(self, *, seconds: float) -> float:
        """Send in bulk; return messages per second."""
        await self.fill(messages=WARM_UP)
        start, sent = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            first = WARM_UP + sent
            await self._contender.enqueue_many([make_job(seq) for seq in range(first, first + BULK)])
            sent += BULK
        return sent / (time.perf_counter() - start)

    async def fill(self, *, messages: int, first: int = 0) -> None:
        for start in range(first, first + messages, BULK):
            end = min(start + BULK, first + messages)
            await self._contender.enqueue_many([make_job(seq) for seq in range(start, end)])

    async def pace(self, *, messages: int, per_second: float, batch: int, first: int) -> None:
        """Send at a steady rate, in batches."""
        start = time.perf_counter()
        for number in range(0, messages, batch):
            await asyncio.sleep(max(0.0, start + number / per_second - time.perf_counter()))
            if batch == 1:
                await self._contender.enqueue_one(make_job(first + number))
            else:
                await self.fill(messages=batch, first=first + number)

    async def left(self) -> tuple[int, int]:
        """Return the time of the question to the store, and the number of messages it said were left."""
        asked_at = time.perf_counter_ns()
        return asked_at, await self._contender.left()

    async def drain(self, *, board: str) -> None:
        await self._contender.drain(Tally(Path(board)), self._wires.wait_for_begin)

    async def special(self, *, name: str, **options: Any) -> Any:
        """Run a command that only one contender has."""
        return await getattr(self._contender, name)(**options)


class Wires:
    """Standard input and output; text that a library prints goes to the log instead."""

    def __init__(self) -> None:
        self._output: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._orders.put(json.loads(line))
        os._exit(0)

    async def next_order(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._orders.get)

    def answer(self, **fields: Any) -> None:
        self._output.write(json.dumps(fields) + "\n")

    def wait_for_begin(self) -> None:
        self.answer(answer=None)
        self._orders.get()


async def serve(contender: Contender, wires: Wires) -> None:
    agent = Agent(contender, wires)
    while True:
        order = await wires.next_order()
        try:
            wires.answer(answer=await getattr(agent, order.pop("do"))(**order))
        except Exception as error:
            traceback.print_exc()
            wires.answer(error=type(error).__name__, text=str(error))


def main(where: str, mode: str, url: str) -> None:
    wires = Wires()
    module, _, name = where.partition(":")
    contender: Contender = getattr(importlib.import_module(module), name)(url, Mode(mode))
    run(serve(contender, wires))


if __name__ == "__main__":
    main(*sys.argv[1:])
