"""Whichever call to the store fails or loses its answer, every message ends done with one effect."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import pytest

from onefold import App, Context, State, StoreUnavailableError
from onefold.store import Query
from onefold.store.open import open_store
from onefold.testing import Fault, FaultyStore, HastyClock, drain

Answer = TypeVar("Answer")

#: More calls than one run makes; the loop ends earlier, with the first run that its fault did not hit.
_CALLS_MAX = 100


async def _until_accepted(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Try again, as a careful sender does, because the message has a key."""
    while True:
        try:
            return await call()
        except StoreUnavailableError:
            continue


async def _run_with(url: str, number: int, plan: list[Fault]) -> FaultyStore:
    """Send three messages over a store with these faults, work until all are done, and check their effects."""
    clock = HastyClock()
    clock.advance(number * 86_400.0)  # one day per run, so that runs on one database stay apart
    faulty = FaultyStore(open_store(url, clock=clock), plan, clock=clock)
    app = App(store=faulty, clock=clock, chance=random.Random(number))

    @app.task(key="{number}:{part}")
    async def write(ctx: Context, number: int, part: str) -> str:
        clock.advance(11.0)  # long enough for the worker to renew its leases meanwhile
        await ctx.execute(f"INSERT INTO effect VALUES ('{number}:{part}')")
        ctx.send(plain, number, part)
        return part

    @app.task(key="{number}:{part}:plain")
    async def plain(number: int, part: str) -> str:
        """A handler without rows, so it is settled together with others."""
        return part

    await _until_accepted(app.open)
    async with app:
        for part in ("a", "b", "c"):
            await _until_accepted(lambda part=part: write.send(number, part))  # type: ignore[misc]
        await _until_accepted(lambda: drain(app))
        found = await _until_accepted(lambda: app.find(Query(correlation_id=None, limit=1_000)))
        effects = await _until_accepted(lambda: app.store.fetch("SELECT name FROM effect ORDER BY name"))
    mine = [record for record in found if record.envelope.idempotency_key.startswith(f"{number}:")]
    assert [(record.state, record.replay_count) for record in mine] == [(State.DONE, 0)] * 6
    assert sorted(record.result or b"" for record in mine) == [b'"a"', b'"a"', b'"b"', b'"b"', b'"c"', b'"c"']
    written = [name for (name,) in effects if name.startswith(f"{number}:")]
    assert written == [f"{number}:{part}" for part in ("a", "b", "c")]
    return faulty


async def _prepare(url: str) -> None:
    """Make the table of effects, and open a first app, which writes its identity."""
    app = App(url)
    await app.migrate()
    async with app, app.transaction() as transaction:
        # Without a unique constraint, so that a second effect shows as a second row and not as an error.
        await transaction.execute("CREATE TABLE effect (name TEXT NOT NULL)")


@pytest.mark.parametrize("kind", ["refuse", "lose"])
def test_whichever_call_fails_every_message_has_one_effect(store_url: str, kind: Literal["refuse", "lose"]) -> None:
    async def scene() -> None:
        await _prepare(store_url)
        number = 1
        while (await _run_with(store_url, number, [Fault(kind, at=number)])).fired:
            number += 1
            assert number < _CALLS_MAX
        # Which call comes n-th differs from run to run, so the most important verbs are also hit by name.
        for verb in ("put", "claim", "begin", "transaction.execute", "transaction.settle", "commit", "settle"):
            number += 1
            assert (await _run_with(store_url, number, [Fault(kind, at=1, verb=verb)])).fired, verb

    asyncio.run(scene())


@pytest.mark.parametrize("verb", ["claim", "begin", "commit", "settle", "extend"])
@pytest.mark.parametrize("kind", ["refuse", "lose"])
def test_a_verb_that_fails_three_times_running_costs_nothing(
    store_url: str, verb: str, kind: Literal["refuse", "lose"]
) -> None:
    async def scene() -> FaultyStore:
        await _prepare(store_url)
        return await _run_with(store_url, 1, [Fault(kind, at=at, verb=verb) for at in (1, 2, 3)])

    assert len(asyncio.run(scene()).fired) >= (1 if verb == "extend" else 3)


