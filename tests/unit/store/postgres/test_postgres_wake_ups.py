"""Parking on PostgreSQL while another transaction records for the run: why it is one statement."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import psycopg

from onefold import limits
from onefold.clock import new_id
from onefold.message.envelope import Envelope
from onefold.store import Lease, Parked, Query, State
from onefold.store.journal_lines import Line, LineKind
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire.arrays import bigints, blobs, ids, teach, texts
from onefold.store.postgres.wire.statements import SQL
from onefold.testing import HastyClock
from onefold.testing.contracts.bench import ACT, DEAD

SIGNAL = Line("paid/1", LineKind.SIGNAL, b"1")
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def run(url: str, scenario: Callable[[PostgresStore, Lease], Awaitable[None]]) -> None:
    """Give the scenario a store with one claimed message."""

    async def within() -> None:
        clock = HastyClock()
        store = PostgresStore(url, clock=clock)
        await store.migrate()
        await store.open()
        try:
            id_ = new_id(clock.now(), random.Random(7))
            names = {"idempotency_key": "k", "correlation_id": id_, "causation_id": id_, "subject": "s"}
            await store.put([Envelope(id=id_, message_type="t", queue="q", payload_inline=b"1", **names)])
            (lease,) = await claim(store)
            async with asyncio.timeout(30):
                await scenario(store, lease)
        finally:
            await store.close()

    asyncio.run(within())


async def claim(store: PostgresStore) -> list[Lease]:
    return await store.claim(["q"], types=["t"], limit=1, lease=30.0, worker="w")


async def state(store: PostgresStore, lease: Lease) -> State:
    return (await store.find(Query(ids=(lease.id,))))[0].state


async def until_somebody_waits(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as watch:
        while (await (await watch.execute(WAITING)).fetchone()) == (0,):
            pass


def test_looking_into_the_mailbox_and_then_parking_loses_a_wake_up(postgres_url: str) -> None:
    """The naive way, to show what the right way is for: neither transaction sees what the other is about to do."""

    async def scenario(store: PostgresStore, lease: Lease) -> None:
        async with (
            await psycopg.AsyncConnection.connect(postgres_url) as teller,
            await psycopg.AsyncConnection.connect(postgres_url) as parker,
        ):
            tell = (
                "INSERT INTO onefold.step (message_id, name, kind, at, fingerprint, value) "
                "VALUES (%s, 'paid/1', 8, 0, '', '1')"
            )
            wake = "UPDATE onefold.delivery SET state = 0, due_at = 0, wake_target = NULL WHERE id = %s AND state = 2"
            park = (
                "UPDATE onefold.delivery SET state = 2, fence = fence + 1, lease_until = NULL, worker = NULL, "
                "due_at = %s, wake_target = 1 WHERE id = %s AND fence = %s "
                "AND NOT EXISTS (SELECT FROM onefold.step WHERE message_id = delivery.id AND kind = 8)"
            )
            await teller.execute(tell, [lease.id])
            assert (await teller.execute(wake, [lease.id])).rowcount == 0  # not parked yet
            parked = await parker.execute(park, [limits.INSTANT_MAX, lease.id, lease.fence])
            assert parked.rowcount == 1  # nothing in the mailbox yet
            await parker.commit()
            await teller.commit()
        assert len(await store.steps(lease.id)) == 1
        assert await state(store, lease) is State.PARKED
        assert await claim(store) == []  # and so it would stay for ever

    run(postgres_url, scenario)


def test_parking_waits_for_a_record_by_another_and_then_does_not_park(postgres_url: str) -> None:
    """B22: the same moment, with the statements of the store."""

    async def scenario(store: PostgresStore, lease: Lease) -> None:
        async with store.transaction() as teller:
            await teller.record(lease.id, [SIGNAL])
            parking = asyncio.create_task(store.settle([(lease, Parked(None, lease.wake))]))
            await until_somebody_waits(postgres_url)
            assert not parking.done()
        assert await parking == [True]
        assert await state(store, lease) is State.SCHEDULED
        assert [one.wake for one in await claim(store)] == [1]

    run(postgres_url, scenario)


def test_a_record_waits_for_the_owner_that_is_parking_and_then_wakes(postgres_url: str) -> None:
    async def scenario(store: PostgresStore, lease: Lease) -> None:
        async with store.transaction() as parker:
            assert await parker.settle([(lease, Parked(None, lease.wake))]) == [True]
            telling = asyncio.create_task(store.record(lease.id, [SIGNAL]))
            await until_somebody_waits(postgres_url)
            assert not telling.done()
        assert len(await telling) == 1
        assert await state(store, lease) is State.SCHEDULED
        assert [one.wake for one in await claim(store)] == [1]

    run(postgres_url, scenario)


def test_telling_waits_for_a_redrive_and_then_tells_the_living(postgres_url: str) -> None:
    """A transaction that saw only the dead letter would write into its journal and wake no run."""

    async def scenario(store: PostgresStore, lease: Lease) -> None:
        await store.settle([(lease, DEAD)])
        async with store.transaction() as operator:
            assert await operator.move([lease.id], State.SCHEDULED, ACT) == [lease.id]
            telling = asyncio.create_task(store.record(lease.id, [SIGNAL]))
            await until_somebody_waits(postgres_url)
        assert len(await telling) == 1
        assert [one.wake for one in await claim(store)] == [1]

    run(postgres_url, scenario)


def test_an_owner_records_only_while_no_worker_takes_over(postgres_url: str) -> None:
    """A record locks its message until the commit: a later claim reads the lines that were recorded."""

    async def scenario(store: PostgresStore, lease: Lease) -> None:
        async with store.transaction() as owner:
            await owner.record(lease, [Line("a", LineKind.RESULT, b"1")])
            cancelling = asyncio.create_task(_cancel(store, lease))
            await until_somebody_waits(postgres_url)
            assert not cancelling.done()
        assert await cancelling == [lease.id]

    run(postgres_url, scenario)


async def _cancel(store: PostgresStore, lease: Lease) -> list[str]:
    async with store.transaction() as transaction:
        return await transaction.move([lease.id], State.CANCELLED, ACT)


GIVEN = {
    "now": None,
    "id": "00000000-0000-7000-8000-000000000001",
    "ids": ids(["00000000-0000-7000-8000-000000000001"]),
    "fences": bigints([2]),
    "names": texts(["a#1"]),
    "kinds": bigints([0]),
    "counts": bigints([1]),
    "seqs": bigints([1]),
    "fingerprints": blobs([b""]),
    "values": blobs([b"1"]),
    "attempts": bigints([1]),
    "targets": bigints([1]),
    "delays": bigints([1]),
    "never": limits.INSTANT_MAX,
    "failures": blobs([None]),
    "workers": texts(["w"]),
    "actor": "ada",
    "reason": "a test",
}
STATEMENTS = [
    "settle_park",
    "record_by_owner",
    "record_by_others",
    "record_wake",
    "record_by_hand",
    "record_stands",
    "rewind",
    "rewind_steps",
    "rewind_parts",
    "move_resume",
    "move_reply",
    "steps",
    "parts",
]


def test_on_used_tables_every_statement_on_journals_goes_by_an_index(postgres_url: str) -> None:
    async def scenario(store: PostgresStore, lease: Lease) -> None:
        for number in range(20):
            steps = [Line(f"a#{number}-{n}", LineKind.RESULT, b"1") for n in range(100)]
            await store.record(lease, steps)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            for table in ("step", "blob", "delivery", "outcome", "message"):
                connection.execute(f"ANALYZE onefold.{table}")  # type: ignore[arg-type]
            teach(connection)
            connection.execute("SET enable_seqscan = off")  # as on our own connections, which plan on empty tables
            for name in STATEMENTS:
                rows = connection.execute(f"EXPLAIN {SQL[name]}", GIVEN).fetchall()  # type: ignore[arg-type]
                assert "Seq Scan on" not in "\n".join(row[0] for row in rows), name

    run(postgres_url, scenario)
