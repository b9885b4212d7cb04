"""The two SQLite libraries under the store: what differs between them, and the journals a file can have."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from onefold import App, ConfigurationError, SchemaError, StoreError, StoreUnavailableError, SyncApp
from onefold.store import Query
from onefold.store.open import open_store
from onefold.store.sqlite import SQLiteStore, connection
from onefold.store.sqlite.drivers import BUSY, CONSTRAINT, has_safe_log, load_driver, result_of
from onefold.store.sqlite.drivers import sqlite3 as on_sqlite3

DRIVERS = ["apsw", "sqlite3"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


def app_on(path: Path, **given: Any) -> App:
    app = App(f"sqlite:///{path}", **given)

    @app.task(key="{number}")
    async def ping(number: int) -> int:
        return number

    return app


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(within())


async def executed(path: Path, driver: str, statements: str, parameters: Any = ()) -> list[Any]:
    async with app_on(path, driver=driver) as app, app.transaction() as transaction:
        return await transaction.execute(statements, *parameters)


# the caller's SQL


@pytest.mark.parametrize("driver", DRIVERS)
def test_several_statements_run_in_order_and_return_all_rows(path: Path, driver: str) -> None:
    """Semicolons in texts, comments, names and triggers end nothing."""
    script = """
        CREATE TABLE "a;b" (x TEXT);  -- a comment; with a semicolon
        CREATE TRIGGER t AFTER INSERT ON "a;b" WHEN NEW.x = 'first; one' BEGIN
            INSERT INTO "a;b" VALUES ('second;');
            INSERT INTO "a;b" VALUES ('third');
        END;
        /* another; one */ INSERT INTO "a;b" VALUES ('first; one');
        SELECT x FROM "a;b" ORDER BY rowid; SELECT 'end';
        -- nothing
    """
    rows = asyncio.run(executed(path, driver, script))
    assert rows == [("first; one",), ("second;",), ("third",), ("end",)]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "control", ["COMMIT", "commit ;", "/* x */ ROLLBACK", "SELECT 1; COMMIT", "-- x\nSAVEPOINT y", ";;END", "BEGIN"]
)
def test_none_of_them_may_end_the_transaction(path: Path, driver: str, control: str) -> None:
    """Also where the store itself has run the same text before."""
    with pytest.raises(StoreError, match="not yours"):
        asyncio.run(executed(path, driver, control))


def test_with_sqlite3_several_statements_share_named_parameters_only(path: Path) -> None:
    """The module does not say how many of them each statement takes."""

    async def transact() -> None:
        store = SQLiteStore(str(path), driver="sqlite3")
        await store.open()
        try:
            async with store.transaction() as transaction:
                await transaction.execute("CREATE TABLE t (x)")
                named = "INSERT INTO t VALUES (:a); INSERT INTO t VALUES (:b); SELECT sum(x) FROM t"
                assert await transaction.execute(named, {"a": 1, "b": 2}) == [(3,)]
                assert await transaction.execute("SELECT ?; -- one statement", (4,)) == [(4,)]
                with pytest.raises(StoreError, match=":name"):
                    await transaction.execute("INSERT INTO t VALUES (?); INSERT INTO t VALUES (?)", (1, 2))
        finally:
            await store.close()

    run(transact)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_reference_that_points_nowhere_fails_its_own_transaction_alone(path: Path, driver: str) -> None:
    """Deferred keys are checked by the commit; transactions beside it, and sends, are committed."""

    async def main() -> None:
        async with app_on(path, driver=driver) as app:
            async with app.transaction() as transaction:
                await transaction.execute("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
                await transaction.execute(
                    "CREATE TABLE child (id INTEGER, parent REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)"
                )

            async def insert(number: int, parent: int | None) -> None:
                async with app.transaction() as transaction:
                    await transaction.execute("INSERT INTO child VALUES (?, ?)", number, parent)
                    transaction.send(app.tasks["ping"], number)

            acts = [insert(number, 7 if number == 5 else None) for number in range(10)]
            sends = [app.tasks["ping"].send(number) for number in range(100, 110)]
            ended = await asyncio.gather(*acts, *sends, return_exceptions=True)
            wrong = [index for index, one in enumerate(ended) if isinstance(one, BaseException)]
            assert wrong == [5], ended
            assert isinstance(ended[5], StoreError)
            assert "constraint" in str(ended[5])
            assert await app.store.fetch("SELECT count(*) FROM child") == [(9,)]
            assert len(await app.find(Query(limit=100))) == 19

    run(main)


# locks


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_lock_that_is_kept_is_waited_for_and_then_a_typed_error(
    path: Path, driver: str, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sends, which do not block the loop meanwhile, and by transactions."""
    monkeypatch.setattr(connection, "BUSY_SECONDS_MAX", 0.2)

    async def main() -> None:
        async with app_on(path, driver=driver, journal=journal) as app:
            other = load_driver(driver).connect(str(path))
            other.begin()
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0.01)  # noqa: TID251 - the loop itself is looked at

            ticking = asyncio.ensure_future(tick())
            with pytest.raises(StoreUnavailableError):
                await app.tasks["ping"].send(1)
            assert ticks > 3
            ticking.cancel()
            other.execute("ROLLBACK")
            await app.tasks["ping"].send(2)
            other.close()
            assert len(await app.find(Query())) == 1

    run(main)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_reader_that_never_ends_does_not_make_an_open_wait_for_ever(
    path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To turn the log on takes a moment without readers; the wait for it is bounded, and a typed error ends it."""
    monkeypatch.setattr(connection, "BUSY_SECONDS_MAX", 0.2)
    reader = load_driver(driver).connect(str(path))
    reader.execute("CREATE TABLE orders (id)")
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM orders").fetchall()

    async def main() -> None:
        async with asyncio.timeout(6):  # waits within waits took twenty times as long
            with pytest.raises(StoreUnavailableError):
                await app_on(path, driver=driver).open()
        reader.execute("COMMIT")
        await open_and_close(path, driver=driver)

    run(main)
    reader.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_without_a_log_a_commit_waits_for_readers_in_the_thread(path: Path, driver: str) -> None:
    """A rollback journal is written back when no reader is left; the event loop goes on meanwhile."""

    async def main() -> None:
        async with app_on(path, driver=driver, journal="delete") as app:
            await app.tasks["ping"].send(0)
            reader = load_driver(driver).connect(str(path))
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM onefold_message").fetchall()
            sending = asyncio.ensure_future(app.tasks["ping"].send(1))
            done, _ = await asyncio.wait([sending], timeout=0.1)
            assert not done
            reader.execute("COMMIT")
            await sending
            reader.close()
            assert len(await app.find(Query())) == 2

    run(main)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_running_statement_can_be_interrupted_from_another_thread(path: Path, driver: str) -> None:
    """Both libraries offer the same method; SQLite looks for it as it goes."""
    opened = load_driver(driver).connect(str(path))
    endless = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"

    async def main() -> None:
        running = asyncio.ensure_future(asyncio.to_thread(lambda: opened.execute(endless).fetchall()))
        while not running.done():
            opened.interrupt()
            await asyncio.wait([running], timeout=0.01)
        assert result_of(running.exception()) == 9

    run(main)
    opened.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_errors_are_told_apart_by_their_codes(path: Path, driver: str) -> None:
    """Whatever class a library gives them."""
    first, second = (load_driver(driver).connect(str(path)) for _ in range(2))
    first.execute("CREATE TABLE t (x UNIQUE)")
    first.begin()
    with pytest.raises(Exception, match="locked") as busy:
        second.begin()
    first.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(Exception, match="UNIQUE") as constraint:
        first.execute("INSERT INTO t VALUES (1)")
    assert (result_of(busy.value), result_of(constraint.value)) == (BUSY, CONSTRAINT)
    assert result_of(ValueError()) == 0
    first.close()
    second.close()


def test_a_damaged_text_is_a_typed_error_on_sqlite3_too(path: Path) -> None:
    """The module has neither a class nor a code for it."""

    async def fill() -> None:
        async with app_on(path, driver="sqlite3", journal="delete") as app:
            await app.tasks["ping"].send(1)

    run(fill)
    path.write_bytes(path.read_bytes().replace(b"default", b"\xff" * 7))

    async def read() -> None:
        async with app_on(path, driver="sqlite3") as app:
            with pytest.raises(SchemaError, match="restore a backup"):
                await app.find(Query())

    run(read)


# the journal


def journal_of(path: Path) -> str:
    opened = sqlite3.connect(path)
    mode: str = opened.execute("PRAGMA journal_mode").fetchone()[0]
    opened.close()
    return mode


async def open_and_close(path: Path, **given: Any) -> None:
    async with app_on(path, **given) as app:
        await app.count()


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_file_keeps_the_journal_it_was_made_with(path: Path, driver: str) -> None:
    """A command that does not say it must not turn the log on under a running app."""
    run(lambda: open_and_close(path, driver=driver, journal="delete"))
    assert journal_of(path) == "delete"
    run(lambda: open_and_close(path))
    assert journal_of(path) == "delete"
    run(lambda: open_and_close(path, journal="wal"))
    assert journal_of(path) == "wal"
    run(lambda: open_and_close(path, driver=driver))
    assert journal_of(path) == "wal"


def test_a_database_of_the_users_gets_the_log(path: Path) -> None:
    """As it always did: only files that onefold made without it stay without it."""
    opened = sqlite3.connect(path)
    opened.execute("CREATE TABLE orders (id)")
    opened.close()
    run(lambda: open_and_close(path))
    assert journal_of(path) == "wal"


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_log_is_not_taken_from_those_who_use_it(path: Path, driver: str) -> None:
    """Said at once, with what to do."""

    async def main() -> None:
        async with app_on(path, driver=driver):
            with pytest.raises(ConfigurationError, match="stop everything"):
                await app_on(path, driver=driver, journal="delete").open()

    run(main)


def test_a_commit_without_a_log_also_syncs_the_directory(path: Path) -> None:
    """Otherwise the removal of the journal, which is the commit, may be lost with the power."""

    async def main() -> None:
        for journal, expected in (("wal", 2), ("delete", 3)):
            file = path.with_name(f"{journal}.db")
            async with app_on(file, journal=journal) as app:
                store = app.store
                assert isinstance(store, SQLiteStore)
                assert await store._write(lambda session: session.connection.pragma("synchronous")) == expected

    run(main)


# versions


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 7, 0), False),
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 54, 1), True),
    ],
)
def test_which_versions_can_damage_a_log(version: tuple[int, int, int], safe: bool) -> None:
    """Mended in 3.51.3, and in 3.50.7 and 3.44.6 for programs that stay there."""
    assert has_safe_log(version) is safe


@pytest.mark.parametrize(
    ("version", "journal", "durability", "warned"),
    [
        ((3, 40, 1), "wal", "process crash", True),
        ((3, 40, 1), "delete", "power loss", False),
        ((3, 51, 3), "wal", "power loss", False),
    ],
)
def test_an_old_version_is_said_and_warned_of(
    path: Path,
    version: tuple[int, int, int],
    journal: str,
    durability: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the store's own facts and in the log, once, when it is opened; with the remedy."""
    monkeypatch.setattr(on_sqlite3, "VERSION", version)

    async def main() -> None:
        async with app_on(path, driver="sqlite3", journal=journal) as app:
            assert app.store.capabilities.durability == durability

    with caplog.at_level(logging.WARNING, "onefold"):
        run(main)
    said = [record.getMessage() for record in caplog.records if "can, rarely, damage" in record.getMessage()]
    assert len(said) == warned
    assert all("3.40.1" in one and "journal='delete'" in one for one in said)


def test_the_facts_follow_the_journal_that_the_file_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is known when it is open, not before."""
    monkeypatch.setattr(on_sqlite3, "VERSION", (3, 40, 1))

    async def main() -> None:
        await open_and_close(path, driver="sqlite3", journal="delete")
        store = open_store(f"sqlite:///{path}?driver=sqlite3")
        assert store.capabilities.durability == "process crash"
        await store.open()
        assert store.capabilities.durability == "power loss"
        await store.close()

    run(main)


# how it is said


def test_driver_and_journal_may_stand_in_the_url_or_in_the_app(path: Path) -> None:
    """Once, or twice the same; what is wrong is named."""
    url = f"sqlite:///{path}"
    with SyncApp(url, driver="sqlite3", journal="delete") as app:
        app.count()
    assert journal_of(path) == "delete"
    run(App(f"{url}?driver=sqlite3", driver="sqlite3").migrate)  # type: ignore[arg-type]
    for wrong, said in (
        (lambda: open_store(f"{url}?driver=sqlite3", driver="apsw"), "say it once"),
        (lambda: open_store(f"{url}?driver=pysqlite"), "'apsw' or 'sqlite3'"),
        (lambda: open_store(f"{url}?journal=memory"), "'wal' and 'delete'"),
        (lambda: open_store(f"{url}?journal="), "'wal' and 'delete'"),
        (lambda: open_store("postgresql://h/d", driver="sqlite3"), "is for SQLite"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            wrong()
