"""A row of ``delivery`` that another transaction has locked costs its own message only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from test_postgres_engine import claim, envelope, opened, run

from onefold import App, StoreUnavailableError
from onefold.clock import MICROSECONDS, SystemClock
from onefold.store import Again, Dead, Done, Failure, HandBack, Lease, Outcome, Query, State
from onefold.store.postgres import PostgresStore

_clock = SystemClock()
FAILURE = Failure(reason="exception", error_type="ValueError", error_message="no")

#: No call waits this long for a lock, though the lock is held for longer.
SOON_SECONDS = 2.0


@contextmanager
def locked(url: str, lease: Lease) -> Iterator[None]:
    """Lock the row of a message, as an operator in psql with a transaction left open."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT FROM onefold.delivery WHERE id = %s FOR UPDATE", [lease.id])
        yield


async def leased(store: PostgresStore, number: int, *, lease: float = 30) -> list[Lease]:
    await store.put([envelope(f"k{n}") for n in range(number)])
    return await store.claim(["default"], types=["charge"], limit=number, lease=lease, worker="w")


def until(url: str) -> dict[str, int]:
    with psycopg.connect(url) as connection:
        return dict(connection.execute("SELECT id::text, lease_until FROM onefold.delivery").fetchall())


def test_leases_are_extended_beside_one_whose_row_is_locked(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            leases = await leased(store, 5)
            before = until(postgres_url)
            with locked(postgres_url, leases[2]):
                async with asyncio.timeout(SOON_SECONDS):
                    assert await store.extend(leases, lease=60) == [True] * 5
                after = until(postgres_url)
                assert [after[one.id] > before[one.id] for one in leases] == [True, True, False, True, True]
            assert await store.extend(leases, lease=60) == [True] * 5
            assert min(until(postgres_url).values()) > max(before.values())

    run(scenario)


def test_a_locked_row_is_not_taken_over_and_its_lease_goes_on_afterwards(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store, opened(postgres_url) as other:
            leases = await leased(store, 3, lease=0.5)
            with locked(postgres_url, leases[0]):
                ends_at = _clock.steady() + MICROSECONDS
                while _clock.steady() < ends_at:
                    assert await store.extend(leases, lease=0.5) == [True] * 3
                    assert await claim(other) == []
                    await _clock.sleep(0.05)
            assert await store.extend(leases, lease=30) == [True] * 3
            assert await store.settle([(one, Done(b"1")) for one in leases]) == [True] * 3

    run(scenario)


def test_a_lost_lease_is_reported_though_its_row_is_locked(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            leases = await leased(store, 2)
            await store.settle([(leases[0], HandBack())])
            with locked(postgres_url, leases[0]):
                assert await store.extend(leases, lease=30) == [False, True]

    run(scenario)


def test_a_suspect_whose_row_is_locked_does_not_begin(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            leases = await leased(store, 2)
            with locked(postgres_url, leases[0]):
                assert await store.extend(leases, lease=0.2, starting=True) == [False, True]

    run(scenario)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Done(b"1"), State.DONE),
        (Dead(FAILURE), State.DEAD),
        (Again(60, FAILURE), State.SCHEDULED),
        (Done(b"1", sends=(envelope(),)), State.DONE),
    ],
)
def test_messages_are_settled_beside_one_whose_row_is_locked(postgres_url: str, outcome: Outcome, state: State) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            leases = await leased(store, 20)
            ids = tuple(one.id for one in leases)
            settlements: list[tuple[Lease, Outcome]] = [(one, Done(b"1")) for one in leases[:10]]
            settlements += [(leases[10], outcome), *((one, outcome) for one in leases[11:] if not _sends(outcome))]
            with locked(postgres_url, leases[3]):
                async with asyncio.timeout(SOON_SECONDS):
                    with pytest.raises(StoreUnavailableError, match=leases[3].id):
                        await store.settle(settlements)
                found = {record.envelope.id: record.state for record in await store.find(Query(ids=ids))}
                assert found[leases[3].id] is State.LEASED
                assert found[leases[10].id] is state
                assert [found[one.id] for one in leases[:3]] == [State.DONE] * 3
                with pytest.raises(StoreUnavailableError, match=leases[3].id):
                    await store.settle([settlements[3]])
            # Asked again it answers for all of them, as the worker does that was told to try again.
            assert await store.settle(settlements) == [True] * len(settlements)
            assert await store.settle(settlements) == [False] * len(settlements)

    run(scenario)


def _sends(outcome: Outcome) -> bool:
    return isinstance(outcome, Done) and bool(outcome.sends)


def test_a_worker_goes_on_beside_a_locked_row(postgres_url: str) -> None:
    async def scenario() -> None:
        app = App(postgres_url)
        await app.migrate()
        runs: list[int] = []
        begun, finish = asyncio.Event(), asyncio.Event()

        @app.task(key="{n}")
        async def work(n: int) -> None:
            runs.append(n)
            if n == 0:
                begun.set()
                await finish.wait()

        async with app:
            first = await work.send(0)
            worker = asyncio.create_task(app.work(until_idle=True, lease=3))
            await begun.wait()
            with psycopg.connect(postgres_url) as connection:
                connection.execute("SELECT FROM onefold.delivery WHERE id = %s FOR UPDATE", [first.id])
                finish.set()
                await app.send_many(work.call(n) for n in range(1, 200))
                ends_at = _clock.steady() + 10 * MICROSECONDS
                while await _ended(app) < 199:
                    assert _clock.steady() < ends_at
                    await _clock.sleep(0.05)
                assert (await app.store.count())["default"].leased == 1
            await worker
            assert sorted(runs) == list(range(200))
            assert await _ended(app) == 200

    run(scenario)


async def _ended(app: App) -> int:
    ((number,),) = await app.store.fetch("SELECT count(*) FROM onefold.outcome WHERE state = 3")
    return int(number)
