"""The caller's own SQL on SQLite, where processes share one write lock: cancelled, endless, too long, or at a close."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from onefold import App, Context, DeadError, ReadTooLongError, RetryPolicy, StoreError, TransactionTooLongError
from onefold.clock import SystemClock
from onefold.store import Query, State
from onefold.store.sqlite import SQLiteStore

#: A scenario takes a second or two; one that hangs ends here.
SECONDS_MAX = 30
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
ENDLESS_WRITE = f"INSERT INTO effect {ENDLESS}"

Scenario = Callable[[App], Awaitable[None]]


@pytest.fixture(params=["apsw", "sqlite3"])
def driver(request: pytest.FixtureRequest) -> str:
    """Each library in turn."""
    name: str = request.param
    return name


def play(path: Path, driver: str, scenario: Scenario) -> None:
    """Run a scenario in an app on a file with the table ``effect``."""

    async def main() -> None:
        app = App(store=SQLiteStore(str(path), driver=driver))
        async with asyncio.timeout(SECONDS_MAX), app:
            async with app.transaction() as tx:
                await tx.execute("CREATE TABLE effect (x)")
            await scenario(app)

    asyncio.run(main())


async def effects(app: App) -> list[Any]:
    """Return the committed rows."""
    return [row[0] for row in await app.store.fetch("SELECT x FROM effect ORDER BY x")]


async def seconds_of(awaited: Awaitable[object]) -> float:
    """Return how long an awaitable takes."""
    clock = SystemClock()
    began = clock.steady()
    await awaited
    return (clock.steady() - began) / 1_000_000


# cancelled statements


async def give_up_before_it_begins(app: App) -> None:
    """Three statements are cancelled while another task has the writer; one is run in the end."""
    is_open, go_on = asyncio.Event(), asyncio.Event()

    async def neighbour() -> None:
        async with app.transaction() as tx:
            await tx.execute("INSERT INTO effect VALUES ('neighbour')")
            is_open.set()
            await go_on.wait()

    holding = asyncio.create_task(neighbour())
    await is_open.wait()
    async with app.transaction() as tx:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await tx.execute("INSERT INTO effect VALUES ('payment')")
        go_on.set()
        await tx.execute("INSERT INTO effect VALUES ('payment')")
    await holding
    assert await effects(app) == ["neighbour", "payment"]


def test_a_statement_that_was_given_up_before_it_began_is_never_run(tmp_path: Path, driver: str) -> None:
    """A caller that stopped waiting and retried has one row, not one for each try."""
    play(tmp_path / "shop.db", driver, give_up_before_it_begins)


async def give_up_while_it_runs(app: App) -> None:
    """A statement is cancelled while it runs; the block then ends normally."""

    async def block() -> None:
        async with app.transaction() as tx:
            await tx.execute("INSERT INTO effect VALUES ('before')")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await tx.execute(ENDLESS)
            await tx.execute("INSERT INTO effect VALUES ('after')")

    with pytest.raises(StoreError, match="given up while it ran"):
        await block()
    assert await effects(app) == []


def test_a_transaction_with_a_statement_that_was_given_up_cannot_commit(tmp_path: Path, driver: str) -> None:
    """The effect of a statement without an awaited answer is unknown, so the whole transaction is rolled back."""
    play(tmp_path / "shop.db", driver, give_up_while_it_runs)


def test_a_commit_that_was_given_up_before_it_began_is_a_rollback(tmp_path: Path, driver: str) -> None:
    """A block that is cancelled while its commit waits has written nothing."""

    async def scenario(app: App) -> None:
        assert isinstance(app.store, SQLiteStore)
        writer = app.store._writer
        transaction = app.store.transaction()
        await transaction.__aenter__()
        await transaction.execute("INSERT INTO effect VALUES (1)")
        ending = asyncio.create_task(transaction.__aexit__(None, None, None))
        writer._busy = True  # as if the writer was busy
        await asyncio.sleep(0.01)
        ending.cancel()
        await asyncio.wait([ending])
        writer._resume()
        async with app.transaction() as tx:
            await tx.execute("INSERT INTO effect VALUES (2)")
        assert await effects(app) == [2]

    play(tmp_path / "shop.db", driver, scenario)


def test_a_send_that_was_given_up_before_it_began_is_not_stored(tmp_path: Path, driver: str) -> None:
    """A send that waits for the writer and is cancelled is withdrawn."""

    async def scenario(app: App) -> None:
        @app.task
        async def work() -> None: ...

        async def send() -> None:
            await work.send()

        async with app.transaction() as tx:
            await tx.execute("INSERT INTO effect VALUES (1)")
            # In its own context: in that of the block the send would join its transaction.
            sending = asyncio.get_running_loop().create_task(send(), context=contextvars.Context())
            await asyncio.sleep(0.02)
            sending.cancel()
            await asyncio.wait([sending])
        assert await app.store.find(Query()) == []

    play(tmp_path / "shop.db", driver, scenario)


# endless statements


@pytest.mark.parametrize("statement", [ENDLESS, ENDLESS_WRITE], ids=["read", "write"])
def test_an_endless_statement_ends_with_the_timeout_of_its_task(tmp_path: Path, driver: str, statement: str) -> None:
    """The statement is interrupted, the writer is free for others, and the message becomes a dead letter."""

    async def scenario(app: App) -> None:
        @app.task(timeout=0.3, retry=RetryPolicy(max_attempts=1))
        async def endless(ctx: Context) -> None:
            await ctx.execute(statement)

        @app.task
        async def neighbour(ctx: Context) -> None:
            await ctx.execute("INSERT INTO effect VALUES (1)")

        await endless.send()
        await neighbour.send()
        assert await seconds_of(app.work(until_idle=True)) < 2.0
        (letter,) = await app.store.find(Query(states=[State.DEAD]))
        assert letter.failure is not None
        assert letter.failure.error_type.endswith("TimeoutError")
        assert await effects(app) == [1]

    play(tmp_path / "shop.db", driver, scenario)


def test_an_endless_statement_ends_with_the_time_of_its_transaction(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a timeout of the task the limit of a transaction ends it, as the typed error, and counts an attempt."""
    monkeypatch.setattr("onefold.limits.TRANSACTION_SECONDS_MAX", 0.3)

    async def scenario(app: App) -> None:
        @app.task(retry=RetryPolicy(max_attempts=1))
        async def endless(ctx: Context) -> None:
            await ctx.execute(ENDLESS_WRITE)

        await endless.send()
        assert await seconds_of(app.work(until_idle=True)) < 2.0
        (letter,) = await app.store.find(Query(states=[State.DEAD]))
        assert letter.failure is not None
        assert letter.failure.error_type.endswith("TransactionTooLongError")
        assert await effects(app) == []

    play(tmp_path / "shop.db", driver, scenario)


