"""What only the PostgreSQL store has: plans, sessions, lost replies, wake-ups, joined connections."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import psycopg
import pytest
from psycopg import errors

from onefold.clock import SystemClock, new_id, system_random
from onefold.codec import fingerprint_of
from onefold.envelope import Envelope
from onefold.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailableError
from onefold.store import Again, Dead, Done, Failure, HandBack, Lease, PutOptions, Query, State
from onefold.stores.postgres import PostgresStore
from onefold.stores.postgres.arrays import numbers, teach, texts
from onefold.stores.postgres.connection import SQL

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


# schema


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


@pytest.mark.parametrize("table", ["something", "migration"])
def test_a_foreign_schema_is_refused(postgres_url: str, table: Literal["something", "migration"]) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE SCHEMA onefold")
        connection.execute(f"CREATE TABLE onefold.{table} (mine int)")  # type: ignore[arg-type]
    for verb in (PostgresStore.open, PostgresStore.migrate):
        with pytest.raises(SchemaError, match="another database"):
            asyncio.run(verb(PostgresStore(postgres_url)))


def test_an_empty_schema_made_by_an_administrator_is_used(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE SCHEMA onefold")
    assert asyncio.run(PostgresStore(postgres_url).migrate()) == ["0001_initial.sql"]


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


# plans


def test_claim_walks_the_due_index_on_a_used_table(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope(f"k{n}") for n in range(3_000)])
            for _ in range(5):
                await store.settle([(lease, Done(b"1")) for lease in await claim(store, 500)])
        plan = _plan_of_claim(postgres_url)
        assert "Index Scan using delivery_due" in plan
        assert "delivery_pkey" in plan
        assert "Index Scan using message_pkey" in plan
        assert "Seq Scan" not in plan

    run(scenario)


def _plan_of_claim(url: str) -> str:
    """The plan with the planner's usual settings, which handlers' connections keep."""
    with psycopg.connect(url) as connection:
        teach(connection)
        given = {
            "now": None,
            "queues": texts(["default"]),
            "floors": numbers([0]),
            "types": texts(["charge"]),
            "limit": 100,
            "lease": 1,
            "worker": "w",
            "suspect_after": 2,
        }
        rows = connection.execute("EXPLAIN " + SQL["claim"], given).fetchall()  # type: ignore[arg-type]
        return "\n".join(row[0] for row in rows)


def test_what_comes_back_is_claimed_though_later_messages_were(postgres_url: str) -> None:
    """A claim begins where the last one ended, but not for ever."""

    async def scenario() -> None:
        async with opened(postgres_url) as store, opened(postgres_url) as other:
            old = envelope("old", due_at=1_000_000)
            await store.put([old])
            (mine,) = await claim(store)
            await store.put([envelope(f"k{n}") for n in range(20)])
            assert len(await claim(store, 10)) == 10
            await store.settle([(mine, HandBack())])
            (mine,) = await claim(store, 1)
            assert mine.id == old.id
            assert len(await claim(store, 5)) == 5
            await other.settle([(mine, HandBack())])
            while not any(lease.id == old.id for lease in await claim(store, 1)):
                await _clock.sleep(0.05)

    run(scenario)


def test_a_plan_made_for_empty_tables_does_not_outlive_them(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            for _ in range(8):
                assert await claim(store) == []
                assert await store.settle([(_lease(envelope()), Done(b"1"))]) == [False]
            await store.put([envelope() for _ in range(2_000)])
            before = _seq_scans(postgres_url)
            for _ in range(4):
                await store.settle([(lease, Done(b"1")) for lease in await claim(store, 200)])
            await store.close()  # sessions report their numbers at their end
            assert _seq_scans(postgres_url) == before

    run(scenario)


def _seq_scans(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname IN ('delivery', 'message') ORDER BY 1"
        ).fetchall()


def _lease(e: Envelope) -> Lease:
    return Lease(e, 2, 1, 0, 0, 0, "w")


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
            _terminate_sessions(postgres_url)
            await asyncio.wait_for(waiting, timeout=5)  # whoever listens anew lets everybody look
            waiting = asyncio.create_task(worker.wait(["default"], timeout=30))
            await _clock.sleep(0)
            await sender.put([envelope()])
            await asyncio.wait_for(waiting, timeout=5)

    run(scenario)


# lost sessions


def _terminate_sessions(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )


def test_terminated_sessions_cost_nothing_but_time(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope("a"), envelope("b")])
            _terminate_sessions(postgres_url)
            await store.put([envelope("c")])
            _terminate_sessions(postgres_url)
            leases = await claim(store)
            assert len(leases) == 3
            _terminate_sessions(postgres_url)
            assert await store.extend(leases, lease=60) == [True, True, True]
            _terminate_sessions(postgres_url)
            assert await store.settle([(lease, Done(b"1")) for lease in leases]) == [True, True, True]
            _terminate_sessions(postgres_url)
            assert (await store.find(Query(ids=(leases[0].id,))))[0].state is State.DONE
            _terminate_sessions(postgres_url)
            async with store.transaction() as transaction:
                await transaction.put([envelope("d")])
            assert (await store.count())["default"].scheduled == 1

    run(scenario)


def test_a_session_lost_inside_a_transaction_is_a_typed_error(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:

            async def interrupted() -> None:
                async with store.transaction() as transaction:
                    await transaction.put([envelope("a")])
                    _terminate_sessions(postgres_url)
                    await transaction.execute("SELECT 1")

            with pytest.raises(StoreUnavailableError):
                await interrupted()
            assert await store.count() == {}

    run(scenario)


def test_a_server_that_cannot_be_reached_is_a_typed_error() -> None:
    store = PostgresStore("postgresql://nobody@127.0.0.1:1/none", patience=0.1)
    with pytest.raises(StoreUnavailableError) as caught:
        asyncio.run(store.open())
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)


class Loser:
    """Loses the connection at one moment: before a statement reached the server, or after it was done there."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.seen = 0
        self.lost = ""

    def __call__(self, moment: Literal["before", "after"], statement: str) -> None:
        if self.at is None or "pg_notify" in statement:
            return
        self.seen += 1
        if self.seen == self.at:
            self.lost = f"{moment} {statement}"
            raise errors.ConnectionFailure(self.lost)


