"""Dead letters through the app: everything known about a failure, and the acts of operators."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    App,
    ConfigurationError,
    Context,
    DeadLetter,
    LimitError,
    Receipt,
    Reject,
    RetentionOverError,
    RetryPolicy,
    State,
    limits,
)
from onefold.tasks.task import Task

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

#: The fields that messaging patterns ask for, by the names they have here.
PATTERN_FIELDS = {
    "original_message",
    "error_type",
    "error_message",
    "stack_trace",
    "retry_count",
    "failed_at",
    "source_queue",
    "consumer",
    "original_timestamp",
}
#: The fields that onefold adds.
OWN_FIELDS = {
    "attempts",
    "upstream_status",
    "reason",
    "crashes",
    "replay_count",
    "redrive_until",
    "kept_until",
    "fence",
}


class HTTPStatusError(Exception):
    """An error like those of HTTP clients."""

    def __init__(self, status: int) -> None:
        super().__init__(f"upstream said {status}")
        self.status = status


def declare(app: App) -> Task[[int], str]:
    """Declare a task that fails until the test lets it succeed."""

    @app.task(key="{order}", queue="money", retry=RetryPolicy(max_attempts=3, jitter=False))
    async def charge(ctx: Context, order: int) -> str:
        if ctx.message.message_type in healed:
            return "paid"
        raise HTTPStatusError(502)

    healed.clear()
    return charge


healed: set[str] = set()


async def letters_of(bench: Bench, **chosen: Any) -> list[DeadLetter]:
    return [letter async for letter in bench.app.dead_letters(**chosen)]


async def die(bench: Bench, charge: Task[[int], str], order: int = 7) -> Receipt[str]:
    sent = await charge.send(order)
    for delay in (5, 10, 20):
        await bench.work()
        bench.clock.advance(delay)
    assert (await bench.record(sent)).state is State.DEAD
    return sent


def test_a_dead_letter_has_everything_that_is_known_about_its_failure(bench: Bench) -> None:
    """D3: all fields of the pattern and our own, ready for JSON, with every attempt."""
    charge = declare(bench.app)
    start = bench.clock.moment

    async def scenario() -> None:
        sent = await die(bench, charge)
        (letter,) = await letters_of(bench)
        told = await letter.as_dict()
        assert told.keys() == PATTERN_FIELDS | OWN_FIELDS
        assert json.loads(json.dumps(told)) == told
        message = told["original_message"]
        assert (message["id"], message["idempotency_key"], message["payload_inline"]) == (sent.id, "7", {"order": 7})
        assert message["correlation_id"] == message["causation_id"] == sent.id
        assert told["error_type"].endswith("HTTPStatusError")
        assert (told["error_message"], told["upstream_status"]) == ("upstream said 502", 502)
        assert "in charge" in told["stack_trace"]
        assert (told["reason"], told["retry_count"], told["crashes"]) == ("attempts exhausted", 2, 0)
        assert (told["source_queue"], told["consumer"], told["replay_count"]) == ("money", "charge", 0)
        assert told["original_timestamp"] == start.isoformat()
        assert told["failed_at"] == (start + timedelta(seconds=15)).isoformat()
        assert [one["attempt"] for one in told["attempts"]] == [1, 2, 3]
        assert [one["delay"] for one in told["attempts"]] == [5, 10, None]
        assert [one["at"] for one in told["attempts"]] == [
            (start + timedelta(seconds=passed)).isoformat() for passed in (0, 5, 15)
        ]
        assert sorted({one["fence"] for one in told["attempts"]}) == [one["fence"] for one in told["attempts"]]
        assert all(one["worker"] and one["error_message"] == "upstream said 502" for one in told["attempts"])

    bench.run(scenario)


def test_letters_are_found_by_queue_and_type_oldest_first(bench: Bench) -> None:
    """D5."""
    charge = declare(bench.app)

    @bench.app.task
    async def refuse(number: int) -> None:
        raise Reject("no")

    async def scenario() -> None:
        await die(bench, charge)
        bench.clock.advance(1)
        ids = []
        for number in range(3):
            ids.append((await refuse.send(number)).id)
            bench.clock.advance(1)
        await bench.work()
        assert [one.id for one in await letters_of(bench, message_type="refuse")] == ids
        assert [one.message.queue for one in await letters_of(bench, queue="money")] == ["money"]
        assert len(await letters_of(bench)) == 4
        assert await letters_of(bench, queue="nowhere") == []

    bench.run(scenario)


def test_more_letters_than_a_page_are_met_once_each_while_they_are_redriven(bench: Bench) -> None:
    """D5, D8."""

    @bench.app.task
    async def refuse(number: int) -> None:
        raise Reject("no")

    async def scenario() -> None:
        many = limits.PAGE * 2 + 1
        await bench.app.send_many(refuse.call(number) for number in range(many))
        await bench.work()
        met = []
        async for letter in bench.app.dead_letters():
            met.append(letter.id)
            if len(met) % 50 == 0:
                assert await letter.redrive(actor="ada", reason="a try")
        assert len(met) == len(set(met)) == many

    bench.run(scenario)


def test_a_redriven_letter_runs_again_with_its_key_and_a_full_set_of_attempts(bench: Bench) -> None:
    """D6, D13: it runs once, however many redrives there are."""
    charge = declare(bench.app)

    async def scenario() -> None:
        sent = await die(bench, charge)
        (letter,) = await letters_of(bench)
        assert await letter.redrive(actor="ada", reason="upstream is back")
        assert not await letter.redrive(actor="bob", reason="upstream is back")
        record = await bench.record(sent)
        assert (record.state, record.attempt, record.replay_count) == (State.SCHEDULED, 0, 1)
        assert record.fence > letter._record.fence
        healed.add("charge")
        await bench.work()
        assert await sent.result() == "paid"
        assert (await charge.send(7)).id == sent.id
        assert await bench.app.redrive([sent.id], actor="ada", reason="again") == []
        assert [one.attempt for one in await bench.app.store.attempts(sent.id)] == [1, 2, 3]

    bench.run(scenario)


def test_a_discarded_letter_is_closed_for_good_and_frees_its_key(bench: Bench) -> None:
    """D5."""
    charge = declare(bench.app)

    async def scenario() -> None:
        sent = await die(bench, charge)
        (letter,) = await letters_of(bench)
        assert await letter.discard(actor="ada", reason="a test order")
        assert not await letter.redrive(actor="ada", reason="changed my mind")
        assert not await letter.discard(actor="ada", reason="twice")
        assert await letters_of(bench) == []
        assert not (await charge.send(7)).duplicate
        assert (await bench.record(sent)).state is State.DISCARDED

    bench.run(scenario)


def test_every_act_of_a_person_is_written_down(bench: Bench) -> None:
    """D6, N3: the actor, the reason, the act and the time."""
    charge = declare(bench.app)

    async def scenario() -> None:
        first = await die(bench, charge)
        await bench.app.redrive([first.id], actor="ada", reason="fixed in 1.4.2")
        await bench.app.cancel(first.id, actor="bob", reason="not wanted")
        second = await die(bench, charge, 8)
        (letter,) = await letters_of(bench)
        await letter.discard(actor="eve", reason="of no use")
        table = "onefold_act" if bench.url.startswith("sqlite") else "onefold.act"
        rows = await bench.app.store.fetch(f"SELECT message_id, kind, actor, reason FROM {table} ORDER BY at, actor")
        assert [(str(row[0]), *row[1:]) for row in rows] == [
            (first.id, "redrive", "ada", "fixed in 1.4.2"),
            (first.id, "cancel", "bob", "not wanted"),
            (second.id, "discard", "eve", "of no use"),
        ]

    bench.run(scenario)


def test_an_act_without_a_name_or_a_reason_is_refused(bench: Bench) -> None:
    """D11, N3."""

    async def scenario() -> None:
        for actor, reason in (("", "fixed"), ("ada", ""), ("ada", "two\nlines"), ("a" * 257, "fixed")):
            with pytest.raises(LimitError):
                await bench.app.redrive(["x"], actor=actor, reason=reason)
            with pytest.raises(LimitError):
                await bench.app.cancel("x", actor=actor, reason=reason)

    bench.run(scenario)


def test_a_bulk_redrive_is_bounded_and_in_one_commit(bench: Bench) -> None:
    """D8: unknown ids are left out, not an error."""

    @bench.app.task
    async def refuse(number: int) -> None:
        raise Reject("no")

    async def scenario() -> None:
        sent = await bench.app.send_many(refuse.call(number) for number in range(3))
        await bench.work()
        ids = [one.id for one in sent]
        with pytest.raises(ConfigurationError, match=str(limits.REDRIVE_MAX)):
            await bench.app.redrive(ids * 34, actor="ada", reason="all of them")
        assert sorted(await bench.app.redrive([*ids, "unknown"], actor="ada", reason="fixed")) == sorted(ids)
        assert await letters_of(bench) == []

    bench.run(scenario)


def test_after_fourteen_days_the_body_is_gone_and_a_tombstone_with_its_key_stays(bench: Bench) -> None:
    """D4: key, type, error and counts are kept for the window of the key, then nothing."""
    charge = declare(bench.app)

    async def scenario() -> None:
        sent = await die(bench, charge)
        bench.clock.advance(timedelta(days=14) - timedelta(minutes=1))
        await bench.purge()
        assert (await bench.record(sent)).envelope.payload_inline == b'{"order":7}'
        bench.clock.advance(timedelta(minutes=1))
        await bench.purge()
        (letter,) = await letters_of(bench)
        assert letter.message.payload_inline is None
        told = await letter.as_dict()
        assert told["original_message"] is None
        assert (told["error_message"], told["retry_count"], len(told["attempts"])) == ("upstream said 502", 2, 3)
        assert (letter.message.idempotency_key, letter.message.message_type) == ("7", "charge")
        with pytest.raises(RetentionOverError, match="its body is no longer kept"):
            await letter.redrive(actor="ada", reason="too late")
        assert (await charge.send(7)).id == sent.id
        bench.clock.advance(timedelta(days=9))
        await bench.purge()
        assert await letters_of(bench) == []
        assert await bench.messages() == []
        assert not (await charge.send(7)).duplicate

    bench.run(scenario)


def test_a_letter_prints_without_its_payload(bench: Bench) -> None:
    """Fault 33."""
    charge = declare(bench.app)

    async def scenario() -> None:
        sent = await die(bench, charge)
        (letter,) = await letters_of(bench)
        assert repr(letter) == f"<dead letter {sent.id} charge (attempts exhausted)>"

    bench.run(scenario)


def test_letters_are_counted_by_type_and_error_with_the_oldest_of_each(bench: Bench) -> None:
    """D9: both, per type and per error group."""

    @bench.app.task(retry=RetryPolicy(max_attempts=1))
    async def parse(what: str) -> None:
        raise {"value": ValueError, "key": KeyError}[what]("no")

    @bench.app.task(queue="mail", retry=RetryPolicy(max_attempts=1))
    async def post() -> None:
        raise Reject("never")

    async def scenario() -> None:
        assert await bench.app.dead_groups() == []
        for call in (parse.call("value"), parse.call("key"), post.call(), parse.call("value")):
            await bench.app.send_many([call])
            await bench.work()
            bench.clock.advance(60)
        first = min(one.oldest_at for one in await bench.app.dead_groups())
        told = [
            (one.queue, one.message_type, one.reason, one.error_type, one.count, one.oldest_at - first)
            for one in await bench.app.dead_groups()
        ]
        assert told == [
            ("default", "parse", "attempts exhausted", "ValueError", 2, timedelta(0)),
            ("default", "parse", "attempts exhausted", "KeyError", 1, timedelta(seconds=60)),
            ("mail", "post", "rejected", "onefold.errors.Reject", 1, timedelta(seconds=120)),
        ]
        assert [one.message_type for one in await bench.app.dead_groups(queue="mail")] == ["post"]

    bench.run(scenario)


def test_one_id_is_redriven_as_one(sqlite_bench: Bench) -> None:
    """A text is a sequence of characters, none of which is an id."""

    @sqlite_bench.app.task(queue="mail")
    async def fail() -> None:
        raise Reject("never")

    async def scenario() -> None:
        receipt = await fail.send()
        assert await sqlite_bench.app.work(queues="mail", until_idle=True) == 1
        assert await sqlite_bench.app.redrive(receipt.id, actor="ada", reason="try") == [receipt.id]

    sqlite_bench.run(scenario)
