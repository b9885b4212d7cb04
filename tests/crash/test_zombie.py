"""A worker that was stopped past its lease cannot commit when it resumes; random kills lose nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from crash_worker import make_app, work

from onefold import App, State
from onefold.store import Query, Record
from onefold.testing.checker import Effect, Final, Journal, check

pytestmark = pytest.mark.alone

#: Long enough for a busy machine; a passing test does not wait this long.
PATIENCE_SECONDS = 30.0
#: How many seconds processes are killed, and the pause between kills.
KILLING_SECONDS = 5.0
KEYS = 60


async def _prepare(url: str) -> None:
    app = App(url)
    await app.migrate()
    async with app, app.transaction() as transaction:
        await transaction.execute("CREATE TABLE effect (key TEXT, message TEXT, fence BIGINT, worker TEXT)")


async def _effects(app: App) -> list[tuple[Any, ...]]:
    return await app.store.fetch("SELECT key, message, fence, worker FROM effect")


async def _records(app: App) -> list[Record]:
    return await app.find(Query(limit=1_000))


def _ask(url: str, question: Callable[[App], Any]) -> Any:
    async def ask() -> Any:
        async with make_app(url, "asker") as app:
            return await question(app)

    return asyncio.run(ask())


def _wait_until(true: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.05)


# one worker is stopped


@contextmanager
def _program(url: str, name: str, middle: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        command = [sys.executable, str(Path(__file__).with_name("crash_worker.py")), url, name, middle]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _freeze(process: subprocess.Popen[bytes], url: str) -> None:
    """Stop a process while it does not hold SQLite's only write lock, which it briefly takes to renew its lease."""
    for _ in range(20):
        process.send_signal(signal.SIGSTOP)
        if not url.startswith("sqlite:") or _is_writable(url.removeprefix("sqlite:///")):
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    pytest.fail("the process was stopped twenty times, each time with the write lock")


