"""At most as many messages of a gate are leased as its cap allows, also when workers die; no place stays lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from onefold import App, Rate, limits
from onefold.store import Query, State

if TYPE_CHECKING:
    from conftest import World


async def leased(app: App) -> int:
    return len(await app.find(Query(states=(State.LEASED,))))


def test_several_workers_together_run_as_many_as_may_and_no_more(world: World) -> None:
    apps = [world.app() for _ in range(3)]
    running, most, seen = 0, 0, list[int]()

    async def charge(n: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append(await leased(apps[0]))
        running -= 1

    tasks = [app.task(name="charge", max_running=3)(charge) for app in apps]

    async def scenario() -> None:
        async with world.running(*apps):
            await apps[0].send_many(tasks[0].call(n) for n in range(40))
            done = await asyncio.gather(*(app.work(until_idle=True) for app in apps))
            assert sum(done) == 40

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert most == max(seen) == 3


def test_a_worker_that_dies_keeps_its_places_for_a_lease_and_no_longer(world: World) -> None:
    app = world.app()

    @app.task(max_running=3)
    async def charge(n: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            await app.send_many(charge.call(n) for n in range(6))
            gatings = app.registry.gatings
            dead = await app.store.claim(
                ["default"], types=["charge"], limit=9, lease=limits.LEASE, worker="dead", gatings=gatings
            )
            assert len(dead) == 3
            assert await app.work(until_idle=True) == 0
            world.clock.advance(limits.LEASE + 1)
            assert await app.work(until_idle=True) == 6

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("burst", [1, 4])
def test_no_window_sees_more_starts_than_the_rate_and_its_burst(world: World, burst: int) -> None:
    app, starts = world.app(), list[int]()

    @app.task(rate=Rate(4, per=10, burst=burst))
    async def call(n: int) -> None:
        starts.append(world.clock.now())

    async def scenario() -> None:
        async with world.running(app):
            await app.send_many(call.call(n) for n in range(20))
            while len(starts) < 20:
                await app.work(until_idle=True)
                world.clock.advance(1)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    for at in starts:
        assert sum(at <= other < at + 10_000_000 for other in starts) <= 4 + burst
