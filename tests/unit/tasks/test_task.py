"""Sending through the app: a second send in every state, due times, and results."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    App,
    CancelledMessageError,
    ConfigurationError,
    Context,
    DeadError,
    Envelope,
    KeyReuseError,
    LimitError,
    Receipt,
    Reject,
    ResultTimeoutError,
)
from onefold.store import State
from onefold.tasks.task import Task

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

Charge = Task[[int, int], str]


def declare(app: App, **settings: Any) -> Charge:
    async def charge(order: int, cents: int) -> str:
        if cents == 666:
            raise Reject("the card was refused")
        return f"paid {cents}"

    task: Charge = app.task(key="{order}", **settings)(charge)
    return task


async def leave_in(bench: Bench, charge: Charge, state: str) -> Receipt[str]:
    """Send order 7 and bring its message into a state."""
    first = await charge.send(7, 666 if state in ("dead", "discarded") else 500)
    if state in ("leased", "cancelled while running"):
        await bench.app.store.claim(["default"], types=["charge"], limit=1, lease=30, worker="w")
    elif state in ("done", "dead", "discarded", "window over"):
        await bench.work()
    if state.startswith("cancelled"):
        assert await bench.app.cancel(first.id, actor="ada", reason="not wanted")
    if state == "discarded":
        letters = [letter async for letter in bench.app.dead_letters()]
        assert await letters[0].discard(actor="ada", reason="of no use")
    if state == "window over":
        bench.clock.advance(timedelta(days=23))
    return first


TABLE = {
    "scheduled": State.SCHEDULED,
    "leased": State.LEASED,
    "done": State.DONE,
    "dead": State.DEAD,
    "cancelled while running": State.CANCELLED,
    "cancelled before it ran": None,
    "discarded": None,
    "window over": None,
}


@pytest.mark.parametrize(("state", "found"), TABLE.items())
@pytest.mark.parametrize("way", ["send", "send_many", "transaction"])
def test_a_second_send_does_what_the_table_says(bench: Bench, state: str, found: State | None, way: str) -> None:
    """B5, B17, B24: the first one's id and state, or a new message if the key is free; for every way to send."""
    charge = declare(bench.app)

    async def scenario() -> None:
        first = await leave_in(bench, charge, state)
        call = charge.call(7, 666 if state == "dead" else 500)
        if way == "send":
            second: Receipt[str] = await bench.app.dispatch(call)
        elif way == "send_many":
            second = (await bench.app.send_many([call]))[0]
        else:
            async with bench.app.transaction() as tx:
                second = tx.add(call)
        if found is None:
            assert (second.duplicate, second.state) == (False, State.SCHEDULED)
            assert second.id != first.id
            await bench.work()
            assert await second.result() == "paid 500"
        else:
            assert (second.duplicate, second.id, second.state) == (True, first.id, found)
            assert len(await bench.messages()) == 1

    bench.run(scenario)


@pytest.mark.parametrize("state", ["scheduled", "leased", "done", "cancelled while running"])
def test_another_payload_is_refused_while_the_key_is_kept(bench: Bench, state: str) -> None:
    """B25: in every state of the first message."""
    charge = declare(bench.app)

    async def scenario() -> None:
        first = await leave_in(bench, charge, state)
        with pytest.raises(KeyReuseError) as refused:
            await charge.send(7, 501)
        assert (refused.value.first_id, refused.value.key, refused.value.message_type) == (first.id, "7", "charge")

    bench.run(scenario)


def test_a_key_is_kept_to_the_last_moment_of_its_window(bench: Bench) -> None:
    """B10: 23 days after the end, to the microsecond."""
    charge = declare(bench.app)

    async def scenario() -> None:
        await leave_in(bench, charge, "done")
        bench.clock.advance(timedelta(days=23) - timedelta(microseconds=1))
        assert (await charge.send(7, 500)).duplicate
        bench.clock.advance(timedelta(microseconds=1))
        assert not (await charge.send(7, 500)).duplicate

    bench.run(scenario)


def test_a_dead_message_is_reopened_if_the_sender_asks_and_that_is_recorded(bench: Bench) -> None:
    """D6: the same message, not a second one."""
    charge = declare(bench.app)

    async def scenario() -> None:
        first = await leave_in(bench, charge, "dead")
        again = await charge.options(if_dead="redrive").send(7, 666)
        assert (again.id, again.duplicate, again.state) == (first.id, True, State.SCHEDULED)
        assert (await bench.record(first)).replay_count == 1
        await bench.work()
        with pytest.raises(DeadError):
            await again.result()

    bench.run(scenario)


def test_fingerprints_are_not_compared_across_versions(bench: Bench) -> None:
    """B25, A3: a new version may write the same work differently."""
    charge = declare(bench.app)
    newer = App(bench.url, clock=bench.clock)
    recharge = declare(newer, version=2)

    async def scenario() -> None:
        async with newer:
            first = await charge.send(7, 500)
            assert (await recharge.send(7, 501)).id == first.id

    bench.run(scenario)


