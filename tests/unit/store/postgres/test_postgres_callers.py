"""Callers' own SQL on PostgreSQL: it runs as psycopg runs it, ends where it was begun, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.rows import dict_row
from test_postgres_engine import envelope, opened, run, terminate_sessions

from onefold import App, Context, RetryPolicy, limits
from onefold.clock import SystemClock
from onefold.errors import (
    ConfigurationError,
    DeadError,
    ResultTimeoutError,
    SchemaError,
    SessionLostError,
    StoreError,
    StoreUnavailableError,
    TransactionEndedError,
    TransactionOpenError,
)
from onefold.store import Done
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire import handler_wire as handling
from onefold.testing.servers import PostgresServer
from onefold.worker import execution

_clock = SystemClock()

#: Attempts that follow at once, so that a test need not wait.
QUICK = RetryPolicy(max_attempts=2, base=0.1, cap=0.1)
#: An outcome that has not come by then does not come.
RESULT_SECONDS = 20.0
#: Looks before a test gives up waiting.
LOOKS_MAX = 400


def ask(url: str, statement: LiteralString, *parameters: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(LOOKS_MAX):
        if holds():
            return
        await _clock.sleep(0.02)
    raise AssertionError("it never came true")


def sleepers(url: str) -> int:
    """Return how many statements of callers sleep on the server."""
    statement: LiteralString = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' "
        "AND query LIKE '%pg_sleep(%' AND pid <> pg_backend_pid()"
    )
    number: int = ask(url, statement)[0][0]
    return number


@asynccontextmanager
async def working(url: str, **options: Any) -> AsyncIterator[App]:
    """An app whose worker runs while the block does."""
    app = App(store=PostgresStore(url, **options))
    await app.migrate()
    yield app


async def outcome(app: App, task: Any, *arguments: Any) -> str:
    """Send, work until it has ended, and return its result, or the reason and the error of its dead letter."""
    receipt = await task.send(*arguments)
    work = asyncio.create_task(app.work())
    try:
        return str(await receipt.result(timeout=RESULT_SECONDS))
    except DeadError as error:
        return f"{error.reason}: {error.error_type}"
    except ResultTimeoutError:
        return "still alive"
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


# what runs is what was said


async def check_statements_are_not_confused(url: str) -> None:
    """Lose the connection at different moments of transactions with several statements, and compare every row."""
    ask(url, "CREATE TABLE audit (n int, v int)")
    ask(url, "CREATE TABLE account (id int PRIMARY KEY, n int)")
    ask(url, "INSERT INTO account VALUES (1, 0)")
    first, second, third = "SELECT %s::int + %s::int", "INSERT INTO audit VALUES (%s, %s)", None
    third = "UPDATE account SET n = n + %s WHERE id = %s"
    async with opened(url, pool_size=1) as store:
        for _ in range(7):  # after a few times a statement is prepared
            async with store.transaction() as transaction:
                await transaction.execute(first, [1, 1])
                await transaction.execute(second, [100, 1])
        ask(url, "TRUNCATE audit")
        with suppress(StoreUnavailableError):
            async with store.transaction() as transaction:
                # Only a connection that is seen to be lost is replaced, and only then can numbers be confused.
                terminate_sessions(url, wait_seconds=5)
                await transaction.execute(second, [200, 1])
        kept = ask(url, "SELECT * FROM audit")
        for _ in range(7):
            async with store.transaction() as transaction:
                await transaction.execute(first, [1, 1])
                await transaction.execute(third, [10, 1])
    assert ask(url, "SELECT n FROM account") == [(70,)]
    assert ask(url, "SELECT * FROM audit") == kept


def test_a_statement_never_runs_the_text_of_another(postgres_url: str) -> None:
    """Names of prepared statements restart with a connection; whichever is lost, each row is the one that was meant."""
    run(lambda: check_statements_are_not_confused(postgres_url))


def test_a_connection_that_was_lost_while_idle_is_replaced_before_anything_is_sent(postgres_url: str) -> None:
    """Nothing of the caller's was sent on it, so a transaction begins on another one."""

    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            assert await store.fetch("SELECT %s::int", [1]) == [(1,)]
            for _ in range(3):
                terminate_sessions(postgres_url)
                async with store.transaction() as transaction:
                    assert await transaction.execute("SELECT %s::int", [2]) == [(2,)]

    run(scenario)


