"""onefold itself, with all of its promises and with every setting at its default."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from benchmarks.board import Tally
from benchmarks.contender import KILLERS, POISON_EVERY, STEPS, Job, Mode, Ready, make_job
from benchmarks.engines import insert_effect
from onefold import App, Context, Run, Task
from onefold.message.codec import fingerprint_of_call
from onefold.store import Done, Parked
from onefold.store.journal_lines import Line, LineKind

QUEUE = "default"
_CLAIM_LEASE = 60.0
_PARKED_AT_ONCE = 1_000
_LINED_AT_ONCE = 1_000
_LONG_SECONDS = 3_600.0

Handler = Callable[..., Awaitable[None]]
Count = Callable[[int, int], None]


class Onefold:
    """Sends keyed tasks; sender and worker make the same app."""

    def __init__(self, url: str, mode: Mode) -> None:
        self._url = url
        self._mode = mode

    def declare(self, count: Count | None) -> tuple[App, Task[Any, Any]]:
        """Return the app, and the task that is sent; ``count`` is None in a sender, which runs no handler."""
        return declare(self._url, self._mode, count)

    async def setup(self) -> None:
        self._app, self._task = self.declare(None)
        await self._app.migrate()
        await self._app.open()

    async def close(self) -> None:
        await self._app.close()

    async def enqueue_one(self, job: Job) -> None:
        await self._task.send(*job)

    async def enqueue_many(self, jobs: list[Job]) -> None:
        await self._app.send_many(self._task.call(*job) for job in jobs)

    async def fill_lines(self, *, messages: int, lines: int, first: int) -> None:
        """Send messages in lines, each in another line than the one before."""
        for start in range(first, first + messages, _LINED_AT_ONCE):
            jobs = [make_job(seq) for seq in range(start, min(start + _LINED_AT_ONCE, first + messages))]
            calls = (self._task.options(ordering_key=f"line-{job.seq % lines}").call(*job) for job in jobs)
            await self._app.send_many(calls)

    async def left(self) -> int:
        return sum(counts.scheduled + counts.leased for counts in (await self._app.count()).values())

    async def drain(self, tally: Tally, ready: Ready) -> None:
        app, _ = self.declare(tally.count)
        async with app:
            ready()
            await app.work()

    async def claims(self, *, size: int, number: int, every: float = 0.0) -> list[tuple[float, int]]:
        """Claim and settle in batches without running a handler; return the seconds and the messages of each claim."""
        store, types = self._app.store, list(self._app.tasks)
        taken: list[tuple[float, int]] = []
        begin = time.perf_counter()
        for turn in range(number):
            await asyncio.sleep(max(0.0, begin + turn * every - time.perf_counter()))
            start = time.perf_counter()
            leases = await store.claim([QUEUE], types=types, limit=size, lease=_CLAIM_LEASE, worker="bench")
            taken.append((time.perf_counter() - start, len(leases)))
            await store.settle([(lease, Done(b"null")) for lease in leases])
        return taken

    async def park(self, *, messages: int, seconds: float | None, first: int = 0) -> None:
        """Send runs and park them as their first activation would: for a signal, or for a number of seconds."""
        store, types = self._app.store, self._app.registry.types()
        name, fingerprint = ("go#1", b"") if seconds is None else ("sleep#1", fingerprint_of_call((seconds,), {}))
        timer = Line(name, LineKind.TIMER, msgspec.json.encode(seconds), fingerprint)
        awaits, parked = (1 if seconds is None else 0), 0
        for start in range(first, first + messages, _PARKED_AT_ONCE):
            jobs = [make_job(seq) for seq in range(start, min(start + _PARKED_AT_ONCE, first + messages))]
            await self._app.send_many(self._task.call(*job, seconds) for job in jobs)
            leases = await store.claim([QUEUE], types=types, limit=len(jobs), lease=_CLAIM_LEASE, worker="bench")
            # Nothing is due before all are parked.
            await store.settle([(one, Parked(_LONG_SECONDS, one.wake, awaits, steps=(timer,))) for one in leases])
            parked += len(leases)
        if parked != messages:
            raise RuntimeError(f"{parked} of {messages} runs were parked")

    async def send_awake(self, *, seq: int) -> None:
        """Send a run that ends without waiting."""
        await self._task.send(*make_job(seq), 0.0)


def declare(url: str, mode: Mode, count: Count | None) -> tuple[App, Task[Any, Any]]:
    """Declare the one task that is needed, so that claims ask for one type; a sender needs its signature only."""
    app = App(url)
    if mode is Mode.PARKED:
        return app, app.workflow(key="{seq}")(make_sleeper(count or not_here))
    if mode is Mode.WORKFLOW:
        return app, app.workflow(key="{seq}")(_workflow(count or not_here))
    return app, app.task(key="{seq}")(_handler(mode, count or not_here, insert_effect(url)))


def not_here(seq: int, made_at: int) -> None:
    raise AssertionError("a sender runs no handler")


def _workflow(count: Count) -> Callable[..., Awaitable[int]]:
    async def add(one: int, other: int) -> int:
        return one + other

    async def five(run: Run, seq: int, t0: int, to: str, template: str) -> int:
        count(seq, t0)
        for number in range(STEPS):
            seq = await run.step(add, seq, number)
        return seq

    return five


def make_sleeper(count: Count) -> Callable[..., Awaitable[None]]:
    async def sleeper(run: Run, seq: int, t0: int, to: str, template: str, seconds: float | None) -> None:
        if seconds is None:
            await run.signal("go")
        else:
            await run.sleep(seconds)
        count(seq, t0)

    return sleeper


def _handler(mode: Mode, count: Count, insert: str) -> Handler:

    async def notify(seq: int, t0: int, to: str, template: str) -> None:
        count(seq, t0)

    async def record(ctx: Context, seq: int, t0: int, to: str, template: str) -> None:
        count(seq, t0)
        await ctx.execute(insert, seq, to)

    async def fail_sometimes(seq: int, t0: int, to: str, template: str) -> None:
        if seq % POISON_EVERY == 0:
            raise RuntimeError("poison")
        count(seq, t0)

    async def wait(seq: int, t0: int, to: str, template: str) -> None:
        count(seq, t0)
        await asyncio.Event().wait()

    async def kill(seq: int, t0: int, to: str, template: str) -> None:
        if seq in KILLERS:
            os._exit(1)
        count(seq, t0)

    handlers: dict[Mode, Handler] = {
        Mode.PLAIN: notify,
        Mode.TRANSACTIONAL: record,
        Mode.POISON: fail_sometimes,
        Mode.WAITING: wait,
        Mode.KILLER: kill,
    }
    return handlers[mode]