# transactions that stay open for too long


def test_a_transaction_that_keeps_the_lock_for_too_long_is_ended(tmp_path: Path, driver: str) -> None:
    """A block that waits inside is rolled back after its time, and others write meanwhile."""

    async def scenario(app: App) -> None:
        is_open, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with app.transaction(timeout=0.2) as tx:
                await tx.execute("INSERT INTO effect VALUES ('held')")
                is_open.set()
                await go_on.wait()
                await tx.execute("INSERT INTO effect VALUES ('late')")

        async def write() -> None:
            async with app.transaction() as tx:
                await tx.execute("INSERT INTO effect VALUES ('neighbour')")

        holding = asyncio.create_task(hold())
        await is_open.wait()
        assert await seconds_of(write()) < 2.0
        go_on.set()
        with pytest.raises(TransactionTooLongError, match=r"more than 0\.2 s"):
            await holding
        assert await effects(app) == ["neighbour"]

    play(tmp_path / "shop.db", driver, scenario)


def test_a_block_that_only_ends_too_late_is_told_so(tmp_path: Path, driver: str) -> None:
    """The end of a block with a rolled back transaction raises, because nothing was committed."""

    async def scenario(app: App) -> None:
        async def block() -> None:
            async with app.transaction(timeout=0.1) as tx:
                await tx.execute("INSERT INTO effect VALUES (1)")
                await asyncio.sleep(0.3)

        with pytest.raises(TransactionTooLongError):
            await block()
        assert await effects(app) == []

    play(tmp_path / "shop.db", driver, scenario)


