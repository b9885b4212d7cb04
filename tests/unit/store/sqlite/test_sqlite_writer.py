"""The writer of the SQLite store: who shares a commit with whom, where it runs, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from onefold import KeyReuseError, StoreError, StoreUnavailableError
from onefold.clock import MICROSECONDS, Clock, give_way
from onefold.store import Done, Lease, Query, State
from onefold.store.sqlite import SQLiteStore
from onefold.store.sqlite.connection import BUSY_SECONDS_MAX
from onefold.store.sqlite.session import SQL
from onefold.store.sqlite.store import TAKEOVER_GRACE_MICROS
from onefold.store.sqlite.writer import writer
from onefold.testing.contracts import Bench
from onefold.testing.contracts.bench import DONE, LEASE
from onefold.testing.contracts.transactions import one_turn
from onefold.testing.vfs import FaultyFiles, FileFault

TABLES = (
    "CREATE TABLE parent (id INTEGER PRIMARY KEY)",
    "CREATE TABLE effect (number INTEGER NOT NULL UNIQUE, "
    "parent INTEGER REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)",
)


#: What a claim asks on the reader before it asks for the write lock.
LOOKS = {" ".join(SQL[name].split()) for name in ("claim_run_out", "claim_kinds", "claim_heads", "claim_of_type")}


class Tracer:
    """What was said to SQLite, and in which thread."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def __call__(self, when: str, statement: str) -> None:
        if when == "before":
            self.said.append((" ".join(statement.split()), threading.get_ident()))

    def clear(self) -> None:
        self.said.clear()

    @property
    def statements(self) -> list[str]:
        return [statement for statement, _ in self.said]

    @property
    def threads(self) -> set[int]:
        return {thread for _, thread in self.said}

    @property
    def commits(self) -> int:
        return self.statements.count("COMMIT")

    @property
    def said_there(self) -> set[str]:
        """What was not said on the event loop."""
        return {statement for statement, thread in self.said if thread != threading.get_ident()}


