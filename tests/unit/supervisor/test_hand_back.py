"""The messages of a process that hangs or has died, on real stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from onefold import App, Query, Run, State, limits
from onefold.store import Lane, Lease, Record
from onefold.supervisor.hand_back import Death, hand_back, settle_dead_process
from onefold.supervisor.lease_renewal import renew
from onefold.testing.clock import FakeClock
from onefold.worker.settings import WorkerSettings
from onefold.worker.slots import Slot
from onefold.worker.worker_list import WorkerList, WorkerRecord, describe, workers


def run(store_url: str, scenario: Callable[[App, FakeClock], Awaitable[None]]) -> None:
    async def main() -> None:
        clock = FakeClock()
        app = App(store_url, clock=clock)

        @app.task
        async def work(number: int) -> None:
            pass

        await app.migrate()
        async with app:
            await scenario(app, clock)

    asyncio.run(main())


async def claim(app: App, number: int, worker: str = "dead", lane: Lane = Lane.MAIN) -> list[Lease]:
    await app.send_many(app.tasks["work"].call(one) for one in range(number))
    return await app.store.claim(["default"], types=["work"], limit=number, lease=30, worker=worker, lane=lane)


async def record(app: App, lease: Lease) -> Record:
    return (await app.find(Query(ids=(lease.id,))))[0]


def test_a_blamed_message_counts_a_crash_and_the_others_are_handed_back(store_url: str) -> None:
    """Fault 20: more than one page of messages; those of another worker stay with it."""

    async def scenario(app: App, clock: FakeClock) -> None:
        leases = await claim(app, 450)
        other = (await claim(app, 1, worker="alive"))[0]
        guilty = leases[3]
        death = Death("dead", {(guilty.id, guilty.fence): "it died"}, "the stack")
        assert await settle_dead_process(app.store, death, lambda _: limits.KEY_WINDOW) == 1
        states = {(one.state, one.crashes) for one in await app.find(Query(limit=1_000))}
        assert states == {(State.SCHEDULED, 0), (State.SCHEDULED, 1), (State.LEASED, 0)}
        assert (await record(app, guilty)).crashes == 1
        assert (await record(app, other)).worker == "alive"
        (attempt,) = await app.store.attempts(guilty.id)
        assert (attempt.failure.reason, attempt.failure.error_message) == ("crash", "it died")
        assert (attempt.failure.stack, attempt.worker) == ("the stack", "dead")

    run(store_url, scenario)


def test_a_saga_is_left_to_be_undone_however_often_its_worker_dies(store_url: str) -> None:
    """The next claim shows the number of crashes, and undoes the saga."""

    async def scenario(app: App, clock: FakeClock) -> None:
        @app.saga
        async def book(run: Run) -> None: ...

        await book.send()
        for _ in range(4):
            (lease,) = await app.store.claim(["default"], types=["book@1"], limit=1, lease=30, worker="dead")
            death = Death("dead", {(lease.id, lease.fence): "it died"})
            assert await settle_dead_process(app.store, death, lambda _: 3_600.0) == 1
        assert (await record(app, lease)).crashes == 4
        await app.work(until_idle=True)
        (letter,) = [one async for one in app.dead_letters()]
        assert letter.failure.reason == "quarantined"

    run(store_url, scenario)


def test_the_third_crash_is_the_last_and_the_key_is_kept_as_long_as_the_task_says(store_url: str) -> None:
    async def scenario(app: App, clock: FakeClock) -> None:
        await app.tasks["work"].send(1)
        for lane in (Lane.MAIN, Lane.PROBATION, Lane.PROBATION):
            (lease,) = await app.store.claim(["default"], types=["work"], limit=1, lease=30, worker="dead", lane=lane)
            death = Death("dead", {(lease.id, lease.fence): f"crash {lease.crashes + 1}"})
            assert await settle_dead_process(app.store, death, lambda _: 3_600.0) == 1
        (letter,) = [one async for one in app.dead_letters()]
        assert (letter.failure.reason, letter.crashes) == ("quarantined", 3)
        assert [one.failure.error_message[:7] for one in await letter.attempts()] == ["crash 1", "crash 2", "crash 3"]
        found = await record(app, lease)
        assert found.kept_until == clock.now() + 3_600_000_000
        assert found.attempt == 0

    run(store_url, scenario)


def test_a_message_that_was_settled_in_the_last_moment_stays_settled(store_url: str) -> None:
    """The shared memory may be a moment behind the store; the fence decides."""

    async def scenario(app: App, clock: FakeClock) -> None:
        (lease,) = await claim(app, 1)
        guilty = {(lease.id, lease.fence): "it died"}
        assert await app.cancel(lease.id, actor="test", reason="in its last moment")
        assert await settle_dead_process(app.store, Death("dead", guilty), lambda _: limits.KEY_WINDOW) == 0
        assert (await record(app, lease)).state is State.CANCELLED

    run(store_url, scenario)


def test_everything_of_a_hanging_process_is_kept_and_what_it_had_only_fetched_is_handed_back(store_url: str) -> None:
    """C13: started messages stay with it for as long as the supervisor renews them."""

    async def scenario(app: App, clock: FakeClock) -> None:
        begun, fetched = await claim(app, 2, worker="hanging")
        slots = [Slot(begun.id, begun.fence, 0, 0, finished=False)]
        clock.advance(20)
        await renew(app.store, "hanging", slots, lease=30)
        clock.advance(20)
        assert await app.store.extend([begun, fetched], lease=30) == [True, True]
        assert await hand_back(app.store, "hanging", slots) == 1
        assert (await record(app, begun)).state is State.LEASED
        assert ((await record(app, fetched)).state, (await record(app, fetched)).crashes) == (State.SCHEDULED, 0)

    run(store_url, scenario)


def test_workers_are_listed_while_they_are_reported(store_url: str) -> None:
    async def scenario(app: App, clock: FakeClock) -> None:
        roll = WorkerList(app.store, clock)

        def known(name: str) -> WorkerRecord:
            return describe(WorkerSettings(name, ["default"]), 0, clock.now(), running=1, settled=2)

        async def names() -> list[str]:
            return [one.name for one in await workers(app.store)]

        await roll.enter([known("ada"), known("grace")])
        assert await names() == ["ada", "grace"]
        for _ in range(3):
            clock.advance(limits.WORKER_ENTRY_SECONDS - 1)
            await roll.enter([known("ada")])
        assert await names() == ["ada"]
        # Its entry has expired meanwhile, and is written again.
        clock.advance(limits.WORKER_ENTRY_SECONDS + 1)
        for _ in range(2):
            await roll.enter([known("ada")])
        assert await names() == ["ada"]
        await roll.strike("ada")
        await roll.strike("unknown")
        assert await names() == []

    run(store_url, scenario)


def test_a_worker_that_stops_while_it_is_being_entered_is_struck_off_all_the_same(store_url: str) -> None:
    async def scenario(app: App, clock: FakeClock) -> None:
        entering = WorkerList(app.store, clock)
        record = describe(WorkerSettings("ada", ["default"]), 0, clock.now(), running=0, settled=0)
        await entering.enter([record])
        # As if no caller had waited for the answer.
        stopped = WorkerList(app.store, clock)
        await stopped.strike("ada")
        assert await workers(app.store) == []

    run(store_url, scenario)


def test_an_embedded_worker_is_listed_and_gone_when_it_has_stopped(store_url: str) -> None:
    async def scenario(app: App, clock: FakeClock) -> None:
        started = asyncio.Event()
        app.middleware(lambda ctx, proceed: _noting(started, proceed))
        await app.tasks["work"].send(1)
        working = asyncio.create_task(app.work(name="embedded"))
        await started.wait()
        while not (listed := await workers(app.store)):
            pass
        assert [(one.name, one.lane, one.parent) for one in listed] == [("embedded", "any", None)]
        app.stop_working()
        await working
        assert await workers(app.store) == []

    run(store_url, scenario)


async def _noting(started: asyncio.Event, proceed: Callable[[], Awaitable[object]]) -> object:
    started.set()
    return await proceed()
