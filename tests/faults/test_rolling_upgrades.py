"""Old and new versions on one database: running ones continue, an old one that starts too late writes nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from fault_scene import Scene, run, until

from onefold import App, Query, SchemaError, State
from onefold.store.open import open_store
from onefold.store.postgres import schema as postgres_schema
from onefold.store.shared.sql import Migration
from onefold.store.sqlite import schema as sqlite_schema

#: Tables that a later version may widen, and the form of such a migration.
WIDENED = ("message", "delivery", "outcome", "key", "attempt", "act", "register")
PROCESSES = 4


def later_migration(url: str) -> Migration:
    """Return a migration of a later version that lets workers of the previous one run meanwhile."""
    prefix = "onefold_" if url.startswith("sqlite") else "onefold."
    number = max(migration.number for migration in migrations_of(url)) + 1
    text = "\n".join(f"ALTER TABLE {prefix}{table} ADD COLUMN later INTEGER DEFAULT 7;" for table in WIDENED)
    return Migration(number, f"{number:04}_later.sql", f"{text}\nCREATE TABLE {prefix}later (id INTEGER);\n")


def migrations_of(url: str) -> list[Migration]:
    return sqlite_schema.MIGRATIONS if url.startswith("sqlite") else postgres_schema.MIGRATIONS


@pytest.fixture
def upgrade(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Migration]:
    """Turn this program into the later version; undone with ``monkeypatch.undo()``."""

    def upgrade() -> Migration:
        later = later_migration(store_url)
        module = sqlite_schema if store_url.startswith("sqlite") else postgres_schema
        monkeypatch.setattr(module, "MIGRATIONS", [*migrations_of(store_url), later])
        return later

    return upgrade


def dump(url: str) -> list[tuple[Any, ...]]:
    """Return every row of every table, so that any write shows."""
    if url.startswith("sqlite"):
        connection = apsw.Connection(url.removeprefix("sqlite:///"))
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").fetchall()
        rows = [(name, connection.execute(f"SELECT * FROM {name}").fetchall()) for (name,) in tables]
        connection.close()
        return rows
    with psycopg.connect(url) as opened:
        tables = opened.execute(
            "SELECT schemaname || '.' || tablename FROM pg_tables WHERE schemaname IN ('onefold', 'public') ORDER BY 1"
        ).fetchall()
        return [(name, opened.execute(f"SELECT * FROM {name}").fetchall()) for (name,) in tables]  # type: ignore[call-overload]


def test_workers_of_both_versions_run_on_the_newer_schema(store_url: str, upgrade: Callable[[], Migration]) -> None:
    """Fault 39: a worker opened before the migration continues to send, claim and settle beside the new one."""

    async def scenario() -> None:
        old = Scene(open_store(store_url))
        await old.prepare()
        async with old.app:
            await old.send("pay", "before")
            later = upgrade()
            new = Scene(open_store(store_url), journal=old.journal)
            assert await new.app.migrate() == [later.name]
            async with new.app:
                for number in range(10):
                    await old.send("pay", f"old-{number}")
                    await new.send("plain", f"new-{number}")
                    await old.order(f"rows-{number}")
                await new.send("flaky", "both")

                async def ended() -> bool:
                    await asyncio.gather(old.app.work(until_idle=True), new.app.work(until_idle=True))
                    return await old.ended()

                await until(ended, every=0.1)
                await old.verdict()
                async with old.app.store.transaction() as transaction:
                    await transaction.purge()
                assert await new.records() == await old.records()

    run(scenario)


def test_an_old_version_that_comes_after_the_migration_writes_nothing(
    store_url: str, upgrade: Callable[[], Migration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults 25 and 39: opening and migrating are refused, and every row stays as it was."""

    async def scenario() -> None:
        scene = Scene(open_store(store_url))
        await scene.prepare()
        upgrade()
        await scene.app.migrate()
        async with scene.app:
            await scene.send("plain", "k")
        before = dump(store_url)
        assert len(before) > len(WIDENED)
        monkeypatch.undo()
        old = Scene(open_store(store_url))
        for verb in (old.app.open, old.app.migrate):
            with pytest.raises(SchemaError, match="upgrade onefold"):
                await verb()
        assert dump(store_url) == before

    run(scenario)


def test_a_new_version_on_the_old_schema_migrates_or_says_how(store_url: str, upgrade: Callable[[], Migration]) -> None:
    """Fault 39: SQLite, which has no administrator, is migrated when it is opened; PostgreSQL is not."""

    async def scenario() -> None:
        scene = Scene(open_store(store_url))
        await scene.prepare()
        upgrade()
        new = Scene(open_store(store_url), journal=scene.journal)
        if store_url.startswith("postgres"):
            with pytest.raises(SchemaError, match="onefold migrate"):
                await new.app.open()
            await new.app.migrate()
        async with new.app:
            await new.send("pay", "k")
            await new.app.work(until_idle=True)
            await new.verdict()
        assert await new.app.migrate() == []

    run(scenario)