def test_a_connection_lost_between_statements_is_not_blamed_on_the_next_one(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:

            async def interrupted() -> None:
                async with store.transaction() as transaction:
                    await transaction.execute("SELECT 1")
                    terminate_sessions(postgres_url)
                    await until(lambda: not transaction._handler.alive)
                    await transaction.execute("SELECT 2")

            with pytest.raises(StoreUnavailableError) as caught:
                await interrupted()
            assert not isinstance(caught.value, SessionLostError)

    run(scenario)


@pytest.mark.parametrize("lent", [False, True])
def test_psycopgs_own_ways_of_building_statements_work(postgres_url: str, lent: bool) -> None:
    """Composed statements with parameters, bytes, and binary results through a lent connection."""

    async def scenario() -> None:
        async with opened(postgres_url) as store, store.transaction() as transaction:
            composed: Any = sql.SQL("SELECT {} + %s::int").format(sql.Literal(1))
            if lent:
                assert await (await transaction.connection.execute(composed, [1])).fetchall() == [(2,)]
            for _ in range(7):
                assert await transaction.execute(composed, [1]) == [(2,)]
            raw: Any = b"SELECT %s::int"
            assert await transaction.execute(raw, [3]) == [(3,)]

    run(scenario)


def test_a_copy_through_execute_is_refused_and_harms_no_caller(postgres_url: str) -> None:
    """COPY TO STDOUT with a parameter is psycopg's error, and the connection serves the next caller."""

    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            for statement, parameters in (("COPY (SELECT 1) TO STDOUT", ()), ("COPY (SELECT 1) TO STDOUT -- %s", (1,))):

                async def copy(statement: str = statement, parameters: tuple[int, ...] = parameters) -> None:
                    async with store.transaction() as transaction:
                        await transaction.execute(statement, parameters)

                with pytest.raises(psycopg.Error):
                    await asyncio.wait_for(copy(), 10)
                assert await store.fetch("SELECT %s::int", [1]) == [(1,)]

    run(scenario)


# statements that end their session


async def check_a_statement_that_ends_its_session_is_bounded(url: str, place: int) -> None:
    """The statement runs once per run of its handler, and the message is a dead letter after a few."""
    ask(url, "CREATE SEQUENCE ended")  # what is taken from a sequence is not rolled back
    async with working(url) as app:
        runs = 0

        @app.task(key="{n}", retry=QUICK)
        async def ends(ctx: Context, n: int) -> None:
            nonlocal runs
            runs += 1
            assert runs < 20
            for _ in range(place):
                await ctx.execute("SELECT %s::int", 1)
            await ctx.execute("SELECT nextval('ended'), pg_terminate_backend(pg_backend_pid()), %s::int", n)

        async with app:
            assert await outcome(app, ends, 1) == "quarantined: onefold.errors.SessionLostError"
    assert runs == limits.QUARANTINE_AFTER
    assert ask(url, "SELECT last_value FROM ended") == [(runs,)]


@pytest.mark.parametrize("place", [0, 1])
def test_a_statement_that_ends_its_session_each_time_is_quarantined(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """It is never sent a second time by itself, and its message does not come back for ever."""
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.05)
    run(lambda: check_a_statement_that_ends_its_session_is_bounded(postgres_url, place))


def test_a_session_that_ends_under_a_statement_now_and_then_uses_up_no_attempt(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.05)

    async def scenario() -> None:
        async with working(postgres_url) as app:
            runs = 0

            @app.task(key="{n}", retry=RetryPolicy(max_attempts=1))
            async def unlucky(ctx: Context, n: int) -> str:
                nonlocal runs
                runs += 1
                if runs < limits.QUARANTINE_AFTER:
                    await ctx.execute("SELECT pg_terminate_backend(pg_backend_pid()), %s::int", n)
                return f"attempt {ctx.attempt}"

            async with app:
                assert await outcome(app, unlucky, 1) == "attempt 1"

    run(scenario)


# statements that are given up


async def check_the_limit_cancels_and_counts(url: str) -> None:
    """A statement past the limit is cancelled on the server, frees its locks, and is a failed attempt."""
    ask(url, "CREATE TABLE account (id int PRIMARY KEY, n int)")
    ask(url, "INSERT INTO account VALUES (1, 0)")
    async with working(url) as app:

        @app.task(key="{lent}", retry=QUICK)
        async def slow(ctx: Context, lent: bool) -> None:
            await ctx.execute("UPDATE account SET n = n + 1 WHERE id = %s", 1)
            if lent:
                await (await ctx.connection()).execute("SELECT pg_sleep(%s)", (60,))
            await ctx.execute("SELECT pg_sleep(%s)", 60)

        async with app:
            for lent in (False, True):
                began = _clock.steady()
                said = await outcome(app, slow, lent)
                assert said == "attempts exhausted: onefold.errors.TransactionTooLongError"
                assert (_clock.steady() - began) / 1e6 < 8
                assert sleepers(url) == 0
                ask(url, "SET lock_timeout = '1s'; UPDATE account SET n = n WHERE id = 1")


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_SECONDS_MAX", 0.3)


@pytest.mark.usefixtures("short_limit")
def test_a_statement_past_the_transactions_limit_is_cancelled_and_counted(postgres_url: str) -> None:
    """Through ctx.execute and on a lent connection."""
    run(lambda: check_the_limit_cancels_and_counts(postgres_url))


async def check_a_callers_timeout_is_kept(url: str) -> None:
    async def fetch(store: PostgresStore) -> None:
        await store.fetch("SELECT pg_sleep(%s)", [60])

    async def execute(store: PostgresStore) -> None:
        async with store.transaction() as transaction:
            await transaction.execute("SELECT pg_sleep(%s)", [60])

    async def lent(store: PostgresStore) -> None:
        async with store.transaction() as transaction:
            await transaction.connection.execute("SELECT pg_sleep(60)")

    async with opened(url, pool_size=1) as store:
        for give_up in (fetch, execute, lent):
            began = _clock.steady()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await give_up(store)
            assert (_clock.steady() - began) / 1e6 < 2
            assert sleepers(url) == 0
            assert await store.fetch("SELECT 1") == [(1,)]


def test_a_callers_timeout_takes_about_as_long_as_it_says(postgres_url: str) -> None:
    """The statement is cancelled on the server, whichever way it was sent."""
    run(lambda: check_a_callers_timeout_is_kept(postgres_url))


def test_a_tasks_timeout_cancels_its_statement_and_counts(postgres_url: str) -> None:
    async def scenario() -> None:
        async with working(postgres_url) as app:

            @app.task(key="{n}", retry=RetryPolicy(max_attempts=1), timeout=0.3)
            async def slow(ctx: Context, n: int) -> None:
                await ctx.execute("SELECT pg_sleep(%s)", 60)

            async with app:
                assert await outcome(app, slow, 1) == "attempts exhausted: onefold.errors.HandlerTimeoutError"
                assert sleepers(postgres_url) == 0

    run(scenario)


def test_a_put_that_waits_for_a_foreign_lock_is_cancelled_too(postgres_url: str) -> None:
    """Statements of our own in a caller's transaction leave no lock behind either."""

    async def scenario() -> None:
        async with opened(postgres_url) as store, opened(postgres_url) as other, other.transaction() as holder:
            await holder.put([envelope("held")])

            async def wait() -> None:
                async with store.transaction() as transaction:
                    await transaction.execute("SELECT pg_advisory_xact_lock(7)")
                    await transaction.put([envelope("held")])

            began = _clock.steady()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await wait()
            assert (_clock.steady() - began) / 1e6 < 2
            free = await store.fetch("SELECT pg_try_advisory_xact_lock(7)")
            assert free == [(True,)]

    run(scenario)


def test_a_statement_that_was_given_up_is_not_committed(postgres_url: str) -> None:
    """It may have been done before the server heard of the cancel; then its transaction cannot be committed."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            async with store.transaction() as transaction:
                await transaction.execute("CREATE TABLE effect (n int)")

            async def careless(number: int) -> None:
                async with store.transaction() as transaction:
                    await transaction.execute("SELECT 1")
                    giving_up = asyncio.create_task(transaction.execute("INSERT INTO effect VALUES (%s)", [number]))
                    for _ in range(number):
                        await _clock.sleep(0)
                    giving_up.cancel()
                    if (await asyncio.gather(giving_up, return_exceptions=True)) == [[]]:
                        done.add(number)

            done: set[int] = set()
            answers = [(await asyncio.gather(careless(number), return_exceptions=True))[0] for number in range(12)]
            kept = {row[0] for row in await store.fetch("SELECT n FROM effect")}
            assert kept <= done
            assert all(answer is None or isinstance(answer, StoreError) for answer in answers)

    run(scenario)


async def check_a_commit_is_left_alone(url: str) -> None:
    """Give up while the server commits, which takes as long as a deferred trigger wants."""
    ask(url, "CREATE TABLE effect (n int)")
    ask(
        url,
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END';"
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION slow()",
    )
    async with opened(url, pool_size=1) as store:

        async def commit() -> None:
            async with store.transaction() as transaction:
                await transaction.execute("INSERT INTO effect VALUES (1)")

        committing = asyncio.create_task(commit())
        statement: LiteralString = "SELECT 1 FROM pg_stat_activity WHERE query = 'COMMIT' AND state = 'active'"
        await until(lambda: bool(ask(url, statement)))
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        await until(lambda: not ask(url, statement))
        assert await store.fetch("SELECT n FROM effect") == [(1,)]


@pytest.mark.parametrize("seconds", [0.02, 5.0])
def test_a_commit_is_never_cancelled_on_the_server(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A caller that is cancelled meanwhile waits for its answer for a while; then it is still left alone."""
    monkeypatch.setattr(handling, "COMMIT_SECONDS", seconds)
    run(lambda: check_a_commit_is_left_alone(postgres_url))


# plans


async def check_changed_tables_cost_nothing(url: str) -> None:
    ask(url, "CREATE TABLE item (id int PRIMARY KEY, v text)")
    ask(url, "INSERT INTO item VALUES (1, 'x')")
    async with working(url) as app:

        @app.task(key="{n}", retry=RetryPolicy(max_attempts=1))
        async def look(ctx: Context, n: int) -> str:
            await ctx.execute("SELECT %s::int", n)
            return str((await ctx.execute("SELECT * FROM item WHERE id = %s", 1))[0][1])

        @app.task(key="{n}", retry=RetryPolicy(max_attempts=1))
        async def look_at_once(ctx: Context, n: int) -> str:
            return str((await ctx.execute("SELECT * FROM item WHERE id = %s", 1))[0][1])

        async with app:
            for change, start in (("ALTER TABLE item ADD COLUMN a int", 0), ("ALTER TABLE item DROP COLUMN a", 100)):
                for task in (look, look_at_once):
                    await app.send_many([task.call(start + n) for n in range(30)])
                await app.work(until_idle=True)
                ask(url, change)  # type: ignore[arg-type]
                for task in (look, look_at_once):
                    assert await outcome(app, task, start + 50) == "x"
                    assert await outcome(app, task, start + 51) == "x"


def test_a_table_that_is_changed_under_prepared_statements_costs_no_attempt(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Cached plan must not change result type" is ours to cure: the plan is forgotten and the handler runs again."""
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.05)
    run(lambda: check_changed_tables_cost_nothing(postgres_url))


@pytest.mark.parametrize(
    "statement",
    ["DEALLOCATE ALL", "DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$", "lent", "DROP TABLE gone", "rolled back"],
)
def test_a_caller_that_drops_prepared_statements_poisons_nothing(postgres_url: str, statement: str) -> None:
    """Neither psycopg's nor ours are taken for prepared by the next caller, nor by the settle of this one."""

    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            for number in range(8):
                async with store.transaction() as transaction:
                    await transaction.execute("SELECT %s::int", [number])
                    await transaction.put([envelope(f"k{number}"), envelope(f"l{number}")])
            ask(postgres_url, "CREATE TABLE gone (n int)")
            with suppress(LookupError, StoreError):
                async with store.transaction() as transaction:
                    if statement == "lent":
                        await transaction.connection.execute("DEALLOCATE ALL")
                    elif statement == "rolled back":
                        raise LookupError
                    else:
                        await transaction.execute(statement)
                    await transaction.put([envelope("m"), envelope("n")])
            for number in range(8):
                async with store.transaction() as transaction:
                    assert await transaction.execute("SELECT %s::int", [number]) == [(number,)]
                    await transaction.put([envelope(f"o{number}"), envelope(f"p{number}")])

    run(scenario)


# the pool


async def check_no_place_is_lost(url: str) -> None:
    """Cancel callers at random moments, once or twice, while they wait, begin, run, end or give back."""
    chance = random.Random(7)
    async with opened(url, pool_size=2, patience=5) as store:

        async def use() -> None:
            async with store.transaction() as transaction:
                await transaction.execute("SELECT pg_sleep(%s)", [chance.choice((0, 0.002, 30))])
                if chance.random() < 0.3:
                    raise LookupError

        for _ in range(25):
            users = [
                asyncio.create_task(chance.choice((use, use, lambda: store.fetch("SELECT 1")))()) for _ in range(5)
            ]
            await _clock.sleep(chance.uniform(0, 0.02))
            for _ in range(2):
                for user in users:
                    user.cancel()
                await _clock.sleep(chance.choice((0, 0.001)))
            await asyncio.wait(users)
        async with asyncio.timeout(10), store.transaction() as one, store.transaction() as two:
            assert await one.execute("SELECT 1") == await two.execute("SELECT 1")


def test_no_cancellation_loses_a_connection_or_its_place(postgres_url: str) -> None:
    run(lambda: check_no_place_is_lost(postgres_url))


def test_a_second_cancellation_while_a_connection_is_given_back_loses_nothing(postgres_url: str) -> None:
    """The limit of a request strikes while that of its query is being carried out."""

    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1, patience=3) as store:
            for _ in range(3):
                giving_up = asyncio.create_task(store.fetch("SELECT pg_sleep(%s)", [30]))
                await until(lambda: sleepers(postgres_url) == 1)
                giving_up.cancel()
                await _clock.sleep(0)
                giving_up.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await giving_up
                assert await store.fetch("SELECT 1") == [(1,)]
                await until(lambda: sleepers(postgres_url) == 0)

    run(scenario)


