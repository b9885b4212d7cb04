"""One chaos run on a store of its own: senders, workers and faults for a while, then no faults, then the comparison."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import apsw
import psycopg
from psycopg import sql

from onefold import limits
from onefold.app import App
from onefold.clock import MICROSECONDS, SystemClock
from onefold.errors import OnefoldError
from onefold.store import Failure, Query, Record
from onefold.testing.chaos import demand
from onefold.testing.chaos.app import make_tables, make_tasks
from onefold.testing.chaos.fleet import Fleet, Role
from onefold.testing.chaos.judge import Tables, Verdict, judge
from onefold.testing.chaos.nemesis import Nemesis, PostgresNemesis, SQLiteNemesis
from onefold.testing.chaos.process import Loop, Orders
from onefold.testing.chaos.sender import read_journal
from onefold.testing.checker import Journal
from onefold.testing.proxy import Proxy
from onefold.testing.servers import PostgresServer

#: A run in which some fault has not occurred often enough is extended to at most this many times its seconds.
STRETCH_MAX = 3.0
#: Seconds that all processes have to get ready before the first fault.
START_SECONDS = 30.0
#: Seconds that senders and workers have to stop after they were told to.
STOP_SECONDS = 20.0
#: Seconds in which all accepted messages must end after the faults have ended.
DRAIN_SECONDS = 180.0
#: Seconds between two checks of the unfinished messages and of the quarantined ones.
LOOK_SECONDS = 0.25
REDRIVE_SECONDS = 2.0
#: How many violations are printed.
VIOLATIONS_SHOWN = 30

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The duration, the load and the faults of a run."""

    seed: int
    seconds: float
    workers: int = 3
    supervisors: int = 1
    senders: int = 2
    #: Messages a second, all senders together.
    rate: float = 150.0
    loop: Loop = "asyncio"
    #: A factor on the frequency of faults.
    pace: float = 1.0
    #: The run continues until each of these events has happened this often.
    least: Mapping[str, int] = field(default_factory=dict)
    #: Whether the PostgreSQL server itself is killed and restarted.
    restarts: bool = False


@dataclass(slots=True)
class Outcome:
    """The events of a run and the result of the comparison."""

    settings: Settings
    store: str
    seconds: float
    verdict: Verdict
    events: Counter[str]
    #: Other problems: workers that ended by themselves or did not stop, dead letters.
    problems: list[str]

    @property
    def failed(self) -> bool:
        """Whether any promise was broken."""
        return bool(self.verdict.report or self.problems)

    def __str__(self) -> str:
        shown = self.verdict.report.violations[:VIOLATIONS_SHOWN]
        more = len(self.verdict.report.violations) - len(shown)
        lines = [self.headline, *self.problems, *map(str, shown)]
        return "\n".join([*lines, f"and {more} more"] if more else lines)

    @property
    def headline(self) -> str:
        """One line about the run, with its seed."""
        v, events = self.verdict, ", ".join(f"{number} {name}" for name, number in sorted(self.events.items()))
        return (
            f"chaos on {self.store} with seed {self.settings.seed} on {self.settings.loop}, {self.seconds:.0f} s: "
            f"{v.accepted} accepted, {v.messages} messages, {v.rows} rows compared; "
            f"{v.lost} lost, {v.twice} twice, {v.wrong} wrong rows, {v.phantom} not asked for; {events}"
        )

    def figures(self) -> dict[str, str]:
        """The rows of a table for the report."""
        v = self.verdict
        counted = {name: f"{number:,}" for name, number in sorted(self.events.items())}
        compared = {"messages accepted": v.accepted, "messages in the end": v.messages, "rows compared": v.rows}
        judged = {"**lost**": v.lost, "**twice**": v.twice, "**wrong rows**": v.wrong, "not asked for": v.phantom}
        return {
            "seed": str(self.settings.seed),
            "event loop": self.settings.loop,
            "minutes": f"{self.seconds / 60:.1f}",
            **{name: f"{number:,}" for name, number in compared.items()},
            **counted,
            **{name: f"**{number:,}**" if "*" in name else f"{number:,}" for name, number in judged.items()},
            "other problems": f"{len(self.problems)}",
        }


