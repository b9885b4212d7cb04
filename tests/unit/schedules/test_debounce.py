"""Many triggers in a short time become one message.  E8."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from onefold import App, ConfigurationError, LimitError, Query, State, TransactionOpenError
from onefold.clock import give_way
from onefold.schedules.debounce import Debounced

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

WAIT, AT_MOST = timedelta(seconds=30), timedelta(minutes=2)


def declare(
    app: App, *, wait: timedelta = WAIT, at_most: timedelta = AT_MOST
) -> tuple[Debounced[[int, str]], list[str]]:
    sent: list[str] = []

    @app.task(key="{user}", queue="mail")
    async def digest(user: int, note: str) -> None:
        sent.append(f"{user}: {note}")

    return app.debounce(digest, key="{user}", wait=wait, at_most=at_most), sent


async def pass_time(bench: Bench, seconds: float) -> None:
    bench.clock.advance(seconds)
    await bench.app.work(queues=["mail"], until_idle=True)


def test_each_trigger_pushes_it_back_and_the_last_one_is_sent(bench: Bench) -> None:
    """E8: debounce."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        for note in "abc":
            due = await quiet.trigger(7, note)
            assert due == bench.clock.moment + WAIT
            await pass_time(bench, 20)
            assert sent == []
        await pass_time(bench, 10)
        assert sent == ["7: c"]
        await pass_time(bench, 3_600)
        assert sent == ["7: c"]

    bench.run(scenario)


def test_it_is_pushed_back_no_further_than_at_most(bench: Bench) -> None:
    """E8."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        for number in range(6):
            await quiet.trigger(7, f"n{number}")
            await pass_time(bench, 20)
        assert sent == ["7: n5"]

    bench.run(scenario)


def test_when_its_time_does_not_move_the_newest_arguments_win(bench: Bench) -> None:
    """E8: keep-last."""
    quiet, sent = declare(bench.app, at_most=WAIT)

    async def scenario() -> None:
        first = await quiet.trigger(7, "a")
        await pass_time(bench, 20)
        assert await quiet.trigger(7, "b") == first
        await pass_time(bench, 10)
        assert sent == ["7: b"]

    bench.run(scenario)


def test_keys_are_apart_and_begin_anew_after_each_message(bench: Bench) -> None:
    """E8: the task's own key does not prevent the next message."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        await quiet.trigger(7, "a")
        await quiet.trigger(8, "b")
        await pass_time(bench, 30)
        assert sorted(sent) == ["7: a", "8: b"]
        await quiet.trigger(7, "c")
        await pass_time(bench, 30)
        assert sorted(sent) == ["7: a", "7: c", "8: b"]
        assert await bench.app.store.entries("debounce") == {}

    bench.run(scenario)


def test_many_at_once_are_one(bench: Bench) -> None:
    """E8: no trigger is lost, whichever process wins."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        await asyncio.gather(*(quiet.trigger(7, str(number)) for number in range(12)))
        await pass_time(bench, 30)
        assert len(sent) == 1
        assert len(await bench.app.find(Query(message_type="digest"))) == 1

    bench.run(scenario)


def test_a_trigger_while_the_message_is_being_sent_begins_anew(bench: Bench) -> None:
    """E8: between the carrier's read and its commit."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        await quiet.trigger(7, "a")
        bench.clock.advance(30)
        store = bench.app.store
        (lease,) = await store.claim(["mail"], types=["digest.debounced"], limit=1, lease=30, worker="w")
        await quiet.trigger(7, "b")  # the carrier has been claimed and has not read the entry yet
        bench.clock.advance(31)
        await bench.app.work(queues=["mail"], until_idle=True)
        assert sent == ["7: b"]
        assert lease.envelope.message_type == "digest.debounced"

    bench.run(scenario)


def test_a_trigger_whose_carrier_was_cancelled_is_carried_by_the_next(bench: Bench) -> None:
    """E8: the key is not blocked for ever."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        await quiet.trigger(7, "a")
        (carrier,) = await bench.app.find(Query(states=(State.SCHEDULED,)))
        assert await bench.app.cancel(carrier.envelope.id, actor="ada", reason="by mistake")
        await pass_time(bench, 120)
        assert sent == []
        await quiet.trigger(7, "b")
        await pass_time(bench, 30)
        assert sent == ["7: b"]

    bench.run(scenario)


def test_a_burst_from_several_processes_loses_no_trigger(store_url: str) -> None:
    """The triggers of one process are written together, and processes that collide wait and retry."""
    apps = [App(store_url) for _ in range(3)]
    ways = [declare(app)[0] for app in apps]

    async def scenario() -> None:
        await apps[0].migrate()
        async with apps[0], apps[1], apps[2]:
            triggers = [way.trigger(7, f"{number}") for number in range(70) for way in ways]
            assert len(await asyncio.gather(*triggers)) == 210
            (carrier,) = await apps[0].find(Query(states=(State.SCHEDULED,)))
            assert carrier.envelope.message_type != "digest"
        assert not any(way._queues for way in ways)

    asyncio.run(scenario())


def test_a_trigger_that_is_given_up_fails_none_of_those_that_wait_with_it(bench: Bench) -> None:
    """The caller that writes for all may be cancelled; then the next one writes."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        first, *others = (asyncio.ensure_future(quiet.trigger(7, note)) for note in "abc")
        await give_way()
        first.cancel()
        assert len(await asyncio.gather(*others)) == 2
        await pass_time(bench, 30)
        assert sent == ["7: c"]

    bench.run(scenario)


@pytest.mark.parametrize("every", [10, 29])
def test_a_busy_key_that_lost_its_carrier_is_heard_again(bench: Bench, every: int) -> None:
    """Once the first trigger is overdue, the next one notices that its carrier has ended."""
    quiet, sent = declare(bench.app)

    async def scenario() -> None:
        await quiet.trigger(7, "first")
        (carrier,) = await bench.messages()
        assert await bench.app.cancel(carrier.envelope.id, actor="ada", reason="a mistake")
        for _ in range(round(AT_MOST.total_seconds()) // every + 2):
            await pass_time(bench, every)
            await quiet.trigger(7, "again")
        await pass_time(bench, 1)
        assert sent

    bench.run(scenario)


@pytest.mark.parametrize(
    ("wait", "at_most", "told"),
    [(0.5, 5, "wait is 0.5"), (30, 10, "at_most is 10; it must be from 30"), (1, 86_400 * 31, "at_most is")],
)
def test_what_cannot_be_meant_is_refused(wait: float, at_most: float, told: str) -> None:
    """P3."""
    with pytest.raises(ConfigurationError, match=told):
        declare(App("sqlite:///never-opened.db"), wait=timedelta(seconds=wait), at_most=timedelta(seconds=at_most))


def test_wrong_triggers_are_refused_at_the_call(bench: Bench) -> None:
    """P3."""
    quiet, _ = declare(bench.app)

    @bench.app.task
    async def note(text: str) -> None: ...

    by_text = bench.app.debounce(note, key="{text}", wait=1, at_most=1)

    async def scenario() -> None:
        with pytest.raises(TypeError):
            await quiet.trigger(7)  # type: ignore[call-arg]
        with pytest.raises(LimitError, match="key"):
            await by_text.trigger("a" * 600)
        async with bench.app.transaction():
            with pytest.raises(TransactionOpenError):
                await quiet.trigger(7, "a")

    bench.run(scenario)