def test_a_caller_that_waits_is_served_although_the_one_before_it_gave_up(postgres_url: str) -> None:
    """The holder's connection is lost and the first in the queue is cancelled: the second has its turn."""

    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1, patience=6) as store:

            async def hold() -> None:
                async with store.transaction() as transaction:
                    await transaction.execute("SELECT %s::int", [1])
                    waiting.extend(asyncio.create_task(store.fetch("SELECT 1")) for _ in range(2))
                    await _clock.sleep(0.05)
                    terminate_sessions(postgres_url)
                    raise LookupError

            waiting: list[asyncio.Task[list[tuple[Any, ...]]]] = []
            with pytest.raises(LookupError):
                await hold()
            waiting[0].cancel()
            assert await asyncio.wait_for(waiting[1], 3) == [(1,)]

    run(scenario)


def test_a_pool_that_is_closed_answers_all_callers_that_wait(postgres_url: str) -> None:
    async def scenario() -> None:
        store = PostgresStore(postgres_url, pool_size=1)
        await store.migrate()
        await store.open()
        async with store.transaction():
            waiting = [asyncio.create_task(store.fetch("SELECT 1")) for _ in range(5)]
            await _clock.sleep(0.05)
            await store.close()
            answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 3)
        assert [type(answer) for answer in answers] == [StoreError] * 5

    run(scenario)


