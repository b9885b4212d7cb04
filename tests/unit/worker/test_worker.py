"""The worker: stopping, losing leases, suspects and quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from onefold import App, ConfigurationError, Context, Query, State, limits
from onefold.handlers.lease import Held
from onefold.store import Counts, Lease
from onefold.testing.clock import FakeClock
from onefold.worker.runners import Runners
from onefold.worker.settings import WorkerSettings
from onefold.worker.worker import Worker

Scenario = Callable[[App, FakeClock], Awaitable[None]]


def run(store_url: str, declare: Callable[[App], None], scenario: Scenario) -> None:
    async def main() -> None:
        clock = FakeClock()
        app = App(store_url, clock=clock)
        declare(app)
        await app.migrate()
        async with app:
            async with app.transaction() as tx:
                await tx.execute("CREATE TABLE effect (number BIGINT)")
            await scenario(app, clock)

    asyncio.run(main())


async def steal(app: App, clock: FakeClock, seconds: float = 31) -> list[Lease]:
    """Claim as another worker would, once the leases of the first have run out."""
    clock.stall(seconds)
    return await app.store.claim(["default"], types=list(app.tasks), limit=10, lease=30, worker="thief")


async def effects(app: App) -> list[int]:
    return sorted(row[0] for row in await app.store.fetch("SELECT number FROM effect"))


def test_a_graceful_stop_finishes_what_runs_and_hands_back_the_rest(store_url: str) -> None:
    """C30: nothing waits for a lease to run out after a graceful stop."""
    started, release = asyncio.Event(), asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def slow(number: int) -> None:
            started.set()
            await release.wait()

    async def scenario(app: App, clock: FakeClock) -> None:
        slow = app.tasks["slow"]
        receipts = await app.send_many(slow.call(number) for number in range(5))
        working = asyncio.create_task(app.work(concurrency=1))
        await started.wait()
        app.stop_working()
        release.set()
        assert await working == 1
        states = [r.state for r in await app.find(Query(ids=tuple(r.id for r in receipts)))]
        assert states.count(State.DONE) == 1
        assert states.count(State.SCHEDULED) == 4

    run(store_url, declare, scenario)


def test_a_stop_that_takes_too_long_hands_back_what_still_runs(store_url: str) -> None:
    started = asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def endless() -> None:
            started.set()
            await asyncio.Event().wait()

    async def scenario(app: App, clock: FakeClock) -> None:
        receipt = await app.tasks["endless"].send()
        working = asyncio.create_task(app.work(stop_after=0.01))
        await started.wait()
        app.stop_working()
        await working
        record = (await app.find(Query(ids=(receipt.id,))))[0]
        assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 0, 0)

    run(store_url, declare, scenario)


def test_a_stop_does_not_wait_for_a_handler_that_swallows_its_cancellation(
    store_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker ends, another one takes the message without a crash counted, and the old handler cannot commit."""
    monkeypatch.setattr(limits, "HARD_TIMEOUT_GRACE", 0.05)
    started, release = asyncio.Event(), asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def stubborn(ctx: Context) -> None:
            started.set()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            await ctx.execute("INSERT INTO effect (number) VALUES (1)")

    async def scenario(app: App, clock: FakeClock) -> None:
        receipt = await app.tasks["stubborn"].send()
        working = asyncio.create_task(app.work(stop_after=0.01))
        await started.wait()
        app.stop_working()
        async with asyncio.timeout(30):
            assert await working == 0
        record = (await app.find(Query(ids=(receipt.id,))))[0]
        assert (record.state, record.attempt, record.crashes) == (State.SCHEDULED, 0, 0)
        assert f"handler_ignores_cancellation message_id={receipt.id} type=stubborn" in caplog.text
        abandoned = [task for task in asyncio.all_tasks() if task.get_name() == "onefold-runner"]
        release.set()
        await asyncio.wait(abandoned, timeout=30)
        assert (len(abandoned), await effects(app)) == (1, [])

    run(store_url, declare, scenario)