def test_a_longer_time_can_be_asked_for(tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that asks for it may stay open for longer than the usual time."""
    monkeypatch.setattr("onefold.limits.TRANSACTION_SECONDS_MAX", 0.1)

    async def scenario(app: App) -> None:
        async with app.transaction(timeout=5) as tx:
            await tx.execute("INSERT INTO effect VALUES (1)")
            await asyncio.sleep(0.3)
        assert await effects(app) == [1]

    play(tmp_path / "shop.db", driver, scenario)


# reads


def test_an_endless_read_keeps_no_claim_and_no_count_waiting(tmp_path: Path, driver: str) -> None:
    """While one handler reads for ever, others are claimed and operators are answered; its timeout ends it."""

    async def scenario(app: App) -> None:
        reading, ran = asyncio.Event(), asyncio.Event()

        @app.task(timeout=1.0, retry=RetryPolicy(max_attempts=1))
        async def report(ctx: Context) -> None:
            reading.set()
            await ctx.fetch(ENDLESS)

        @app.task
        async def work() -> None:
            ran.set()

        working = asyncio.create_task(app.work(stop_after=1))
        receipt = await report.send()
        await reading.wait()
        await work.send()
        async with asyncio.timeout(0.9):
            await ran.wait()
            await app.count()
            await app.store.find(Query())
        with pytest.raises(DeadError, match="TimeoutError"):
            await receipt.result(timeout=SECONDS_MAX)
        assert await seconds_of(app.store.fetch("SELECT 1")) < 1.0
        app.stop_working()
        await working

    play(tmp_path / "shop.db", driver, scenario)


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_read_that_takes_too_long_is_a_typed_error(
    tmp_path: Path, driver: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted after its time; reads that waited behind it have their whole time."""
    monkeypatch.setattr("onefold.limits.FETCH_SECONDS_MAX", 0.2)

    async def scenario(app: App) -> None:
        reads = [app.store.fetch(ENDLESS), app.store.fetch(ENDLESS), app.store.fetch("SELECT 1")]
        first, second, third = await asyncio.gather(*reads, return_exceptions=True)
        assert isinstance(first, ReadTooLongError)
        assert isinstance(second, ReadTooLongError)
        assert third == [(1,)]

    play(tmp_path / "shop.db" if place == "file" else Path(":memory:"), driver, scenario)


def test_a_close_ends_the_reads_of_callers(tmp_path: Path, driver: str) -> None:
    """A running read and a waiting one get the error that the store is closed."""

    async def main() -> None:
        app = App(store=SQLiteStore(str(tmp_path / "shop.db"), driver=driver))
        await app.open()
        reads = [asyncio.create_task(app.store.fetch(ENDLESS)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await seconds_of(app.close()) < 2.0
        for error in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(error, StoreError)
            assert "closed" in str(error)

    asyncio.run(asyncio.wait_for(main(), SECONDS_MAX))


# statements that callers may not run

REFUSED = {
    "PRAGMA query_only = ON": "PRAGMA query_only",
    "PRAGMA locking_mode = EXCLUSIVE": "PRAGMA locking_mode",
    "PRAGMA journal_mode = DELETE": "PRAGMA journal_mode",
    "PRAGMA synchronous = OFF": "PRAGMA synchronous",
    "/* c */ PRAGMA busy_timeout = 1": "PRAGMA busy_timeout",
    "ATTACH ':memory:' AS other": "ATTACH",
    "DETACH main": "DETACH",
    "COMMIT": "COMMIT",
    "BEGIN IMMEDIATE": "BEGIN",
    "SELECT 1; COMMIT": "COMMIT",
    "BEGIN; SELECT count(*) FROM onefold_inbox": "BEGIN",
    "SAVEPOINT mine": "SAVEPOINT",
    "CREATE TEMP TABLE onefold_delivery (x)": "temporary",
    "CREATE TABLE temp.onefold_delivery (x)": "temporary",
    "CREATE TEMPORARY VIEW v AS SELECT 1": "temporary",
    "DROP VIEW onefold_inbox": "DROP VIEW onefold_inbox",
    "DROP TABLE OneFold_message": "DROP TABLE onefold_message",
    "DROP INDEX onefold_delivery_due": "DROP INDEX onefold_delivery_due",
    "ALTER TABLE onefold_message ADD COLUMN mine": "ALTER TABLE onefold_message",
    "CREATE TRIGGER mine AFTER INSERT ON onefold_message BEGIN SELECT 1; END": "CREATE TRIGGER ON onefold_message",
}


@pytest.mark.parametrize("verb", ["execute", "fetch"])
@pytest.mark.parametrize("place", ["file", "memory"])
def test_what_would_change_the_shared_connection_is_refused(tmp_path: Path, driver: str, verb: str, place: str) -> None:
    """Each is a typed error with its reason, in a transaction and in a read, and everything works as before."""

    async def run(app: App, statement: str) -> None:
        if verb == "fetch":
            await app.store.fetch(statement)
        else:
            async with app.transaction() as tx:
                await tx.execute(statement)

    async def scenario(app: App) -> None:
        for statement, reason in REFUSED.items():
            with pytest.raises(StoreError, match=reason):
                await run(app, statement)
        async with app.transaction() as tx:
            await tx.execute("INSERT INTO effect VALUES (1)")
            assert await tx.execute("SELECT name FROM pragma_table_info('effect')") == [("x",)]
            assert (await tx.execute("PRAGMA table_info(effect)"))[0][1] == "x"
        assert await effects(app) == [1]
        assert await app.store.fetch("SELECT count(*) FROM onefold_inbox") == [(0,)]

        @app.task
        async def work() -> None: ...

        await work.send()
        assert await app.work(until_idle=True) == 1

    play(tmp_path / "shop.db" if place == "file" else Path(":memory:"), driver, scenario)


def test_a_vacuum_is_refused(tmp_path: Path, driver: str) -> None:
    """It is impossible inside a transaction, and a read must not copy the file elsewhere."""

    async def scenario(app: App) -> None:
        with pytest.raises(Exception, match=r"VACUUM|vacuum"):
            await app.store.fetch(f"VACUUM INTO '{tmp_path}/copy.db'")
        assert not (tmp_path / "copy.db").exists()

    play(tmp_path / "shop.db", driver, scenario)


# closing


def test_a_close_answers_all_that_wait(tmp_path: Path, driver: str) -> None:
    """Twenty transactions are under way at the close: each is committed or gets an error, none waits for ever."""

    async def main() -> None:
        app = App(store=SQLiteStore(str(tmp_path / "shop.db"), driver=driver))
        await app.open()
        async with app.transaction() as tx:
            await tx.execute("CREATE TABLE effect (x)")

        async def one(number: int) -> None:
            async with app.transaction() as tx:
                await tx.execute("INSERT INTO effect VALUES (?)", number)
                await asyncio.sleep(0.002)

        under_way = [asyncio.create_task(one(number)) for number in range(20)]
        await asyncio.sleep(0.004)
        await app.close()
        done, waiting = await asyncio.wait(under_way, timeout=5)
        assert not waiting
        committed = {number for number, task in enumerate(under_way) if task.exception() is None}
        assert {type(task.exception()) for task in done} <= {type(None), StoreError}
        async with app:
            assert set(await effects(app)) == committed

    asyncio.run(asyncio.wait_for(main(), SECONDS_MAX))


def test_a_close_does_not_wait_for_an_endless_statement(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close interrupts a block's statement after the usual time of a transaction, even if the block has more."""
    monkeypatch.setattr("onefold.limits.TRANSACTION_SECONDS_MAX", 0.2)

    async def main() -> None:
        app = App(store=SQLiteStore(str(tmp_path / "shop.db"), driver=driver))
        await app.open()

        async def endless() -> None:
            async with app.transaction(timeout=1_000) as tx:
                await tx.execute(ENDLESS)

        running = asyncio.create_task(endless())
        await asyncio.sleep(0.05)
        assert await seconds_of(app.close()) < 2.0
        done, _ = await asyncio.wait([running], timeout=5)
        assert done

    asyncio.run(asyncio.wait_for(main(), SECONDS_MAX))
