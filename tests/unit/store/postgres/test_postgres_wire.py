"""The short way to PostgreSQL: what callers see of it is what the driver would have shown them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb
from test_postgres_engine import claim, envelope, opened, run

from onefold.clock import SystemClock
from onefold.errors import StoreError, StoreUnavailableError
from onefold.store import Act, Done, State

_clock = SystemClock()

VALUES: tuple[Any, ...] = (
    None,
    True,
    7,
    2**40,
    2**70,
    1.5,
    Decimal("1.10"),
    "grün",
    b"\x00\xff",
    date(2024, 2, 29),
    datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
    timedelta(days=1, seconds=2),
    UUID("01a1e299-2392-704c-b23f-6cac9535a3d2"),
    [1, 2, 3],
    ["a", None],
    Jsonb({"a": [1, None]}),
)

# statements of callers


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        ("SELECT %s, %s::text", (1, "a")),
        ("SELECT %(b)s::int, %(a)s::text, %(b)s::int", {"a": "x", "b": 2, "unused": 3}),
        ("SELECT '100%%', %s::int %% 2", (3,)),
        ("SELECT %b::int, %t::int", (1, 2)),
        ("SELECT 1", ()),
        ("SELECT 1 WHERE false", ()),
        ("SELECT 1; SELECT 2", ()),
    ],
)
def test_statements_mean_what_they_mean_to_the_driver(
    postgres_url: str, statement: str, parameters: Sequence[Any] | Mapping[str, Any]
) -> None:
    with psycopg.connect(postgres_url) as connection:
        expected = connection.execute(statement, parameters or None).fetchall()  # type: ignore[call-overload]

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            async with store.transaction() as transaction:
                for _ in range(8):  # after a few times it is prepared
                    assert await transaction.execute(statement, parameters) == expected
            assert await store.fetch(statement, parameters) == expected

    run(scenario)


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [("SELECT %s", (1, 2)), ("SELECT %(a)s", {"b": 1}), ("SELECT %s, %(a)s", (1,)), ("SELECT %x", (1,))],
)
def test_mistakes_are_reported_as_the_driver_reports_them(
    postgres_url: str, statement: str, parameters: Sequence[Any] | Mapping[str, Any]
) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            with pytest.raises((psycopg.ProgrammingError, KeyError)):
                await store.fetch(statement, parameters)
            assert await store.fetch("SELECT %s::int", [1]) == [(1,)]

    run(scenario)


def test_values_travel_as_with_the_driver(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        expected = [connection.execute("SELECT %s", [value]).fetchall() for value in VALUES]

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            assert [await store.fetch("SELECT %s", [value]) for value in VALUES] == expected

    run(scenario)


def test_errors_of_the_callers_own_sql_stay_the_drivers(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:

            async def insert_twice() -> None:
                async with store.transaction() as transaction:
                    await transaction.execute("CREATE TEMP TABLE mine (n int CONSTRAINT once PRIMARY KEY)")
                    for _ in range(2):
                        await transaction.execute("INSERT INTO mine VALUES (%s)", [1])

            with pytest.raises(errors.UniqueViolation) as caught:
                await insert_twice()
            assert caught.value.diag.constraint_name == "once"

    run(scenario)


def test_few_statements_of_callers_are_prepared(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            for number in range(120):
                for _ in range(7):
                    await store.fetch(f"SELECT {number}, %s::int", [1])
            rows = await store.fetch("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE '_pg3_%%'")
            assert rows[0][0] <= 101  # one may still be to be dropped

    run(scenario)


def test_text_that_would_be_cut_off_is_refused(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            (stored,) = await store.put([envelope("a")])

            async def cancel() -> None:
                async with store.transaction() as transaction:
                    await transaction.move([stored.id], State.CANCELLED, Act(actor="ada", reason="no\0t so"))

            with pytest.raises(StoreError, match="NUL"):
                await cancel()
            assert (await store.count())["default"].scheduled == 1

    run(scenario)


# transactions


def test_a_lent_connection_is_inside_the_transaction_from_the_beginning(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:

            async def use() -> None:
                async with store.transaction() as transaction:
                    connection = transaction.connection
                    async with connection.transaction():
                        await connection.execute("CREATE TABLE mine (n int)")
                    await transaction.execute("INSERT INTO mine VALUES (%s)", [1])
                    await connection.execute("INSERT INTO mine VALUES (2)")
                    await transaction.put([envelope("a")])
                    raise LookupError

            with pytest.raises(LookupError):
                await use()
            assert await store.fetch("SELECT to_regclass('mine')::text") == [(None,)]
            assert await store.count() == {}

    run(scenario)


def test_statements_of_one_transaction_may_be_under_way_together(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            async with store.transaction() as transaction:
                answers = await asyncio.gather(
                    *(transaction.execute("SELECT %s::int, pg_current_xact_id()::text", [n]) for n in range(20))
                )
            assert [rows[0][0] for rows in answers] == list(range(20))
            assert len({rows[0][1] for rows in answers}) == 1

    run(scenario)


# callers that give up


def test_a_caller_that_is_cancelled_leaves_the_connection_in_order(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            for number in range(5):
                sleeping = asyncio.create_task(store.fetch("SELECT pg_sleep(%s), %s::int", [0.05, number]))
                await _clock.sleep(0.01)
                sleeping.cancel()
                assert await store.fetch("SELECT %s::int", [number]) == [(number,)]

    run(scenario)


def test_a_cancelled_claim_does_not_disturb_the_next(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope("a"), envelope("b")])
            assert await store.claim(["empty"], types=["charge"], limit=1, lease=30, worker="w") == []
            async with await psycopg.AsyncConnection.connect(postgres_url) as other:
                await other.execute("LOCK TABLE onefold.delivery")
                claiming = asyncio.create_task(claim(store, 1))
                await _clock.sleep(0.05)
                claiming.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await claiming
                next_one = asyncio.create_task(claim(store, 1))
                await other.rollback()
            # The server carried out the first claim, so its lease has no worker until it runs out.
            (lease,) = await next_one
            assert await store.settle([(lease, Done(b"1"))]) == [True]
            assert (await store.count())["default"].leased == 1

    run(scenario)


def test_a_transaction_that_is_cancelled_in_a_statement_is_rolled_back(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:

            async def work() -> None:
                async with store.transaction() as transaction:
                    await transaction.put([envelope("a")])
                    await transaction.execute("SELECT pg_sleep(%s)", [0.1])

            working = asyncio.create_task(work())
            await _clock.sleep(0.05)
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
            assert await store.count() == {}

    run(scenario)


# the pool


def test_a_pool_that_is_used_up_names_the_remedy(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1, patience=0.1) as store:
            async with store.transaction():
                with pytest.raises(StoreUnavailableError, match="pool_size"):
                    await store.fetch("SELECT 1")
            assert await store.fetch("SELECT 1") == [(1,)]

    run(scenario)


def test_callers_that_wait_for_a_connection_get_it_in_turn(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url, pool_size=1) as store:
            order: list[int] = []

            async def use(number: int) -> None:
                async with store.transaction() as transaction:
                    order.append(number)
                    await transaction.execute("SELECT %s", [number])

            users = [asyncio.create_task(use(number)) for number in range(10)]
            await _clock.sleep(0)
            users[3].cancel()
            await asyncio.gather(*users, return_exceptions=True)
            assert order == [0, 1, 2, 4, 5, 6, 7, 8, 9]
            assert await store.fetch("SELECT 1") == [(1,)]

    run(scenario)