def test_a_fault_is_counted_by_verb_or_over_all(sqlite_url: str) -> None:
    async def scene() -> None:
        plan = [Fault("refuse", at=2, verb="count"), Fault("lose", at=5)]
        faulty = FaultyStore(open_store(sqlite_url), plan)
        await faulty.open()
        try:
            assert await faulty.count() == {}
            assert await faulty.registered("k", "n") is None
            with pytest.raises(StoreUnavailableError, match="refused"):
                await faulty.count()
            assert await faulty.count() == {}
            with pytest.raises(StoreUnavailableError, match="lost"):
                await faulty.count()
            assert await faulty.count() == {}
            assert faulty.calls == ["count", "registered", "count", "count", "count", "count"]
            assert faulty.fired == plan
        finally:
            await faulty.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("kind", "verb", "kept"),
    [
        ("refuse", "begin", False),
        ("lose", "begin", False),
        ("lose", "transaction.execute", False),
        ("refuse", "commit", False),
        ("lose", "commit", True),
    ],
)
def test_a_faulty_transaction_leaves_all_or_nothing(
    store_url: str, kind: Literal["refuse", "lose"], verb: str, kept: bool
) -> None:
    """A refused commit did not happen; a lost one did, but its answer did not arrive."""

    async def write(faulty: FaultyStore) -> None:
        async with faulty.transaction() as transaction:
            await transaction.execute("INSERT INTO effect VALUES ('x')")

    async def scene() -> list[tuple[object, ...]]:
        await _prepare(store_url)
        faulty = FaultyStore(open_store(store_url), [Fault(kind, verb=verb)])
        await faulty.open()
        try:
            with pytest.raises(StoreUnavailableError):
                await write(faulty)
            return await faulty.fetch("SELECT name FROM effect")
        finally:
            await faulty.close()

    assert asyncio.run(scene()) == ([("x",)] if kept else [])


def test_a_delayed_call_waits_for_the_clock(sqlite_url: str) -> None:
    async def scene() -> None:
        clock = HastyClock()
        faulty = FaultyStore(open_store(sqlite_url), [Fault("delay", verb="count", seconds=60.0)], clock=clock)
        await faulty.open()
        try:
            slow = asyncio.create_task(faulty.count())
            assert await faulty.registered("k", "n") is None
            assert not slow.done()
            clock.advance(60.0)
            assert await slow == {}
        finally:
            await faulty.close()

    asyncio.run(scene())


_CHILD = """
    import asyncio, sys
    from onefold import App, Context
    from onefold.store.open import open_store
    from onefold.testing import Fault, FaultyStore

    url, kind, verb = sys.argv[1:]
    app = App(store=FaultyStore(open_store(url), [Fault(kind, verb=verb)]))

    @app.task(key="{number}")
    async def write(ctx: Context, number: int) -> None:
        await ctx.execute(f"INSERT INTO effect VALUES ('{number}')")

    async def main():
        async with app:
            await write.send(7)
            await app.work(until_idle=True)

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("kind", "verb", "kept"),
    [("kill", "put", 0), ("kill after", "put", 0), ("kill", "commit", 0), ("kill after", "commit", 1)],
)
def test_a_killed_process_leaves_all_or_nothing(sqlite_url: str, kind: str, verb: str, kept: int) -> None:
    async def effects() -> int:
        store = open_store(sqlite_url)
        await store.open()
        try:
            return len(await store.fetch("SELECT name FROM effect"))
        finally:
            await store.close()

    asyncio.run(_prepare(sqlite_url))
    child = [sys.executable, "-c", textwrap.dedent(_CHILD), sqlite_url, kind, verb]
    ended = subprocess.run(child, capture_output=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert asyncio.run(effects()) == kept
