"""Messages that no handler can process wait or become dead letters, while all others are handled."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fault_scene import run
from msgspec.structs import replace

from onefold import App, RetryPolicy, limits
from onefold.clock import MICROSECONDS
from onefold.store import Again, Lease, Query, State
from onefold.testing import FakeClock, HastyClock, drain
from onefold.worker.refusals import UNSUPPORTED_SECONDS, UNSUPPORTED_SECONDS_MAX, refuse

MESSAGES = 400
#: One message in twenty.
POISON_EVERY = 20


def old_code(url: str, clock: FakeClock) -> App:
    """The program before a deployment: it has one task, in its first version."""
    app = App(url, clock=clock)

    @app.task(key="{number}")
    async def known(number: int) -> int:
        return number

    return app


def new_code(url: str, clock: FakeClock) -> App:
    """The program after the deployment: one task more, and a newer version of the old one."""
    app = App(url, clock=clock)

    @app.task(key="{number}", version=2)
    async def known(number: int) -> int:
        return number * 10

    @app.task(key="{number}")
    async def fresh(number: int) -> int:
        return number

    return app


def test_a_task_that_old_workers_do_not_know_waits_for_a_new_one(store_url: str) -> None:
    """Fault 18: it is not claimed, not failed and not dead, however long the rolling deployment takes."""

    async def scenario() -> None:
        clock = HastyClock()
        old, new = old_code(store_url, clock), new_code(store_url, clock)
        await old.migrate()
        async with old, new:
            receipt = await new.tasks["fresh"].send(1)
            for _ in range(5):
                beside = await old.tasks["known"].send(clock.now())
                await old.work(until_idle=True)
                # Other messages are handled meanwhile.
                assert await beside.result() is not None
                clock.advance(timedelta(hours=6))
            (waiting,) = await old.find(Query(ids=(receipt.id,)))
            assert (waiting.state, waiting.attempt, waiting.crashes) == (State.SCHEDULED, 0, 0)
            assert waiting.fence == 1
            await new.work(until_idle=True)
            assert await receipt.result() == 1

    run(scenario)


def test_a_newer_version_of_a_message_is_deferred_until_a_newer_worker_comes(store_url: str) -> None:
    """Faults 18 and 25: no attempt is used up, and older messages are handled meanwhile."""

    async def scenario() -> None:
        clock = HastyClock()
        old, new = old_code(store_url, clock), new_code(store_url, clock)
        await old.migrate()
        async with old, new:
            receipt = await new.tasks["known"].send(1)
            for number in range(2, 7):
                beside = await old.tasks["known"].send(number)
                await old.work(until_idle=True)
                assert await beside.result() == number
                clock.advance(UNSUPPORTED_SECONDS)
            (waiting,) = await old.find(Query(ids=(receipt.id,)))
            assert (waiting.state, waiting.attempt, waiting.crashes) == (State.SCHEDULED, 0, 0)
            assert await old.store.attempts(receipt.id) == []
            # It was claimed once per round at most.
            assert waiting.fence <= 1 + 2 * 6
            clock.advance(6 * UNSUPPORTED_SECONDS)
            await new.work(until_idle=True)
            assert await receipt.result() == 10

    run(scenario)


@pytest.mark.parametrize("expires", [limits.MESSAGE_RETENTION, None])
@pytest.mark.parametrize("late", [0.0, limits.DAY])
def test_a_version_from_a_far_future_is_looked_at_ever_more_seldom(expires: float | None, late: float) -> None:
    """Once per half minute would be 20,000 claims in a week; a message due later starts with the same short pauses."""
    app = App("sqlite:///:memory:")

    @app.task(expires=expires)
    async def known(number: int) -> None: ...

    sent = known.call(1).envelope(app.fresh_id())
    retention = 0 if expires is None else round(expires * MICROSECONDS)
    due_at = round((limits.DAY + (late if expires else 0.0)) * MICROSECONDS)
    envelope = replace(
        sent,
        schema_version=9,
        created_at=round(limits.DAY * MICROSECONDS),
        retention=retention,
        expires_at=due_at + retention if retention else 0,
    )
    looks = list[float]()
    now = due_at
    while now < due_at + limits.MESSAGE_RETENTION * MICROSECONDS:
        outcome = refuse(known, Lease(envelope, 2, 1, 0, 0, now, "w"), limits.QUARANTINE_AFTER)
        assert isinstance(outcome, Again)
        assert not outcome.counted
        looks.append(outcome.delay)
        now += round(outcome.delay * MICROSECONDS)
    assert looks[:4] == [30.0, 30.0, 60.0, 120.0]
    assert looks[-1] == UNSUPPORTED_SECONDS_MAX
    assert len(looks) < 200


def test_poison_ends_as_dead_letters_and_everything_else_is_done(store_url: str) -> None:
    """Fault 18: one message in twenty always fails; its letter shows the error, the attempts and the work."""
    ran: dict[int, int] = {}

    async def scenario() -> None:
        clock = HastyClock()
        app = App(store_url, clock=clock)

        @app.task(key="{number}", subject="order:{number}", retry=RetryPolicy(max_attempts=3))
        async def handle(number: int) -> int:
            ran[number] = ran.get(number, 0) + 1
            if number % POISON_EVERY == 0:
                raise ValueError(f"poison {number}")
            return number

        await app.migrate()
        async with app:
            receipts = await app.send_many(handle.call(number) for number in range(MESSAGES))
            # The first round: no message waits behind one that fails.
            await app.work(until_idle=True)
            done = await app.find(Query(states=(State.DONE,), limit=1_000))
            assert len(done) == MESSAGES - MESSAGES // POISON_EVERY
            await drain(app)
            letters = {letter.id: letter async for letter in app.dead_letters()}
            poison = [number for number in range(MESSAGES) if number % POISON_EVERY == 0]
            assert set(letters) == {receipts[number].id for number in poison}
            for number in poison:
                letter = letters[receipts[number].id]
                assert (letter.failure.error_type, letter.failure.error_message) == ("ValueError", f"poison {number}")
                assert len(await app.store.attempts(letter.id)) == 3
                assert letter.message.subject == f"order:{number}"
            assert {number: times for number, times in ran.items() if times != 1} == dict.fromkeys(poison, 3)
            assert await asyncio.gather(*(receipts[n].result() for n in (1, 7, 399))) == [1, 7, 399]

    run(scenario)