def test_the_same_key_twice_in_one_commit_is_one_message(bench: Bench) -> None:
    """B5: within a batch too, and a clash fails all of it."""
    charge = declare(bench.app)

    async def scenario() -> None:
        first, second = await bench.app.send_many([charge.call(7, 500), charge.call(7, 500)])
        assert (first.duplicate, second.duplicate, second.id) == (False, True, first.id)
        with pytest.raises(KeyReuseError):
            await bench.app.send_many([charge.call(8, 500), charge.call(8, 501)])
        assert len(await bench.messages()) == 1

    bench.run(scenario)


def test_a_batch_key_is_all_or_nothing(bench: Bench) -> None:
    """B12: a repeated batch is the first one; another batch under its key is refused."""
    charge = declare(bench.app)

    @bench.app.task
    async def ping(number: int) -> None: ...

    async def scenario() -> None:
        first = await bench.app.send_many([ping.call(1), charge.call(7, 500)], batch_key="import-1")
        again = await bench.app.send_many([ping.call(1), charge.call(7, 500)], batch_key="import-1")
        assert [one.id for one in again] == [one.id for one in first]
        assert all(one.duplicate for one in again)
        for other in ([ping.call(1)], [ping.call(2), charge.call(7, 500)], [charge.call(7, 500), ping.call(1)]):
            with pytest.raises(KeyReuseError):
                await bench.app.send_many(other, batch_key="import-1")
        with pytest.raises(KeyReuseError):
            await bench.app.send_many([ping.call(3), charge.call(7, 501)], batch_key="import-2")
        assert len(await bench.messages()) == 2
        assert await bench.app.send_many([], batch_key="import-3") == []
        with pytest.raises(LimitError, match="batch_key"):
            await bench.app.send_many([ping.call(1)], batch_key="")

    bench.run(scenario)


def test_a_deduplication_key_coalesces_triggers_for_its_window(bench: Bench) -> None:
    """B5, B10: whatever the payload; after the window the same trigger is stored again."""

    @bench.app.task
    async def digest(text: str) -> None: ...

    async def scenario() -> None:
        trigger = digest.options(deduplicate="digest:42", deduplicate_for=timedelta(minutes=10))
        first = await trigger.send("one")
        bench.clock.advance(timedelta(minutes=10) - timedelta(microseconds=1))
        second = await trigger.send("two")
        assert (second.duplicate, second.id) == (True, first.id)
        await bench.work()
        assert (await trigger.send("three")).state is State.DONE
        bench.clock.advance(timedelta(microseconds=1))
        assert not (await trigger.send("four")).duplicate

    bench.run(scenario)


def test_when_both_keys_point_at_different_messages_the_idempotency_key_wins(bench: Bench) -> None:
    """The idempotency key names the work, the deduplication key only a trigger."""
    charge = declare(bench.app)

    async def scenario() -> None:
        by_key = await charge.send(7, 500)
        by_trigger = await charge.options(deduplicate="d").send(8, 500)
        both = await charge.options(deduplicate="d").send(7, 500)
        assert (both.duplicate, both.id) == (True, by_key.id)
        only_trigger = await charge.options(deduplicate="d").send(9, 500)
        assert (only_trigger.duplicate, only_trigger.id) == (True, by_trigger.id)

    bench.run(scenario)


@pytest.mark.parametrize("by", ["delay", "at"])
def test_a_delayed_message_is_due_then_and_not_before(bench: Bench, by: str) -> None:
    """E1, C11: relative or absolute, by the store's clock."""

    @bench.app.task
    async def ping() -> str:
        return "pong"

    async def scenario() -> None:
        hour = timedelta(hours=1)
        task = ping.options(delay=hour) if by == "delay" else ping.options(at=bench.clock.moment + hour)
        sent = await task.send()
        bench.clock.advance(hour - timedelta(microseconds=1))
        assert await bench.work() == 0
        bench.clock.advance(timedelta(microseconds=1))
        assert await bench.work() == 1
        assert await sent.result() == "pong"

    bench.run(scenario)


def test_a_message_that_expired_is_a_dead_letter_and_never_ran(bench: Bench) -> None:
    """C21: counted from the due time; kept as a dead letter with the reason ``expired``."""
    ran: list[int] = []

    @bench.app.task(expires=timedelta(hours=2), key_window=timedelta(days=30))
    async def ping(number: int) -> None:
        ran.append(number)

    async def scenario() -> None:
        late = await ping.options(delay=timedelta(hours=1)).send(1)
        kept = await ping.options(expires=None).send(2)
        bench.clock.advance(timedelta(hours=3) - timedelta(microseconds=1))
        alive = await ping.send(3)
        bench.clock.advance(timedelta(microseconds=1))
        await bench.work()
        assert sorted(ran) == [2, 3]
        record = await bench.record(late)
        assert record.state is State.DEAD
        assert record.failure is not None
        assert record.failure.reason == "expired"
        assert {(await bench.record(one)).state for one in (kept, alive)} == {State.DONE}

    bench.run(scenario)


