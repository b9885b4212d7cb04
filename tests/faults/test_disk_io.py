"""A disk that fails below SQLite: operations happen entirely or not at all, and work continues without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from fault_scene import Scene, run, until_accepted

from onefold import StoreUnavailableError
from onefold.store import State
from onefold.store.sqlite import SQLiteStore, connection
from onefold.testing import HastyClock, drain
from onefold.testing.vfs import FaultyFiles, FileFault, Operation

#: More calls than one run makes; the loop ends earlier, with the first run that its fault did not hit.
POINTS_MAX = 1_000
#: A lasting fault is healed after the store has failed this often.
TROUBLES_MAX = 4
#: A caller that is still refused after this many retries on a healed disk never recovers.
TRIES_MAX = 40
#: The pause of a refused caller before it retries, on the clock of the test.
PAUSE_SECONDS = 1.0


class HealingClock(HastyClock):
    """Heals the disk after a few sleeps of callers that wait for it."""

    def __init__(self, files: FaultyFiles) -> None:
        super().__init__()
        self._files = files
        self.waits = 0

    async def sleep(self, seconds: float) -> None:
        self.waits += 1
        if self._files.fired and self.waits > TROUBLES_MAX:
            self._files.heal()
        await super().sleep(seconds)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, to be copied for every run."""
    path = tmp_path_factory.mktemp("template") / "onefold.db"
    run(Scene(SQLiteStore(str(path))).prepare)
    return path


def copy_of(template: Path, directory: Path, number: int) -> Path:
    return Path(shutil.copy(template, directory / f"{number}.db"))


def assert_sound(path: Path) -> None:
    """Check the file with SQLite's own check."""
    opened = apsw.Connection(str(path))
    try:
        assert opened.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        opened.close()


async def live(scene: Scene, clock: HastyClock, files: FaultyFiles) -> None:
    """Do everything in the life of messages, as careful callers do it."""
    troubles = 0

    async def careful(call: Callable[[], Any]) -> Any:
        nonlocal troubles
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                troubles += 1
                assert troubles < TRIES_MAX, "it does not recover"
                if troubles > TROUBLES_MAX:
                    files.heal()
                await clock.sleep(PAUSE_SECONDS)

    for name in ("pay", "plain", "flaky"):
        await careful(lambda name=name: scene.send(name, "k"))
    await careful(lambda: scene.order("rows"))
    # A duplicate is answered with the first message, even if the first answer was lost.
    assert (await careful(lambda: scene.send("pay", "k", "again"))).duplicate
    await careful(lambda: drain(scene.app))
    clock.advance(8 * 86_400.0)

    async def purge() -> None:
        async with scene.app.store.transaction() as transaction:
            await transaction.purge()

    await careful(purge)


#: Each fault, and the step between the calls of a run that it hits: 1 for every call.
FAULTS = [
    (FileFault("io error", "read"), 1),
    (FileFault("io error", "sync"), 1),
    (FileFault("io error", "sync", lasting=True), 1),
    (FileFault("io error", "truncate"), 1),
    # A page is written in two pieces, so an odd step hits both kinds.
    (FileFault("io error", "write"), 3),
    (FileFault("io error", "write", lasting=True), 7),
    (FileFault("torn", "write"), 5),
    (FileFault("full", "write"), 5),
    (FileFault("full", "write", lasting=True), 7),
]


