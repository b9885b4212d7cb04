"""Gates on PostgreSQL under races: why a cap needs a row to hold, and a line an index."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Literal

import psycopg
import pytest
from psycopg import errors
from test_postgres_engine import claim, envelope, opened, run
from test_postgres_sessions import Loser

from onefold.store import Again, Done, Failure, Lease
from onefold.store.gates import Gating, Rate
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire.statements import SQL

FAILURE = Failure(reason="exception", error_type="ValueError", error_message="no")
CAP = 3
CAPPED = {"charge": Gating(name="charge", max_running=CAP)}
RUNNING = "SELECT count(*) FROM onefold.delivery WHERE state = 1"

#: Counts and takes in one statement, as one is tempted to.
NAIVE = """
    UPDATE onefold.delivery SET state = 1, lease_until = 1, worker = 'w'
    WHERE id IN (SELECT id FROM onefold.delivery WHERE state = 0 LIMIT 1 FOR UPDATE SKIP LOCKED)
        AND (SELECT count(*) FROM onefold.delivery WHERE state = 1) < 3
"""


async def capped(store: PostgresStore, limit: int = 10) -> list[Lease]:
    return await store.claim(["default"], types=["charge"], limit=limit, lease=30, worker="w", gatings=CAPPED)


def test_a_claim_that_counts_and_takes_in_one_statement_breaks_the_cap(postgres_url: str) -> None:
    """The statement of the second claimer does not see what the first one has not committed yet."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope(gate="charge:") for _ in range(10)])
            assert len(await capped(store, CAP - 1)) == CAP - 1

    run(scenario)
    with psycopg.connect(postgres_url) as one, psycopg.connect(postgres_url) as other:
        assert one.execute(NAIVE).rowcount == 1
        assert other.execute(NAIVE).rowcount == 1
        one.commit()
        other.commit()
        assert one.execute(RUNNING).fetchall() == [(CAP + 1,)]


