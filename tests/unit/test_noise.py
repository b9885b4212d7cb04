"""The noise of the benchmarks is made of messages as the stores know them, and none of it can run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from benchmarks.contender import Mode
from benchmarks.engines import Engine, Postgres, SQLite
from benchmarks.filling import keep_done_messages, name_of
from benchmarks.noise import NOISES, Noise, fill
from benchmarks.noisy import Example, Noisy, declare
from benchmarks.ours import QUEUE

from onefold import App
from onefold.store import Lease, Query, State

#: A thousandth of each kind: some hundred messages at twenty keys.
SHARE = 1 / 1_000
STATES = {"parked": State.PARKED, "dead": State.DEAD, "done": State.DONE}


@pytest.fixture
def engine(store_url: str, tmp_path: Path) -> Engine:
    return SQLite(tmp_path) if store_url.startswith("sqlite") else Postgres(tmp_path)


@asynccontextmanager
async def sending(url: str) -> AsyncIterator[Noisy]:
    sender = Noisy(url, Mode.NOISY)
    await sender.setup()
    try:
        yield sender
    finally:
        await sender.close()


@asynccontextmanager
async def working(url: str) -> AsyncIterator[App]:
    """Open the app as a worker has it: without the task that only senders know."""
    app, _ = declare(url, lambda seq, made_at: None)
    async with app:
        yield app


async def claim(app: App) -> list[Lease]:
    registry = app.registry
    return await app.store.claim(
        [QUEUE], types=registry.types(), limit=100, lease=30, worker="w", gatings=registry.gatings
    )


async def make(engine: Engine, url: str, title: str) -> Noise:
    noise = next(noise for noise in NOISES if noise.title == title)
    async with sending(url) as sender:
        await fill(engine, url, noise, SHARE, lambda kind, seq: sender.example(kind=kind, seq=seq))
    return noise


@pytest.mark.parametrize("title", [noise.title for noise in NOISES if noise.parts])
def test_noise_is_kept_as_messages_are_and_cannot_run(title: str, engine: Engine, store_url: str) -> None:
    async def scenario() -> None:
        noise = await make(engine, store_url, title)
        messages = sum(round(SHARE * part.messages) for part in noise.parts)
        table = name_of(engine, "message")
        assert engine.execute(store_url, f"SELECT count(*) FROM {table}") == [(messages + len(noise.parts),)]

        named = f"SELECT id FROM {table} WHERE idempotency_key IN ('copy-1', 'copy-{messages}')"
        ids = tuple(str(row[0]) for row in engine.execute(store_url, named))
        async with working(store_url) as app:
            first, last = await app.find(Query(ids=ids))
            assert first.envelope.correlation_id == first.envelope.id < last.envelope.id
            assert last.state is STATES.get(title, State.SCHEDULED)
            assert await claim(app) == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("title", "task"),
    [
        ("lines", "ordered"),
        ("lines of another queue", "ordered"),
        ("fair keys", "fair"),
        ("keys without a token", "rated"),
        ("keys without a place", "capped"),
    ],
)
def test_a_message_at_an_open_gate_is_claimed_beside_shut_ones(
    title: str, task: str, engine: Engine, store_url: str
) -> None:
    async def scenario() -> None:
        await make(engine, store_url, title)
        async with working(store_url) as app:
            receipt = await app.tasks[task].send(1, 0, "open", "")
            assert [lease.id for lease in await claim(app)] == [receipt.id]

    asyncio.run(scenario())


def test_a_dead_copy_can_be_redriven(engine: Engine, store_url: str) -> None:
    async def scenario() -> None:
        await make(engine, store_url, "dead")
        async with working(store_url) as app:
            letters = await app.find(Query(states=(State.DEAD,), limit=1_000))
            assert len(letters) == round(SHARE * 200_000) + 1
            ids = [letter.envelope.id for letter in letters[:3]]
            assert await app.redrive(ids, actor="test", reason="a copy is a whole message") == ids

    asyncio.run(scenario())


def test_a_history_is_made_of_copies_of_its_first_message(engine: Engine, store_url: str) -> None:
    async def scenario() -> None:
        async with sending(store_url) as sender:
            await sender.example(kind=Example.DONE, seq=0)
        keep_done_messages(engine, store_url, 10)
        for table in ("message", "outcome", "key"):
            assert engine.execute(store_url, f"SELECT count(*) FROM {name_of(engine, table)}") == [(11,)]

    asyncio.run(scenario())


def test_commits_that_write_are_counted_and_reads_are_not(engine: Engine, store_url: str) -> None:
    async def scenario() -> None:
        async with sending(store_url) as sender:
            start = engine.log_position(store_url)
            await sender.leased()
            read = engine.log_position(store_url)
            await sender.example(kind=Example.LATER, seq=0)
            commits, size = engine.log_position(store_url).since(read)
        assert read.since(start)[0] == 0
        assert commits == 1
        assert size > 0

    asyncio.run(scenario())
