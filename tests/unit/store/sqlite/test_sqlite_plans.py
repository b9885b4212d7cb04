"""How SQLite goes about the statements, on a file in use: nothing that is kept is read to find what is alive."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import apsw
import pytest

from onefold.store import Done, Lane
from onefold.store.sqlite import SQLiteStore
from onefold.store.sqlite.session import SQL as STATEMENTS
from onefold.store.sqlite.session import Session, as_json
from onefold.store.sqlite.verbs.claim import claim, look
from onefold.store.sqlite.verbs.gates import Asked, Gates
from onefold.testing.contracts import Bench
from onefold.testing.contracts.bench import AGAIN, DEAD

#: Statements that go through a whole table or index on purpose, and through which: none that grows with what is kept.
#: The table of the purge has one row.
WHOLE = {
    "find_leased": {"d USING INDEX onefold_delivery_lease"},
    "find_crashed": {"d USING INDEX onefold_delivery_crashed"},
    "count_alive": {"onefold_delivery"},
    "count_dead": {"o USING COVERING INDEX onefold_outcome_letter"},
    "purge_register": {"onefold_register"},
    # Only its oldest rows, up to a limit.
    "purge_acts": {"onefold_act"},
    # Once after a restart of the machine or a restore from backup.
    "expire_all": {"onefold_delivery USING INDEX onefold_delivery_lease"},
    "restored_leases": {"onefold_delivery USING COVERING INDEX onefold_delivery_lease"},
    "restored_deliveries": {"onefold_delivery"},
    "restored_outcomes": {"onefold_outcome"},
}


#: What statements call the rows that they have found already.
ALIASES = "d|g|walk|level|gone|kind"


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with many ended messages, some dead, some that wait, some leased and a few that crashed."""
    path = tmp_path_factory.mktemp("used") / "onefold.db"

    async def use() -> None:
        async with AsyncExitStack() as stack:
            bench = Bench(lambda clock: SQLiteStore(str(path), clock=clock, synchronous="OFF"), stack)
            bench.store = await bench.another()
            for outcome in (Done(b"1"), Done(b"1"), DEAD, AGAIN):
                await bench.store.put([bench.message(f"{outcome}{number}") for number in range(500)])
                await bench.store.settle([(lease, outcome) for lease in await bench.claim(500)])
            await bench.crashed()
            await bench.store.put([bench.message() for _ in range(300)])
            await bench.claim(100)

    asyncio.run(use())
    return path


@pytest.fixture(params=["as it is", "analyzed"])
def connection(used: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[apsw.Connection]:
    """A copy of it, also with statistics, which its owner may have made for tables of their own."""
    copy = tmp_path / "copy.db"
    copy.write_bytes(used.read_bytes())
    opened = apsw.Connection(str(copy))
    opened.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    if request.param == "analyzed":
        opened.execute("ANALYZE")
    yield opened
    opened.close()


def plan(connection: apsw.Connection, statement: str) -> list[str]:
    numbers = [int(number) for number in re.findall(r"\?(\d+)", statement)]
    parameters = [None] * (max(numbers) if numbers else statement.count("?"))
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]


def test_nothing_reads_a_whole_table_that_grows_with_what_is_kept(connection: apsw.Connection) -> None:
    """S10: a claim costs the same whether nothing or five million ended messages are kept."""
    for name, statement in STATEMENTS.items():
        scanned = {line.removeprefix("SCAN ") for line in plan(connection, statement) if line.startswith("SCAN ")}
        ours = {
            line
            for line in scanned
            if not re.search(rf"json_each|VIRTUAL TABLE|CONSTANT ROW|subquery|onefold_purge|^({ALIASES})$", line)
        }
        assert ours <= WHOLE.get(name, set()), (name, plan(connection, statement))