def test_losing_the_lease_cancels_the_handler_and_nothing_of_it_stays(store_url: str) -> None:
    """C14: the renewer notices the takeover, the handler is cancelled, and the worker continues."""
    started, cancelled = asyncio.Event(), asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def waits(ctx: Context, number: int) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def scenario(app: App, clock: FakeClock) -> None:
        receipt = await app.tasks["waits"].send(1)
        working = asyncio.create_task(app.work())
        await started.wait()
        # Raising the fence by hand is what another worker's claim does.
        assert await app.cancel(receipt.id, actor="test", reason="taken over")
        while not cancelled.is_set():
            clock.advance(5)
            await asyncio.wait_for(_turns(), 5)
        app.stop_working()
        await working

    run(store_url, declare, scenario)


def test_a_worker_that_claims_its_own_message_again_ends_the_older_run(store_url: str) -> None:
    """After a restore, or a redrive by hand: the older run can no longer commit, so it is cancelled."""
    started, cancelled = asyncio.Semaphore(0), asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def waits() -> None:
            started.release()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def scenario(app: App, clock: FakeClock) -> None:
        receipt = await app.tasks["waits"].send()
        working = asyncio.create_task(app.work(stop_after=0.01))
        await started.acquire()
        assert await app.store.restored() == 1
        await asyncio.wait_for(cancelled.wait(), 10)
        app.stop_working()
        await working
        record = (await app.find(Query(ids=(receipt.id,))))[0]
        assert (record.state, record.crashes, record.attempt) == (State.SCHEDULED, 0, 0)

    run(store_url, declare, scenario)


async def _turns() -> None:
    """Let the event loop and the store's threads run for a moment."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.005, done.set)
    await done.wait()


def test_a_handler_whose_message_was_taken_over_cannot_commit(store_url: str) -> None:
    """C14: two runs may overlap, two commits cannot."""
    taken: list[Lease] = []

    def declare(app: App) -> None:
        @app.task
        async def effect(ctx: Context, number: int) -> None:
            if ctx.message.id not in {lease.id for lease in taken}:
                taken.extend(await steal(app, clock_of(app)))
            await ctx.execute(f"INSERT INTO effect VALUES ({number})")

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.tasks["effect"].send(1)
        await app.work(until_idle=True)
        assert len(taken) == 1
        assert await effects(app) == []
        clock.advance(31)
        await app.work(until_idle=True)
        assert await effects(app) == [1]

    run(store_url, declare, scenario)


def clock_of(app: App) -> FakeClock:
    clock = app.clock
    assert isinstance(clock, FakeClock)
    return clock


def test_a_message_that_keeps_killing_its_worker_is_quarantined_and_its_neighbours_are_not(store_url: str) -> None:
    """C17: crashes are counted apart from failures, and only for messages that had started."""
    ran: list[int] = []

    def declare(app: App) -> None:
        @app.task
        async def innocent(number: int) -> None:
            ran.append(number)

        @app.task
        async def killer() -> None:
            raise AssertionError("it would kill the worker, so it never gets here")

    async def scenario(app: App, clock: FakeClock) -> None:
        killer = await app.tasks["killer"].send()
        await app.send_many(app.tasks["innocent"].call(number) for number in range(5))
        for _ in range(2):
            # A worker claims all of them and dies: all of them become suspects.
            assert len(await steal(app, clock)) == 6
        for _ in range(2):
            # From now on a worker marks a message as started; it starts the killer, and dies.
            leases = await steal(app, clock)
            mine = [lease for lease in leases if lease.id == killer.id]
            assert await app.store.extend(mine, lease=30, starting=True) == [True]
        clock.advance(31)
        await app.work(until_idle=True)
        assert sorted(ran) == list(range(5))
        letters = [letter async for letter in app.dead_letters()]
        assert [letter.id for letter in letters] == [killer.id]
        assert (letters[0].failure.reason, letters[0].crashes) == ("quarantined", 4)

    run(store_url, declare, scenario)


def test_a_suspect_runs_alone(store_url: str) -> None:
    running: set[int] = set()
    alone: list[bool] = []

    def declare(app: App) -> None:
        @app.task
        async def work(number: int) -> None:
            running.add(number)
            await _turns()
            if number == 0:
                alone.append(running == {0})
            running.discard(number)

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.tasks["work"].send(0)
        for _ in range(2):
            assert len(await steal(app, clock)) == 1
        await app.send_many(app.tasks["work"].call(number) for number in range(1, 8))
        clock.advance(31)
        await app.work(until_idle=True)
        assert alone == [True]

    run(store_url, declare, scenario)


def test_claims_never_exceed_the_free_places_of_slow_handlers(store_url: str) -> None:
    """A worker holds no messages that cannot start, which another worker could run."""
    started, release = asyncio.Semaphore(0), asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def slow(number: int) -> None:
            started.release()
            await release.wait()

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.send_many(app.tasks["slow"].call(number) for number in range(50))
        working = asyncio.create_task(app.work(concurrency=4))
        for _ in range(4):
            await started.acquire()
        counts = (await app.count())["default"]
        assert (counts.leased, counts.scheduled) == (4, 46)
        release.set()
        app.stop_working()
        await working

    run(store_url, declare, scenario)


def test_more_run_at_once_than_one_claim_brings(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S13: places are filled by several claims, while the messages of the first ones run."""
    monkeypatch.setattr(limits, "CLAIM_MAX", 3)
    started, release = asyncio.Semaphore(0), asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def slow(number: int) -> None:
            started.release()
            await release.wait()

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.send_many(app.tasks["slow"].call(number) for number in range(12))
        working = asyncio.create_task(app.work(concurrency=10))
        for _ in range(10):
            await asyncio.wait_for(started.acquire(), 10)
        release.set()
        app.stop_working()
        await working

    run(store_url, declare, scenario)


