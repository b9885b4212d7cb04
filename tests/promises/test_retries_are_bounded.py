"""A handler that fails is run again, with growing delays, a bounded number of times."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from onefold import Context, Reject, Retry, RetryPolicy, Snooze
from onefold.store import State

if TYPE_CHECKING:
    from conftest import World


class UpstreamError(Exception):
    """The part of an HTTP client's exception that onefold reads."""

    def __init__(self, status_code: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"status {status_code}")
        self.status_code = status_code
        self.headers = headers or {}


def test_a_failing_message_runs_five_times_and_then_is_a_dead_letter(world: World) -> None:
    app = world.app()
    ran_at: list[float] = []

    @app.task
    async def fail() -> None:
        ran_at.append(world.clock.steady() / 1_000_000)
        raise ConnectionError("still down")

    async def scenario() -> None:
        async with world.running(app):
            receipt = await fail.send()
            for _ in range(400):
                await app.work(until_idle=True)
                world.clock.advance(1)
            assert (await world.record(app, receipt)).state is State.DEAD

    asyncio.run(scenario())
    waits = [later - earlier for earlier, later in itertools.pairwise(ran_at)]
    assert len(ran_at) == 5
    for wait, full in zip(waits, (5, 10, 20, 40), strict=True):
        assert full / 2 <= wait <= full + 1


def test_the_number_of_runs_is_the_policys(world: World) -> None:
    app = world.app()
    runs: list[int] = []

    @app.task(retry=RetryPolicy(max_attempts=2))
    async def fail(ctx: Context) -> None:
        runs.append(ctx.attempt)
        raise ConnectionError("still down")

    async def scenario() -> None:
        async with world.running(app):
            await fail.send()
            for _ in range(5):
                await app.work(until_idle=True)
                world.clock.advance(300)

    asyncio.run(scenario())
    assert runs == [1, 2]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Reject("never"), "rejected"),
        (UpstreamError(404), "permanent"),
        (KeyError("permanent by policy"), "permanent"),
    ],
    ids=["Reject", "404", "permanent="],
)
def test_what_a_retry_cannot_cure_is_a_dead_letter_at_once(world: World, error: Exception, reason: str) -> None:
    app = world.app()

    @app.task(retry=RetryPolicy(permanent=(KeyError,)))
    async def fail() -> None:
        raise error

    async def scenario() -> None:
        async with world.running(app):
            receipt = await fail.send()
            assert await app.work(until_idle=True) == 1
            record = await world.record(app, receipt)
            assert (record.state, record.attempt) == (State.DEAD, 1)
            assert record.failure is not None
            assert record.failure.reason == reason

    asyncio.run(scenario())


def test_a_handler_may_say_when_to_retry_and_it_counts(world: World) -> None:
    app = world.app()
    attempts: list[int] = []

    @app.task
    async def later(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise Retry(after=timedelta(minutes=30))

    async def scenario() -> None:
        async with world.running(app):
            await later.send()
            await app.work(until_idle=True)
            world.clock.advance(timedelta(minutes=29))
            assert await app.work(until_idle=True) == 0
            world.clock.advance(timedelta(minutes=2))
            assert await app.work(until_idle=True) == 1

    asyncio.run(scenario())
    assert attempts == [1, 2]


@pytest.mark.parametrize("error", [Snooze(after=60), UpstreamError(429, {"Retry-After": "60"})], ids=["Snooze", "429"])
def test_waiting_for_an_appointment_uses_up_no_attempt(world: World, error: Exception) -> None:
    app = world.app()
    attempts: list[int] = []

    @app.task(retry=RetryPolicy(max_attempts=1))
    async def wait(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) < 4:
            raise error

    async def scenario() -> None:
        async with world.running(app):
            receipt = await wait.send()
            for _ in range(4):
                await app.work(until_idle=True)
                world.clock.advance(61)
            assert (await world.record(app, receipt)).state is State.DONE

    asyncio.run(scenario())
    assert attempts == [1, 1, 1, 1]


def test_snoozing_ends_when_the_message_expires(world: World) -> None:
    app = world.app()

    @app.task(expires=timedelta(minutes=10))
    async def wait() -> None:
        raise Snooze(after=60)

    async def scenario() -> None:
        async with world.running(app):
            receipt = await wait.send()
            for _ in range(15):
                await app.work(until_idle=True)
                world.clock.advance(61)
            record = await world.record(app, receipt)
            assert record.failure is not None
            assert record.failure.reason == "expired"

    asyncio.run(scenario())
