"""How often claims walk through gates, and that in between nothing waits that may pass."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from onefold import App, Rate, limits
from onefold.clock import MICROSECONDS, SystemClock
from onefold.store import Done, Lease
from onefold.store.shared import gate_pace
from onefold.store.shared.gate_pace import GatePace, News

MS = MICROSECONDS // 1_000
GATE = News("default", "mail:ada", is_line=False)
KEYS = 600


def test_a_walk_in_vain_makes_the_next_ones_rare_and_a_good_one_does_not() -> None:
    pace = GatePace()
    assert pace.is_walk_due(0)
    assert not pace.is_rare
    pace.walked(0, 10 * MS, taken=2)
    assert not pace.is_rare
    pace.walked(0, 10 * MS, taken=1)
    assert pace.is_rare
    assert not pace.is_walk_due(10 * MS + round(4 * MS / gate_pace.SHARE_MAX))
    assert pace.is_walk_due(10 * MS + round(5 * MS / gate_pace.SHARE_MAX))


def test_too_many_gates_to_remember_bring_a_walk() -> None:
    pace = GatePace()
    pace.walked(0, 10 * MS, taken=0)
    pace.settled([GATE])
    assert pace.take_news(0) == [GATE]
    assert pace.take_news(0) == []
    assert not pace.is_walk_due(11 * MS)
    pace.settled(News("default", f"mail:{n}", is_line=True) for n in range(gate_pace.NEWS_MAX + 1))
    assert pace.is_walk_due(11 * MS)
    assert len(pace.take_news(0)) == gate_pace.NEWS_MAX


def test_a_gate_that_is_settled_during_a_walk_is_looked_at_after_it() -> None:
    """The walk may have passed it just before."""
    pace = GatePace()
    pace.settled([GATE])
    pace.walked(0, 10 * MS, taken=0)
    assert pace.take_news(0) == [GATE]


def test_a_gate_is_looked_at_when_its_token_comes() -> None:
    pace = GatePace()
    for _ in range(2):
        pace.wait_for_token(GATE, 5 * MS)
    assert pace.take_news(5 * MS - 1) == []
    assert pace.take_news(5 * MS) == [GATE]
    assert pace.take_news(9 * MS) == []


def test_each_look_overlaps_the_last_one_and_sometimes_by_much() -> None:
    """A message is dated before its transaction commits."""
    pace = GatePace()
    now = 100 * MICROSECONDS
    pace.looked(now, found=0)
    assert pace.since(0) == now - round(gate_pace.FURTHER_BACK_SECONDS * MICROSECONDS)
    assert pace.since(1) == now - round(gate_pace.BACK_SECONDS * MICROSECONDS)
    later = round(gate_pace.FURTHER_SECONDS * MICROSECONDS)
    assert pace.since(later) == now - round(gate_pace.FURTHER_BACK_SECONDS * MICROSECONDS)


def test_beside_shut_gates_nothing_waits_for_a_walk_that_may_pass(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a walk in vain there is no other one here, so whatever is claimed was found by its news."""
    clock = SystemClock()
    app = App(store_url)

    @app.task(gate="{key}", max_running_each=1)
    async def full(key: str) -> None: ...

    @app.task(ordering_key="{key}")
    async def lined(key: str) -> None: ...

    @app.task(gate="{key}", rate_each=Rate(1, per=0.5))
    async def rated(key: str) -> None: ...

    async def claim(*, thorough: bool = False) -> list[str]:
        held = await app.store.claim(
            ["default"],
            types=list(app.tasks),
            limit=limits.CLAIM_MAX,
            lease=600,
            worker="w",
            gatings=app.registry.gatings,
            thorough=thorough,
        )
        leases.extend(held)
        return [str(lease.gate) for lease in held]

    async def settle(gate: str, *, inside: bool = False) -> None:
        (lease,) = [one for one in leases if one.gate == gate]
        leases.remove(lease)
        if inside:
            # As a handler with SQL of its own does.
            async with app.store.transaction() as transaction:
                await transaction.execute("SELECT 1")
                await transaction.conclude([(lease, Done(b"null"))])
        else:
            assert await app.store.settle([(lease, Done(b"null"))]) == [True]

    async def scenario() -> None:
        await app.migrate()
        async with app:
            await app.send_many([full.call(f"k{n:03}") for n in range(KEYS) for _ in range(2)])
            await app.send_many([lined.call("a"), lined.call("a")])
            first = [gate for _ in range(3) for gate in await claim(thorough=True)]
            assert len(first) == KEYS + 1
            monkeypatch.setattr(gate_pace, "SHARE_MAX", 1e-9)
            for _ in range(2):
                assert await claim() == []
            await full.send("new")
            assert await claim() == ["full:new"]
            await settle("lined:a")
            assert await claim() == ["lined:a"]
            await settle("full:k300")
            assert await claim() == ["full:k300"]
            await settle("full:k500", inside=True)
            assert await claim() == ["full:k500"]
            assert await claim() == []
            await app.send_many([rated.call("b"), rated.call("b")])
            assert await claim() == ["rated:b"]
            begun_at, found = clock.steady(), list[str]()
            while not found and clock.steady() - begun_at < 10 * MICROSECONDS:
                await clock.sleep(0.02)
                found = await claim()
            assert found == ["rated:b"]

    leases: list[Lease] = []
    asyncio.run(scenario())