class Chaos:
    """The parts of a run that are the same on every store."""

    def __init__(self, settings: Settings, store: str, url: str, folder: Path) -> None:
        self.settings = settings
        self._store = store
        #: The URL for the harness itself, without the proxy.
        self._url = url
        self._folder = folder
        self._clock = SystemClock()
        self._chance = random.Random(f"{settings.seed} orders")
        self._redriven: set[str] = set()
        self._problems: list[str] = []
        self.fleet = Fleet(folder, str(settings.seed), self._orders_for)
        self.urls: list[str] = [url]

    def _orders_for(self, role: Role, slot: int, name: str) -> Orders:
        settings = self.settings
        # The sqlite3 module cannot use the VFS that lets files fail.
        can_fail = self._url.startswith("sqlite") and "driver=sqlite3" not in self._url and role != "supervisor"
        return Orders(
            url=self.urls[-1] if role == "supervisor" else self._chance.choice(self.urls),
            folder=str(self._folder),
            name=name,
            seed=f"{settings.seed} {name}",
            loop=settings.loop,
            faulty_files=can_fail and slot % 2 == 0,
            slot=slot,
            rate=settings.rate / settings.senders,
        )

    async def run(self, nemesis: Nemesis, progress: Progress) -> Outcome:
        """Make the tables, cause faults, wait until all messages have ended, compare."""
        await make_tables(make_tasks(self._url))
        try:
            self._start()
            progress("starting", 0.0)
            await self.fleet.until_ready(START_SECONDS)
            began = self._clock.steady()
            await self._storm(nemesis, progress)
            took = (self._clock.steady() - began) / MICROSECONDS
            progress("calming down", 0.0)
            await self._stop_senders()
            progress("draining", 0.0)
            records = await self._drain()
            await self._stop_workers()
        finally:
            self.fleet.end()
        progress("comparing", 0.0)
        verdict = judge(self._journal(), records, read_tables(self._url), redriven=self._redriven)
        events = nemesis.events + self.fleet.figures + self._suffered()
        events["quarantined and redriven"] = len(self._redriven)
        self._problems += [f"ended by itself: {one}" for one in self.fleet.surprises]
        return Outcome(self.settings, self._store, took, verdict, +events, self._problems)

    def _start(self) -> None:
        settings = self.settings
        counts: dict[Role, int] = {
            "worker": settings.workers,
            "supervisor": settings.supervisors,
            "sender": settings.senders,
        }
        for role, number in counts.items():
            for slot in range(number):
                self.fleet.start(role, slot)

    async def _storm(self, nemesis: Nemesis, progress: Progress) -> None:
        """Cause faults for the requested time, and until each has occurred often enough."""
        stopping = asyncio.Event()
        began, settings = self._clock.steady(), self.settings
        async with asyncio.TaskGroup() as group:
            group.create_task(nemesis.run(stopping))
            operating = group.create_task(self._redrive_meanwhile())
            passed = 0.0
            while passed < settings.seconds * STRETCH_MAX:
                await self._clock.sleep(LOOK_SECONDS)
                passed = (self._clock.steady() - began) / MICROSECONDS
                progress("chaos", passed)
                missing = [name for name, number in settings.least.items() if nemesis.events[name] < number]
                if passed >= settings.seconds and not missing:
                    break
            else:
                self._problems.append(f"not often enough: {', '.join(missing)}")
            stopping.set()
            operating.cancel()

    # operating

    async def _redrive_meanwhile(self) -> None:
        """Redrive, during the faults, messages that were quarantined because their workers were killed."""
        app = App(self._url)
        try:
            while True:
                await self._clock.sleep(REDRIVE_SECONDS)
                with suppress(OnefoldError):
                    await app.open()
                    await self._redrive(app)
        finally:
            await app.close()

    async def _redrive(self, app: App) -> None:
        async for letter in app.dead_letters():
            if was_killed(letter.failure):
                await letter.redrive(actor="chaos", reason="it was killed from outside")
                self._redriven.add(letter.id)

    # calming down

    async def _stop_senders(self) -> None:
        """Stop the senders, then send unanswered messages again, so that every message with a key is accepted."""
        late = await self.fleet.stop(self.fleet.of("sender"), STOP_SECONDS)
        self._problems += [f"{member.log.stem} did not stop" for member in late]
        last = [self.fleet.start("sender", slot, only_repeat=True) for slot in range(self.settings.senders)]
        for member in await self.fleet.ended(last, DRAIN_SECONDS):
            self._problems.append(f"{member.log.stem} could not send everything:\n{member.log.read_text()[-1_500:]}")

    async def _drain(self) -> list[Record]:
        """Wait until every message has ended, for as long as the number left goes down; return all messages."""
        give_up_at, fewest = self._clock.steady() + DRAIN_SECONDS * MICROSECONDS, math.inf
        async with App(self._url) as app:
            while self._clock.steady() < give_up_at:
                self.fleet.tend()
                with suppress(OnefoldError):
                    await self._redrive(app)
                    left = sum(c.scheduled + c.leased + c.parked for c in (await app.count()).values())
                    if not left:
                        break
                    if left < fewest:
                        give_up_at, fewest = self._clock.steady() + DRAIN_SECONDS * MICROSECONDS, left
                await self._clock.sleep(LOOK_SECONDS)
            else:
                self._problems.append(f"no fewer are left than {DRAIN_SECONDS:g} s ago: {await app.count()}")
            async for letter in app.dead_letters():
                said = f"{letter.failure.reason}: {letter.failure.error_type}: {letter.failure.error_message}"
                self._problems.append(f"dead letter {letter.id} {letter.message.message_type}: {said}")
            return await all_records(app)

    async def _stop_workers(self) -> None:
        late = await self.fleet.stop(self.fleet.of("worker", "supervisor"), STOP_SECONDS)
        self._problems += [f"{m.log.stem} did not stop:\n{m.log.read_text()[-1_500:]}" for m in late]
        if left := await self.fleet.left_behind(limits.STOP_SECONDS):
            self._problems.append(f"{len(left)} processes were left behind")

    # reading

    def _journal(self) -> Journal:
        """Read the journals of all senders."""
        whole = Journal()
        for path in sorted(self._folder.glob("*.journal")):
            whole.entries.extend(read_journal(path).entries)
        return whole

    def _suffered(self) -> Counter[str]:
        """Count disk faults, unanswered sends and errors of other types, from the files that processes wrote."""
        suffered = Counter[str]()
        for path in self._folder.glob("*.faults"):
            suffered["disk faults"] += path.read_text().count("\n")
        for path in self._folder.glob("*.errors"):
            for line in path.read_text().splitlines():
                suffered[f"sends that raised {line.partition(': ')[0]}"] += 1
        for entry in self._journal().entries:
            suffered["sends without an answer, repeated if keyed"] += entry.event == "unknown"
        return suffered