def test_a_claim_reads_one_range_of_each_type_and_no_more_messages_than_it_takes(connection: apsw.Connection) -> None:
    ranges = {
        "claim_heads": "due (queue=? AND priority=? AND message_type=? AND due_at<?)",
        "claim_of_type": "due (queue=? AND priority=? AND message_type=? AND due_at>? AND due_at<?)",
        "claim_crashed": "crashed (queue=? AND due_at<?)",
        "crowd": "crowd (queue=? AND gate=? AND priority=? AND message_type=? AND due_at<?)",
        "gates_due": "gate_due (queue=? AND message_type=? AND due_at>? AND due_at<?)",
        "crowd_kinds": "crowd (queue=? AND gate=? AND priority=? AND message_type>?)",
    }
    for name, index in ranges.items():
        lines = plan(connection, STATEMENTS[name])
        assert [line for line in lines if re.search(rf"INDEX onefold_delivery_{re.escape(index)}$", line)], lines
        assert not [line for line in lines if "ORDER BY" in line]
    assert "SEARCH m USING INTEGER PRIMARY KEY (rowid=?)" in plan(connection, STATEMENTS["claim_rows"])


def test_a_claim_costs_the_same_beside_any_number_of_messages_of_other_types(tmp_path: Path) -> None:
    """Counted in steps of SQLite's machine, which do not depend on how busy this one is."""

    async def steps(others: int) -> tuple[int, int]:
        path = str(tmp_path / f"{others}.db")
        async with AsyncExitStack() as stack:
            bench = Bench(lambda clock: SQLiteStore(path, clock=clock, synchronous="OFF"), stack)
            bench.store = await bench.another()
            noise = [bench.message(message_type=f"other{n % 30}", priority=n % 10) for n in range(others)]
            await bench.store.put(noise)
            bench.clock.advance(1.0)
            for kind in ("task", "second"):
                await bench.store.put([bench.message(message_type=kind, priority=n % 3) for n in range(30)])
        connection = apsw.Connection(path)
        session, counted = Session(connection, bench.clock), [0, 0]
        known = as_json(["task", "second", "third"])
        asked = Asked(["default"], frozenset(), known, 50, Lane.ANY, {}, None)

        def count() -> bool:
            counted[0] += 1
            return False

        connection.set_progress_handler(count, 1)
        assert look(session, Gates(), asked, for_all=True) is not None
        counted[1] = counted[0]
        with connection:
            assert len(claim(session, Gates(), asked, {}, lease=30.0, worker="w")) == 50
        connection.close()
        return counted[1], counted[0]

    few, many = asyncio.run(steps(30)), asyncio.run(steps(20_000))
    assert many[0] <= few[0] * 1.2
    assert many[1] <= few[1] * 1.2


@pytest.mark.parametrize("name", ["claim_take", "lease_fences", "extend", "settle_end", "settle_again"])
def test_leases_are_kept_and_ended_by_number(connection: apsw.Connection, name: str) -> None:
    lines = plan(connection, STATEMENTS[name])
    assert any(re.match(r"SEARCH (onefold_delivery|d) USING INTEGER PRIMARY KEY \(rowid=\?\)", line) for line in lines)


def test_a_message_is_found_by_its_id_in_a_short_range_of_numbers(connection: apsw.Connection) -> None:
    assert "SEARCH m USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in plan(connection, STATEMENTS["near"])


def test_the_end_of_a_line_is_one_look(connection: apsw.Connection) -> None:
    lines = plan(connection, STATEMENTS["put_delivery"])
    assert "SEARCH l USING COVERING INDEX onefold_delivery_line (gate=? AND place>? AND place<?)" in lines
    assert not [line for line in lines if "ORDER BY" in line]


def test_a_chain_is_found_by_its_index(connection: apsw.Connection) -> None:
    """M6: and its first message, which does not stand there, by its id."""
    lines = "\n".join(plan(connection, STATEMENTS["find_correlated"]))
    assert "USING INDEX onefold_message_correlation (correlation_id=?)" in lines
    assert "SCAN onefold_message" not in lines


def test_a_page_of_dead_letters_reads_only_them_and_in_order(connection: apsw.Connection) -> None:
    lines = plan(connection, STATEMENTS["find_dead"])
    assert "SEARCH o USING INDEX onefold_outcome_letter (letter>?)" in lines
    assert not [line for line in lines if "ORDER BY" in line]
