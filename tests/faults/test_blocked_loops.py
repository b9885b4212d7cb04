"""An embedded worker whose handler blocks the event loop keeps its leases, which a thread renews meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from onefold import App
from onefold.clock import MICROSECONDS, SystemClock
from onefold.errors import StoreUnavailableError
from onefold.handlers.lease import Held
from onefold.store import Lease, Query, State, Store
from onefold.testing import FakeClock
from onefold.worker.thread_renewer import ThreadRenewer

#: The shortest possible lease, and a handler that blocks for longer than a takeover takes on any store.
LEASE_SECONDS = 1.0
BLOCK_SECONDS = 4.0
SECONDS_MAX = 30.0


class Rivals:
    """Two embedded workers on one database, each on its own event loop, with handlers that block it."""

    def __init__(self, url: str, block: Callable[[float], object]) -> None:
        self.url = url
        self.runs: list[str] = []
        self.began = threading.Event()
        self._block = block

    def app(self, name: str) -> App:
        app = App(self.url)

        @app.task(name="block")
        async def block() -> None:
            self.runs.append(name)
            self.began.set()
            self._block(BLOCK_SECONDS)

        return app

    async def compete(self) -> Any:
        """Let the second worker run while the handler of the first blocks; return the message's record."""
        first, second = self.app("first"), self.app("second")
        await first.migrate()
        loops: list[asyncio.AbstractEventLoop] = []

        async def work_too() -> None:
            loops.append(asyncio.get_running_loop())
            async with second:
                await second.work(lease=LEASE_SECONDS)

        async with asyncio.timeout(SECONDS_MAX), first:
            receipt = await first.tasks["block"].send()
            rival = threading.Thread(target=lambda: self.began.wait(SECONDS_MAX) and asyncio.run(work_too()))
            rival.start()
            working = asyncio.create_task(first.work(lease=LEASE_SECONDS))
            try:
                while not (await first.find(Query(ids=(receipt.id,))))[0].state.ended:
                    await SystemClock().sleep(0.05)
            finally:
                first.stop_working()
                loops[0].call_soon_threadsafe(second.stop_working)
                await working
                await asyncio.to_thread(rival.join)
            return (await first.find(Query(ids=(receipt.id,))))[0]


def runs_once(url: str, block: Callable[[float], object]) -> None:
    """Check that no other worker runs the message of the blocked one."""
    rivals = Rivals(url, block)
    record = asyncio.run(rivals.compete())
    assert rivals.runs == ["first"]
    assert record.state is State.DONE


