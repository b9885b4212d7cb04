"""Faults hit everything at random for a while; afterwards every row is as the accepted messages imply.

The seed is new in every run and printed; ``ONEFOLD_CHAOS_SEED`` sets it.  ``scripts/chaos.py`` runs for longer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from onefold.clock import system_random
from onefold.testing.chaos.process import Loop
from onefold.testing.chaos.run import Outcome, Settings, chaos_on_postgres, chaos_on_sqlite
from onefold.testing.servers import PostgresServer

RecordProperty = Callable[[str, object], None]

#: Both event loops in turn; the processes of one run all use the same.
LOOPS: tuple[Loop, ...] = ("asyncio", "uvloop")

#: The interpreter's own SQLite, without failing files, which only apsw supports.  Without the write-ahead log, because
#: some SQLite versions can damage a file that has one.
OTHER_DRIVER = "driver=sqlite3&journal=delete"


def _seed() -> int:
    return int(os.environ.get("ONEFOLD_CHAOS_SEED") or system_random().randrange(1_000_000))


def _short(**least: int) -> Settings:
    """A run of a few seconds with few processes, on one of the loops."""
    seed, named = _seed(), {name.replace("_", " "): number for name, number in least.items()}
    return Settings(
        seed=seed, seconds=6.0, workers=2, supervisors=0, rate=80.0, pace=1.5, loop=LOOPS[seed % 2], least=named
    )


def _judge(outcome: Outcome, record_property: RecordProperty) -> None:
    record_property("chaos", outcome.headline)
    print(outcome.headline)
    assert not outcome.failed, str(outcome)
    assert outcome.verdict.accepted > 0


@pytest.mark.parametrize("options", ["", OTHER_DRIVER])
def test_chaos_on_sqlite_leaves_every_row_right(options: str, record_property: RecordProperty) -> None:
    """Faults 1, 3, 10, 13 and 14 at once: nothing lost, nothing twice, no wrong row."""
    settings = _short(workers_killed=2, locks_held_by_another_process=1)
    _judge(asyncio.run(chaos_on_sqlite(settings, options=options)), record_property)


def test_chaos_on_postgres_leaves_every_row_right(
    postgres_server: PostgresServer, postgres_url: str, record_property: RecordProperty
) -> None:
    """Faults 1, 3, 4, 5, 9 and 10 at once: nothing lost, nothing twice, no wrong row."""
    settings = _short(workers_killed=2, backends_terminated=10, statements_cancelled=5)
    _judge(asyncio.run(chaos_on_postgres(settings, postgres_server, postgres_url)), record_property)


@pytest.mark.deep
@pytest.mark.parametrize(("loop", "options"), [("asyncio", ""), ("uvloop", ""), ("uvloop", OTHER_DRIVER)])
def test_a_minute_of_chaos_on_sqlite_leaves_every_row_right(
    loop: Loop, options: str, record_property: RecordProperty
) -> None:
    """The same for a minute, with supervisors and at least thirty killed workers."""
    settings = Settings(seed=_seed(), seconds=60.0, loop=loop, least={"workers killed": 30})
    _judge(asyncio.run(chaos_on_sqlite(settings, options=options)), record_property)


@pytest.mark.deep
@pytest.mark.parametrize("loop", LOOPS)
def test_a_minute_of_chaos_on_postgres_leaves_every_row_right(loop: Loop, record_property: RecordProperty) -> None:
    """The same for a minute, with at least a hundred terminated backends, thirty killed workers and server crashes."""
    least = {"workers killed": 30, "backends terminated": 100}
    settings = Settings(seed=_seed(), seconds=60.0, loop=loop, least=least, restarts=True)
    with PostgresServer() as server:
        outcome = asyncio.run(chaos_on_postgres(settings, server, server.create_database("chaos")))
    _judge(outcome, record_property)