MIGRATE = """
    import asyncio, sys
    from onefold.store.open import open_store

    url = sys.argv[1]

    async def main():
        store = open_store(url)
        print("ready", flush=True)
        sys.stdin.readline()
        applied = await store.migrate()
        await store.close()
        print(",".join(applied), flush=True)

    asyncio.run(main())
"""


@pytest.mark.empty
def test_processes_that_migrate_at_once_apply_each_migration_once(store_url: str) -> None:
    """Fault 39: the later process waits, and then has nothing to do."""
    command = [sys.executable, "-c", textwrap.dedent(MIGRATE), store_url]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    applied: list[str] = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        said, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        applied += [name for name in said.strip().split(",") if name]
    names = [migration.name for migration in migrations_of(store_url)]
    assert applied == names

    async def scenario() -> None:
        scene = Scene(open_store(store_url))
        await scene.prepare()
        async with scene.app:
            await scene.send("pay", "k")
            await scene.app.work(until_idle=True)
            await scene.verdict()

    run(scenario)


class Rollout:
    """Workers and senders of two builds of one application, as processes on one store."""

    def __init__(self, url: str, directory: Path) -> None:
        self.app = App(url)
        self._url = url
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def work(self, build: str) -> subprocess.Popen[bytes]:
        """Start a worker of a build."""
        return self._start(build, "-m", "onefold", "worker", "rolling_build:app", "--lease", "5")

    def send(self, build: str, numbers: range) -> subprocess.Popen[bytes]:
        """Start a sender of a build."""
        return self._start(build, "rolling_build.py", str(numbers.start), str(numbers.stop))

    def _start(self, build: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=Path(__file__).parent,
                env={**os.environ, "ONEFOLD_URL": self._url, "BUILD": build},
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text()

    async def end(self, *processes: subprocess.Popen[bytes], stop: bool = False) -> None:
        """Wait until these have ended, workers after a SIGTERM; each must exit with 0."""
        for process in processes:
            if stop:
                process.terminate()
        for process in processes:
            assert await asyncio.to_thread(process.wait, 60) == 0, self.log

    async def settled(self, number: int) -> bool:
        """Whether this many messages have ended."""
        states = await self.states()
        assert not states[State.DEAD], self.log
        return states[State.DONE] >= number

    async def newer_works(self) -> bool:
        """Whether a worker of the newer build has handled a message that only it can handle."""
        return bool(await self.app.find(Query(message_type="said", states=(State.DONE,), limit=1)))

    async def states(self) -> Counter[State]:
        counts: Counter[State] = Counter()
        after = ""
        while page := await self.app.find(Query(after=after, limit=1_000)):
            counts.update(record.state for record in page)
            after = page[-1].envelope.id
        return counts

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def rollout(store_url: str, tmp_path: Path) -> Iterator[Rollout]:
    made = Rollout(store_url, tmp_path)
    yield made
    made.kill()


@pytest.mark.parametrize("load", [15, pytest.param(300, marks=pytest.mark.deep)])
def test_two_builds_roll_forward_and_back_under_load(rollout: Rollout, load: int) -> None:
    """A new argument with a default, in tasks, workflows and their children: nothing dead, lost or twice."""
    first, both, last = range(load), range(load // 2, 2 * load), range(2 * load, 3 * load)

    async def scenario() -> None:
        app = rollout.app
        await app.migrate()
        async with app:
            async with app.transaction() as transaction:
                await transaction.execute("CREATE TABLE ledger (kind TEXT, number INTEGER)")
            old = rollout.work("old")
            senders = [rollout.send("old", first), rollout.send("new", both)]
            # Forward: newer senders before newer workers, the order in which old workers meet the new argument.
            await rollout.end(*senders)
            new = rollout.work("new")
            await until(rollout.newer_works, every=0.1)
            # Back, while both builds send again, partly the same messages.
            again = [rollout.send("old", both), rollout.send("new", last)]
            await rollout.end(new, stop=True)
            await rollout.end(*again)
            # Forward again, for good.
            new = rollout.work("new")
            await rollout.end(old, stop=True)
            numbers = len(range(3 * load))
            of_newer = len(both) + len(last)
            await until(lambda: rollout.settled(3 * numbers + of_newer), every=0.1)
            await rollout.end(new, stop=True)
            assert set(await rollout.states()) == {State.DONE}, rollout.log
            rows = await app.store.fetch("SELECT kind, number FROM ledger")
            ledger = Counter((kind, number) for kind, number in rows)
            expected = {("plain", n) for n in range(numbers)} | {("plain", 100_000 + n) for n in range(numbers)}
            expected |= {("step", n) for n in range(numbers)} | {("said", n) for n in [*both, *last]}
            assert ledger == dict.fromkeys(expected, 1), rollout.log

    async def bounded() -> None:
        # A dozen processes have to start first, which takes seconds on a busy machine.
        async with asyncio.timeout(600 if load > 100 else 200):
            await scenario()

    asyncio.run(bounded())
