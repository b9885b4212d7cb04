"""A row that the store cannot process ends alone: no claim, settle or listing fails for the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from row_scene import LARGEST, Shop, a_bad_row_ends_alone, a_number_at_the_limit_stops_no_worker, wire

from onefold import EnvelopeError, OnefoldError, Query, RetryPolicy, State, limits
from onefold.brokers.redis import RedisTransport


def test_a_number_at_the_limit_stops_no_worker(store_url: str) -> None:
    """Comparing sequence numbers of a line must not overflow: that would fail every claim of every worker."""
    asyncio.run(a_number_at_the_limit_stops_no_worker(store_url))


def test_a_number_above_the_limit_is_refused_at_the_call(sqlite_url: str) -> None:
    """The error names the field and the limit; the limit itself is accepted."""
    shop = Shop(sqlite_url)
    for number in (limits.SEQUENCE_MAX + 1, LARGEST, -1, True, 1.5):
        with pytest.raises(EnvelopeError, match=f"sequence.*{limits.SEQUENCE_MAX}"):
            shop.lined.options(sequence=number).call("a", 1)  # type: ignore[typeddict-item]

    async def scenario() -> None:
        async with shop.app:
            await shop.lined.options(sequence=limits.SEQUENCE_MAX).send("a", 1)
            await shop.work_until(lambda: shop.have_run(1, name="a"))

    asyncio.run(scenario())


@pytest.mark.parametrize("spoil", [Shop.overtax, Shop.garble], ids=["fence", "headers"])
def test_a_row_that_cannot_be_claimed_or_read_is_a_dead_letter_and_the_others_are_done(
    spoil: Callable[[Shop, str], None], store_url: str
) -> None:
    """Faults 15 and 18: a plain one, one in a line and one behind a limit are set aside with the reason ``damaged``."""
    asyncio.run(a_bad_row_ends_alone(store_url, spoil))


def test_a_failure_that_cannot_be_read_is_shown_as_such(store_url: str) -> None:
    """Fault 15: the lists of dead letters and of attempts still work, and the database is not called damaged."""
    shop = Shop(store_url)

    @shop.app.task(retry=RetryPolicy(max_attempts=1))
    async def fails(number: int) -> None:
        raise ValueError(number)

    async def scenario() -> None:
        await shop.app.migrate()
        async with shop.app:
            garbled, whole = await fails.send(1), await fails.send(2)

            async def both_dead() -> bool:
                return len(await shop.app.find(Query(states=(State.DEAD,)))) == 2

            await shop.work_until(both_dead)
            for table in ("outcome", "attempt"):
                shop.write(f"UPDATE onefold.{table} SET failure = %s WHERE {shop.names(table, garbled.id)}", b"{\xff")
            letters = {letter.id: letter async for letter in shop.app.dead_letters()}
            assert letters[garbled.id].failure.reason == "unreadable"
            assert letters[whole.id].failure.error_type == "ValueError"
            assert [one.failure.reason for one in await letters[garbled.id].attempts()] == ["unreadable"]
            assert await letters[garbled.id].redrive(actor="ada", reason="a test")

    asyncio.run(scenario())


def test_a_number_from_the_wire_counts_only_where_the_task_has_an_order(store_url: str) -> None:
    """A foreign entry cannot put a task without order into lines of its choice; numbers too large are refused."""
    shop = Shop(store_url, receives=True)

    async def scenario() -> None:
        await shop.app.migrate()
        async with shop.app:
            for number, sequence in enumerate((LARGEST, 1, limits.SEQUENCE_MAX, 7)):
                await shop.transport.publish([wire(f"w{number}", ordering_key="l", sequence=sequence)])

            async def all_have_run() -> bool:
                return len(shop.ran) >= 3

            await shop.work_until(all_have_run)
            records = [one for one in await shop.app.find(Query()) if one.envelope.message_type == "plain"]
            assert [one.envelope.sequence for one in records] == [None] * len(records)

    asyncio.run(scenario())


def test_entries_of_redis_with_the_largest_number_stop_no_worker(store_url: str, redis_url: str) -> None:
    """Two such entries to a task without order must not overflow the claim on PostgreSQL."""
    shop = Shop(store_url)
    shop.app.receive(RedisTransport(redis_url, group="g"), "orders", types=["plain"])

    def publish(id_: str, sequence: int, number: int) -> None:
        entry: dict[str, Any] = {
            "envelope_version": 1,
            "id": id_,
            "message_type": "plain",
            "schema_version": 1,
            "correlation_id": "c",
            "causation_id": "c",
            "idempotency_key": id_,
            "subject": "s",
            "created_at": "2026-01-01T00:00:00Z",
            "payload_inline": {"number": number},
            "ordering_key": "l",
            "sequence": sequence,
        }
        with redis.Redis.from_url(redis_url) as client:
            client.xadd("orders", {"envelope": json.dumps(entry)})

    async def scenario() -> None:
        await shop.app.migrate()
        async with shop.app:
            publish("a", limits.SEQUENCE_MAX, 1)
            await shop.work_until(lambda: shop.have_run(1))
            publish("b", LARGEST, 2)
            publish("c", 1, 3)
            await shop.plain.send(4)
            await shop.work_until(lambda: shop.have_run(3, 4))

    asyncio.run(scenario())


_FOREVER = timedelta(seconds=limits.INSTANT_MAX / 1e6)


#: Values at the limits of the options, and beyond.
_EDGES: tuple[dict[str, Any], ...] = (
    {"delay": timedelta.max},
    {"delay": _FOREVER},
    {"delay": 1e300},
    {"expires": timedelta.max},
    {"expires": _FOREVER, "delay": _FOREVER},
    {"expires": 1e18},
    {"at": datetime.max.replace(tzinfo=UTC)},
    {"at": datetime.min.replace(tzinfo=UTC)},
    {"at": datetime.max.replace(tzinfo=UTC), "expires": _FOREVER},
    {"deduplicate": "d", "deduplicate_for": limits.DEDUPLICATION_WINDOW_MAX},
    {"priority": limits.PRIORITY_MAX, "at": datetime(1, 1, 1, tzinfo=UTC)},
    {"ordering_key": "k", "sequence": limits.SEQUENCE_MAX, "expires": _FOREVER},
    {"ordering_key": "k", "sequence": 0},
)


def test_options_at_their_limits_are_refused_or_stop_no_worker(store_url: str) -> None:
    """Stores add instants, windows and ranks: no accepted value makes a statement overflow."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.app.migrate()
        async with shop.app:
            for number, options in enumerate(_EDGES, start=1):
                with suppress(OnefoldError):
                    await shop.plain.options(**options).send(0)
                await shop.plain.send(number)
            await shop.limited.send(1)
            await shop.work_until(lambda: shop.have_run(*range(1, len(_EDGES) + 1)))
            await shop.work_until(lambda: shop.have_run(1, name="limited"))
            await shop.app.count()
            await shop.app.find(Query())

    asyncio.run(scenario())
