"""Purging keeps up with new messages, leaves the store free for most of the time, and blocks no other purger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from onefold import App, limits
from onefold.clock import SystemClock, give_way
from onefold.store import Act, Dead, Done, Failure, Purged, Query, State, Store
from onefold.testing import FakeClock
from onefold.worker.purger import keep_purged
from onefold.worker.settings import WorkerSettings

#: A scenario takes a second or two; one that hangs ends here.
SECONDS_MAX = 60
#: More than one batch can take, and not a multiple of it.
_BACKLOG = limits.PURGE_BATCH * 2 + 500
#: Checks of the store before a backlog counts as not purged: far more than batches are needed.
_LOOKS_MAX = 200


def _run(url: str, scenario: Callable[[App, FakeClock], Any]) -> None:
    async def main() -> None:
        clock = FakeClock()
        app = App(url, clock=clock)
        app.task(name="job")(_nothing)
        await app.migrate()
        async with asyncio.timeout(SECONDS_MAX), app:
            await scenario(app, clock)

    asyncio.run(main())


async def _nothing(n: int) -> None:
    """A handler."""


async def _outlived(app: App, clock: FakeClock, number: int) -> None:
    """Let this many messages be done and outlive their keys, without a purge."""
    await app.send_many(app.tasks["job"].call(n) for n in range(number))
    while leases := await app.store.claim(["default"], types=["job"], limit=1_000, lease=30.0, worker="w"):
        await app.store.settle([(lease, Done(b"null")) for lease in leases])
    clock.advance(limits.KEY_WINDOW + limits.MESSAGE_RETENTION)


async def _left(app: App) -> int:
    table = "onefold_message" if "sqlite" in type(app.store).__module__ else "onefold.message"
    count: int = (await app.store.fetch(f"SELECT count(*) FROM {table}"))[0][0]
    return count


async def backlog_is_gone_after_a_minute(app: App, clock: FakeClock) -> None:
    """Check that a worker removes many batches within one minute."""
    await _outlived(app, clock, _BACKLOG)
    began = asyncio.Event()
    working = asyncio.create_task(app.work_as(WorkerSettings("w", ["default"]), begin=lambda _: began.set()))
    await began.wait()
    await give_way()
    clock.advance(limits.PURGE_SECONDS)
    left = await _left(app)
    for _ in range(_LOOKS_MAX):
        if not left:
            break
        await SystemClock().sleep(0.02)
        left = await _left(app)
    app.stop_working()
    await working
    assert left == 0


def test_a_backlog_of_many_batches_is_purged_within_one_minute(store_url: str) -> None:
    """A worker continues to purge while batches are full; its clock shows one minute."""
    _run(store_url, backlog_is_gone_after_a_minute)


def test_a_worker_that_ends_when_idle_purges_more_than_it_settled_and_not_without_bound(store_url: str) -> None:
    """Runs with ``until_idle`` keep the store from growing, and each removes a bounded number."""

    async def scenario(app: App, clock: FakeClock) -> None:
        await _outlived(app, clock, _BACKLOG)
        await app.work(until_idle=True)
        assert await _left(app) == _BACKLOG - 2 * limits.PURGE_BATCH
        await app.send_many(app.tasks["job"].call(n) for n in range(limits.PURGE_BATCH))
        await app.work(until_idle=True)
        assert await _left(app) == limits.PURGE_BATCH

    _run(store_url, scenario)


def test_purgers_at_the_same_time_do_not_wait_for_each_other(postgres_url: str) -> None:
    """While one transaction has purged and not committed, another one skips those rows, at once."""

    async def scenario(app: App, clock: FakeClock) -> None:
        await _outlived(app, clock, 10)
        async with app.store.transaction() as first:
            assert (await first.purge(limit=4)).messages == 4
            async with asyncio.timeout(5), app.store.transaction() as second:
                assert (await second.purge(limit=10)).total == 0
        async with app.store.transaction() as third:
            assert (await third.purge(limit=10)).messages == 6

    _run(postgres_url, scenario)


async def _letter(app: App) -> str:
    """Let a message become a dead letter; return its id."""
    receipt = await app.tasks["job"].send(1)
    (lease,) = await app.store.claim(["default"], types=["job"], limit=1, lease=30.0, worker="w")
    failure = Failure(reason="rejected", error_type="E", error_message="e")
    await app.store.settle([(lease, Dead(failure))])
    return receipt.id


_ACT = Act(actor="ada", reason="try again")


def test_a_letter_is_not_redriven_while_its_body_is_being_removed(postgres_url: str) -> None:
    """A redrive that waited for an uncommitted purge reads the body again, and does not run without arguments."""

    async def scenario(app: App, clock: FakeClock) -> None:
        id_ = await _letter(app)
        clock.advance(limits.DEAD_RETENTION)

        async def redrive() -> list[str]:
            async with app.store.transaction() as transaction:
                return await transaction.move([id_], State.SCHEDULED, _ACT)

        async with app.store.transaction() as purging:
            assert (await purging.purge()).bodies == 1
            redriving = asyncio.create_task(redrive())
            # It waits for the purge, or knows that the body's time is over; half a second shows that it did not go on.
            await asyncio.wait([redriving], timeout=0.5)
        assert await redriving == []
        (record,) = await app.find(Query(ids=(id_,)))
        assert (record.state, record.envelope.payload_inline) == (State.DEAD, None)

    _run(postgres_url, scenario)


def test_a_letter_that_is_being_redriven_keeps_its_body(postgres_url: str) -> None:
    """A purge that meets an uncommitted redrive leaves the body alone and does not wait for it."""

    async def scenario(app: App, clock: FakeClock) -> None:
        id_ = await _letter(app)
        async with app.store.transaction() as redriving:
            assert await redriving.move([id_], State.SCHEDULED, _ACT) == [id_]
            clock.advance(limits.DEAD_RETENTION)
            async with asyncio.timeout(5), app.store.transaction() as purging:
                assert (await purging.purge()).total == 0
        async with app.store.transaction() as purging:
            assert (await purging.purge()).bodies == 0
        (record,) = await app.find(Query(ids=(id_,)))
        assert (record.state, record.envelope.payload_inline) == (State.SCHEDULED, b'{"n":1}')

    _run(postgres_url, scenario)


def test_bodies_go_also_after_the_clock_was_set_back(store_url: str) -> None:
    """The position up to which bodies were removed does not hide messages that end after the clock was set back."""

    async def scenario(app: App, clock: FakeClock) -> None:
        for days in (0, -30):
            clock.jump(days * limits.DAY)
            async with app.store.transaction() as purging:
                assert (await purging.purge()).bodies == 0
            id_ = await _letter(app)
            clock.jump(limits.DEAD_RETENTION)
            async with app.store.transaction() as purging:
                assert (await purging.purge()).bodies == 1
            (record,) = await app.find(Query(ids=(id_,)))
            assert record.envelope.payload_inline is None

    _run(store_url, scenario)


class _SlowStore:
    """A store on which each batch takes a while by the test's clock; all batches but the last are full."""

    def __init__(self, clock: FakeClock, batches: int, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.left = batches

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[_SlowStore]:
        yield self

    async def purge(self) -> Purged:
        self._clock.stall(self._seconds)
        self.left -= 1
        return Purged(keys=limits.PURGE_BATCH if self.left else 0)


def test_purging_takes_a_fixed_share_of_the_time() -> None:
    """The pause after each full batch is so long that batches take a fifth of the time, however slow they are."""

    async def main() -> None:
        clock = FakeClock()
        store = _SlowStore(clock, batches=5, seconds=0.3)
        purging = asyncio.create_task(keep_purged(cast(Store, store), clock))
        await give_way()
        clock.advance(limits.PURGE_SECONDS)
        began, steps = clock.steady(), 0
        while store.left and steps < 1_000:
            await give_way()
            await give_way()
            clock.advance(0.01)
            steps += 1
        seconds = (clock.steady() - began) / 1e6
        purging.cancel()
        assert 5 * 0.3 / seconds == pytest.approx(limits.PURGE_SHARE_MAX, rel=0.25)

    asyncio.run(main())
