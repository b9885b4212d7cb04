"""A run that branches on every kind of decision, killed anywhere: its calls to the provider must fit one decision each.

The process that recovers finds other conditions than the one that died: the clock is days ahead, the signal has come,
failing calls succeed, the command is answered.  A decision that is made again after it was acted on gives two values.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from onefold import App, DeadError, Receipt, RetryPolicy, Run, SignalTimeoutError, State, StepError
from onefold.store import Query, Store
from onefold.testing import HastyClock, drain
from onefold.testing.crash import CrashReport, Point, crash_points

#: Opens the store of a process, with its clock and its trace of statements.
OpenStore = Callable[[HastyClock, Any], Store]

ONCE = RetryPolicy(max_attempts=1)
#: By then every lease of the dead process has run out.
LATER = timedelta(days=3)


def _live_on(when: Literal["before", "after"], what: str) -> None:
    """Do not die; the default of ``die``."""


class Branching:
    """One process: its app, and the provider, which is a file with one line per call."""

    def __init__(
        self,
        open_store: OpenStore,
        outside: Path,
        *,
        trace: Any = None,
        recovers: bool = False,
        die: Callable[[Literal["before", "after"], str], None] = _live_on,
    ) -> None:
        self.outside = outside
        self.clock = HastyClock()
        if recovers:
            self.clock.advance(LATER)
        self.app = app = App(store=open_store(self.clock, trace), clock=self.clock)

        async def act(what: str, decided: str) -> str:
            die("before", what)
            with outside.open("a") as file:
                file.write(f"{what} {decided}\n")
            die("after", what)
            return decided

        @app.step(retry=ONCE)
        async def bank() -> str:
            if not recovers:
                raise ConnectionError("the bank is down")
            return "paid"

        @app.task(queue="clerk", retry=ONCE)
        async def clerk() -> str:
            if not recovers:
                raise ConnectionError("the clerk is ill")
            return "booked"

        @app.task(queue="courier")
        async def courier() -> str:
            return "delivered"

        async def one_of_two(run: Run, number: int) -> str:
            return await run.step(act, f"branch-{number}", run.now().isoformat())

        @app.workflow(key="{key}", retry=ONCE)
        async def branching(run: Run, key: str) -> dict[str, str]:
            seen = {"now": await run.step(act, "now", run.now().isoformat())}
            try:
                answer = await run.signal("approved", timeout=timedelta(hours=1), type=str)
            except SignalTimeoutError:
                answer = "late"
            seen["signal"] = await run.step(act, "signal", answer)
            try:
                paid = await run.step(bank)
            except StepError:
                paid = "unpaid"
            seen["step"] = await run.step(act, "step", paid)
            try:
                booked = await run.child(clerk)
            except DeadError:
                booked = "unbooked"
            seen["child"] = await run.step(act, "child", booked)
            try:
                delivered = await run.options(timeout=timedelta(minutes=1)).step(courier)
            except StepError:
                delivered = "undelivered"
            seen["command"] = await run.step(act, "command", delivered)
            seen["sent"] = await run.step(act, "sent", run.send(clerk).id)
            both = await run.gather(one_of_two(run, 1), one_of_two(run, 2))
            return {**seen, "branch-1": both[0], "branch-2": both[1]}

        self.branching = branching

    async def start(self, point: Point) -> Receipt[dict[str, str]]:
        return await self.branching.send(f"branching-{point.number}")

    async def act(self, point: Point) -> None:
        """Run the workflow to its end, with a late signal and every other decision a failure."""
        await self.start(point)
        for _ in range(3):
            await self.app.work(queues=["default", "clerk"], until_idle=True)
            self.clock.advance(timedelta(hours=2))

    async def recover(self, point: Point) -> object:
        """Bring the run to its end under the other conditions; return the calls that do not agree with its result."""
        receipt = await self.start(point)
        await self.app.signal(receipt.id, "approved", "yes", id="the only one")
        dead = await self.app.find(Query(correlation_id=receipt.id, states=(State.DEAD,)))
        await self.app.redrive([record.envelope.id for record in dead], actor="ada", reason="the clerk is back")
        # The other queues answer before the run continues.
        await self.app.work(queues=["clerk", "courier"], until_idle=True)
        await drain(self.app)
        (record,) = await self.app.find(Query(ids=(receipt.id,)))
        if record.state is not State.DONE:
            return f"{record} {record.failure}"
        calls = [line.split() for line in self.outside.read_text().splitlines()]
        decided = {what: sorted({value for name, value in calls if name == what}) for what, _ in calls}
        result = await receipt.result()
        return None if decided == {what: [value] for what, value in result.items()} else f"{decided}, not {result}"


def crash_decisions(open_store: OpenStore, directory: Path, *, at_statements: bool = False) -> CrashReport:
    """Kill a run that branches on each kind of decision in each of its steps, or at each of its statements."""

    def outside(point: Point) -> Path:
        return directory / f"outside-{point.number}"

    async def act(point: Point) -> None:
        point.armed = False
        trace, die = (point.trace, _live_on) if at_statements else (None, point.trace)
        process = Branching(open_store, outside(point), trace=trace, die=die)
        async with process.app:
            point.armed = True
            await process.act(point)
            point.armed = False

    async def recover(point: Point) -> object:
        process = Branching(open_store, outside(point), recovers=True)
        async with process.app:
            return await process.recover(point)

    return crash_points(act, recover)