@pytest.mark.parametrize(("fault", "step"), FAULTS, ids=lambda f: _named(f))
def test_whichever_call_to_the_disk_fails_every_message_has_one_effect(
    fault: FileFault, step: int, template: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Faults 12 and 14: sends, claims, handlers, settles, a retry and a purge, on one store that stays open."""

    async def scenario(files: FaultyFiles, path: Path, at: int) -> int:
        clock = HealingClock(files)
        scene = Scene(SQLiteStore(str(path), clock=clock), clock)
        async with scene.app:
            opened = files.opened
            files.plan(FileFault(fault.kind, fault.operation, at, fault.lasting))
            await live(scene, clock, files)
            fired, again = files.fired, files.opened - opened
            files.plan(None)
            await scene.verdict()
            if fired and fault.kind in ("io error", "torn"):
                assert again, f"point {at}: the connection that saw the error is still in use"
        return fired

    with FaultyFiles(durable=False) as files:
        tried = 0
        for at in range(1, POINTS_MAX, step):
            path = copy_of(template, tmp_path, at)
            fired = run(lambda path=path, at=at: scenario(files, path, at))  # type: ignore[misc]
            assert_sound(path)
            if not fired:
                break
            tried += 1
    record_property("file faults", tried)
    # The log is too short to be truncated here; all other operations occur many times.
    assert tried >= (0 if fault.operation == "truncate" else 8)


def _named(part: FileFault | int) -> str:
    return f"{part.kind} {part.operation}{' lasting' * part.lasting}" if isinstance(part, FileFault) else f"1 in {part}"


@pytest.mark.parametrize("operation", ["read", "write", "sync", "lock"])
def test_opening_on_a_disk_that_fails_is_a_typed_error_and_opening_again_works(
    operation: Operation, tmp_path: Path
) -> None:
    """Fault 14: a new file is created entirely or not at all."""

    async def scenario(files: FaultyFiles, path: Path, at: int) -> int:
        scene = Scene(SQLiteStore(str(path)))
        files.plan(FileFault("io error", operation, at))
        with contextlib.suppress(StoreUnavailableError):
            await scene.app.open()
        fired = files.fired
        files.plan(None)
        await scene.app.open()
        await scene.app.close()
        await scene.prepare()
        async with scene.app:
            await scene.send("pay", "k")
            await scene.app.work(until_idle=True)
            await scene.verdict()
        return fired

    with FaultyFiles(durable=False) as files:
        for at in range(1, POINTS_MAX, 3 if operation == "write" else 1):
            path = tmp_path / f"{at}.db"
            if not run(lambda path=path, at=at: scenario(files, path, at)):  # type: ignore[misc]
                break
            assert_sound(path)
    assert at > 3


def test_whichever_lock_is_taken_while_a_new_file_is_opened_it_is_waited_for(tmp_path: Path) -> None:
    """Fault 13: as when several processes open it at the same moment; SQLite itself does not wait for some locks."""

    async def scenario(files: FaultyFiles, path: Path, at: int) -> int:
        files.plan(FileFault("busy", "lock", at))
        scene = Scene(SQLiteStore(str(path)))
        await scene.prepare()
        return files.fired

    with FaultyFiles(durable=False) as files:
        for at in range(1, POINTS_MAX):
            if not run(lambda at=at: scenario(files, tmp_path / f"{at}.db", at)):  # type: ignore[misc]
                break
    assert at > 3


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_killed_in_the_middle_of_a_write_or_before_a_sync(operation: Operation, template: Path, tmp_path: Path) -> None:
    """Fault 2: an answered write is there; an unanswered one is there entirely or not at all."""

    async def die(path: Path, at: int, told: int) -> None:
        # The layer is made in the child, because it must be made before any file is open.
        with FaultyFiles(durable=False) as files:
            clock = HastyClock()
            scene = Scene(SQLiteStore(str(path), clock=clock), clock)
            async with scene.app:
                files.plan(FileFault("kill", operation, at))
                await scene.order("a")
                os.write(told, b"a")
                await scene.send("pay", "b")
                os.write(told, b"b")
                await scene.app.work(until_idle=True)
                os.write(told, b"w")

    async def look(path: Path, told: bytes) -> None:
        clock = HastyClock()
        clock.advance(3_600.0)  # so that the lease of the dead process has run out
        scene = Scene(SQLiteStore(str(path), clock=clock), clock)
        async with scene.app:
            found = await scene.records()
            pays = {one.envelope.subject: one for one in found if one.envelope.message_type == "pay"}
            assert set(told.decode()) - {"w"} <= pays.keys()
            orders = await scene.app.store.fetch("SELECT key FROM orders")
            assert orders == [("a",)] * ("a" in pays)
            if b"w" in told:
                assert {one.state for one in found} == {State.DONE}
            await drain(scene.app)
            done = sorted(effect.key for effect in await scene.effects())
            assert done == sorted(f"{name}:{key}" for name in ("child", "pay") for key in pays)
            assert {one.state for one in await scene.records()} <= {State.DONE}

    for at in range(1, POINTS_MAX, 3 if operation == "write" else 1):
        path = copy_of(template, tmp_path, at)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                asyncio.run(die(path, at, writing))
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        run(lambda path=path, told=told: look(path, told))  # type: ignore[misc]
        assert_sound(path)
        if status == 0:
            break
    assert told == b"abw"
    assert at > 5


# no space


@pytest.fixture
def room() -> Iterator[Callable[[int | None], None]]:
    """Limits every database opened from now on to a number of pages, like a full disk."""
    pages: int | None = None

    def limit(connection: apsw.Connection) -> None:
        if pages is not None:
            connection.pragma("max_page_count", pages)

    def set_room(number: int | None) -> None:
        nonlocal pages
        pages = number

    apsw.connection_hooks.append(limit)
    yield set_room
    apsw.connection_hooks.remove(limit)


def test_a_full_disk_refuses_sends_and_lets_reads_through_until_there_is_room(
    template: Path, tmp_path: Path, room: Callable[[int | None], None]
) -> None:
    """Fault 12: nothing half-written, nothing lost, no restart."""
    path = copy_of(template, tmp_path, 1)
    room(path.stat().st_size // 4096 + 4)

    async def scenario() -> None:
        clock = HastyClock()
        scene = Scene(SQLiteStore(str(path), clock=clock), clock)
        async with scene.app:
            accepted = 0
            with contextlib.suppress(StoreUnavailableError):
                while accepted < 500:
                    await scene.send("plain", f"{accepted:0>200}")
                    accepted += 1
            for refused in (scene.send, scene.send, lambda _, key: scene.order(key)):
                await clock.sleep(PAUSE_SECONDS)
                with pytest.raises(StoreUnavailableError, match="full"):
                    await refused("plain", "0" * 250)
            assert len(await scene.records()) == accepted
            assert (await scene.app.count())["default"].scheduled == accepted
            assert await scene.app.store.fetch("SELECT count(*) FROM orders") == [(0,)]
            room(None)
            await clock.sleep(PAUSE_SECONDS)
            # The first try succeeds: no process has to be restarted.
            await scene.send("plain", "0" * 250)
            await scene.order("now")
            await drain(scene.app)
            await scene.verdict()

    run(scenario)
    assert_sound(path)


# the lock of another process


HOLDER = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
connection.execute("ROLLBACK")
print("free", flush=True)
"""


class Holder:
    """A process that holds the write lock of a file for the length of the block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        command = [sys.executable, "-c", HOLDER, str(self._path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "held\n"

    def __exit__(self, *_: object) -> None:
        said, _ = self._process.communicate(timeout=30)
        assert said == "free\n"


def test_a_lock_that_another_process_keeps_is_waited_for_and_then_a_typed_error(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 13: a bounded wait without spinning, and nothing lost; reads continue meanwhile."""
    path = copy_of(template, tmp_path, 1)
    monkeypatch.setattr(connection, "BUSY_SECONDS_MAX", 0.6)

    async def scenario() -> None:
        scene = Scene(SQLiteStore(str(path)))
        async with scene.app:
            await scene.send("plain", "before")
            with Holder(path):
                cpu, began = _cpu(), asyncio.get_running_loop().time()
                for attempt in (lambda: scene.send("pay", "k"), lambda: scene.order("rows")):
                    with pytest.raises(StoreUnavailableError, match="write lock"):
                        await attempt()
                waited = asyncio.get_running_loop().time() - began
                assert 0.5 <= waited < 8.0
                assert _cpu() - cpu < 0.5 * waited, "it spins while it waits"
                assert len(await scene.records()) == 1
                waiting = asyncio.create_task(until_accepted(lambda: scene.send("pay", "k")))
                await asyncio.sleep(0.05)
            await waiting
            await scene.order("rows")
            await scene.app.work(until_idle=True)
            await scene.verdict()

    run(scenario)
    assert_sound(path)


def _cpu() -> float:
    used = os.times()
    return used.user + used.system


def test_a_worker_waits_out_a_lock_that_another_process_keeps(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 13: messages are claimed and settled when the lock is free again, and no attempt is used up."""
    path = copy_of(template, tmp_path, 1)
    monkeypatch.setattr(connection, "BUSY_SECONDS_MAX", 0.2)

    async def scenario() -> None:
        scene = Scene(SQLiteStore(str(path)))
        entered, go_on = asyncio.Event(), asyncio.Event()

        @scene.app.task(key="{key}", subject="{key}")
        async def slow(key: str) -> None:
            entered.set()
            await go_on.wait()

        async with scene.app:
            await scene.app.tasks["slow"].send("k")
            scene.journal.invoke("sender", "slow:k")
            worker = asyncio.create_task(scene.app.work(until_idle=True))
            await entered.wait()
            with Holder(path):
                go_on.set()
                await asyncio.sleep(0.7)
                assert not worker.done()
            assert await worker == 1
            (record,) = await scene.records()
            assert (record.state, record.attempt, record.crashes) == (State.DONE, 0, 0)
            assert await scene.app.store.attempts(record.envelope.id) == []

    run(scenario)


def test_every_transaction_begins_with_the_write_lock(template: Path, tmp_path: Path) -> None:
    """Fault 13: a transaction that reads first and writes later would fail at once instead of waiting."""
    path = copy_of(template, tmp_path, 1)
    begins: list[str] = []
    inside = False
    outside: list[str] = []

    def trace(moment: str, statement: str) -> None:
        nonlocal inside
        words = statement.upper().split()
        if words[:3] == ["INSERT", "INTO", "ONEFOLD_ARRIVAL"]:
            # A single statement, with its triggers, takes the lock at its beginning.
            inside = moment == "before"
        if moment == "after" or not words:
            return
        if words[0] == "BEGIN":
            begins.append(" ".join(words))
            inside = True
        elif words in (["COMMIT"], ["ROLLBACK"], ["END"]):
            inside = False
        elif words[0] in ("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "SAVEPOINT") and not inside:
            outside.append(statement)

    async def scenario() -> None:
        clock = HastyClock()
        with FaultyFiles(durable=False) as files:
            scene = Scene(SQLiteStore(str(path), clock=clock, trace=trace), clock)
            async with scene.app:
                await live(scene, clock, files)
                await scene.verdict()

    run(scenario)
    assert set(begins) == {"BEGIN IMMEDIATE"}
    assert len(begins) > 10
    assert outside == []


def test_nothing_but_errors_of_ours_leaves_the_store(template: Path, tmp_path: Path) -> None:
    """Faults 12 to 14: when the disk fails for good, every call raises an error type of onefold."""

    async def scenario(files: FaultyFiles) -> None:
        path = copy_of(template, tmp_path, 1)
        scene = Scene(SQLiteStore(str(path)))
        async with scene.app:
            await scene.send("plain", "k")
            (lease,) = await scene.app.store.claim(["default"], types=["plain"], limit=1, lease=30, worker="w")
            for kind in ("io error", "full", "busy"):
                for verb in verbs(scene, lease):
                    files.plan(FileFault(kind, lasting=True))  # type: ignore[arg-type]
                    with contextlib.suppress(StoreUnavailableError):
                        await verb()
                    files.plan(None)
            assert len(await scene.records()) == 1

    def verbs(scene: Scene, lease: Any) -> list[Callable[[], Any]]:
        store = scene.app.store

        async def write() -> None:
            async with store.transaction() as transaction:
                await transaction.execute("INSERT INTO orders VALUES ('x')")
                raise StoreUnavailableError("not meant to stay")

        return [
            write,
            lambda: store.extend([lease], lease=30.0),
            lambda: store.claim(["default"], types=["plain"], limit=1, lease=30, worker="w"),
            lambda: store.fetch("SELECT * FROM effect"),
            scene.records,
            store.count,
            lambda: store.attempts(lease.id),
            lambda: store.registered("kind", "name"),
        ]

    with FaultyFiles(durable=False) as files:
        run(lambda: scenario(files))