def test_gates_take_turns_while_walks_are_rare(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message at a time, as a busy worker claims: a key with many messages is not served before the others."""
    app = App(store_url)

    @app.task(gate="{key}", max_running_each=1)
    async def full(key: str) -> None: ...

    @app.task(fair_key="{key}")
    async def fair(key: str) -> None: ...

    async def claim(limit: int, *, thorough: bool = False) -> list[str]:
        held = await app.store.claim(
            ["default"],
            types=list(app.tasks),
            limit=limit,
            lease=600,
            worker="w",
            gatings=app.registry.gatings,
            thorough=thorough,
        )
        return [str(lease.gate) for lease in held]

    async def scenario() -> None:
        await app.migrate()
        async with app:
            await app.send_many([full.call(f"k{n:03}") for n in range(KEYS) for _ in range(2)])
            while await claim(limits.CLAIM_MAX, thorough=True):
                pass
            monkeypatch.setattr(gate_pace, "SHARE_MAX", 1e-9)
            for _ in range(2):
                assert await claim(1) == []
            poor = [fair.call(f"poor{n % 5}") for n in range(20)]
            await app.send_many([*(fair.call("rich") for _ in range(100)), *poor])
            taken = Counter([gate for _ in range(24) for gate in await claim(1)])
            assert taken == {"fair:rich": 4, **{f"fair:poor{n}": 4 for n in range(5)}}

    asyncio.run(scenario())


def test_a_thorough_claim_ends_whatever_the_numbers_of_shut_gates(store_url: str) -> None:
    """In two queues, where a walk has come to the end of one while it is in the middle of the other."""
    app = App(store_url)

    @app.task(queue="few", gate="{key}", max_running_each=1)
    async def few(key: str) -> None: ...

    @app.task(queue="many", gate="{key}", max_running_each=1)
    async def many(key: str) -> None: ...

    async def claim(limit: int = limits.GATES_PER_CLAIM) -> list[Lease]:
        return await app.store.claim(
            ["few", "many"],
            types=list(app.tasks),
            limit=limit,
            lease=600,
            worker="w",
            gatings=app.registry.gatings,
        )

    async def scenario() -> None:
        await app.migrate()
        async with app:
            for task, number in ((few, 300), (many, 500)):
                await app.send_many([task.call(f"k{n:03}") for n in range(number) for _ in range(2)])
            async with asyncio.timeout(60):
                taken: list[Lease] = []
                while more := await claim():
                    taken += more
                assert len(taken) == 800
                # From now on the walks through the two queues come to their ends in turns.
                (lease,) = [one for one in taken if one.gate == "few:k010"]
                await app.store.settle([(lease, Done(b"null"))])
                assert [one.gate for one in await claim(1)] == ["few:k010"]
                assert await claim() == []

    asyncio.run(scenario())
