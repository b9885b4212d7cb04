"""Handlers that use a number from their message as a duration, beside handlers that do not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from tests.faults.row_scene import Shop

from onefold import Query, Retry, RetryPolicy, Run, Snooze, State
from onefold.tasks.task import Task

#: Longer than various limits: a century, the calendar, 64 bits in microseconds, and the precision of a double.
TOO_LONG = (4e9, 2.534e11, 1e13, 1e300)


class DurationShop(Shop):
    """The tasks of ``Shop``, and one for each call that takes a duration in a handler."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        app, once = self.app, RetryPolicy(max_attempts=1)

        @app.task(retry=once)
        async def snooze(seconds: float) -> None:
            raise Snooze(after=seconds)

        @app.task(retry=once)
        async def again(seconds: float) -> None:
            raise Retry(after=seconds)

        @app.task(retry=once)
        async def sends_later(seconds: float) -> None:
            await self.plain.options(delay=seconds).send(-1)

        @app.workflow(retry=once)
        async def sleeps(run: Run, seconds: float) -> None:
            await run.sleep(seconds)

        @app.workflow(retry=once)
        async def sleeps_days(run: Run, seconds: float) -> None:
            await run.sleep(days=seconds)

        @app.workflow(retry=once)
        async def waits(run: Run, seconds: float) -> None:
            await run.signal("go", timeout=seconds)

        @app.workflow(retry=once)
        async def waits_for_ever(run: Run, seconds: float) -> None:
            await run.signal("go", timeout=timedelta.max)

        @app.workflow(retry=once)
        async def steps(run: Run, seconds: float) -> None:
            await run.options(timeout=seconds).step(_nothing)

        self.named: tuple[Task[[float], None], ...] = (
            snooze,
            again,
            sends_later,
            sleeps,
            sleeps_days,
            waits,
            waits_for_ever,
            steps,
        )


async def _nothing() -> None: ...


async def a_long_duration_fails_its_own_message(url: str, judge: Callable[[str], bool]) -> None:
    """Each long duration makes a dead letter with an error type that ``judge`` accepts; all others are done."""
    shop = DurationShop(url)
    await shop.app.migrate()
    async with shop.app:
        sent = []
        for number, seconds in enumerate(TOO_LONG):
            for one in shop.named:
                sent.append(await one.send(seconds))
                await shop.plain.send(number * len(shop.named) + len(sent))
            await shop.limited.send(number)

        async def all_over() -> bool:
            states = [one.state for one in await shop.app.find(Query(limit=1_000))]
            return all(state.ended for state in states)

        await shop.work_until(all_over)
        letters = {letter.id: letter async for letter in shop.app.dead_letters()}
        assert set(letters) == {receipt.id for receipt in sent}
        wrong = [str(one.failure) for one in letters.values() if not judge(one.failure.error_type)]
        assert not wrong, wrong[0]
        assert await shop.app.find(Query(states=(State.PARKED, State.SCHEDULED))) == []


async def an_outcome_that_cannot_be_written_ends_alone(url: str) -> None:
    """Of many messages that are settled together, one has an outcome that no store can encode."""
    shop = Shop(url)

    @shop.app.task(retry=RetryPolicy(max_attempts=2))
    async def bad(number: int) -> None:
        error = Snooze(after=1.0)
        error.after_seconds = 1e300
        raise error

    await shop.app.migrate()
    async with shop.app:
        receipt = await bad.send(0)
        for number in range(20):
            await shop.plain.send(number)
        await shop.work_until(lambda: shop.have_run(*range(20)))

        async def dead() -> bool:
            return await shop.state(receipt.id) is State.DEAD

        await shop.work_until(dead)
        assert [one.state for one in await shop.app.find(Query(message_type="plain"))] == [State.DONE] * 20
        (letter,) = [letter async for letter in shop.app.dead_letters()]
        assert letter.failure.reason == "damaged"