def test_a_claim_that_takes_at_a_gate_has_it_to_itself(postgres_url: str) -> None:
    """The same moment as above: the first claimer has taken the last place and not committed yet."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope(gate="charge:") for _ in range(10)])
            leases = await capped(store, CAP - 1)
            with psycopg.connect(postgres_url) as first:
                first.execute("SELECT FROM onefold.gate WHERE gate = 'charge' FOR UPDATE")
                assert first.execute(NAIVE).rowcount == 1
                assert await capped(store) == []
                first.commit()
            assert await capped(store) == []
            await store.settle([(lease, Done(b"1")) for lease in leases])
            assert len(await capped(store)) == CAP - 1

    run(scenario)


def test_a_worker_that_waits_at_shut_gates_writes_nothing(postgres_url: str) -> None:
    """Neither where no token is left nor where all places are taken, with a gate for each key or one for all."""
    gatings = {
        "rated": Gating(name="rated", rate_each=Rate(1, per=3_600)),
        "full": Gating(name="full", max_running_each=1),
        "charge": Gating(name="charge", max_running=1),
    }

    async def ask(store: PostgresStore) -> int:
        asked = store.claim(["default"], types=["charge"], limit=100, lease=3_600, worker="w", gatings=gatings)
        return len(await asked)

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            for name in ("rated", "full"):
                await store.put([envelope(gate=f"{name}:{n % 40}") for n in range(80)])
            await store.put([envelope(gate="charge:") for _ in range(5)])
            taken = 0
            while more := await ask(store):
                taken += more
            assert taken == 40 + 40 + 1
            with psycopg.connect(postgres_url, autocommit=True) as other:
                log = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
                before = other.execute(log).fetchall()[0][0]
                for _ in range(20):
                    assert await ask(store) == 0
                # The server itself writes a few dozen bytes now and then.
                assert other.execute(log).fetchall()[0][0] - before < 20 * 20

    run(scenario)


def test_many_claimers_never_run_more_than_the_cap_and_leave_no_place_empty(postgres_url: str) -> None:
    messages, claimers = 60, 8
    held: list[Lease] = []
    done: list[str] = []

    async def claim_at_once(stores: list[PostgresStore]) -> None:
        for some in await asyncio.gather(*(capped(store, 2) for store in stores)):
            held.extend(some)
        assert len(held) <= CAP

    async def settle(store: PostgresStore) -> None:
        lease = held.pop(0)
        done.append(lease.id)
        assert await store.settle([(lease, Done(b"1"))]) == [True]

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            stores = [await stack.enter_async_context(opened(postgres_url)) for _ in range(claimers)]
            await stores[0].put([envelope(gate=f"charge:{n % 5}") for n in range(messages)])
            while len(done) < messages:
                await claim_at_once(stores)
                # Claims that met others at the gate may have taken nothing, but then the others have.
                await claim_at_once(stores)
                assert len(held) == min(CAP, messages - len(done))
                await asyncio.gather(*(settle(store) for store in stores[: 1 + len(done) % len(held)]))
            assert len(set(done)) == messages

    run(scenario)


def test_gates_take_turns_at_a_limit(postgres_url: str) -> None:
    one = {"charge": Gating(name="charge", max_running=1)}

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            for tenant in "abc":
                await store.put([envelope(gate=f"charge:{tenant}") for _ in range(5)])
                await store.put([envelope(gate=f"charge:line-{tenant}", ordering_key=tenant) for _ in range(5)])
            seen: Counter[str | None] = Counter()
            for _ in range(12):
                asked: dict[str, Any] = {"types": ["charge"], "limit": 9, "lease": 30, "worker": "w", "gatings": one}
                (lease,) = await store.claim(["default"], **asked)
                seen[lease.gate] += 1
                await store.settle([(lease, Done(b"1"))])
            assert set(seen.values()) == {2}, seen

    run(scenario)


def test_the_index_lets_one_of_a_line_run_whatever_a_claimer_thinks(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope(ordering_key="a") for _ in range(2)])
            assert len(await claim(store)) == 1
        with psycopg.connect(postgres_url) as direct, pytest.raises(errors.UniqueViolation, match="delivery_turn"):
            direct.execute("UPDATE onefold.delivery SET state = 1, lease_until = 1, worker = 'w' WHERE state = 0")

    run(scenario)


def test_who_was_passed_over_and_comes_back_at_that_moment_costs_the_other_lines_nothing(postgres_url: str) -> None:
    """Between the look and the claim another claim has taken the first of the line, which had backed off."""
    skipping = {"charge": Gating(name="charge", on_failure="skip")}
    rivals = 0

    def let_the_first_through(moment: Literal["before", "after"], statement: str) -> None:
        nonlocal rivals
        if rivals and (moment, statement) == ("before", SQL["claim_lines"]):
            rivals -= 1
            with psycopg.connect(postgres_url) as rival:
                rival.execute(
                    "UPDATE onefold.delivery SET state = 1, lease_until = due_at + 60000000, worker = 'r', due_at = 0 "
                    "WHERE attempt = 1"
                )

    async def scenario() -> None:
        nonlocal rivals
        async with opened(postgres_url, trace=let_the_first_through) as store:
            await store.put([envelope(ordering_key="a") for _ in range(2)])
            (first,) = await claim(store)
            await store.settle([(first, Again(60, FAILURE))])
            await store.put([envelope(ordering_key="b")])
            rivals = 1
            asked: dict[str, Any] = {"types": ["charge"], "limit": 9, "lease": 30, "worker": "w", "gatings": skipping}
            leases = await store.claim(["default"], **asked)
            assert rivals == 0
            assert [lease.gate for lease in leases] == ["charge:b"]

    run(scenario)


def test_whichever_reply_of_a_claim_at_gates_is_lost_nothing_it_took_is_forgotten(postgres_url: str) -> None:
    async def scenario() -> None:
        loser = Loser()
        async with opened(postgres_url, trace=loser) as store, opened(postgres_url) as other:
            for at in itertools.count(1):
                loser.at = None
                await other.put([envelope(ordering_key=f"{n}") for n in range(3)])
                await other.put([envelope(gate=f"fair:{n % 2}", message_type="mail") for n in range(4)])
                await other.put([envelope(gate=f"charge:{n}") for n in range(2)])
                await other.put([envelope(), envelope(priority=3)])
                loser.at, loser.seen = at, 0
                asked: dict[str, Any] = {"types": ["charge", "mail"], "limit": 50, "lease": 30, "worker": "w"}
                leases = await store.claim(["default"], **asked, gatings=CAPPED)
                fired, loser.at = loser.seen >= at, None
                with psycopg.connect(postgres_url) as direct:
                    held = direct.execute("SELECT id::text FROM onefold.delivery WHERE state = 1").fetchall()
                assert sorted(lease.id for lease in leases) == sorted(row[0] for row in held), loser.lost
                with psycopg.connect(postgres_url) as direct:
                    direct.execute("TRUNCATE onefold.delivery, onefold.message, onefold.gate")
                if not fired:
                    break
            assert at > 10

    run(scenario)
