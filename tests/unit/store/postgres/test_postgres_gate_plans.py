"""Plans of what claims at gates: on a used table every statement still touches only the rows it is about."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from test_postgres_engine import claim, envelope, opened, run
from test_postgres_plans import GIVEN as CLAIMING

from onefold.clock import SystemClock
from onefold.store import Again, Done
from onefold.store.gates import Gating
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire.arrays import bigints, ids, numbers, teach, texts
from onefold.store.postgres.wire.statements import SQL

_clock = SystemClock()
SOMEBODY = "00000000-0000-0000-0000-000000000001"
GIVEN: dict[str, Any] = {
    **CLAIMING,
    "crashes_least": 0,
    "step": 60_000_000,
    "since": 0,
    "after": "",
    "afters": texts([""]),
    "portion": 256,
    "gates": texts(["charge:a"]),
    "names": texts(["charge"]),
    "keys": texts(["charge", "charge:a"]),
    "counts": bigints([5]),
    "ids": ids([SOMEBODY]),
    "fences": bigints([2]),
    "sequences": bigints([1]),
    "kept": 1,
    "line_retention": 1,
    "tokens": numbers([1.0, 1.0]),
    "at": 1,
    "full_ats": bigints([1, 1]),
}
#: Each statement, and the indexes it goes by.
STATEMENTS = {
    "claim": {"delivery_due", "delivery_lease", "delivery_line", "delivery_crowd", "message_pkey"},
    "claim_crashed": {"delivery_crashed", "message_pkey"},
    "lines_after": {"delivery_line", "delivery_turn", "gate_pkey"},
    "lines_crashed": {"delivery_crashed", "delivery_line"},
    "lines_at": {"delivery_line", "delivery_turn", "gate_pkey"},
    "line_front": {"delivery_line", "gate_pkey"},
    "crowds_after": {"delivery_crowd"},
    "gates_due": {"delivery_gate_due"},
    "crowds_crashed": {"delivery_crashed"},
    "claim_lines": {"delivery_pkey", "message_pkey"},
    "claim_crowds": {"delivery_crowd", "message_pkey"},
    "gate_read": {"gate_pkey"},
    "gate_hold": {"gate_pkey"},
    "gate_running": {"delivery_inside", "delivery_turn"},
    "gate_tokens": {"gate_pkey"},
    "gate_passed": {"delivery_pkey"},
    "purge_gates": {"gate_expires", "gate_pkey"},
}


async def use(store: PostgresStore) -> None:
    """Leave behind one long line, many short ones, a crowd at one gate and few at many, and messages without any."""
    await store.put([envelope(f"k{n}") for n in range(1_000)])
    await store.put([envelope(ordering_key="hot") for _ in range(1_000)])
    await store.put([envelope(ordering_key=f"line{n:03}", sequence=1) for n in range(300)])
    await store.put([envelope(gate="charge:crowd", priority=n % 10) for n in range(1_000)])
    await store.put([envelope(gate=f"charge:{n:03}") for n in range(300)])
    await store.put([envelope(priority=n % 10) for n in range(100)])
    await store.settle([(lease, Done(b"1")) for lease in await claim(store, 500)])
    await store.settle([(lease, Again(0, None, crashed=True)) for lease in await claim(store, 20)])
    await store.claim(
        ["default"],
        types=["charge"],
        limit=100,
        lease=30,
        worker="w",
        gatings={"charge": Gating(name="charge", max_running=50)},
    )


@pytest.mark.parametrize("analyzed", [False, True])
def test_on_used_tables_every_statement_on_gates_goes_by_its_indexes(postgres_url: str, analyzed: bool) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await use(store)

    run(scenario)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        if analyzed:
            connection.execute("VACUUM ANALYZE")
        teach(connection)
        connection.execute("SET enable_seqscan = off")  # as on our own connections, which plan on empty tables
        for name, indexes in STATEMENTS.items():
            rows = connection.execute(f"EXPLAIN {SQL[name]}", GIVEN).fetchall()  # type: ignore[arg-type]
            plan = "\n".join(row[0] for row in rows)
            assert not [index for index in indexes if index not in plan], f"{name}\n{plan}"
            assert "Seq Scan on" not in plan, f"{name}\n{plan}"


def test_a_long_line_and_a_large_crowd_are_not_read(postgres_url: str) -> None:
    """A claim at gates reads the heads of lines and as many of a crowd as it takes, however many wait behind them."""

    async def read(store: PostgresStore) -> int:
        await store.fetch(
            "SELECT pg_sleep(%s)", [1.1]
        )  # sessions report their numbers once a second, when they are idle
        await store.claim(["none"], types=["charge"], limit=1, lease=30, worker="w")
        rows = await store.fetch(
            "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relname = 'delivery'"
        )
        return int(rows[0][0])

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope(ordering_key="hot") for _ in range(3_000)])
            await store.put([envelope(gate="charge:crowd") for _ in range(3_000)])
            before = await read(store)
            for _ in range(10):
                leases = await claim(store, 5)
                assert {lease.gate for lease in leases} <= {"charge:hot", "charge:crowd"}
                await store.settle([(lease, Done(b"1")) for lease in leases])
            assert await read(store) - before < 1_500

    run(scenario)
