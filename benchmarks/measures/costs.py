"""C1 to C4: physical costs, which do not depend on how busy or how fast the machine is.

On PostgreSQL the bytes of its log and the statements, on SQLite the bytes that the process writes: into the log, and
from there into the database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.board import Board
from benchmarks.contender import STEPS, Mode
from benchmarks.engines import FRAME_HEADER_BYTES, PAGE_BYTES, Postgres
from benchmarks.measures.draining import drained
from benchmarks.place import Figures, Place
from benchmarks.processes import Agent
from benchmarks.small import GATED, PLAIN, ROW
from benchmarks.small import STEPS as STEPS_TASK

#: Behind the codes in the names of rows.
BULK, DRAIN, WITH_ROW, AT_GATE, STEP = "bulk", "drain", "row", "gate", "step"
#: Behind those: the second figure, statements on PostgreSQL and pages on SQLite.
STATEMENTS, PAGES = "statements", "pages"

#: Messages that are sent one by one, in bulk, and drained with something more; runs of five steps; steps of one run.
SINGLE, MANY, SOME, RUNS, RUN_STEPS = 1_000, 10_000, 5_000, 400, 1_000
#: As fast as one send follows the other.
_UNLIMITED = 1e9


@dataclass(frozen=True, slots=True)
class _Spent:
    """What was written so far, and how many statements there were."""

    size: int
    statements: int


class _Meter:
    """Counts what one process does to its database; on PostgreSQL it is alone on its server."""

    def __init__(self, place: Place, url: str, agent: Agent) -> None:
        self._place = place
        self._url = url
        self._agent = agent
        self._before = self._read()

    def _read(self) -> _Spent:
        engine = self._place.engine
        if isinstance(engine, Postgres):
            statements = engine.logged_statements()
            return _Spent(engine.log_position(self._url).size, statements)
        # Everything that its processes have handed to the system; beside the pages that is next to nothing.
        return _Spent(sum(process.io_counters().write_chars for process in self._agent.tree()), 0)

    def stop(self, row: str, messages: int) -> Figures:
        """Return the costs of a message since the start, and start again."""
        before, after = self._before, self._read()
        size, name = (after.size - before.size) / messages, self._place.contender
        if isinstance(self._place.engine, Postgres):
            second = f"{row} {STATEMENTS}", (after.statements - before.statements) / messages
        else:
            second = f"{row} {PAGES}", size / (PAGE_BYTES + FRAME_HEADER_BYTES)
        self._before = after
        return {row: {name: [size]}, second[0]: {name: [second[1]]}}


@asynccontextmanager
async def _counted(place: Place, mode: Mode) -> AsyncIterator[tuple[Agent, str]]:
    """Yield a sender and its database, while nothing else writes to the server."""
    engine = place.engine
    with ExitStack() as stack:
        if isinstance(engine, Postgres):
            stack.enter_context(engine.counting())
        url = engine.create()
        stack.callback(engine.drop, url)
        if isinstance(engine, Postgres):
            engine.log_statements(url)
        async with place.sender_to(url, mode) as sender:
            yield sender, url


async def _drain(place: Place, url: str, sender: Agent, messages: int, row: str, mode: Mode) -> Figures:
    """Drain messages with a new worker; its start is a part of the costs, a small one beside so many messages."""
    if isinstance(place.engine, Postgres):
        place.engine.execute(url, "ANALYZE")
    return await _run(place, url, sender, messages, messages, row, mode)


async def _run(place: Place, url: str, sender: Agent, runs: int, shares: int, row: str, mode: Mode) -> Figures:
    board = Board(place.directory, 1, runs)
    async with place.workers(url, board, mode) as agents:
        meter = _Meter(place, url, agents[0])
        await drained(sender, board, agents, runs)
        figures = meter.stop(row, shares)
    board.check(runs)
    return figures


async def of_plain_messages(place: Place) -> Figures:
    """C1: send, send in bulk, drain."""
    async with _counted(place, Mode.PLAIN) as (sender, url):
        meter = _Meter(place, url, sender)
        await sender.ask("pace", messages=SINGLE, per_second=_UNLIMITED, batch=1, first=0)
        figures = meter.stop("C1", SINGLE)
        await sender.ask("fill", messages=MANY, first=SINGLE)
        figures |= meter.stop(f"C1 {BULK}", MANY)
        return figures | await _drain(place, url, sender, SINGLE + MANY, f"C1 {DRAIN}", Mode.PLAIN)


async def of_own_rows(place: Place) -> Figures:
    """C2: drain messages whose handlers write a row in the same commit."""
    async with _counted(place, Mode.TRANSACTIONAL) as (sender, url):
        await sender.ask("fill", messages=SOME)
        return await _drain(place, url, sender, SOME, "C2", Mode.TRANSACTIONAL)


async def of_steps(place: Place) -> Figures:
    """C3: a step of a workflow of five, with its share of the run's claim and end."""
    async with _counted(place, Mode.WORKFLOW) as (sender, url):
        await sender.ask("fill", messages=RUNS)
        return await _run(place, url, sender, RUNS, RUNS * STEPS, "C3", Mode.WORKFLOW)


async def of_small_messages(place: Place) -> Figures:
    """C4: the same with the smallest possible messages, which the bars are about."""
    async with _counted(place, Mode.SMALL) as (sender, url):
        meter = _Meter(place, url, sender)

        async def put(task: str, messages: int, *, first: int = 0) -> None:
            await sender.ask("special", name="put_at_once", task=task, first=first, messages=messages)

        async def drain(messages: int, what: str, shares: int | None = None) -> Figures:
            return await _run(place, url, sender, messages, shares or messages, f"C4 {what}", Mode.SMALL)

        await sender.ask("special", name="put", task=PLAIN, numbers=list(range(SINGLE)))
        figures = meter.stop("C4", SINGLE)
        await put(PLAIN, MANY, first=SINGLE)
        figures |= meter.stop(f"C4 {BULK}", MANY)
        figures |= await drain(SINGLE + MANY, DRAIN)
        await put(ROW, SOME)
        figures |= await drain(SOME, WITH_ROW)
        await put(GATED, SOME)
        figures |= await drain(SOME, AT_GATE)
        await sender.ask("special", name="put", task=STEPS_TASK, numbers=[RUN_STEPS])
        return figures | await drain(1, STEP, RUN_STEPS)