def alter(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement on a connection of its own."""
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


class Stage(Bench):
    """A bench on a SQLite file with the caller's own tables, whose statements are traced."""

    def __init__(self, path: Path, stack: Any) -> None:
        self.path = path
        self.tracer = Tracer()
        super().__init__(self._make, stack)

    def _make(self, clock: Clock) -> SQLiteStore:
        return SQLiteStore(str(self.path), clock=clock, trace=self.tracer, synchronous="OFF")

    @property
    def sqlite(self) -> SQLiteStore:
        assert isinstance(self.store, SQLiteStore)
        return self.store

    def seen(self) -> list[int]:
        """What another connection sees of the effects."""
        return [row[0] for row in alter(self.path, "SELECT number FROM effect ORDER BY number")]


@asynccontextmanager
async def stage(path: Path) -> AsyncIterator[Stage]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        made = Stage(path, stack)
        made.store = await made.another()
        async with made.store.transaction() as transaction:
            for statement in TABLES:
                await transaction.execute(statement)
        made.tracer.clear()
        yield made


Scenario = Callable[[Stage], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    def play(scenario: Scenario) -> None:
        async def main() -> None:
            async with stage(tmp_path / "onefold.db") as made:
                await scenario(made)

        asyncio.run(main())

    return play


Play = Callable[[Scenario], None]


async def turns(number: int = 20) -> None:
    """Let everything that can run do so."""
    for _ in range(number):
        await one_turn()


class Open:
    """A transaction of which a test drives each step."""

    def __init__(self, made: Stage, number: int) -> None:
        self._manager = made.store.transaction()
        self._number = number

    async def write(self, statement: str | None = None) -> None:
        self._transaction = await self._manager.__aenter__()
        await self._transaction.execute(statement or f"INSERT INTO effect (number) VALUES ({self._number})")

    async def go_on(self, statement: str) -> None:
        await self._transaction.execute(statement)

    async def conclude(self, *leases: Lease) -> None:
        await self._transaction.conclude([(lease, DONE) for lease in leases])


async def alone(made: Stage, number: int) -> None:
    """Write and conclude."""
    transaction = Open(made, number)
    await transaction.write()
    await transaction.conclude()


# sharing a commit


def test_transactions_at_once_share_a_commit_and_are_answered_after_it(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        async def work(number: int) -> None:
            await alone(made, number)
            assert number in made.seen()

        await asyncio.gather(*(work(number) for number in range(20)))
        assert made.seen() == list(range(20))
        assert made.tracer.commits < 10

    play(scenario)


def test_no_caller_is_answered_while_another_one_in_the_same_commit_goes_on(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        first, second = Open(made, 1), Open(made, 2)
        await first.write()
        waiting = asyncio.create_task(second.write())
        await one_turn()
        concluding = asyncio.create_task(first.conclude())
        await waiting
        await turns()
        assert not concluding.done()
        assert made.seen() == []
        await second.conclude()
        assert made.seen() == [1, 2]
        await concluding
        assert made.tracer.commits == 1

    play(scenario)


@pytest.mark.parametrize(
    ("statement", "mates_stay"),
    [
        ("INSERT INTO effect (number) VALUES (1)", True),
        ("INSERT INTO effect (number, parent) VALUES (3, 404)", True),
        # SQLite's own clause for rolling everything back: nobody's fault but the one's who wrote it.
        ("INSERT OR ROLLBACK INTO effect (number) VALUES (1)", False),
    ],
    ids=["unique", "deferred", "or rollback"],
)
def test_a_transaction_that_fails_in_a_shared_commit_fails_alone(play: Play, statement: str, mates_stay: bool) -> None:
    async def scenario(made: Stage) -> None:
        first, second = Open(made, 1), Open(made, 2)
        await first.write()
        waiting = asyncio.create_task(second.write())
        await one_turn()
        concluding = asyncio.create_task(first.conclude())
        await waiting

        async def fail() -> None:
            await second.go_on(statement)
            await second.conclude()

        with pytest.raises((apsw.ConstraintError, StoreError), match=r"(?i)constraint"):
            await fail()
        if mates_stay:
            await second._manager.__aexit__(ValueError, ValueError(), None)
            await concluding
            assert made.seen() == [1]
        else:
            with pytest.raises(StoreUnavailableError, match="trying again is safe"):
                await concluding
            assert made.seen() == []
            # What comes after in the same block must not be written by itself.
            for late in (second.go_on("INSERT INTO effect (number) VALUES (9)"), second.conclude()):
                with pytest.raises((apsw.ConstraintError, StoreError)):
                    await late
            assert made.seen() == []
        await asyncio.gather(*(alone(made, number) for number in (5, 6, 7)))
        assert made.seen()[-3:] == [5, 6, 7]

    play(scenario)


def test_a_commit_that_fails_fails_all_callers_that_share_it_and_keeps_nothing(tmp_path: Path) -> None:
    """Fault 14: all of it or nothing; the next try works on a new connection."""

    async def main() -> None:
        with FaultyFiles(durable=False) as files:
            async with stage(tmp_path / "onefold.db") as made:
                first, second = Open(made, 1), Open(made, 2)
                await first.write()
                waiting = asyncio.create_task(second.write())
                await one_turn()
                concluding = asyncio.create_task(first.conclude())
                await waiting
                files.plan(FileFault("io error", "write"))
                with pytest.raises(StoreUnavailableError):
                    await second.conclude()
                with pytest.raises(StoreUnavailableError):
                    await concluding
                files.plan(None)
                assert made.seen() == []
                opened = files.opened
                assert not (await made.put("next")).duplicate
                assert files.opened == opened + 1

    asyncio.run(main())


def test_a_slow_transaction_is_committed_without_waiting_for_the_next(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        slow, following = Open(made, 1), Open(made, 2)
        await slow.write()
        waiting = asyncio.create_task(following.write())
        await one_turn()
        made.clock.advance(1.0)
        await slow.conclude()
        assert made.seen() == [1]
        await waiting
        await following.conclude()
        assert made.seen() == [1, 2]

    play(scenario)


def test_of_writes_that_share_a_commit_one_can_fail_without_the_others(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        await made.put("taken", queue="mail")
        bad, good = await made.leased("bad"), await made.leased("good")
        clash = made.message("taken", payload=b"[2]")
        made.tracer.clear()
        answers = await asyncio.gather(
            made.store.put([made.message("other"), made.message("another")]),
            made.store.settle([(bad, Done(b"1", sends=(clash,)))]),
            made.store.settle([(good, DONE)]),
            return_exceptions=True,
        )
        assert isinstance(answers[1], KeyReuseError)
        assert answers[2] == [True]
        assert (await made.state(bad.id), await made.state(good.id)) == (State.LEASED, State.DONE)
        assert made.tracer.statements.count("BEGIN IMMEDIATE") <= 3
        assert (await made.put("other")).duplicate

    play(scenario)


# the caller's own SQL


@pytest.mark.parametrize("word", ["BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT mine", "RELEASE mine"])
@pytest.mark.parametrize("before", ["", "  \n", "-- a comment\n", "/* * one */ ; " * 40, "\ufeff", "SELECT 1; "])
def test_the_callers_sql_cannot_end_the_transaction(play: Play, before: str, word: str) -> None:
    async def scenario(made: Stage) -> None:
        async def break_out(text: str) -> None:
            async with made.store.transaction() as transaction:
                await transaction.execute("INSERT INTO effect (number) VALUES (1)")
                await transaction.execute(f"{before}{text}")

        for text in (word, word.lower(), f"{word};"):
            with pytest.raises(StoreError, match="not yours to say"):
                await break_out(text)
        assert made.seen() == []

    play(scenario)


def test_words_that_only_look_like_the_end_are_the_callers_business(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        async with made.store.transaction() as transaction:
            await transaction.execute(
                "CREATE TRIGGER echo AFTER INSERT ON parent BEGIN INSERT INTO effect (number) VALUES (NEW.id); END"
            )
            await transaction.execute("INSERT INTO parent VALUES (7); -- COMMIT\nSELECT 'ROLLBACK'")
            assert await transaction.execute("SELECT 'COMMIT' AS \"commit\"") == [("COMMIT",)]
        assert made.seen() == [7]

    play(scenario)


# where it runs


def test_what_is_written_is_written_on_the_event_loop_unless_it_is_very_much(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        lease, other = await made.leased(), await made.leased()
        made.tracer.clear()
        await made.put("a")
        await made.store.put([made.message() for _ in range(1_000)])
        await made.claim(limit=1_000)
        assert made.tracer.said_there <= {"COMMIT"}
        children = tuple(made.message() for _ in range(1_000))
        for large in (
            made.store.put([made.message() for _ in range(1_001)]),
            made.store.put([made.message(payload=b'"' + b"x" * 90_000 + b'"') for _ in range(50)]),
            made.store.settle([(lease, Done(b"1", sends=children))]),
            made.store.settle([(other, Done(b'"' + b"x" * 5_000_000 + b'"'))]),
        ):
            made.tracer.clear()
            await large
            assert len(made.tracer.said_there) > 1

    play(scenario)


@pytest.mark.parametrize(("quick_micros", "where"), [(10_000_000, set()), (0, {"COMMIT"})])
def test_a_task_that_writes_alone_commits_on_the_event_loop_if_the_disk_is_quick(
    play: Play, monkeypatch: pytest.MonkeyPatch, quick_micros: int, where: set[str]
) -> None:
    """Others run between its writes; with another writer beside it, commits are made in the thread, and shared."""
    monkeypatch.setattr(writer, "_QUICK_MICROS", quick_micros)

    async def scenario(made: Stage) -> None:
        for _ in range(2):
            await made.put()
        made.tracer.clear()
        for _ in range(5):
            await made.put()
        assert (made.tracer.said_there, made.tracer.commits) == (where, 5)

        async def write() -> None:
            for _ in range(5):
                await made.put()

        made.tracer.clear()
        await asyncio.gather(write(), write(), write())
        assert made.tracer.said_there == {"COMMIT"}
        assert made.tracer.commits <= 10

    play(scenario)


def test_no_handler_runs_while_a_transaction_of_ours_is_open(play: Play) -> None:
    """C13, fault 21: a handler that hangs in C, holding the interpreter, does not hang with the write lock.

    Only the commit is made elsewhere, and once it has begun it needs no interpreter.
    """

    async def scenario(made: Stage) -> None:
        connection = made.sqlite._writer._connection
        seen: set[str] = set()

        def said_in_transactions() -> list[tuple[str, int]]:
            return [one for one in made.tracer.said if one[0] not in LOOKS]

        async def watch() -> None:
            while True:
                if connection.session.connection.in_transaction:
                    seen.add(said_in_transactions()[-1][0])
                await give_way()

        async def work(number: int) -> None:
            await made.store.put([made.message() for _ in range(100)])
            leases = await made.claim(limit=50 + number)
            await made.store.extend(leases, lease=LEASE, starting=True)
            await made.store.settle([(lease, DONE) for lease in leases])

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(work(number) for number in range(20)))
        watching.cancel()
        assert seen <= {"COMMIT"}
        assert {said for said, thread in said_in_transactions() if thread != threading.get_ident()} == {"COMMIT"}
        assert made.tracer.commits > 5

    play(scenario)


def test_a_lease_that_ran_out_is_left_to_its_owner_once(play: Play) -> None:
    """C13, C15: an owner that only waited for the lock renews before a claimer takes over; a dead one loses."""

    async def scenario(made: Stage) -> None:
        alive, dead = await made.leased("alive"), await made.leased("dead")
        beside = await made.another()
        assert isinstance(beside, SQLiteStore)
        beside._grace_micros = TAKEOVER_GRACE_MICROS
        made.clock.advance(2 * LEASE)
        claiming = asyncio.create_task(made.claim(store=beside))
        while not alter(made.path, "SELECT 1 FROM onefold_delivery WHERE graced"):
            await one_turn()
        assert await made.store.extend([alive], lease=LEASE) == [True]
        made.clock.advance(TAKEOVER_GRACE_MICROS / MICROSECONDS)
        assert [lease.id for lease in await claiming] == [dead.id]
        # A renewed lease has its grace again when it runs out the next time.
        assert alter(made.path, "SELECT graced FROM onefold_delivery") == [(0,), (0,)]

    play(scenario)


async def take_over_beside_other_work(made: Stage) -> None:
    """Claim other work every 0.6 s: what a dead worker held comes within two seconds after its lease."""
    made.sqlite._grace_micros = TAKEOVER_GRACE_MICROS
    dead = await made.leased("dead")
    made.clock.advance(LEASE)
    for number in range(4):
        await made.put(f"other {number}")
        if dead.id in [lease.id for lease in await made.claim()]:
            return
        made.clock.advance(0.6)
    raise AssertionError("not taken over in time")


def test_a_claimer_that_always_finds_other_work_takes_over_in_time(play: Play) -> None:
    """A takeover does not wait for a claim that finds nothing else."""
    play(take_over_beside_other_work)


def test_puts_at_once_share_a_commit_also_after_lone_ones(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        for number in range(20):
            await made.put(f"alone {number}")
        made.tracer.clear()
        await asyncio.gather(*(made.put(f"key {number}") for number in range(100)))
        # The first finds nothing waiting and is committed at once, the others together.
        assert made.tracer.commits == 2

    play(scenario)


def test_many_tasks_that_write_again_and_again_share_every_commit(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        async def write(name: int) -> None:
            for number in range(10):
                await made.put(f"{name}: {number}")

        await made.put("alone")
        made.tracer.clear()
        await asyncio.gather(*(write(name) for name in range(50)))
        # Some at first, before anybody was seen, and then hardly more than one for each time.
        assert made.tracer.commits <= 16 + 15

    play(scenario)


def test_a_task_that_writes_alone_is_told_of_duplicates(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        firsts = [await made.put(f"key {number}") for number in range(12)]
        seconds = [await made.put(f"key {number}") for number in range(12)]
        assert not any(one.duplicate for one in firsts)
        assert [(one.id, one.duplicate) for one in seconds] == [(one.id, True) for one in firsts]
        lost = made.message("lost")
        assert {(await made.store.put([lost]))[0].id for _ in range(6)} == {lost.id}
        assert len(await made.claim(limit=100)) == 13

    play(scenario)


def test_the_callers_own_statements_never_run_on_the_event_loop(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        async with made.store.transaction() as transaction:
            await transaction.execute("INSERT INTO effect (number) VALUES (1)")
        await made.store.fetch("SELECT count(*) FROM effect")
        assert threading.get_ident() not in made.tracer.threads

    play(scenario)


def test_the_lock_of_another_process_is_never_waited_for_on_the_event_loop(play: Play) -> None:
    """Fault 13: the loop goes on, and the write is made when the lock is free."""

    async def scenario(made: Stage) -> None:
        await made.put("before")
        other = apsw.Connection(str(made.path))
        other.execute("BEGIN IMMEDIATE")
        made.tracer.clear()
        began = asyncio.get_running_loop().time()
        writing = asyncio.create_task(made.put("k"))
        await turns()
        assert not writing.done()
        assert asyncio.get_running_loop().time() - began < BUSY_SECONDS_MAX / 2
        other.execute("ROLLBACK")
        other.close()
        assert not (await writing).duplicate
        assert made.tracer.said_there <= {"COMMIT"}

    play(scenario)


def test_a_task_that_only_writes_lets_the_others_have_their_turn(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await give_way()

        ticking = asyncio.create_task(tick())
        for _ in range(100):
            await made.put()
        ticking.cancel()
        assert ticks >= 6
        assert made.tracer.said_there <= {"COMMIT"}

    play(scenario)


def test_the_log_is_copied_into_the_file_and_does_not_grow_for_ever(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        for number in range(40):
            await made.store.put([made.message(payload=b"[%d]" % number + b" " * 2_000) for _ in range(60)])
        file, log = sizes(made.path)
        assert file > 3_000_000
        assert log < 12_000_000

    play(scenario)


def sizes(path: Path) -> tuple[int, int]:
    """How long the file and its log are."""
    return path.stat().st_size, Path(f"{path}-wal").stat().st_size


# a transaction that no work owns


@pytest.mark.parametrize("driver", ["apsw", "sqlite3"])
def test_nothing_is_accepted_into_a_transaction_that_will_not_be_committed(driver: str, tmp_path: Path) -> None:
    """An exception right behind BEGIN, as a signal handler raises it, leaves a transaction that no work owns.

    Messages that were written in it were answered as accepted, and gone with the connection.
    """
    raising = False

    def trace(when: str, statement: str) -> None:
        nonlocal raising
        if raising and when == "after" and statement == "BEGIN IMMEDIATE":
            raising = False
            raise RuntimeError("a signal handler raises")

    def make_store(clock: Clock) -> SQLiteStore:
        return SQLiteStore(str(tmp_path / "onefold.db"), clock=clock, driver=driver, trace=trace)

    async def scenario() -> None:
        nonlocal raising
        async with AsyncExitStack() as stack:
            made = Bench(make_store, stack)
            made.store = await made.another()
            raising = True
            with suppress(Exception):
                await made.store.put([made.message() for _ in range(2)])
            assert not raising
            accepted = {(await made.put(f"k{number}")).id for number in range(5)}
            other = await made.another()
            assert {record.envelope.id for record in await other.find(Query())} >= accepted

    asyncio.run(scenario())


# the end


def test_closing_rolls_back_what_is_open_and_refuses_what_comes_later(play: Play) -> None:
    async def scenario(made: Stage) -> None:
        transaction = Open(made, 1)
        await transaction.write()
        waiting = asyncio.create_task(made.put("waiting"))
        await one_turn()
        await made.store.close()
        await waiting
        with pytest.raises(StoreError, match="closed"):
            await transaction.conclude()
        assert made.seen() == []
        await made.store.open()
        assert (await made.put("waiting")).duplicate

    play(scenario)