def test_a_handler_that_blocks_its_loop_for_four_leases_runs_once(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a lease of one second a handler sleeps for four without yielding, beside an idle worker."""
    runs_once(store_url, time.sleep)
    assert not [one for one in caplog.records if "lease_lost" in one.getMessage()]


def test_what_a_blocked_worker_has_only_fetched_is_run_by_others(store_url: str) -> None:
    """After a lease without progress of the event loop its fetched messages are handed back, not counted as crashes."""
    block = threading.Event()

    def make() -> App:
        app = App(store_url)

        @app.task(name="block")
        async def block_all(n: int) -> None:
            if n == 0:
                began.set()
                block.wait(SECONDS_MAX)
            else:
                ran.add(n)

        return app

    began, ran = threading.Event(), set[int]()
    first, second = make(), make()

    async def hang() -> None:
        async with first:
            await first.work(lease=LEASE_SECONDS, until_idle=True)

    async def main() -> None:
        await second.migrate()
        async with asyncio.timeout(SECONDS_MAX), second:
            await second.send_many(second.tasks["block"].call(n) for n in range(10))
            hanging = threading.Thread(target=lambda: asyncio.run(hang()))
            hanging.start()
            try:
                await asyncio.to_thread(began.wait, SECONDS_MAX)
                while len(ran) < 9:
                    await second.work(lease=LEASE_SECONDS, until_idle=True)
                    await SystemClock().sleep(0.05)
                records = await second.find(Query())
                assert [one.crashes for one in records] == [0] * 10
            finally:
                block.set()
                await asyncio.to_thread(hanging.join)
            records = await second.find(Query())
            assert {one.state for one in records} == {State.DONE}

    asyncio.run(main())


@pytest.mark.deep
def test_a_handler_that_computes_for_four_leases_runs_once(store_url: str) -> None:
    """The same with a handler that computes in Python: threads share the interpreter, so the renewing thread runs."""
    runs_once(store_url, _compute)


def _compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1_000))


class _Twin:
    """A store in the renewing thread; ``trouble`` is called before each of its calls."""

    def __init__(self, trouble: Callable[[str], object]) -> None:
        self._trouble = trouble
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.hang = False
        self.hanging = threading.Event()

    def twin(self) -> _Twin:
        return self

    async def _call(self, verb: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(verb)
        self._trouble(verb)

    async def open(self) -> None:
        await self._call("open")

    async def close(self) -> None:
        await self._call("close")

    async def extend(self, leases: list[Lease], *, lease: float) -> list[bool]:
        await self._call("extend")
        if self.hang:
            self.hanging.set()
            await asyncio.Event().wait()
        return [one.id != "lost" for one in leases]


@asynccontextmanager
async def _guarded(twin: _Twin, *ids: str) -> AsyncIterator[dict[str, Held]]:
    """Hold leases that only the renewing thread renews."""
    clock = SystemClock()
    until = clock.steady() + round(LEASE_SECONDS * MICROSECONDS)
    held = {id_: Held(cast(Lease, _Named(id_)), until) for id_ in ids}
    guard = ThreadRenewer(cast(Store, twin), clock, held, LEASE_SECONDS)
    guard.start()
    try:
        yield held
    finally:
        began = time.monotonic()
        await guard.stop()
        assert time.monotonic() - began < 2.0
        assert not [one for one in threading.enumerate() if one.name == "onefold-guard"]


class _Named:
    def __init__(self, id_: str) -> None:
        self.id = id_
        self.fence = 2


async def _renewed(held: Held) -> None:
    """Wait until a lease was extended."""
    until = held.until
    async with asyncio.timeout(SECONDS_MAX):
        while held.until == until:
            await SystemClock().sleep(0.01)


def test_a_late_lease_is_renewed_through_a_store_of_the_thread() -> None:
    """A lost lease is not extended, and the event loop is not told: it finds out by its own renewal."""

    async def main() -> None:
        twin = _Twin(lambda _: None)
        async with _guarded(twin, "kept", "lost") as held:
            lost = held["lost"].until
            await _renewed(held["kept"])
        assert (held["lost"].until, held["lost"].lost) == (lost, False)
        assert (twin.calls[:2], twin.calls[-1]) == (["open", "extend"], "close")
        assert twin.threads == {"onefold-guard"}

    asyncio.run(main())


def test_a_lease_that_the_event_loop_renews_needs_no_second_store() -> None:
    """The thread opens no store while the event loop renews in time."""

    async def main() -> None:
        twin = _Twin(lambda _: None)
        async with _guarded(twin, "kept") as held:
            for _ in range(6):
                await SystemClock().sleep(LEASE_SECONDS / 6)
                held["kept"].until = SystemClock().steady() + round(LEASE_SECONDS * MICROSECONDS)
        assert twin.calls == []

    asyncio.run(main())


def test_a_store_that_the_thread_cannot_reach_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an unreachable store nor one that fails later ends the thread; each failure is logged."""
    failures = iter(["open", "extend"])
    failing = [next(failures)]

    def trouble(verb: str) -> None:
        if failing and verb == failing[0]:
            failing[:] = [*failures][:1]
            raise StoreUnavailableError(f"no {verb}")

    async def main() -> None:
        twin = _Twin(trouble)
        async with _guarded(twin, "kept") as held:
            await _renewed(held["kept"])
        assert twin.calls.count("open") == 3

    with caplog.at_level(logging.WARNING, "onefold"):
        asyncio.run(main())
    said = [one.getMessage() for one in caplog.records if "doing=guard" in one.getMessage()]
    assert [("no open" in one, "no extend" in one) for one in said] == [(True, False), (False, True)]


def test_a_stop_does_not_wait_for_a_renewal_under_way() -> None:
    """A renewal that gets no answer is cancelled and its store is closed."""

    async def main() -> None:
        twin = _Twin(lambda _: None)
        twin.hang = True
        async with _guarded(twin, "kept"):
            await asyncio.to_thread(twin.hanging.wait, SECONDS_MAX)
        assert twin.calls[-1] == "close"

    asyncio.run(main())


def test_a_guard_without_a_second_store_or_real_time_starts_nothing(sqlite_url: str) -> None:
    """Databases in memory, simulations and tests with a fake clock are renewed by the event loop alone."""

    async def main() -> None:
        for app in (App("sqlite:///:memory:"), App(sqlite_url, clock=FakeClock())):
            async with app:
                assert app.store.twin() is None
                guard = ThreadRenewer(app.store, SystemClock(), {}, LEASE_SECONDS)
                guard.start()
                assert not [one for one in threading.enumerate() if one.name == "onefold-guard"]
                await guard.stop()

    asyncio.run(main())
