"""Plans of the PostgreSQL store: on a used table every statement still touches only the rows it is about."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import psycopg
import pytest
from test_postgres_engine import claim, envelope, opened, run

from onefold.clock import SystemClock
from onefold.errors import LeaseLostError
from onefold.message.envelope import Envelope
from onefold.store import Again, Dead, Done, Failure, HandBack, Lane, Lease, Query
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.session import FIRST_ID
from onefold.store.postgres.verbs.claimer import NEAR_SECONDS
from onefold.store.postgres.wire.arrays import numbers, teach, texts
from onefold.store.postgres.wire.statements import SQL

_clock = SystemClock()
FAILURE = Failure(reason="exception", error_type="ValueError", error_message="no")


GIVEN: dict[str, Any] = {
    "now": None,
    "queues": texts(["default"]),
    "floors": numbers([0]),
    "lease_floor": 0,
    "floor": 0,
    "types": texts(["charge"]),
    "limit": 100,
    "lease": 1,
    "worker": "w",
    "suspect_after": 2,
    "call": 1,
    "crashes_most": 0,
    "crashes": 1,
    "step": 60_000_000,
    "runs": False,
    "after": FIRST_ID,
    "states": numbers([0, 1]),
    "queue": None,
    "message_type": None,
    "correlation_id": None,
}


async def use(store: PostgresStore) -> None:
    """Leave behind what every plan has to find its way through: kept, waiting, leased and crashed messages."""
    await store.put([envelope(f"k{n}") for n in range(4_000)])
    for _ in range(4):
        await store.settle([(lease, Done(b"1")) for lease in await claim(store, 500)])
    crashed = [(lease, Again(0, None, counted=False, crashed=True)) for lease in await claim(store, 5)]
    await store.settle(crashed)
    await claim(store, 50)


def plan_of(url: str, statement: str, **given: object) -> str:
    """Return the plan with the planner's usual settings, which handlers' connections keep."""
    with psycopg.connect(url) as connection:
        teach(connection)
        rows = connection.execute("EXPLAIN " + SQL[statement], {**GIVEN, **given}).fetchall()  # type: ignore[arg-type]
        return "\n".join(row[0] for row in rows)


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize(
    ("statement", "begins_with"),
    [
        ("claim_again", "delivery_lease"),
        ("find_leased", "delivery_lease"),
        ("find_crashed", "delivery_crashed"),
    ],
)
def test_statements_begin_with_their_index_on_a_used_table(
    postgres_url: str, statement: str, begins_with: str, analyzed: bool
) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)
        if analyzed:
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute("VACUUM ANALYZE")
        plan = plan_of(postgres_url, statement)
        assert begins_with in plan
        assert "message_pkey" in plan
        assert "Seq Scan" not in plan

    run(scenario)


@pytest.mark.parametrize(
    ("statement", "index"), [("find_open", "pkey"), ("find_parked", "parked"), ("find_runs", "run")]
)
def test_what_is_open_is_found_without_a_look_at_what_is_kept(postgres_url: str, statement: str, index: str) -> None:
    """From the deliveries, in the order of a page, to their messages."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
        plan = plan_of(postgres_url, statement, ids=None, worker=None, crashes=None)
        assert f"Index Scan using delivery_{index} on delivery" in plan
        assert "message_pkey" in plan
        # The table of attempts is empty here, and only asked about messages that are parked.
        assert "Seq Scan on" not in plan.replace("Seq Scan on attempt", "")
        assert "Sort" not in plan

    run(scenario)


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_purge_of_keys_begins_with_those_that_expire(postgres_url: str, analyzed: bool) -> None:
    """None of the keys expires here, so a plan that looks for some in the table would read all of it."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)

    run(scenario)
    if analyzed:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
    plan = plan_of(postgres_url, "purge_keys")
    assert "Index Scan using key_expires" in plan
    assert "Seq Scan" not in plan


def test_a_page_of_all_messages_begins_where_it_should(postgres_url: str) -> None:
    """Look-ups from the message on: a join would begin with the first delivery and outcome for every page."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)

    run(scenario)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    plan = plan_of(postgres_url, "find_any", worker=None, crashes=None)
    assert "Merge" not in plan
    assert "Hash" not in plan


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_claim_visits_no_type_that_it_does_not_know(postgres_url: str, analyzed: bool) -> None:
    """Beside 20,000 messages of other types, with priorities, each row that is read is a candidate."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)
            others = [envelope(message_type=f"other{n % 30}", priority=n % 10) for n in range(20_000)]
            await store.put(others)
            await store.put([envelope(message_type="refund", priority=n % 3) for n in range(60)])
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            if analyzed:
                connection.execute("VACUUM ANALYZE")
            teach(connection)
            given = {**GIVEN, "types": texts(["charge", "refund", "none"])}
            rows = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS) {SQL['claim']}", given).fetchall()
        plan = "\n".join(row[0] for row in rows)
        removed = [int(number) for number in re.findall(r"Rows Removed by \w+(?: \w+)*: (\d+)", plan)]
        assert sum(removed) <= 1_000, plan
        assert "Seq Scan on" not in plan

    run(scenario)


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_chain_is_found_by_its_index_on_a_used_table(postgres_url: str, analyzed: bool) -> None:
    """M6: and its first message, which does not stand there, by its id."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)
        if analyzed:
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute("VACUUM ANALYZE")
        plan = plan_of(postgres_url, "find_correlated", correlation_id=FIRST_ID, root=FIRST_ID)
        assert "message_correlation" in plan
        assert "Seq Scan on message" not in plan

    run(scenario)


