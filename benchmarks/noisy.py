"""onefold with one plain task and others whose messages are the noise beside it; see ``benchmarks.noise``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from benchmarks.board import Tally
from benchmarks.contender import Job, Mode, Ready, make_job
from benchmarks.ours import QUEUE, Count, Onefold, make_sleeper, not_here
from onefold import App, Rate, Task
from onefold.store import Again, Dead, Done, Failure, Lease, Outcome, Parked, Query, State
from onefold.store.journal_lines import Line, LineKind
from onefold.tasks.options import SendOptions

#: Names of tasks.  Only a sender has the last one, so a worker does not know its messages.
NOTIFY, ORDERED, FAIR, RATED, CAPPED, SLEEPER = "notify", "ordered", "fair", "rated", "capped", "sleeper"
UNKNOWN = "unknown"
#: The beginning of the keys of noise.
SHUT = "shut"
EXAMPLE_KEY = f"{SHUT}-0"
#: Beginnings of keys of measured messages: a walk of all gates meets them before, among and behind those of noise.
_OPEN = ("a", f"{SHUT}-3/", "m", f"{SHUT}-7/", "z")

#: Queues of a worker with very many.
QUEUES = 300
_ELSEWHERE = "elsewhere"
_DAY_SECONDS, _HOUR_SECONDS = 86_400.0, 3_600.0
#: ``Receipt.result`` looks after 5, 15 and 35 ms, so a figure taken with it would be one of these.
_LOOK_SECONDS = 0.001
#: A claim walks past some thousand shut gates at most, and the next one goes on from there.
_CLAIMS_MAX = 10

_FAILED = Failure(reason="failed", error_type="ValueError", error_message="no")
_SIGNAL = Line("go#1", LineKind.TIMER, msgspec.json.encode(None), b"")


class Example(StrEnum):
    """A message that is copied to make noise, by its state or the place where it waits."""

    LATER = "later"
    ELSEWHERE = "elsewhere"
    UNKNOWN = "unknown"
    UNKNOWN_LINE = "unknown line"
    PARKED = "parked"
    DEAD = "dead"
    DONE = "done"
    BACKED_OFF = "backed off"
    LINE = "line"
    LINE_ELSEWHERE = "line elsewhere"
    FAIR = "fair"
    #: It has used up its key's token, or waits for the next one.
    RATED_SPENT = "rated spent"
    RATED = "rated"
    #: It has its key's only place, or waits for it.
    CAPPED_RUNNING = "capped running"
    CAPPED = "capped"


_TASKS = {
    Example.UNKNOWN: UNKNOWN,
    Example.UNKNOWN_LINE: UNKNOWN,
    Example.PARKED: SLEEPER,
    Example.LINE: ORDERED,
    Example.LINE_ELSEWHERE: ORDERED,
    Example.FAIR: FAIR,
    Example.RATED_SPENT: RATED,
    Example.RATED: RATED,
    Example.CAPPED_RUNNING: CAPPED,
    Example.CAPPED: CAPPED,
}
_OPTIONS: dict[Example, SendOptions] = {
    Example.LATER: {"delay": _DAY_SECONDS},
    Example.ELSEWHERE: {"queue": _ELSEWHERE},
    Example.UNKNOWN_LINE: {"ordering_key": EXAMPLE_KEY},
    Example.LINE: {"delay": _DAY_SECONDS},
    Example.LINE_ELSEWHERE: {"queue": _ELSEWHERE},
    Example.FAIR: {"delay": _DAY_SECONDS},
}
#: The outcomes of examples that are claimed; None for one that stays leased.
_OUTCOMES: dict[Example, Outcome | None] = {
    Example.PARKED: Parked(_DAY_SECONDS, 0, 1, steps=(_SIGNAL,)),
    Example.DEAD: Dead(_FAILED),
    Example.DONE: Done(b"null"),
    Example.BACKED_OFF: Again(_DAY_SECONDS, _FAILED),
    Example.RATED_SPENT: Done(b"null"),
    Example.CAPPED_RUNNING: None,
}


class Noisy(Onefold):
    """Sends plain tasks; makes examples of noise, and measures single messages of every task."""

    def declare(self, count: Count | None) -> tuple[App, Task[Any, Any]]:
        return declare(self._url, count)

    def _of(self, job: Job) -> Any:
        """Return what sends a message: with very many queues, each message goes to another one than that before."""
        if self._mode is not Mode.QUEUES:
            return self._task
        return self._task.options(queue=_queue(job.seq % QUEUES))

    async def enqueue_one(self, job: Job) -> None:
        await self._of(job).send(*job)

    async def enqueue_many(self, jobs: list[Job]) -> None:
        await self._app.send_many(self._of(job).call(*job) for job in jobs)

    async def drain(self, tally: Tally, ready: Ready) -> None:
        app, _ = self.declare(tally.count)
        async with app:
            ready()
            queues = [_queue(number) for number in range(QUEUES)] if self._mode is Mode.QUEUES else [QUEUE]
            await app.work(queues=queues)

    async def example(self, *, kind: str, seq: int) -> str:
        """Store one message in the state or at the place that the kind says; return its id."""
        example = Example(kind)
        task: Any = self._app.tasks[_TASKS.get(example, NOTIFY)]
        arguments = make_job(seq)._replace(to=EXAMPLE_KEY)
        sender = task.options(**_OPTIONS[example]) if example in _OPTIONS else task
        receipt = await sender.send(*arguments, *((None,) if example is Example.PARKED else ()))
        if example in _OUTCOMES:
            await self._claim(receipt.id, _OUTCOMES[example])
        return str(receipt.id)

    async def _claim(self, id_: str, outcome: Outcome | None) -> None:
        store, registry = self._app.store, self._app.registry
        leases: list[Lease] = []
        for _ in range(_CLAIMS_MAX):
            leases = leases or await store.claim(
                [QUEUE],
                types=registry.types(),
                limit=1,
                lease=_HOUR_SECONDS,
                worker="bench",
                gatings=registry.gatings,
            )
        if [lease.id for lease in leases] != [id_]:
            raise RuntimeError(f"{len(leases)} messages were claimed instead of the example")
        if outcome is not None:
            await store.settle([(leases[0], outcome)])

    async def leased(self) -> tuple[int, int]:
        """Return the time of the question to the store, and the number of messages that were leased."""
        table = "onefold_delivery" if self._url.startswith("sqlite:") else "onefold.delivery"
        asked_at = time.perf_counter_ns()
        rows = await self._app.store.fetch(f"SELECT count(*) FROM {table} WHERE state = {State.LEASED:d}")
        return asked_at, rows[0][0]

    async def latencies(self, *, task: str, messages: int, first: int, pause: float, seconds_max: float) -> list[float]:
        """Send messages one by one; return the milliseconds from each call of send until the message is done.

        After ``seconds_max`` no more are sent; the last one may not be done then.
        """
        taken: list[float] = []
        end = time.perf_counter() + seconds_max
        for job in _open_jobs(first, messages):
            start = time.perf_counter()
            sender: Any = self._of(job) if task == NOTIFY else self._app.tasks[task]
            receipt = await sender.send(*job)
            await self._wait_for_end(receipt.id, end)
            taken.append(1e3 * (time.perf_counter() - start))
            if time.perf_counter() >= end:
                break
            await asyncio.sleep(pause)
        return taken

    async def _wait_for_end(self, id_: str, until: float) -> None:
        while time.perf_counter() < until:
            record = (await self._app.store.find(Query(ids=(id_,))))[0]
            if record.state.ended:
                break
            await asyncio.sleep(_LOOK_SECONDS)

    async def send_times(self, *, seconds: float, pause: float, first: int) -> list[float]:
        """Send plain messages with pauses; return the milliseconds that each call of send took."""
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            job = make_job(first + len(taken))
            start = time.perf_counter()
            await self.enqueue_one(job)
            taken.append(1e3 * (time.perf_counter() - start))
            await asyncio.sleep(pause)
        return taken


def _open_jobs(first: int, messages: int) -> Iterator[Job]:
    """Yield jobs with keys of their own, because a key has one token an hour."""
    for seq in range(first, first + messages):
        yield make_job(seq)._replace(to=f"{_OPEN[seq % len(_OPEN)]}{seq}")


def _queue(number: int) -> str:
    return QUEUE if number == 0 else f"queue-{number}"


def declare(url: str, count: Count | None) -> tuple[App, Task[Any, Any]]:
    """Declare the plain task and those at gates; a sender has one more."""
    app, run = App(url), count or not_here

    async def handler(seq: int, t0: int, to: str, template: str) -> None:
        run(seq, t0)

    plain = app.task(name=NOTIFY, key="{seq}")(handler)
    app.task(name=ORDERED, key="{seq}", ordering_key="{to}")(handler)
    app.task(name=FAIR, key="{seq}", fair_key="{to}")(handler)
    app.task(name=RATED, key="{seq}", gate="{to}", rate_each=Rate(1, per=_HOUR_SECONDS))(handler)
    app.task(name=CAPPED, key="{seq}", gate="{to}", max_running_each=1)(handler)
    app.workflow(name=SLEEPER, key="{seq}")(make_sleeper(run))
    if count is None:
        app.task(name=UNKNOWN, key="{seq}")(handler)
    return app, plain
