"""Messages with one ordering key run one at a time and commit in order, through failures and deaths of workers."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from onefold import Context, limits

if TYPE_CHECKING:
    from conftest import World


def test_one_key_commits_in_order_through_failures_and_deaths(world: World) -> None:
    apps = [world.app() for _ in range(3)]
    chance, running, number = random.Random(4), dict[str, int](), 0

    async def post(ctx: Context, account: str, n: int) -> None:
        nonlocal number
        assert running.setdefault(account, 0) == 0
        running[account] += 1
        try:
            if chance.random() < 0.3 and ctx.attempt < limits.ATTEMPTS_DEFAULT:
                raise ValueError("not this time")
            number += 1
            await ctx.execute(world.insert_effect, f"{account} {number:04} {n}")
        finally:
            running[account] -= 1

    tasks = [app.task(name="post", ordering_key="{account}")(post) for app in apps]

    async def scenario() -> None:
        async with world.running(*apps):
            await apps[0].send_many(tasks[0].call(account, n) for n in range(6) for account in "abcd")
            for step in range(200):
                if step % 5 == 0:
                    # A worker claims messages and dies.
                    await apps[0].store.claim(["default"], types=["post"], limit=2, lease=5, worker=f"dead-{step}")
                await asyncio.gather(*(app.work(until_idle=True) for app in apps))
                counts = (await apps[0].count()).get("default")
                if counts is None or not (counts.scheduled or counts.leased):
                    break
                world.clock.advance(6)
            effects = [name.split() for name in await world.effects(apps[0])]
        for account in "abcd":
            assert [int(n) for key, _, n in effects if key == account] == list(range(6))

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_key_that_waits_does_not_hold_up_others(world: World) -> None:
    app, seen = world.app(), list[str]()

    @app.task(ordering_key="{account}")
    async def post(account: str, n: int) -> None:
        seen.append(f"{account}{n}")
        if account == "stuck":
            raise ValueError("always")

    async def scenario() -> None:
        async with world.running(app):
            await app.send_many(post.call(account, n) for n in range(50) for account in ("stuck", "free"))
            await app.work(until_idle=True)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert seen.count("stuck0") == 1
    assert [one for one in seen if one.startswith("free")] == [f"free{n}" for n in range(50)]