def test_a_worker_is_made_of_named_tasks_only(sqlite_url: str) -> None:
    """A leaked task is known by its name; no task of a worker is left after it stopped."""

    def declare(app: App) -> None:
        @app.task
        async def nothing() -> None:
            pass

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.work(until_idle=True)
        left = [task for task in asyncio.all_tasks() if task.get_name().startswith("onefold")]
        assert left == []

    run(sqlite_url, declare, scenario)
    assert Worker.__doc__


def test_a_stop_while_a_claim_is_under_way_leaves_nothing_leased(store_url: str) -> None:
    """C30: the store commits the claim even if its caller was cancelled."""

    def declare(app: App) -> None:
        @app.task
        async def ship(number: int) -> None:
            pass

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.send_many(app.tasks["ship"].call(number) for number in range(10))
        claim = app.store.claim

        async def stop_before_the_answer_comes(*args: Any, **kwargs: Any) -> list[Lease]:
            leases = await claim(*args, **kwargs)
            app.stop_working()
            await _turns()
            return leases

        app.store.claim = stop_before_the_answer_comes  # type: ignore[method-assign]
        await app.work()
        assert (await app.count()).get("default", Counts()).leased == 0

    run(store_url, declare, scenario)


@pytest.mark.parametrize("outcome", ["waits", "ends at its cancellation"])
def test_a_cancelled_worker_hands_back_its_messages(store_url: str, outcome: str) -> None:
    """C30: after Ctrl-C in ``asyncio.run``, or ``task.cancel()``, no message waits for its lease to run out."""
    started = asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def slow(number: int) -> int:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if outcome == "waits":
                    raise
            return number

    async def scenario(app: App, clock: FakeClock) -> None:
        slow = app.tasks["slow"]
        await app.send_many(slow.call(number) for number in range(5))
        working = asyncio.create_task(app.work(concurrency=2))
        await started.wait()
        await _turns()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        counts = (await app.count())["default"]
        assert (counts.leased, counts.scheduled) == (0, 5)

    run(store_url, declare, scenario)


def test_a_stop_hands_back_a_running_suspect_without_blaming_it(store_url: str) -> None:
    started = asyncio.Event()

    def declare(app: App) -> None:
        @app.task
        async def endless() -> None:
            started.set()
            await asyncio.Event().wait()

    async def scenario(app: App, clock: FakeClock) -> None:
        receipt = await app.tasks["endless"].send()
        for _ in range(2):
            assert len(await steal(app, clock)) == 1
        clock.advance(31)
        working = asyncio.create_task(app.work(stop_after=0.01))
        await started.wait()
        app.stop_working()
        await working
        record = (await app.find(Query(ids=(receipt.id,))))[0]
        assert (record.state, record.crashes) == (State.SCHEDULED, 2)

    run(store_url, declare, scenario)