def test_whichever_reply_is_lost_puts_and_settles_happen_once(postgres_url: str) -> None:
    async def scenario() -> None:
        loser = Loser()
        async with opened(postgres_url, trace=loser) as store:
            for at in itertools.count(1):
                loser.at = None
                first = await store.put([envelope(f"{at}:old")])
                outcomes = [
                    Done(b"1", sends=(envelope(f"{at}:child"), envelope())),
                    Dead(FAILURE),
                    Again(60, FAILURE),
                    Again(60, None, counted=False),
                    HandBack(),
                ]
                await store.put([envelope() for _ in outcomes])
                leases = [lease for lease in await claim(store) if not lease.envelope.keyed]
                loser.at, loser.seen = at, 0

                assert not (await store.put([envelope(f"{at}:new")]))[0].duplicate
                assert (await store.put([envelope(f"{at}:old")]))[0].id == first[0].id
                many = await store.put([envelope(f"{at}:m1"), envelope(), envelope(f"{at}:old")])
                assert [stored.duplicate for stored in many] == [False, False, True]
                assert await store.settle(list(zip(leases, outcomes, strict=True))) == [True] * 5

                fired = loser.seen >= at
                loser.at = None
                # new, m1 and its neighbour, child and its sibling; again twice, handed back; old is leased.
                await _expect_and_clear(store, scheduled=8, leased=1, dead=1)
                if not fired:
                    break
            assert at > 30

    run(scenario)


async def _expect_and_clear(store: PostgresStore, **expected: int) -> None:
    counts = (await store.count())["default"]
    assert {name: getattr(counts, name) for name in expected} == expected
    async with store.transaction() as transaction:
        await transaction.execute("TRUNCATE onefold.message, onefold.delivery, onefold.outcome, onefold.key")


