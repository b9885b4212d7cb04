"""Every accepted message ends: the messages of a worker that dies are handled by another one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from onefold import App, Context, limits
from onefold.store import Query, State

if TYPE_CHECKING:
    from conftest import World

#: A worker that is killed in its third handler, while it has claimed more messages.
WORKER = """
import asyncio, os, signal, sys
from onefold import App, Context

app = App(sys.argv[1])
runs = 0

@app.task(key="{number}")
async def ship(ctx: Context, number: int) -> None:
    global runs
    runs += 1
    await ctx.execute(sys.argv[2], str(number))
    if runs == 3:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with app:
        await app.work(lease=1, concurrency=1)

asyncio.run(main())
"""


def test_a_killed_worker_loses_nothing_and_repeats_no_effect(world: World) -> None:
    # Real processes and real leases: the second worker waits for the first one's lease to run out.
    app = App(world.url)

    @app.task(key="{number}")
    async def ship(ctx: Context, number: int) -> None:
        await ctx.execute(world.insert_effect, str(number))
        if len(await ctx.fetch("SELECT name FROM effect")) == 10:
            app.stop_working()

    async def prepare() -> None:
        async with world.running(app):
            await app.send_many(ship.call(number) for number in range(10))

    async def finish() -> None:
        async with world.running(app):
            assert len(await world.effects(app)) == 2
            await app.work(concurrency=1)
            assert await world.effects(app) == [str(number) for number in range(10)]
            assert {record.state for record in await app.find(Query())} == {State.DONE}

    asyncio.run(prepare())
    killed = subprocess.run(
        [sys.executable, "-c", WORKER, world.url, world.insert_effect], capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    asyncio.run(asyncio.wait_for(finish(), 60))


def test_a_message_whose_lease_ran_out_is_claimed_by_another_worker(world: World) -> None:
    app = world.app()

    @app.task
    async def ship(ctx: Context, number: int) -> None:
        await ctx.execute(world.insert_effect, str(number))

    async def scenario() -> None:
        async with world.running(app):
            receipt = await ship.send(7)
            await app.store.claim(["default"], types=["ship"], limit=10, lease=30, worker="died")
            assert await app.work(until_idle=True) == 0
            world.clock.advance(31)
            assert await app.work(until_idle=True) == 1
            record = await world.record(app, receipt)
            assert (record.state, record.crashes, record.attempt) == (State.DONE, 1, 0)

    asyncio.run(scenario())


def test_a_graceful_stop_hands_back_what_has_not_finished(world: World) -> None:
    app = world.app()
    started = asyncio.Event()

    @app.task
    async def endless(ctx: Context, number: int) -> None:
        if ctx.fence == 2:
            started.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with world.running(app):
            receipt = await endless.send(7)
            working = asyncio.create_task(app.work(stop_after=0))
            await started.wait()
            app.stop_working()
            await working
            record = await world.record(app, receipt)
            assert (record.state, record.crashes, record.attempt) == (State.SCHEDULED, 0, 0)
            assert await app.work(until_idle=True) == 1

    asyncio.run(scenario())


def test_a_message_that_kills_its_workers_is_kept_as_a_dead_letter(world: World) -> None:
    app = world.app()

    @app.task
    async def poison(number: int) -> None:
        raise AssertionError("must not run again")

    async def scenario() -> None:
        async with world.running(app):
            receipt = await poison.send(7)
            for crashes in range(limits.QUARANTINE_AFTER):
                (lease,) = await app.store.claim(["default"], types=["poison"], limit=1, lease=30, worker="dies")
                assert lease.crashes == crashes
                if crashes >= limits.SUSPECT_AFTER:
                    assert await app.store.extend([lease], lease=30, starting=True) == [True]
                world.clock.advance(31)
            await app.work(until_idle=True)
            record = await world.record(app, receipt)
            assert record.state is State.DEAD
            assert record.failure is not None
            assert record.failure.reason == "quarantined"
            assert record.envelope.payload_inline == b'{"number":7}'

    asyncio.run(scenario())


def test_a_suspect_that_had_not_begun_is_not_blamed_for_the_death_of_its_worker(world: World) -> None:
    app = world.app()

    @app.task
    async def ship(number: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            receipt = await ship.send(7)
            for _ in range(limits.QUARANTINE_AFTER + 3):
                await app.store.claim(["default"], types=["ship"], limit=1, lease=30, worker="dies")
                world.clock.advance(31)
            await app.work(until_idle=True)
            record = await world.record(app, receipt)
            assert (record.state, record.crashes) == (State.DONE, limits.SUSPECT_AFTER)

    asyncio.run(scenario())


def test_a_message_that_was_never_done_in_its_time_is_a_dead_letter_not_gone(world: World) -> None:
    app = world.app()

    @app.task(expires=3600)
    async def ship(number: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            receipt = await ship.send(7)
            world.clock.advance(3601)
            await app.work(until_idle=True)
            record = await world.record(app, receipt)
            assert record.state is State.DEAD
            assert record.failure is not None
            assert record.failure.reason == "expired"

    asyncio.run(scenario())
