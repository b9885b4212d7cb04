"""A role that may only connect to the database cannot harm the workers on it."""

from __future__ import annotations

import asyncio
import re
import time
import tracemalloc
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from onefold import App, Context
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.schema import MIGRATIONS
from onefold.store.postgres.wire.connect import Pooler
from onefold.store.postgres.wire.statements import OURS, SQL

#: Some 24 MB, a multiple of what a worker may keep of it.
FLOOD, FLOOD_BYTES = 3_000, 7_900
KEPT_BYTES_MAX = 4_000_000
#: While notifications are read, the event loop runs other tasks at least this often.
LAG_SECONDS_MAX = 0.5
#: A message sent meanwhile starts within this time; without a wake-up it would have to wait for a poll.
WOKEN_SECONDS_MAX = 5.0


def stranger_on(url: str) -> str:
    """Return the URL of a role that may only connect, made for this test."""
    parts = urlsplit(url)
    name = f"stranger_{parts.path.strip('/')}"
    with psycopg.connect(url, autocommit=True) as direct:
        direct.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))
        direct.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'stranger'").format(sql.Identifier(name)))
    return parts._replace(netloc=f"{name}:stranger@{parts.hostname}:{parts.port}").geturl()


def test_a_flood_of_notifications_neither_fills_memory_nor_stops_the_loop(postgres_url: str) -> None:
    """Names of unknown queues are dropped at once, and other tasks run between many of them."""
    app = App(postgres_url)
    ran = asyncio.Event()

    @app.task
    async def work() -> None:
        ran.set()

    def flood(url: str) -> None:
        statement = "SELECT pg_notify('onefold', i || repeat('x', %s)) FROM generate_series(1, %s::int) AS i"
        with psycopg.connect(url, autocommit=True) as direct:
            direct.execute(statement, [FLOOD_BYTES, FLOOD])
            direct.execute("SELECT pg_notify('onefold', 'default') FROM generate_series(1, 100)")

    async def longest_lag() -> float:
        longest, last = 0.0, time.monotonic()
        while not done.is_set():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest

    done = asyncio.Event()

    async def scenario() -> None:
        await app.migrate()
        stranger = await asyncio.to_thread(stranger_on, postgres_url)
        async with app:
            assert isinstance(app.store, PostgresStore)
            working = asyncio.create_task(app.work())
            await app.store.wait(["default"], timeout=0.3)
            lag = asyncio.create_task(longest_lag())
            tracemalloc.start()
            await asyncio.to_thread(flood, stranger)
            await asyncio.sleep(1.0)
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            done.set()
            await work.send()
            async with asyncio.timeout(WOKEN_SECONDS_MAX):
                await ran.wait()
            app.stop_working()
            await working
        assert kept <= KEPT_BYTES_MAX, f"{kept:,} bytes are kept"
        assert await lag <= LAG_SECONDS_MAX

    asyncio.run(scenario())


#: Functions that match arrays of a certain type better than the server's own.
_PLANTED_FUNCTIONS = """
CREATE TABLE public.loot (payload text);
GRANT INSERT ON public.loot TO public;
CREATE FUNCTION public.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.loot VALUES ('unnest'); RETURN QUERY SELECT pg_catalog.unnest($1); END $$;
CREATE FUNCTION public.unnest(uuid[]) RETURNS SETOF uuid LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.loot VALUES ('unnest'); RETURN QUERY SELECT pg_catalog.unnest($1); END $$;
CREATE FUNCTION public.array_position(uuid[], uuid) RETURNS int LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.loot VALUES ('array_position'); RETURN pg_catalog.array_position($1, $2); END $$;
CREATE FUNCTION public.cardinality(uuid[]) RETURNS int LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.loot VALUES ('cardinality'); RETURN pg_catalog.cardinality($1); END $$;
CREATE FUNCTION public.nextval(text) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.loot VALUES ('nextval'); RETURN pg_catalog.nextval($1::regclass); END $$;
"""