def test_a_lost_commit_of_a_transaction_is_resolved(postgres_url: str) -> None:
    async def scenario() -> None:
        loser = Loser()
        async with opened(postgres_url, trace=loser) as store:
            async with store.transaction() as transaction:
                await transaction.execute("CREATE TABLE effect (n int)")
            for settles, at in itertools.product((True, False), range(1, 13)):
                loser.at = None
                await store.put([envelope()])
                (lease,) = await claim(store)
                loser.at, loser.seen, loser.lost = at, 0, ""
                committed = True
                try:
                    async with store.transaction() as transaction:
                        await transaction.execute("INSERT INTO effect VALUES (%s)", [at])
                        await transaction.put([envelope(f"{settles}{at}")])
                        if settles:
                            assert await transaction.settle([(lease, Done(b"1"))]) == [True]
                except StoreUnavailableError:
                    committed = False
                loser.at = None
                if loser.lost in ("", "after COMMIT"):
                    assert committed
                effects = await store.fetch("SELECT count(*) FROM effect")
                assert effects == [(1 if committed else 0,)]
                assert (await store.count())["default"].leased == (0 if committed and settles else 1)
                async with store.transaction() as transaction:
                    await transaction.execute("TRUNCATE effect, onefold.message, onefold.delivery, onefold.outcome")

    run(scenario)


# transactions


def test_a_joined_connection_is_not_committed(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            connection = await psycopg.AsyncConnection.connect(postgres_url, row_factory=psycopg.rows.dict_row)
            async with connection:
                async with store.transaction(connection) as transaction:
                    assert transaction.connection is connection
                    await transaction.put([envelope("a"), envelope("b")])
                    assert await transaction.execute("SELECT 1") == [(1,)]
                assert await store.count() == {}
                await connection.rollback()
                async with store.transaction(connection) as transaction:
                    assert not (await transaction.put([envelope("a")]))[0].duplicate
                await connection.commit()
                assert (await store.count())["default"].scheduled == 1

    run(scenario)


def test_what_cannot_be_joined_is_refused_by_name(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            with pytest.raises(ConfigurationError, match=r"psycopg\.AsyncConnection"):
                async with store.transaction(object()):
                    pass
            async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
                with pytest.raises(ConfigurationError, match="autocommit"):
                    async with store.transaction(connection):
                        pass

    run(scenario)


def test_a_transaction_that_had_failed_does_not_pretend_to_commit(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:

            async def careless() -> None:
                async with store.transaction() as transaction:
                    await transaction.put([envelope("a")])
                    with pytest.raises(errors.DivisionByZero):
                        await transaction.execute("SELECT 1 / 0")

            with pytest.raises(StoreError, match="nothing of it was committed"):
                await careless()
            assert await store.count() == {}

    run(scenario)


def test_fetch_refuses_to_write(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            with pytest.raises(errors.ReadOnlySqlTransaction):
                await store.fetch("CREATE TABLE mine (n int)")

    run(scenario)


def test_behind_a_transaction_pooler_nothing_is_prepared_or_set(postgres_url: str) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        async with opened(postgres_url, pooler="transaction", trace=lambda _, text: seen.append(text)) as store:
            assert not store.capabilities.notifies
            for number in range(8):
                await store.put([envelope(f"k{number}")])
            leases = await claim(store)
            assert await store.settle([(lease, Done(b"1")) for lease in leases]) == [True] * 8
            await store.wait(["default"], timeout=0)
        assert not any("set_config" in text or "LISTEN" in text for text in seen)

    run(scenario)


def test_a_batch_of_successes_is_one_statement(postgres_url: str) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        async with opened(postgres_url, trace=lambda moment, text: seen.append(text)) as store:
            await store.put([envelope() for _ in range(10)])
            await store.wait(["default"], timeout=0)
            leases = await claim(store)
            await store.settle([])
            seen.clear()
            await store.settle([(lease, Done(b"1")) for lease in leases])
            assert [text for text in seen if not re.search("pg_notify|set_config|LISTEN", text)] == [
                SQL["settle_end"]
            ] * 2
            seen.clear()
            await store.put([envelope("one")])
            assert [text for text in seen if not re.search("pg_notify|set_config|LISTEN", text)] == [SQL["put_one"]] * 2

    run(scenario)


def test_a_batch_key_covers_the_whole_batch(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as one, opened(postgres_url) as other:
            options = PutOptions(batch_key="b")
            batches = [[envelope("x"), envelope("y")] for _ in range(4)]
            stores = itertools.cycle((one, other))
            answers = await asyncio.gather(*(next(stores).put(batch, options) for batch in batches))
            assert sum(not stored.duplicate for answer in answers for stored in answer) == 2
            assert (await one.count())["default"].scheduled == 2

    run(scenario)