def _is_writable(path: str) -> bool:
    with closing(sqlite3.connect(path, timeout=0.5, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


# Not on SQLite after its write: a worker stopped with the only write lock blocks every writer, so no other takes over.
@pytest.mark.parametrize(
    ("store_url", "middle"),
    [("sqlite", "before"), ("postgres", "before"), ("postgres", "after")],
    indirect=["store_url"],
)
def test_a_stopped_worker_cannot_commit_when_it_comes_back(middle: str, store_url: str, tmp_path: Path) -> None:
    asyncio.run(_prepare(store_url))
    log, other_log = tmp_path / "zombie.log", tmp_path / "other.log"
    with _program(store_url, "zombie", middle, log) as zombie:
        _wait_until(lambda: b"ready" in log.read_bytes(), "the worker did not start")
        _ask(store_url, lambda app: app.tasks["pay"].send("k"))
        _wait_until(lambda: b"in the middle" in log.read_bytes(), "the handler was not reached")
        _freeze(zombie, store_url)
        with _program(store_url, "other", "", other_log):
            _wait_until(lambda: _ask(store_url, _effects) != [], f"no worker took over: {other_log.read_text()}")
            assert b"lease_lost" not in log.read_bytes()
            zombie.send_signal(signal.SIGCONT)
            _wait_until(lambda: b"lease_lost" in log.read_bytes(), f"the zombie noticed nothing: {log.read_text()}")
    (record,) = _ask(store_url, _records)
    assert record.state is State.DONE
    # One effect, by the other worker, under the fence that ended the message.
    assert _ask(store_url, _effects) == [("pay:k", record.envelope.id, record.fence, "other")]


def test_a_worker_stopped_with_the_only_write_lock_holds_up_all_and_harms_none(sqlite_url: str, tmp_path: Path) -> None:
    """Fault 10, after the effect and before the commit, where no other worker can take over: one effect in the end."""
    asyncio.run(_prepare(sqlite_url))
    log, other_log = tmp_path / "zombie.log", tmp_path / "other.log"
    with _program(sqlite_url, "zombie", "after", log) as zombie:
        _wait_until(lambda: b"ready" in log.read_bytes(), "the worker did not start")
        _ask(sqlite_url, lambda app: app.tasks["pay"].send("k"))
        _wait_until(lambda: b"in the middle" in log.read_bytes(), "the handler was not reached")
        zombie.send_signal(signal.SIGSTOP)
        with _program(sqlite_url, "other", "", other_log):
            time.sleep(1.4)  # longer than its lease
            zombie.send_signal(signal.SIGCONT)
            _wait_until(lambda: _ask(sqlite_url, _all_ended), f"not done: {log.read_text()}{other_log.read_text()}")
    (record,) = _ask(sqlite_url, _records)
    ((key, message, fence, _),) = _ask(sqlite_url, _effects)
    assert (record.state, key, message, fence) == (State.DONE, "pay:k", record.envelope.id, record.fence)


async def _all_ended(app: App) -> bool:
    return all(record.state.ended for record in await _records(app))


def test_a_worker_stopped_after_its_commit_has_done_it_once(store_url: str, tmp_path: Path) -> None:
    """Fault 10, after the commit and before the worker has its answer: nothing runs again, and the worker continues."""
    asyncio.run(_prepare(store_url))
    log, other_log = tmp_path / "zombie.log", tmp_path / "other.log"
    with _program(store_url, "zombie", "committed", log) as zombie:
        _wait_until(lambda: b"ready" in log.read_bytes(), "the worker did not start")
        _ask(store_url, lambda app: app.tasks["pay"].send("k"))
        _wait_until(lambda: b"in the middle" in log.read_bytes(), "the commit was not reached")
        zombie.send_signal(signal.SIGSTOP)
        (first,) = _ask(store_url, _records)
        assert first.state is State.DONE
        with _program(store_url, "other", "", other_log):
            _wait_until(lambda: b"ready" in other_log.read_bytes(), "the other worker did not start")
            time.sleep(1.5)  # longer than its lease
            zombie.send_signal(signal.SIGCONT)
        _ask(store_url, lambda app: app.tasks["pay"].send("next"))
        _wait_until(lambda: len(_ask(store_url, _effects)) > 1, f"it did not go on: {log.read_text()}")
    assert [(key, worker) for key, _, _, worker in _ask(store_url, _effects)] == [
        ("pay:k", "zombie"),
        ("pay:next", "zombie"),
    ]
    assert {record.crashes for record in _ask(store_url, _records)} == {0}


# many are killed


def _fork(main: Callable[[], Any]) -> int:
    """Start a process; forking is fast, so that many deaths fit into a few seconds."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(main())
        finally:
            os._exit(0)
    return child


async def _produce(url: str, name: str, file: Path, seed: int) -> None:
    """Send the same keys as the other producers, again and again, with a journal that outlives the process."""
    chance = random.Random(seed)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    journal = Journal(lambda line: os.write(descriptor, line))
    async with make_app(url, name) as app:
        while True:
            key = f"k{chance.randrange(KEYS)}"
            journal.invoke(name, f"pay:{key}")
            receipts = await asyncio.gather(*(app.tasks["pay"].send(key) for _ in range(chance.randint(1, 2))))
            journal.ok(name, f"pay:{key}", receipts[0].id)
            await asyncio.sleep(chance.uniform(0.0, 0.05))


def _kill_and_restart(url: str, directory: Path, seed: int) -> int:
    """Keep three workers and two producers running and kill them at random; return how many died."""
    chance, deaths = random.Random(seed), 0
    directory.mkdir()

    def start(role: str, number: int) -> int:
        name = f"{role}-{number}"
        if role == "worker":
            return _fork(lambda: work(url, name, ""))
        return _fork(lambda: _produce(url, name, directory / name, number))

    alive = [(role, start(role, number)) for number, role in enumerate(["worker"] * 3 + ["producer"] * 2)]
    try:
        give_up_at = time.monotonic() + KILLING_SECONDS
        while time.monotonic() < give_up_at:
            time.sleep(chance.uniform(0.02, 0.25))
            place = chance.randrange(len(alive))
            role, process = alive[place]
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            deaths += 1
            alive[place] = (role, start(role, 100 + deaths))
    finally:
        for _, process in alive:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return deaths


async def _drain(app: App) -> None:
    """Work until every message has ended; leases of dead workers run out after a second."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while any(not record.state.ended for record in await _records(app)):
        assert time.monotonic() < give_up_at, "not drained"
        await app.work(until_idle=True)
        await asyncio.sleep(0.1)


def test_processes_killed_at_random_lose_nothing_and_repeat_nothing(store_url: str, tmp_path: Path) -> None:
    asyncio.run(_prepare(store_url))
    deaths = _kill_and_restart(store_url, tmp_path / "journals", seed=20_260)
    _ask(store_url, _drain)
    journal = Journal()
    for file in sorted((tmp_path / "journals").iterdir()):
        journal.read(file.read_bytes())
    effects = [Effect(key, message, fence) for key, message, fence, _ in _ask(store_url, _effects)]
    finals = [Final(r.envelope.id, f"pay:{r.envelope.subject}", r.state) for r in _ask(store_url, _records)]
    report = check(journal, effects, finals)
    assert not report, f"seed 20260\n{report}"
    accepted = sum(entry.event == "ok" for entry in journal.entries)
    print(f"{deaths} processes killed, {accepted} sends accepted, {len(finals)} messages, {len(effects)} effects")
    assert deaths >= 10
    # Duplicates were sent, and messages were handled while processes died.
    assert accepted > len(finals) > 0
    assert len(effects) > 0
