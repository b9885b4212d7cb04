"""N0 to N14: plain messages, and due ones at gates, beside very many other messages.

Every kind of noise has a database, a sender and workers of its own, so no state is left from the kind before.
The ratios are to the same measures without noise (N0), which are taken before, in the middle and after.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.board import Board
from benchmarks.contender import Mode
from benchmarks.noise import ALONE, Noise, fill
from benchmarks.noisy import CAPPED, FAIR, NOTIFY, ORDERED, RATED, Example
from benchmarks.place import Figures, Place, wait_for
from benchmarks.processes import Agent
from onefold import limits

#: Behind the code of a kind in the names of its rows.
DRAIN, SEND, DUE, COMMITS, BYTES = "drain", "send", "due", "commits", "bytes"
#: Tasks at whose gates noise waits.
GATED = (ORDERED, FAIR, RATED, CAPPED)

DRAINED = 3_000
#: Pauses between sends: after the first the worker is idle again, the second is that of a busy web application.
_PAUSE_SECONDS, BUSY_PAUSE_SECONDS = 0.02, 0.01
_WARM_UP = 5
#: Beside the worst noise a single message once took eleven seconds.
_LATENCY_SECONDS_MAX = 20.0
#: After its first messages a worker is idle by then.
_SETTLE_SECONDS = 1.5
#: A worker writes its entry in the register at its start and then this often, so it is watched between two writes.
_WATCHED_UNTIL_SECONDS = limits.WORKER_CHECK_SECONDS - 1.0
_WATCH_SECONDS_MIN = 2.0
_SETTLED_SECONDS_MAX = 60.0
_DRAIN_SECONDS_MAX = 120.0
_LOOK_SECONDS = 0.002
#: Numbers of messages: those of examples are below zero, those of drains below this.
_FIRST = 1_000_000

Measure = Callable[[Place], Awaitable[Figures]]


def row_of(code: str, what: str = "") -> str:
    return f"{code} {what}".rstrip()


def beside(noise: Noise) -> Measure:
    """Return the measure of plain messages beside a kind of noise."""
    return partial(_measure, noise.code, noise, (noise.gated,) if noise.gated else ())


def alone() -> Measure:
    """Return the same measure without noise, with everything that is taken beside any kind."""
    return partial(_measure, ALONE, Noise(ALONE, "no noise", "no other messages"), GATED)


async def _measure(code: str, noise: Noise, gated: tuple[str, ...], place: Place) -> Figures:
    figures: Figures = {}

    def add(what: str, value: float) -> None:
        figures[row_of(code, what)] = {place.contender: [value]}

    async with place.sender(noise.mode) as (sender, url):
        await fill(place.engine, url, noise, place.scale.noise_share, partial(_ask_for_example, sender))
        visit = _Visit(place, sender, url, noise.mode, (await sender.ask("special", name="leased"))[1])
        add(DRAIN, statistics.median([await visit.drain(turn) for turn in range(place.scale.neighbour_drains)]))
        # Else the server might clean up behind the drains while the idle worker is watched.
        place.engine.tidy(url)
        await visit.stay(code, gated, add)
    return figures


async def _ask_for_example(sender: Agent, kind: Example, seq: int) -> str:
    return str(await sender.ask("special", name="example", kind=kind, seq=seq))


class _Visit:
    """The measures in one store that is full of noise."""

    def __init__(self, place: Place, sender: Agent, url: str, mode: Mode, leased: int) -> None:
        self._place = place
        self._sender = sender
        self._url = url
        self._mode = mode
        #: Messages of noise that are leased.
        self._leased = leased

    async def drain(self, turn: int) -> float:
        """Drain plain messages with a new worker, from its first claim until all are settled; return the rate."""
        await self._sender.ask("fill", messages=DRAINED, first=turn * DRAINED)
        board = Board(self._place.directory, 1, DRAINED)
        async with self._place.workers(self._url, board, self._mode) as agents:
            start = time.perf_counter_ns()
            await wait_for(board, DRAINED, agents, seconds=_DRAIN_SECONDS_MAX)
            end = await self._settled()
        board.check(DRAINED)
        return DRAINED / (end - start) * 1e9

    async def _settled(self) -> int:
        """Return the time at which no message was leased but those of the noise."""
        async with asyncio.timeout(_SETTLED_SECONDS_MAX):
            while True:
                asked_at, leased = await self._sender.ask("special", name="leased")
                if leased == self._leased:
                    return int(asked_at)
                await asyncio.sleep(_LOOK_SECONDS)

    async def stay(self, code: str, gated: tuple[str, ...], add: Callable[[str, float], None]) -> None:
        """Take what is measured beside one running worker."""
        sends, seconds = self._place.scale.neighbour_sends, self._place.scale.neighbour_seconds
        board = Board(self._place.directory, 1, _FIRST)
        async with self._place.workers(self._url, board, self._mode) as agents:
            started_at = time.perf_counter()
            sent, done = 0, True

            async def latency(task: str, messages: int) -> float:
                nonlocal sent, done
                taken = await self._latencies(task, messages, _FIRST + sent)
                sent += len(taken)
                done = done and len(taken) == messages
                return statistics.median(taken)

            await latency(NOTIFY, _WARM_UP)
            if gated:
                commits, size = await self._watch(agents[0], started_at)
                add(COMMITS, commits)
                add(BYTES, size)
            add("", await latency(NOTIFY, sends))
            if gated:
                times = await self._sender.ask(
                    "special", name="send_times", seconds=seconds, pause=BUSY_PAUSE_SECONDS, first=_FIRST + sent
                )
                sent += len(times)
                add(SEND, statistics.quantiles(times, n=10, method="inclusive")[-1])
            for task in gated:
                add(DUE if code != ALONE else task, await latency(task, max(sends // 2, 1)))
            # When a message was not done in time, its figure says so, and it may still run or not.
            if done:
                await wait_for(board, sent, agents)
                await self._settled()
                board.check(sent)

    async def _latencies(self, task: str, messages: int, first: int) -> list[float]:
        taken: list[float] = await self._sender.ask(
            "special",
            name="latencies",
            task=task,
            messages=messages,
            first=first,
            pause=_PAUSE_SECONDS,
            seconds_max=_LATENCY_SECONDS_MAX,
        )
        return taken

    async def _watch(self, worker: Agent, started_at: float) -> tuple[float, float]:
        """Return how often an idle worker commits writes, and how much goes to the engine's log, each per second."""
        await asyncio.sleep(_SETTLE_SECONDS)
        start, before = time.perf_counter(), self._place.engine.log_position(self._url)
        seconds = min(self._place.scale.watch_seconds, started_at + _WATCHED_UNTIL_SECONDS - start)
        if seconds < _WATCH_SECONDS_MIN:
            raise RuntimeError("the worker took too long to become idle, so its own upkeep would be measured")
        await asyncio.sleep(seconds)
        worker.check()
        after = self._place.engine.log_position(self._url)
        commits, size = after.since(before)
        return commits / seconds, size / seconds