def test_the_keys_of_messages_that_never_ran_are_kept_as_long_as_declared(bench: Bench) -> None:
    """B10: an expired message's key has its task's window, like any other."""
    charge = declare(bench.app, key_window=timedelta(days=90))

    async def scenario() -> None:
        first = await charge.send(7, 500)
        bench.clock.advance(timedelta(days=8))
        await bench.work()
        assert (await bench.record(first)).state is State.DEAD
        bench.clock.advance(timedelta(days=80))
        assert (await charge.send(7, 500)).id == first.id

    bench.run(scenario)


def test_a_child_has_its_parents_correlation_and_names_its_parent_as_cause(bench: Bench) -> None:
    """A5, A6: over two generations, by ctx.send and by an awaited send."""

    @bench.app.task
    async def grandchild() -> None: ...

    @bench.app.task
    async def child() -> None:
        await grandchild.send()

    @bench.app.task
    async def parent(ctx: Context) -> None:
        ctx.send(child)

    async def scenario() -> None:
        await parent.options(correlation_id="request-1").send()
        await bench.work()
        by_type = {record.envelope.message_type: record.envelope for record in await bench.messages()}
        first, second, third = by_type["parent"], by_type["child"], by_type["grandchild"]
        assert {e.correlation_id for e in (first, second, third)} == {"request-1"}
        assert (first.causation_id, second.causation_id, third.causation_id) == (first.id, first.id, second.id)

    bench.run(scenario)


def test_a_result_is_waited_for_and_then_the_same_for_every_sender(bench: Bench) -> None:
    """B17, B24: also for a sender that comes while the handler runs."""
    may_end = asyncio.Event()

    @bench.app.task(key="{number}")
    async def double(number: int) -> int:
        await may_end.wait()
        return number * 2

    async def scenario() -> None:
        first = await double.send(21)
        waiting = asyncio.create_task(first.result())
        working = asyncio.create_task(bench.work())
        second = await double.send(21)
        assert second.duplicate
        may_end.set()
        assert await waiting == await second.result() == 42
        await working

    bench.run(scenario)


def test_a_result_that_does_not_come_in_time_is_a_timeout_and_changes_nothing(bench: Bench) -> None:
    """G5."""

    @bench.app.task
    async def ping() -> str:
        return "pong"

    async def scenario() -> None:
        sent = await ping.send()
        for timeout in (0, 1.5):
            with pytest.raises(ResultTimeoutError, match=sent.id):
                await sent.result(timeout=timeout)
        await bench.work()
        assert await sent.result(timeout=0) == "pong"

    bench.run(scenario)


def test_no_result_comes_of_a_dead_or_a_cancelled_message(bench: Bench) -> None:
    """C9, G4: the two errors differ."""

    @bench.app.task
    async def refuse() -> None:
        raise Reject("never")

    async def scenario() -> None:
        dead = await refuse.send()
        await bench.work()
        with pytest.raises(DeadError, match="never") as raised:
            await dead.result()
        assert (raised.value.message_id, raised.value.reason, raised.value.error_type) == (
            dead.id,
            "rejected",
            "onefold.errors.Reject",
        )
        cancelled = await refuse.send()
        assert await bench.app.cancel(cancelled.id, actor="ada", reason="not wanted")
        assert not await bench.app.cancel(cancelled.id, actor="ada", reason="twice")
        with pytest.raises(CancelledMessageError):
            await cancelled.result()

    bench.run(scenario)


@pytest.mark.parametrize("returned", [None, "text", 7])
def test_an_on_send_that_returns_no_envelope_is_told_so(bench: Bench, returned: Any) -> None:
    """The usual mistake is a missing return; nothing is stored."""

    @bench.app.task
    async def note(n: int) -> None: ...

    @bench.app.on_send  # type: ignore[arg-type]
    def forgetful(envelope: Envelope) -> Any:
        return returned

    async def scenario() -> None:
        kind = type(returned).__name__
        with pytest.raises(ConfigurationError, match=rf"on_send: .*forgetful returned a {kind}; return the envelope"):
            await note.send(1)
        assert await bench.messages() == []

    bench.run(scenario)


@pytest.mark.parametrize("wrong", ["5s", True, b"5", None, [1]])
@pytest.mark.parametrize("name", ["delay", "deduplicate_for", "expires"])
def test_a_duration_that_is_none_is_refused_with_the_name_of_its_option(name: str, wrong: Any) -> None:
    """True is not one second, and a text has no unit."""

    @App("sqlite:///:memory:").task
    async def note(n: int) -> None: ...

    if wrong is None and name == "expires":
        note.options(expires=None)
        return
    with pytest.raises(ConfigurationError, match=rf"{name} is a {type(wrong).__name__}; write a number of seconds"):
        note.options(**{name: wrong})