def was_killed(failure: Failure) -> bool:
    """Whether a message is dead only because its workers, or those of a child of it, were killed."""
    return failure.reason == "quarantined" or (
        failure.reason == "child failed" and "(quarantined)" in failure.error_message
    )


def read_tables(url: str) -> Tables:
    """Read every table with the engine's own driver, without onefold."""
    names = (*demand.ROW_TABLES, *demand.SUM_TABLES)
    if url.startswith("sqlite"):
        connection = apsw.Connection(_path_of(url), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return {name: list(connection.execute(f"SELECT * FROM {name}")) for name in names}
        finally:
            connection.close()
    with psycopg.connect(url) as server:
        select = sql.SQL("SELECT * FROM {}")
        return {name: server.execute(select.format(sql.Identifier(name))).fetchall() for name in names}


async def all_records(app: App) -> list[Record]:
    """Read every message of a store."""
    records: list[Record] = []
    while page := await app.find(Query(limit=limits.PAGE_MAX, after=records[-1].envelope.id if records else "")):
        records += page
    return records


def _path_of(url: str) -> str:
    return url.removeprefix("sqlite:///").partition("?")[0]


def _silent(phase: str, seconds: float) -> None:
    """Report nothing."""


async def chaos_on_sqlite(settings: Settings, *, options: str = "", progress: Progress = _silent) -> Outcome:
    """Run chaos on a new SQLite file; ``options`` are those of its URL, such as ``driver=sqlite3``."""
    with _folder() as folder:
        url = f"sqlite:///{folder}/chaos.db" + (f"?{options}" if options else "")
        chaos = Chaos(settings, f"sqlite ({options})" if options else "sqlite", url, folder)
        nemesis = SQLiteNemesis(chaos.fleet, str(settings.seed), Path(_path_of(url)), pace=settings.pace)
        return await chaos.run(nemesis, progress)


async def chaos_on_postgres(
    settings: Settings, server: PostgresServer, url: str, *, progress: Progress = _silent
) -> Outcome:
    """Run chaos on an empty database of a server; half of the processes connect through a proxy that fails."""
    with _folder() as folder:
        async with Proxy("127.0.0.1", server.port) as proxy:
            chaos = Chaos(settings, "postgres", url, folder)
            chaos.urls = [proxy.through(url), url]
            nemesis = PostgresNemesis(
                chaos.fleet,
                str(settings.seed),
                server,
                urlsplit(url).path.removeprefix("/"),
                proxy,
                pace=settings.pace,
                restarts=settings.restarts,
            )
            return await chaos.run(nemesis, progress)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="onefold-chaos-") as folder:
        yield Path(folder)
