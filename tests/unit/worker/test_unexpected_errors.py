"""Unexpected errors of a store are logged with their traceback, tried again, and end no worker at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from onefold import Batch, StoreError, StoreUnavailableError, limits
from onefold.clock import give_way
from onefold.testing import FakeClock
from onefold.worker import claimer
from onefold.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


class OddError(Exception):
    """Nothing that a store raises."""


def _events(caplog: pytest.LogCaptureFixture, event: str) -> list[tuple[str, bool]]:
    """Return the level of each line with this event, and whether it has a traceback."""
    found = [record for record in caplog.records if vars(record)["event"] == event]
    return [(record.levelname, bool(record.exc_text)) for record in found]


def _failing(times: int, error: Exception, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    left = iter(range(times))

    async def fail_first(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is not None:
            raise error
        return await call(*args, **kwargs)

    return fail_first


async def _pass(clock: FakeClock, seconds: float) -> None:
    clock.advance(seconds)
    for _ in range(10):
        await give_way()


def test_upkeep_goes_on_after_any_error_and_pauses_longer(caplog: pytest.LogCaptureFixture) -> None:
    """The traceback of the same error is logged once; after a success the pause is as before."""
    errors: list[Exception | None] = [OddError("secret"), OddError(), KeyError(), None, OddError(), None]
    done: list[float] = []
    clock = FakeClock()

    async def work() -> None:
        done.append(clock.steady() / 1e6)
        if error := errors[len(done) - 1]:
            raise error

    async def main() -> None:
        running = asyncio.create_task(Upkeep(clock, "purge", 60.0, work).run())
        for _ in range(1 + 60 + 120 + 240 + 480 + 60 + 120):
            await _pass(clock, 1.0)
        assert not running.done()
        running.cancel()

    asyncio.run(main())
    assert [later - earlier for earlier, later in pairwise(done)] == [120, 240, 480, 60, 120]
    assert _events(caplog, "upkeep_failed") == [
        ("ERROR", True),
        ("WARNING", False),
        ("ERROR", True),
        ("ERROR", True),
    ]
    assert "secret" not in caplog.text
    assert "test_unexpected_errors.py" in caplog.text


def test_upkeep_pauses_no_longer_than_a_quarter_of_an_hour() -> None:
    done: list[float] = []
    clock = FakeClock()

    async def work() -> None:
        done.append(clock.steady() / 1e6)
        raise OddError

    async def main() -> None:
        running = asyncio.create_task(Upkeep(clock, "purge", 60.0, work).run())
        for _ in range(4_000):
            await _pass(clock, 1.0)
        running.cancel()

    asyncio.run(main())
    assert done[-1] - done[-2] == 900


@pytest.mark.parametrize("doing", ["purge", "expire", "register"])
def test_a_worker_survives_errors_of_its_upkeep(
    sqlite_bench: Bench, doing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages are handled before and after it, and it is tried again."""
    bench = sqlite_bench
    tried = asyncio.Event()
    calls: list[str] = []

    async def fail(*_: object) -> None:
        calls.append(doing)
        tried.set()
        raise OddError

    where = {
        "purge": "onefold.worker.purger._purge_all",
        "expire": "onefold.worker.expirer.Expirer.look",
        "register": "onefold.worker.worker_list.WorkerList.enter",
    }
    monkeypatch.setattr(where[doing], fail)

    @bench.app.task
    async def ping() -> str:
        return "pong"

    async def scenario() -> None:
        working = asyncio.create_task(bench.app.work())
        for _ in range(2):
            sent = await ping.send()
            assert await sent.result() == "pong"
            tried.clear()
            while not tried.is_set() and not working.done():
                bench.clock.advance(limits.PURGE_SECONDS)
                await asyncio.wait([working], timeout=0.01)
        assert not working.done()
        bench.app.stop_working()
        await working

    bench.run(scenario)
    assert len(calls) >= 2
    assert _events(caplog, "upkeep_failed")[:2] == [("ERROR", True), ("WARNING", False)]


def test_a_worker_that_ends_when_idle_survives_a_purge_that_fails(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise OddError

    monkeypatch.setattr("onefold.worker.purger._purge_batch", fail)

    async def scenario() -> None:
        assert await sqlite_bench.work() == 0

    sqlite_bench.run(scenario)
    assert _events(caplog, "upkeep_failed") == [("ERROR", True)]


def test_a_claim_that_fails_unexpectedly_is_tried_again(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as it is allowed to fail in a row, also with a store that is away in between."""
    bench = sqlite_bench
    most = claimer._FAILURES_MAX - 1

    @bench.app.task
    async def ping() -> str:
        return "pong"

    async def scenario() -> None:
        sent, store = await ping.send(), bench.app.store
        claim = _failing(most, OddError("secret"), store.claim)
        claim = _failing(1, StoreUnavailableError("away"), claim)
        claim = _failing(most, OddError(), claim)
        monkeypatch.setattr(store, "claim", claim)
        working = asyncio.create_task(bench.work())
        while not working.done():
            bench.clock.advance(1.0)
            await asyncio.wait([working], timeout=0.001)
        assert await working == 1
        assert await sent.result() == "pong"

    bench.run(scenario)
    assert _events(caplog, "claim_failed") == [("ERROR", True), *[("WARNING", False)] * (most - 1)] * 2
    assert "secret" not in caplog.text


def test_a_worker_whose_claims_always_fail_the_same_way_stops_and_says_why(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After about a minute; below a supervisor its process then ends with status 1 and is replaced."""
    bench = sqlite_bench
    bench.app.task(name="ping")(_nothing)

    async def scenario() -> None:
        monkeypatch.setattr(bench.app.store, "claim", _failing(1_000, OddError(), bench.app.store.claim))
        working = asyncio.create_task(bench.app.work())
        began = bench.clock.steady()
        while not working.done():
            bench.clock.advance(0.5)
            await asyncio.wait([working], timeout=0.001)
        assert 30 <= (bench.clock.steady() - began) / 1e6 <= 120
        with pytest.raises(StoreError, match="10 claims in a row failed with OddError") as caught:
            await working
        assert isinstance(caught.value.__cause__, OddError)

    bench.run(scenario)
    assert _events(caplog, "claim_failed") == [("ERROR", True), *[("WARNING", False)] * 9]
    (line,) = [record.getMessage() for record in caplog.records if vars(record)["event"] == "claims_stopped"]
    assert line == "claims_stopped failures=10 error=OddError: the worker ends"


def test_an_error_that_the_store_means_to_be_final_ends_the_worker_at_once(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        store = sqlite_bench.app.store
        monkeypatch.setattr(store, "claim", _failing(1, StoreError("the file was replaced"), store.claim))
        with pytest.raises(StoreError, match="the file was replaced"):
            await sqlite_bench.work()

    sqlite_bench.run(scenario)


def test_a_batch_runs_without_the_messages_that_could_not_be_claimed_for_it(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = sqlite_bench
    sizes: list[int] = []

    @bench.app.task(batch=10)
    async def together(batch: Batch[int]) -> None:
        sizes.append(len(batch))
        for item in batch:
            item.done()

    async def scenario() -> None:
        await bench.app.send_many(together.call(number) for number in range(3))
        claim, calls = bench.app.store.claim, iter(range(1_000))

        async def fail_the_second(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 1:
                raise OddError
            return await claim(*args, **kwargs)

        monkeypatch.setattr(bench.app.store, "claim", fail_the_second)
        assert await bench.work() == 3

    bench.run(scenario)
    assert sizes == [3]
    assert _events(caplog, "claim_failed") == [("ERROR", True)]


async def _nothing() -> None:
    """A handler."""