@pytest.mark.empty
@pytest.mark.parametrize("pooler", ["session", "transaction"])
def test_functions_that_another_role_has_planted_are_not_run(pooler: Pooler, postgres_url: str) -> None:
    """On our own connections, handlers' and a caller's own; behind a pooler, settings of the session cannot help."""
    app = App(store=PostgresStore(postgres_url, pooler=pooler))

    @app.task(key="{number}", ordering_key="{number}")
    async def store(ctx: Context, number: int) -> None:
        await ctx.execute("SELECT 1")
        ctx.send(plain, number)

    @app.task
    async def plain(number: int) -> None: ...

    stranger = stranger_on(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as direct:
        # The default up to PostgreSQL 14, kept by upgrades from it.
        direct.execute("GRANT CREATE ON SCHEMA public TO public")
    with psycopg.connect(stranger, autocommit=True) as direct:
        direct.execute(_PLANTED_FUNCTIONS)

    async def scenario() -> None:
        await app.migrate()
        async with app:
            await store.send(1)
            await app.send_many([store.call(number) for number in range(2, 10)])
            async with app.transaction() as transaction:
                transaction.send(store, 10)
            async with (
                await psycopg.AsyncConnection.connect(postgres_url) as own,
                app.transaction(connection=own) as transaction,
            ):
                transaction.send(store, 11)
            await app.work(until_idle=True)
            assert sum(counts.scheduled for counts in (await app.count()).values()) == 0

    asyncio.run(scenario())
    with psycopg.connect(stranger, autocommit=True) as direct:
        assert direct.execute("SELECT DISTINCT payload FROM public.loot").fetchall() == []


#: An operator for every pair of types that the server would have to convert first.
_PLANTED_OPERATORS = """
DO $$
DECLARE
    l text; r text; o text;
    made text := 'CREATE FUNCTION public.op_%1$s_%2$s(%1$s, %2$s) RETURNS bytea LANGUAGE sql RETURN NULL::bytea';
    planted text := 'CREATE OPERATOR public.%1$s (LEFTARG = %2$s, RIGHTARG = %3$s, FUNCTION = public.op_%2$s_%3$s)';
    types text[] := ARRAY['int2', 'int4', 'int8', 'float8', 'numeric', 'text', 'uuid', 'bytea', 'json', 'name', 'bool'];
BEGIN
    FOREACH l IN ARRAY types LOOP FOREACH r IN ARRAY types LOOP
        EXECUTE format(made, l, r);
        FOREACH o IN ARRAY ARRAY['+', '-', '*', '/', '||', '=', '<>', '<', '>', '<=', '>='] LOOP
            CONTINUE WHEN EXISTS (
                SELECT FROM pg_operator WHERE oprname = o AND oprleft = l::regtype AND oprright = r::regtype);
            EXECUTE format(planted, o, l, r);
        END LOOP;
    END LOOP; END LOOP;
END $$
"""
#: Utility statements, which have no plan to explain.
_UTILITY = re.compile(r"SAVEPOINT|RELEASE|ROLLBACK|SET|LISTEN|LOCK|CREATE")


def test_operators_that_another_role_has_planted_are_in_no_plan(postgres_url: str) -> None:
    """Every statement is planned under the default search path, with operators in it that match better than casts."""
    asyncio.run(App(postgres_url).migrate())
    planned = 0
    with psycopg.connect(postgres_url, autocommit=True) as direct:
        direct.execute(_PLANTED_OPERATORS)
        for name, ours in OURS.items():
            if _UTILITY.match(ours.text.decode()):
                continue
            result = direct.pgconn.exec_(b"EXPLAIN (GENERIC_PLAN, VERBOSE) " + ours.text)
            assert not result.error_message, f"{name}: {result.error_message.decode()}"
            plan = b"\n".join(result.get_value(row, 0) or b"" for row in range(result.ntuples)).decode()
            assert "public." not in plan, f"{name}: {plan}"
            planned += 1
    assert planned > 80


@pytest.mark.empty
def test_a_stranger_cannot_keep_migrations_waiting(postgres_url: str) -> None:
    """The lock that migrations take is on a table of ours, which a stranger cannot lock."""
    held = "SELECT pg_advisory_lock(7381240915)"
    with psycopg.connect(stranger_on(postgres_url), autocommit=True) as stranger:
        stranger.execute(held)
        assert asyncio.run(asyncio.wait_for(App(postgres_url).migrate(), 10)) != []


#: These look like functions but are part of the grammar.
_GRAMMAR = frozenset({"coalesce", "greatest", "least", "nullif", "extract"})


@pytest.mark.parametrize("name", [*SQL, *(migration.name for migration in MIGRATIONS)])
def test_every_function_is_called_by_its_whole_name(name: str) -> None:
    """A qualified name makes the search path irrelevant."""
    text = SQL.get(name) or next(migration.text for migration in MIGRATIONS if migration.name == name)
    text = re.sub(r"--.*|'[^']*'", "", text)
    for found in re.finditer(r"(?<![.\w\"])([a-z_]+)\(", text):
        if found[1] == "unnest":
            arguments = _inside(text, found.end())
            assert "," in re.sub(r"\([^()]*\)", "", arguments), f"unnest({arguments}) stands alone"
        else:
            assert found[1] in _GRAMMAR, f"{found[1]}(…) in {name}"


def _inside(text: str, start: int) -> str:
    """Return the text between an opening parenthesis and its closing one."""
    depth, end = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return text[start : end - 1]
