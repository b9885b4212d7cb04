"""What only the PostgreSQL store has: a schema to check, plans to pin, keys under concurrency, wake-ups."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import psycopg
import pytest

from onefold import limits
from onefold.clock import SystemClock, new_id, system_random
from onefold.errors import ConfigurationError, SchemaError
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import Envelope
from onefold.store import Done, Failure, Lease, Query
from onefold.store.postgres import PostgresStore
from onefold.store.postgres import restore as restoring
from onefold.testing import FakeClock

_chance = system_random()
_clock = SystemClock()
FAILURE = Failure(reason="exception", error_type="ValueError", error_message="no")


def envelope(key: str | None = None, *, payload: bytes = b"{}", **fields: Any) -> Envelope:
    id_ = new_id(_clock.now(), _chance)
    return Envelope(
        id=id_,
        message_type=fields.pop("message_type", "charge"),
        queue=fields.pop("queue", "default"),
        idempotency_key=key or f"unkeyed:{id_}",
        correlation_id=id_,
        causation_id=id_,
        subject="order:1",
        payload_inline=payload,
        fingerprint=fingerprint_of(payload),
        **fields,
    )


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, **options)
    await store.migrate()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def claim(store: PostgresStore, limit: int = 100) -> list[Lease]:
    return await store.claim(["default"], types=["charge"], limit=limit, lease=30, worker="w")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


def terminate_sessions(url: str, *, wait_seconds: int = 0) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()",
            [wait_seconds * 1_000],
        )


# idle


def test_an_idle_look_is_one_statement_and_leases_that_ran_out_are_found_by_it(postgres_url: str) -> None:
    statements = 0

    def count(moment: Literal["before", "after"], _: str) -> None:
        nonlocal statements
        statements += moment == "before"

    async def scenario() -> None:
        nonlocal statements
        clock = FakeClock()
        async with opened(postgres_url, clock=clock, trace=count) as store:
            await store.put([envelope("a")])
            statements = 0
            (lease,) = await claim(store)
            assert await claim(store) == []
            assert statements == 2
            clock.advance(30)
            (again,) = await claim(store)
            assert (again.id, again.fence, again.crashes) == (lease.id, lease.fence + 1, 1)

    run(scenario)


# schema


@pytest.mark.empty
def test_a_database_without_the_schema_is_refused_with_the_remedy(postgres_url: str) -> None:
    with pytest.raises(SchemaError, match="onefold migrate"):
        asyncio.run(PostgresStore(postgres_url).open())


def test_a_schema_from_the_future_is_refused(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            assert await store.migrate() == []
        with psycopg.connect(postgres_url) as connection:
            connection.execute("INSERT INTO onefold.migration VALUES (9000, 'later', '', 0)")
        with pytest.raises(SchemaError, match="newer"):
            await PostgresStore(postgres_url).open()
        with pytest.raises(SchemaError, match="newer"):
            await PostgresStore(postgres_url).migrate()

    run(scenario)


def test_a_changed_migration_is_refused(postgres_url: str) -> None:
    async def scenario() -> None:
        await PostgresStore(postgres_url).migrate()
        with psycopg.connect(postgres_url) as connection:
            connection.execute("UPDATE onefold.migration SET checksum = 'other'")
        with pytest.raises(SchemaError, match="another content"):
            await PostgresStore(postgres_url).open()

    run(scenario)


@pytest.mark.empty
@pytest.mark.parametrize("table", ["something", "migration"])
def test_a_foreign_schema_is_refused(postgres_url: str, table: Literal["something", "migration"]) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE SCHEMA onefold")
        connection.execute(f"CREATE TABLE onefold.{table} (mine int)")  # type: ignore[arg-type]
    for verb in (PostgresStore.open, PostgresStore.migrate):
        with pytest.raises(SchemaError, match="another database"):
            asyncio.run(verb(PostgresStore(postgres_url)))


@pytest.mark.empty
def test_an_empty_schema_made_by_an_administrator_is_used(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE SCHEMA onefold")
    assert asyncio.run(PostgresStore(postgres_url).migrate()) == ["0001_initial.sql"]


@pytest.mark.empty
def test_machines_that_migrate_at_once_apply_each_file_once(postgres_url: str) -> None:
    async def scenario() -> None:
        applied = await asyncio.gather(*(PostgresStore(postgres_url).migrate() for _ in range(5)))
        assert sorted(applied) == [[], [], [], [], ["0001_initial.sql"]]

    run(scenario)


def test_durability_is_what_the_server_says(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            assert store.capabilities.durability == "power loss"
        async with opened(f"{postgres_url}?options=-c%20synchronous_commit%3Doff") as store:
            assert store.capabilities.durability == "process crash"

    run(scenario)


# keys


def test_of_concurrent_puts_of_one_key_one_wins(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as one, opened(postgres_url) as other:
            for number in range(20):
                envelopes = [envelope(f"k{number}") for _ in range(6)]
                stores = itertools.cycle((one, other))
                answers = await asyncio.gather(*(next(stores).put([e]) for e in envelopes))
                assert [a[0].duplicate for a in answers].count(False) == 1
                assert len({a[0].id for a in answers}) == 1
            assert (await one.count())["default"].scheduled == 20

    run(scenario)


def test_of_concurrent_takeovers_of_a_free_key_one_wins(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as one, opened(postgres_url) as other:
            for number in range(20):
                await one.put([envelope(f"k{number}", deduplication_key=f"d{number}", deduplicate_for=1)])
                (lease,) = await claim(one)
                await one.settle([(lease, Done(b"1", key_window=0))])
                again = [
                    envelope(f"k{number}", deduplication_key=f"d{number}", deduplicate_for=10**9) for _ in range(6)
                ]
                stores = itertools.cycle((one, other))
                answers = await asyncio.gather(*(next(stores).put([e]) for e in again))
                assert [a[0].duplicate for a in answers].count(False) == 1
                (lease,) = await claim(one)
                await one.settle([(lease, Done(b"1"))])

    run(scenario)


def test_senders_are_not_held_up_by_one_who_waits_for_a_foreign_transaction(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store, opened(postgres_url) as other:
            async with other.transaction() as transaction:
                (first,) = await transaction.put([envelope("held")])
                waiting = asyncio.create_task(store.put([envelope("held")]))
                quick = await asyncio.wait_for(
                    asyncio.gather(*(store.put([envelope(f"k{n}")]) for n in range(50))), timeout=5
                )
                assert not any(answer[0].duplicate for answer in quick)
                assert not waiting.done()
            (answer,) = await waiting
            assert (answer.id, answer.duplicate) == (first.id, True)

    run(scenario)


def test_bulk_puts_of_the_same_keys_in_opposite_order_both_return(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as one, opened(postgres_url) as other:
            keys = [f"k{n}" for n in range(500)]
            forth = [envelope(key) for key in keys]
            back = [envelope(key) for key in reversed(keys)]
            answers = await asyncio.gather(one.put(forth), other.put(back))
            assert sum(not a.duplicate for answer in answers for a in answer) == 500

    run(scenario)


# wake-ups


def test_a_put_wakes_a_waiting_worker_in_another_process(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as sender, opened(postgres_url) as worker:
            await worker.wait(["default"], timeout=5)  # returns once it listens
            waiting = asyncio.create_task(worker.wait(["default"], timeout=30))
            elsewhere = asyncio.create_task(worker.wait(["other"], timeout=30))
            await _clock.sleep(0)
            await sender.put([envelope()])
            await asyncio.wait_for(waiting, timeout=5)
            assert not elsewhere.done()
            elsewhere.cancel()

    run(scenario)


def test_a_put_between_claim_and_wait_is_not_missed(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            assert await claim(store) == []
            await store.put([envelope()])
            await asyncio.wait_for(store.wait(["default"], timeout=30), timeout=5)

    run(scenario)


def test_a_lost_listener_comes_back(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as sender, opened(postgres_url) as worker:
            await worker.wait(["default"], timeout=5)
            waiting = asyncio.create_task(worker.wait(["default"], timeout=30))
            terminate_sessions(postgres_url)
            await asyncio.wait_for(waiting, timeout=5)  # a new listener lets all that wait look
            waiting = asyncio.create_task(worker.wait(["default"], timeout=30))
            await _clock.sleep(0)
            await sender.put([envelope()])
            await asyncio.wait_for(waiting, timeout=5)

    run(scenario)


# restores


def test_after_a_restore_every_fence_has_risen_once_page_by_page(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "_PAGE", 3)

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope(f"k{n}") for n in range(10)])
            leases = await claim(store, 7)
            await store.settle([(lease, Done(b"1")) for lease in leases[:3]])
            before = {record.envelope.id: record.fence for record in await store.find(Query())}
            assert await store.restored() == 4
            after = {record.envelope.id: record.fence for record in await store.find(Query())}
            assert after == {id_: fence + limits.FENCE_LEAP for id_, fence in before.items()}
            assert await store.settle([(lease, Done(b"1")) for lease in leases[3:]]) == [False] * 4
            assert len(await claim(store)) == 7

    run(scenario)


# addresses


def test_an_unreadable_url_is_refused_without_repeating_the_password() -> None:
    with pytest.raises(ConfigurationError) as caught:
        PostgresStore("postgresql://ada:sec%ret@localhost/shop")
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None