def test_leases_of_a_worker_and_crashed_messages_are_found(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)
            mine = await store.claim(["default"], types=["charge"], limit=3, lease=30, worker="me", lane=Lane.MAIN)
            assert [r.envelope.id for r in await store.find(Query(worker="me"))] == sorted(one.id for one in mine)
            crashed = await store.find(Query(crashes=1))
            assert [record.crashes for record in crashed] == [1] * 5
            assert await store.find(Query(crashes=2)) == []

    run(scenario)


def test_what_comes_back_is_claimed_though_later_messages_were(postgres_url: str) -> None:
    """A claim begins where the last one ended, unless it was notified of a message that came back."""

    async def scenario() -> None:
        async with opened(postgres_url) as store, opened(postgres_url) as other:
            await store.wait(["default"], timeout=5)  # returns once it listens
            old = envelope("old", due_at=1_000_000)
            await store.put([old])
            (mine,) = await claim(store)
            await store.put([envelope(f"k{n}") for n in range(20)])
            assert len(await claim(store, 10)) == 10
            await store.settle([(mine, HandBack())])
            (mine,) = await claim(store, 1)
            assert mine.id == old.id
            assert len(await claim(store, 5)) == 5
            await store.wait(["default"], timeout=0)
            await other.settle([(mine, HandBack())])
            await store.wait(["default"], timeout=30)
            (mine,) = await claim(store, 1)
            assert mine.id == old.id

    run(scenario)


def test_what_was_put_long_before_its_commit_is_claimed_at_once(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            async with store.transaction() as transaction:
                (slow,) = await transaction.put([envelope("slow")])
                await store.put([envelope("quick")])
                await store.fetch("SELECT pg_sleep(%s)", [NEAR_SECONDS * 2])
                await store.put([envelope("late")])
                assert len(await claim(store)) == 2
            assert [lease.id for lease in await claim(store)] == [slow.id]

    run(scenario)


def test_claims_walk_past_few_dead_entries_beside_an_open_transaction(postgres_url: str) -> None:
    """S12: what the server may not clean up lies before the place where a claim begins."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            with psycopg.connect(postgres_url) as foreign:
                foreign.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                foreign.execute("SELECT count(*) FROM onefold.delivery")
                long_ago = _clock.now() - 60_000_000
                for start in range(0, 5_000, 500):
                    await store.put([envelope(due_at=long_ago + start + n) for n in range(500)])
                    await store.settle([(lease, Done(b"1")) for lease in await claim(store, 500)])
                before = await _entries_read(store)
                for n in range(20):
                    await store.put([envelope(f"new{n}")])
                    assert len(await claim(store, 1)) == 1
                # One look from the beginning may fall into this second.
                assert await _entries_read(store) - before < 3 * 5_000

    run(scenario)


async def _entries_read(store: PostgresStore) -> int:
    await store.fetch("SELECT pg_sleep(%s)", [1.1])  # sessions report their numbers once a second, when they are idle
    await claim(store, 1)
    rows = await store.fetch("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'delivery_due'")
    return int(rows[0][0])


def test_a_plan_made_for_empty_tables_does_not_outlive_them(postgres_url: str) -> None:
    """Prepared statements keep their plans; on full tables each must still touch only the rows it names."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute("ANALYZE")
            strangers = [_lease(envelope()) for _ in range(4)]
            for _ in range(8):
                assert await claim(store) == []
                assert await store.extend(strangers, lease=30) == [False] * 4
                for outcome in (Done(b"1"), Dead(FAILURE), Again(1, FAILURE), HandBack()):
                    assert await store.settle([(lease, outcome) for lease in strangers]) == [False] * 4
                    assert await store.settle([(strangers[0], outcome)]) == [False]
                with pytest.raises(LeaseLostError):
                    await _conclude(store, strangers[0])
                await asyncio.gather(*(store.put([envelope("same")]) for _ in range(4)))
                await store.settle([(lease, Done(b"1", key_window=0)) for lease in await claim(store)])
            await store.put([envelope(f"k{n}") for n in range(10_000)])
            leases = await claim(store, 400)
            assert await store.extend(leases, lease=30) == [True] * 400
            await asyncio.gather(*(store.put([envelope("same")]) for _ in range(4)))
            for _ in range(10):
                await _conclude(store, leases.pop())
            leases += await claim(store, 10)
            for n, outcome in enumerate((Done(b"1"), Dead(FAILURE), Again(1, FAILURE), HandBack())):
                those = leases[n * 100 : n * 100 + 100]
                assert await store.settle([(lease, outcome) for lease in those]) == [True] * 100
        # Sessions report their numbers at their end.
        read = _rows_read(postgres_url)
        assert read["delivery"] < 5_000
        assert read["key"] < 500
        assert read["message"] < 1_000

    run(scenario)


async def _conclude(store: PostgresStore, lease: Lease) -> None:
    async with store.transaction() as transaction:
        await transaction.conclude([(lease, Done(b"1"))])


def _rows_read(url: str) -> dict[str, int]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT relname, seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables").fetchall()
        return {name: number or 0 for name, number in rows}


def _lease(e: Envelope) -> Lease:
    return Lease(e, 2, 1, 0, 0, 0, "w")