def test_a_handler_cannot_send_a_task_of_another_app(sqlite_url: str) -> None:
    """Its message would be stored where no worker knows the task."""
    refused: list[str] = []
    other = App("sqlite:///:memory:")

    @other.task
    async def foreign() -> None:
        pass

    def declare(app: App) -> None:
        @app.task
        async def sends(ctx: Context) -> None:
            try:
                await foreign.send()
            except ConfigurationError as error:
                refused.append(str(error))

    async def scenario(app: App, clock: FakeClock) -> None:
        async with other:
            await app.tasks["sends"].send()
            await app.work(until_idle=True)
            assert len(refused) == 1
            assert await other.count() == {}

    run(sqlite_url, declare, scenario)


def test_a_message_that_expired_keeps_its_key_for_the_tasks_own_window(store_url: str) -> None:
    """An expired message is a dead letter, and no run of it is counted."""

    def declare(app: App) -> None:
        @app.task(key="{number}", expires=3600, key_window=timedelta(days=90))
        async def ship(number: int) -> None:
            pass

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.tasks["ship"].send(1)
        clock.advance(7200)
        await app.work(until_idle=True)
        letters = [letter async for letter in app.dead_letters()]
        assert [letter.failure.reason for letter in letters] == ["expired"]
        assert (await letters[0].as_dict())["retry_count"] == 0
        clock.advance(timedelta(days=60))
        assert (await app.tasks["ship"].send(1)).duplicate

    run(store_url, declare, scenario)


def test_a_busy_queue_does_not_starve_another(store_url: str) -> None:
    order: list[str] = []

    def declare(app: App) -> None:
        @app.task(queue="a")
        async def busy(number: int) -> None:
            order.append("busy")

        @app.task(queue="b")
        async def quiet() -> None:
            order.append("quiet")

    async def scenario(app: App, clock: FakeClock) -> None:
        await app.send_many(app.tasks["busy"].call(number) for number in range(200))
        await app.tasks["quiet"].send()
        await app.work(until_idle=True, concurrency=1)
        assert order.index("quiet") < 20

    run(store_url, declare, scenario)


def test_a_worker_is_not_idle_while_what_it_settles_may_bring_more(store_url: str) -> None:
    """A claim may have found nothing just before a handler's messages left with its outcome."""
    ran: list[str] = []

    def declare(app: App) -> None:
        @app.task
        async def parent(ctx: Context) -> None:
            ctx.send(app.tasks["child"])

        @app.task
        async def child() -> None:
            ran.append("child")

    async def scenario(app: App, clock: FakeClock) -> None:
        settle, claim = app.store.settle, app.store.claim
        asked, settled = asyncio.Event(), asyncio.Event()

        async def answer_late(*args: Any, **kwargs: Any) -> list[Lease]:
            leases = await claim(*args, **kwargs)
            if not leases:
                asked.set()
                await settled.wait()
            return leases

        async def settle_after_the_question(*args: Any, **kwargs: Any) -> list[bool]:
            await asked.wait()
            won = await settle(*args, **kwargs)
            asyncio.get_running_loop().call_later(0.01, settled.set)
            return won

        app.store.claim = answer_late  # type: ignore[method-assign]
        app.store.settle = settle_after_the_question  # type: ignore[method-assign]
        await app.tasks["parent"].send()
        await app.work(until_idle=True)
        assert ran == ["child"]

    run(store_url, declare, scenario)


def test_a_message_that_arrives_as_a_runner_ends_is_run(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that found the supply empty counts as running until its callback has run."""
    ran: list[object] = []

    async def note(_: Runners, held: object, runner: object) -> None:
        ran.append(held)

    monkeypatch.setattr(Runners, "_run_one", note)

    def declare(app: App) -> None:
        @app.task
        async def quick(number: int) -> None: ...

    async def scenario(app: App, clock: FakeClock) -> None:
        app.stop_working()
        first, second = [
            Held(Lease(app.tasks["quick"].call(number).envelope("x"), 2, 1, 0, 0, 0, "w"), 10**18) for number in (1, 2)
        ]

        def look(worker: Worker) -> None:
            runners = worker._runners

            async def arrive() -> None:
                runners.supply.append(second)
                runners.call()

            runners.supply.append(first)
            runners.call()
            later = asyncio.create_task(arrive())
            later.add_done_callback(lambda _: None)

        settings = WorkerSettings(
            "w", ["default"], concurrency=1, lease_seconds=30.0, stop_seconds=1.0, until_idle=True
        )
        await asyncio.wait_for(app.work_as(settings, begin=look), 10)
        assert ran == [first, second]

    run(sqlite_url, declare, scenario)