# encodings


@pytest.mark.empty
@pytest.mark.parametrize("where", ["url", "environment"])
def test_our_connections_speak_utf8_whatever_was_asked_for(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def scenario() -> None:
        url = f"{postgres_url}?client_encoding=latin1" if where == "url" else postgres_url
        if where == "environment":
            monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
        async with opened(url) as store:
            async with store.transaction() as transaction:
                await transaction.execute("CREATE TABLE word (v text)")
                await transaction.execute("INSERT INTO word VALUES ('ü' || %s)", ["grün €"])
                await transaction.execute("INSERT INTO word VALUES ('ü')")
                await transaction.execute("SET client_encoding = 'LATIN1'")
            assert await store.fetch("SELECT v, length(v) FROM word") == [("ügrün €", 7), ("ü", 1)]
            (one,) = await store.put([envelope("grün")])
            (two,) = await store.put([envelope("grün")])
            assert (two.id, two.duplicate) == (one.id, True)

    run(scenario)
    with psycopg.connect(postgres_url, client_encoding="utf8") as connection:
        assert connection.execute("SELECT idempotency_key FROM onefold.message").fetchall() == [("grün",)]


def test_a_database_that_does_not_know_its_encoding_is_refused(postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database("ascii_only")
    base = url.rsplit("/", 1)[0]
    ask(f"{base}/postgres", "DROP DATABASE ascii_only")
    ask(f"{base}/postgres", "CREATE DATABASE ascii_only ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    try:
        for verb in (PostgresStore.migrate, PostgresStore.open):
            with pytest.raises(SchemaError, match="ENCODING 'UTF8'"):
                asyncio.run(verb(PostgresStore(url)))
    finally:
        postgres_server.drop_database("ascii_only")


def test_a_joined_connection_with_another_encoding_is_refused(postgres_url: str) -> None:
    async def scenario() -> None:
        connecting = psycopg.AsyncConnection.connect(postgres_url, client_encoding="latin1")
        async with opened(postgres_url) as store, await connecting as connection:
            with pytest.raises(ConfigurationError, match="client_encoding=UTF8"):
                async with store.transaction(connection):
                    pass

    run(scenario)


# behind a transaction pooler


@pytest.mark.empty
def test_behind_a_transaction_pooler_each_transaction_sets_its_own_limits(postgres_url: str) -> None:
    """A stopped process must not keep its locks there either."""

    async def scenario() -> None:
        async with opened(postgres_url, pooler="transaction") as store:
            question = "SELECT current_setting('idle_in_transaction_session_timeout')"
            async with store.transaction() as transaction:
                assert await transaction.execute(question) == [("30s",)]
            # Outside of it the session is as the pooler has it.
            with psycopg.connect(postgres_url, autocommit=True) as direct:
                assert direct.execute(question).fetchall() == [("0",)]

    run(scenario)


@pytest.mark.empty
def test_behind_a_transaction_pooler_one_key_that_is_held_holds_up_only_its_own_sender(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url, pooler="transaction") as store, opened(postgres_url) as other:
            async with other.transaction() as transaction:
                await transaction.put([envelope("held")])
                waiting = asyncio.create_task(store.put([envelope("held")]))
                await _clock.sleep(0.02)
                began = _clock.steady()
                for number in range(20):
                    await store.put([envelope(f"k{number}")])
                assert (_clock.steady() - began) / 1e6 < 5
                assert not waiting.done()
            assert (await waiting)[0].duplicate

    run(scenario)


# lent connections

LENT: dict[str, Callable[[psycopg.AsyncConnection[Any]], Awaitable[Any]]] = {}


def lends(function: Callable[[psycopg.AsyncConnection[Any]], Awaitable[Any]]) -> None:
    LENT[function.__name__] = function


@lends
async def stream(connection: psycopg.AsyncConnection[Any]) -> Any:
    return [row async for row in connection.cursor().stream("SELECT 1")]


@lends
async def server_side(connection: psycopg.AsyncConnection[Any]) -> Any:
    async with connection.cursor(name="s") as cursor:
        await cursor.execute("SELECT 1")
        return await cursor.fetchall()


@lends
async def copy(connection: psycopg.AsyncConnection[Any]) -> Any:
    async with connection.cursor().copy("COPY word FROM STDIN") as writer:
        await writer.write_row(("copied",))
    return [(1,)]


@lends
async def pipeline(connection: psycopg.AsyncConnection[Any]) -> Any:
    async with connection.pipeline():
        cursor = await connection.execute("SELECT 1")
    return await cursor.fetchall()


@lends
async def many(connection: psycopg.AsyncConnection[Any]) -> Any:
    await connection.cursor().executemany("INSERT INTO word VALUES (%s)", [("a",), ("b",)])
    return [(1,)]


@lends
async def nested(connection: psycopg.AsyncConnection[Any]) -> Any:
    async with connection.transaction():
        return await (await connection.execute("SELECT 1")).fetchall()


@lends
async def status(connection: psycopg.AsyncConnection[Any]) -> Any:
    assert connection.info.transaction_status.name == "INTRANS"
    return [(1,)]


@pytest.mark.parametrize("name", LENT)
def test_a_lent_connection_is_plain_psycopg_from_its_first_statement(postgres_url: str, name: str) -> None:
    """Streams, server-side cursors, COPY, pipelines: first thing in the transaction, and committed with it."""

    async def scenario() -> None:
        ask(postgres_url, "CREATE TABLE word (v text)")
        async with opened(postgres_url, pool_size=1) as store:
            async with asyncio.timeout(10), store.transaction() as transaction:
                assert await LENT[name](transaction.connection) == [(1,)]
                await transaction.execute("INSERT INTO word VALUES (%s)", [name])
                await transaction.put([envelope("a")])
            assert (name,) in await store.fetch("SELECT v FROM word")
            assert (await store.count())["default"].scheduled == 1

    run(scenario)


def test_nothing_that_is_set_on_a_lent_connection_reaches_the_next_caller(postgres_url: str) -> None:
    """Each lends an object of its own: row factory, adapters, prepared statements, handlers of notices."""

    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            async with store.transaction() as transaction:
                kept = transaction.connection
                kept.row_factory = dict_row
                kept.prepare_threshold = 0
                cursor = await kept.execute("SELECT %s::int AS a", [1])
                assert await cursor.fetchone() == {"a": 1}
                assert await transaction.execute("SELECT %s::int AS a", [1]) == [(1,)]
            async with store.transaction() as transaction:
                assert await (await transaction.connection.execute("SELECT 1 AS a")).fetchone() == (1,)
                assert kept.closed
                with pytest.raises(psycopg.OperationalError):
                    await kept.execute("SELECT 1")
                with pytest.raises(psycopg.OperationalError):
                    await cursor.execute("SELECT 1")

    run(scenario)


def test_inside_a_pipeline_of_the_callers_its_statements_are_answered_and_ours_refused(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store, store.transaction() as transaction:
            async with transaction.connection.pipeline():
                assert await transaction.execute("SELECT %s::int", [1]) == [(1,)]
                with pytest.raises(StoreError, match="pipeline"):
                    await transaction.put([envelope("a")])
            await transaction.put([envelope("a")])

    run(scenario)


# whose transaction it is


@pytest.mark.parametrize(
    "statement",
    ["COMMIT", "commit work", " /* now */ -- really\n ROLLBACK", "END", "ABORT", "BEGIN", "start  transaction",
     "PREPARE TRANSACTION 'x'", "ROLLBACK AND CHAIN", b"COMMIT"],
)  # fmt: skip
def test_a_statement_that_would_end_the_transaction_is_refused(postgres_url: str, statement: Any) -> None:
    async def scenario() -> None:
        ask(postgres_url, "CREATE TABLE effect (n int)")
        async with opened(postgres_url) as store:
            async with store.transaction() as transaction:
                await transaction.execute("INSERT INTO effect VALUES (1)")
                with pytest.raises(TransactionOpenError, match="not carried out"):
                    await transaction.execute(statement)
                await transaction.execute("INSERT INTO effect VALUES (2)")
            with pytest.raises(TransactionOpenError):
                await store.fetch(statement)
            assert await store.fetch("SELECT n FROM effect") == [(1,), (2,)]

    run(scenario)


def test_savepoints_are_the_callers_to_use(postgres_url: str) -> None:
    async def scenario() -> None:
        ask(postgres_url, "CREATE TABLE effect (n int)")
        async with opened(postgres_url) as store:
            async with store.transaction() as transaction:
                await transaction.execute("SAVEPOINT a")
                with pytest.raises(errors.DivisionByZero):
                    await transaction.execute("SELECT 1 / %s", [0])
                await transaction.execute("ROLLBACK TO SAVEPOINT a")
                await transaction.execute("rollback work to a")
                await transaction.execute("INSERT INTO effect VALUES (%s)", [1])
                with suppress(LookupError):
                    async with transaction.connection.transaction():
                        await transaction.execute("INSERT INTO effect VALUES (%s)", [2])
                        raise LookupError
                await transaction.put([envelope("a"), envelope("b")])
            assert await store.fetch("SELECT n FROM effect") == [(1,)]

    run(scenario)


#: Ways around the first keyword, each given the context or transaction and its lent connection.
HIDDEN = ("SELECT 1; COMMIT", "SELECT 1; ROLLBACK", "SELECT 1; COMMIT; BEGIN", "SELECT 1; COMMIT AND CHAIN", "lent")


async def _end(ctx: Context, how: str) -> None:
    if how == "lent":
        await (await ctx.connection()).execute("COMMIT")
    else:
        await ctx.execute(how)


async def check_an_early_end_is_noticed(url: str, how: str, *, fails: bool) -> None:
    """However a handler ends its transaction, its message is a dead letter at once, and the effect is not repeated."""
    ask(url, "CREATE TABLE effect (n int)")
    async with working(url, pool_size=1) as app:

        @app.task(key="{n}", retry=QUICK)
        async def ends(ctx: Context, n: int) -> str:
            await ctx.execute("INSERT INTO effect VALUES (%s)", n)
            await _end(ctx, how)
            await ctx.execute("INSERT INTO effect VALUES (%s)", 100)
            if fails:
                raise LookupError
            return "done"

        async with app:
            assert await outcome(app, ends, 1) == "contract: onefold.errors.TransactionEndedError"
            assert await app.store.fetch("SELECT 1") == [(1,)]
    assert ask(url, "SELECT n FROM effect") in ([], [(1,)])


@pytest.mark.parametrize(("how", "fails"), list(itertools.product(HIDDEN, (False, True))))
def test_a_handler_that_ends_its_transaction_is_noticed(
    postgres_url: str, how: str, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The proof is a savepoint with a random name, taken when the transaction begins."""
    run(lambda: check_an_early_end_is_noticed(postgres_url, how, fails=fails))
    assert "TransactionEndedError" in caplog.text


@pytest.mark.parametrize("verb", ["commit", "rollback", "close", "block"])
def test_a_lent_connection_refuses_to_end_the_transaction(postgres_url: str, verb: str) -> None:
    """As a session of SQLAlchemy would, or ``async with connection``."""

    async def scenario() -> None:
        ask(postgres_url, "CREATE TABLE effect (n int)")
        async with opened(postgres_url) as store:
            async with store.transaction() as transaction:
                connection = transaction.connection
                await connection.execute("INSERT INTO effect VALUES (1)")
                ending = connection.__aexit__(None, None, None) if verb == "block" else getattr(connection, verb)()
                with pytest.raises(TransactionOpenError, match=r"connection\.transaction"):
                    await ending
                assert ask(postgres_url, "SELECT n FROM effect") == []
            assert ask(postgres_url, "SELECT n FROM effect") == [(1,)]

    run(scenario)


def test_a_read_that_hides_a_commit_is_noticed(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            with pytest.raises(TransactionEndedError):
                await store.fetch("SELECT 1; COMMIT; CREATE TABLE written (n int)")
            assert await store.fetch("SELECT 1") == [(1,)]

    run(scenario)


# sessions

#: What a caller may leave, and a question whose answer must not change by it.
LEFT: list[tuple[LiteralString, LiteralString]] = [
    ("SET search_path = evil", "SELECT current_setting('search_path')"),
    ("SET statement_timeout = '5s'", "SELECT current_setting('statement_timeout')"),
    ("SET ROLE pg_monitor", "SELECT current_user::text"),
    ("SET SESSION AUTHORIZATION left_over", "SELECT session_user::text"),
    ("SELECT pg_advisory_lock(42)", "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42"),
    ("CREATE TEMP TABLE mine (n int)", "SELECT to_regclass('pg_temp.mine')::text"),
    ("LISTEN news", "SELECT count(*) FROM pg_listening_channels()"),
    ("DECLARE kept CURSOR WITH HOLD FOR SELECT 1", "SELECT count(*) FROM pg_cursors WHERE name = 'kept'"),
    ("SET idle_in_transaction_session_timeout = 0", "SELECT current_setting('idle_in_transaction_session_timeout')"),
]


async def check_sessions_are_reset(url: str, *, lent: bool, fails: bool) -> None:
    with suppress(errors.DuplicateObject):
        ask(url, "CREATE ROLE left_over")
    async with opened(url, pool_size=1) as store:
        for statement, question in LEFT:
            before = await store.fetch(question)
            with suppress(LookupError):
                async with store.transaction() as transaction:
                    if lent:
                        await transaction.connection.execute(statement)
                    else:
                        await transaction.execute(statement)
                    await transaction.execute("RESET ROLE")
                    if fails:
                        raise LookupError
            async with store.transaction() as transaction:
                assert await transaction.execute(question) == before, statement


@pytest.mark.parametrize(("lent", "fails"), list(itertools.product((False, True), (False, True))))
def test_what_a_caller_leaves_in_its_session_does_not_reach_the_next(
    postgres_url: str, lent: bool, fails: bool
) -> None:
    run(lambda: check_sessions_are_reset(postgres_url, lent=lent, fails=fails))


def test_a_handlers_settle_is_still_quick_after_a_reset(postgres_url: str) -> None:
    """Prepared statements survive an ordinary reset, psycopg's and ours."""

    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            for number in range(8):
                await store.put([envelope()])
                (lease,) = await store.claim(["default"], types=["charge"], limit=1, lease=30, worker="w")
                async with store.transaction() as transaction:
                    await transaction.execute("SELECT %s::int", [number])
                    await transaction.conclude([(lease, Done(b"1"))])
            names = await store.fetch("SELECT name FROM pg_prepared_statements")
            assert {("_pg3_0",), ("onefold_settle_one",)} <= set(names)

    run(scenario)
