"""Messages that are due at once get their deliveries later: nobody may see or feel the difference."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import apsw
import pytest

from onefold.clock import MICROSECONDS
from onefold.store import HandBack, Query, State
from onefold.stores.sqlite import SQLiteStore
from onefold.stores.sqlite.delivering import ARRIVALS_MAX
from onefold.testing.contracts import Bench


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        bench = Bench(lambda clock: SQLiteStore(str(path), clock=clock, synchronous="OFF"), stack)
        bench.store = await bench.another()
        yield bench


def deliveries(path: Path) -> list[int]:
    connection = apsw.Connection(str(path))
    try:
        return [seq for (seq,) in connection.execute("SELECT seq FROM onefold_delivery ORDER BY seq").fetchall()]
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "onefold.db"


Test = Callable[[Path], Awaitable[None]]


def scenario(test: Test) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(path), 60))

    run.__doc__ = test.__doc__
    return run


@scenario
async def test_a_message_that_has_just_come_is_shown_as_one_that_waits(path: Path) -> None:
    async with opened(path) as bench:
        plain = await bench.put("plain", retention=60 * MICROSECONDS)
        later = await bench.put("later", delay=60 * MICROSECONDS)
        assert deliveries(path) == [2]
        before = {record.envelope.id: record for record in await bench.store.find(Query(ids=[plain.id, later.id]))}
        assert (await bench.store.count())["default"].scheduled == 2
        for query in (Query(), Query(states=(State.SCHEDULED,)), Query(correlation_id=plain.id)):
            assert before[plain.id] in await bench.store.find(query)
        shown = f"SELECT state, fence, attempt, crashes, due_at FROM onefold_inbox WHERE id = '{plain.id}'"
        assert await bench.store.fetch(shown) == [("scheduled", 1, 0, 0, before[plain.id].envelope.due_at)]
        (lease,) = await bench.claim()
        assert lease.id == plain.id
        assert deliveries(path) == [1, 2]
        assert await bench.store.settle([(lease, HandBack())]) == [True]
        after = {record.envelope.id: record for record in await bench.store.find(Query(ids=[plain.id, later.id]))}
        assert (await bench.store.count())["default"].scheduled == 2
        assert before[later.id] == after[later.id]
        assert before[plain.id].envelope == after[plain.id].envelope
        assert before[plain.id].state is after[plain.id].state is State.SCHEDULED
        assert (before[plain.id].attempt, before[plain.id].fence) == (0, 1)


@scenario
async def test_a_process_leaves_few_of_them_behind(path: Path) -> None:
    async with opened(path) as bench:
        for number in range(3 * ARRIVALS_MAX):
            await bench.put(f"alone {number}")
            assert number + 1 - len(deliveries(path)) <= ARRIVALS_MAX
        await bench.store.put([bench.message() for _ in range(ARRIVALS_MAX)])
        assert len(deliveries(path)) == 4 * ARRIVALS_MAX


@scenario
async def test_they_are_claimed_in_the_order_in_which_they_came(path: Path) -> None:
    async with opened(path) as bench:
        sent = [(await bench.put(f"{number}", delay=number % 3)).id for number in range(20)]
        bench.clock.advance(1)
        due = {record.envelope.id: record.envelope.due_at for record in await bench.store.find(Query(limit=100))}
        assert [lease.id for lease in await bench.claim()] == sorted(sent, key=lambda id_: (due[id_], sent.index(id_)))


def _put_and_die(path: Path) -> None:
    async def put() -> None:
        async with opened(path) as bench:
            for number in range(5):
                await bench.put(f"key {number}")
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(put())


@scenario
async def test_what_a_process_left_is_delivered_by_whoever_claims(path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_put_and_die, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert deliveries(path) == []
    async with opened(path) as bench:
        assert (await bench.store.count())["default"].scheduled == 5
        assert (await bench.put("key 3")).duplicate
        assert len(await bench.claim()) == 5
