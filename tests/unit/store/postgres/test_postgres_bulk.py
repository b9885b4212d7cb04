"""Many messages at once on PostgreSQL: each is stored as it would be alone, and part follows part without a pause."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import psycopg
import pytest
from test_postgres_engine import claim, envelope, opened, run, terminate_sessions

from onefold import App, StoreUnavailableError
from onefold.clock import MICROSECONDS
from onefold.message.envelope import Envelope, Occurrence
from onefold.store import Query
from onefold.store.postgres.wire.arrays import Column, LiteralColumn, blobs, ids, teach, texts
from onefold.store.postgres.wire.statements import SQL
from onefold.testing import FakeClock

# columns

ONE, OTHER = "0192f0c1-2345-7abc-8def-0123456789ab", "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("kind", "column", "items"),
    [
        ("text", texts, []),
        ("text", texts, ["same", "same"]),
        ("text", texts, ["", "ä", "longer", "…"]),
        ("text", texts, [None, "a", None]),
        ("text", texts, [None, None]),
        ("bytea", blobs, [b"12", b"34", b"\0\0"]),
        ("bytea", blobs, [b"", b"1", None, b"123"]),
        ("uuid", ids, []),
        ("uuid", ids, [ONE]),
        ("uuid", ids, [ONE, OTHER]),
        ("uuid", ids, [ONE.upper(), OTHER.replace("-", "")]),
    ],
)
def test_columns_are_read_as_they_were_written(postgres_url: str, kind: str, column: Any, items: list[Any]) -> None:
    with psycopg.connect(postgres_url) as connection:
        teach(connection)
        (read,) = connection.execute(f"SELECT %s::{kind}[]", (column(items),)).fetchone() or ()
        assert read == ([uuid.UUID(item) for item in items] if kind == "uuid" else items)


@pytest.mark.parametrize("wrong", ["", "order:1", ONE[:-1], ONE + "0", ONE[:-2] + "zz"])
def test_what_is_no_id_is_left_to_the_server_to_refuse(postgres_url: str, wrong: str) -> None:
    column: Column = ids([ONE, wrong])
    assert isinstance(column, LiteralColumn)
    with psycopg.connect(postgres_url) as connection:
        teach(connection)
        with pytest.raises(psycopg.DataError):
            connection.execute("SELECT %s::uuid[]", (column,))


# one statement for every kind of message


def _about_itself(key: str) -> Envelope:
    return msgspec.structs.replace(envelope(key), subject=key)


def _about_something(key: str) -> Envelope:
    return msgspec.structs.replace(envelope(key), subject=f"order:{key}")


def _caused(key: str) -> Envelope:
    return msgspec.structs.replace(envelope(key), correlation_id="a chain", causation_id="a cause")


TOGETHER: dict[str, list[Envelope]] = {
    "plain": [envelope(key) for key in "cab"],
    "with payloads": [envelope(key, payload=b'"%s"' % (key.encode() * size)) for size, key in enumerate("cab")],
    "elsewhere": [envelope(key, message_type="ship", queue="other") for key in "cab"],
    "about themselves": [_about_itself(key) for key in "cab"],
    "about something": [_about_something(key) for key in "cab"],
    "caused": [_caused(key) for key in "cab"],
    "delayed": [envelope(key, delay=5 * MICROSECONDS, retention=7 * MICROSECONDS) for key in "cab"],
    "due": [envelope(key, due_at=123_456_789, retention=1) for key in "cab"],
    "pinned": [envelope(key, schema_version=3, pinned=True, saga=True) for key in "cab"],
    "with headers": [envelope(key, trace="00-ab", tags={"a": "b"}, reply_to="m/s") for key in "cab"],
    "scheduled": [envelope(key, occurrence=Occurrence("s", 5)) for key in "cab"],
    "without keys": [envelope() for _ in "cab"],
    "of two tasks": [envelope("a"), envelope("b", message_type="ship")],
    "in two queues": [envelope("a"), envelope("b", queue="other")],
    "of two versions": [envelope("a"), envelope("b", schema_version=2)],
    "one without a key": [envelope("a"), envelope()],
    "one delayed": [envelope("a"), envelope("b", delay=5)],
    "one with tags": [envelope("a"), envelope("b", tags={"a": "b"})],
    "one caused": [envelope("a"), _caused("b")],
    "with a priority": [envelope(key, priority=3) for key in "ab"],
    "at a gate": [envelope(key, gate="charge:x") for key in "ab"],
    "in a line": [envelope(key, ordering_key="x") for key in "ab"],
}


def _row(url: str, e: Envelope) -> tuple[Any, ...]:
    """Return all that is stored of a message, but for its place in a line, which the server counts."""
    with psycopg.connect(url) as connection:
        (row,) = connection.execute(
            """
            SELECT to_jsonb(m), to_jsonb(d) - 'place', to_jsonb(k)
            FROM onefold.message m JOIN onefold.delivery d USING (id) LEFT JOIN onefold.key k ON k.message_id = m.id
            WHERE m.id = %s
            """,
            (e.id,),
        ).fetchall()
        return row


@pytest.mark.parametrize("what", TOGETHER)
def test_messages_put_together_are_stored_as_each_would_be_alone(postgres_url: str, what: str) -> None:
    async def scenario() -> None:
        given = TOGETHER[what]
        clock = FakeClock()
        async with opened(postgres_url, clock=clock) as store:
            assert [one.id for one in await store.put(given)] == [e.id for e in given]
            together = [_row(postgres_url, e) for e in given]
            found = await store.find(Query(ids=tuple(e.id for e in given)))
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("TRUNCATE onefold.message, onefold.delivery, onefold.key")
        async with opened(postgres_url, clock=clock) as store:
            for e in given:
                await store.put([e])
            assert together == [_row(postgres_url, e) for e in given]
            assert found == await store.find(Query(ids=tuple(e.id for e in given)))

    run(scenario)


def test_of_messages_put_together_those_whose_key_is_taken_are_reported(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            first = await store.put([envelope("b"), envelope("d")])
            given = [envelope(key) for key in "abcde"]
            answers = await store.put(given)
            assert [one.duplicate for one in answers] == [False, True, False, True, False]
            assert [answers[1].id, answers[3].id] == [one.id for one in first]
            assert {lease.id for lease in await claim(store)} == {one.id for one in (*first, *answers)}
            assert not await store.find(Query(ids=(given[1].id, given[3].id)))

    run(scenario)


# part after part


class _Held:
    """A key that an open transaction holds, so that the server gets no further than to its message."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = psycopg.connect(url)
        self._connection.execute(
            "INSERT INTO onefold.key (scope, key, kind, schema_version, message_id, fingerprint) "
            "VALUES ('charge', %s, 0, 1, gen_random_uuid(), '')",
            (key,),
        )

    def let_go(self) -> None:
        self._connection.close()


class _Watch:
    """Counts the puts that are under way, and says when there are two."""

    def __init__(self) -> None:
        self.under_way = self.most = 0
        self.two = asyncio.Event()

    def see(self, moment: str, text: str) -> None:
        if text == SQL["put"]:
            self.under_way += 1 if moment == "before" else -1
            self.most = max(self.most, self.under_way)
            if self.under_way > 1:
                self.two.set()


def _declare(store: Any) -> tuple[App, Any]:
    app = App(store=store)

    @app.task(key="{order}")
    async def charge(order: int) -> None: ...

    return app, charge


def test_a_server_has_the_next_part_before_it_is_done_with_the_last(postgres_url: str) -> None:
    async def scenario() -> None:
        watch = _Watch()
        async with opened(postgres_url, trace=watch.see) as store:
            app, charge = _declare(store)
            await app.open()
            held = _Held(postgres_url, "150")
            sending = asyncio.ensure_future(app.send_many(charge.call(n) for n in range(1_000)))
            await watch.two.wait()
            held.let_go()
            assert not any(one.duplicate for one in await sending)
            assert watch.most == 2
            assert (await store.count())["default"].scheduled == 1_000

    run(scenario)


def test_a_key_that_is_taken_at_the_last_moment_is_found(postgres_url: str) -> None:
    async def scenario() -> None:
        watch = _Watch()
        async with opened(postgres_url, trace=watch.see) as store, opened(postgres_url) as other:
            app, charge = _declare(store)
            await app.open()
            sending: asyncio.Future[Any]
            async with other.transaction() as transaction:
                call = charge.call(150)
                first = envelope("150", payload=call.payload)
                await transaction.put([first])
                sending = asyncio.ensure_future(app.send_many(charge.call(n) for n in range(1_000)))
                await watch.two.wait()
            sent = await sending
            assert [n for n, one in enumerate(sent) if one.duplicate] == [150]
            assert sent[150].id == first.id
            assert (await store.count())["default"].scheduled == 1_000

    run(scenario)


def test_a_batch_that_is_sent_again_with_more_stores_only_the_rest(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            app, charge = _declare(store)
            await app.open()
            first = await app.send_many(charge.call(n) for n in range(1_000))
            for known in (1_000, 1_100):
                again = await app.send_many(charge.call(n) for n in range(1_100))
                assert [one.id for one in again[:1_000]] == [one.id for one in first]
                assert [one.duplicate for one in again] == [n < known for n in range(1_100)]
            assert (await store.count())["default"].scheduled == 1_100

    run(scenario)


def test_messages_that_are_put_again_get_no_second_delivery(postgres_url: str) -> None:
    """Without a key only their ids tell that they are there already: the answer to the first put was lost."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            given = [envelope() for _ in range(3)]
            await store.put(given)
            assert len(await claim(store, 1)) == 1
            assert [one.duplicate for one in await store.put([*given, envelope()])] == [False] * 4
            assert len(await claim(store)) == 3

    run(scenario)


@pytest.mark.parametrize("first", range(6))
def test_a_put_that_is_in_vain_takes_nothing_else_with_it(postgres_url: str, first: int) -> None:
    """Whatever is sent before or behind it: other messages, some that need to be judged, and more of the same kind."""

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope("a1"), envelope("a2")])
            parts = [
                [envelope("a0"), envelope("a1")],
                [envelope("b0", deduplication_key="b")],
                [envelope("c0"), envelope("c1", queue="other")],
                [envelope("d0", deduplication_key="d"), envelope("d1")],
                [envelope("e0"), envelope("a2")],
                [envelope("f0"), envelope("f1")],
            ]
            parts = parts[first:] + parts[:first]
            async with store.transaction() as transaction:
                answers = await asyncio.gather(*map(transaction.put, parts))
            taken = [[e.idempotency_key in ("a1", "a2") for e in part] for part in parts]
            assert [[one.duplicate for one in part] for part in answers] == taken
            counts = await store.count()
            assert (counts["default"].scheduled, counts["other"].scheduled) == (10, 1)

    run(scenario)


def test_in_a_line_nothing_is_sent_ahead(postgres_url: str) -> None:
    async def scenario() -> None:
        watch = _Watch()
        async with opened(postgres_url, trace=watch.see) as store:
            app, charge = _declare(store)
            await app.open()
            await app.send_many(charge.options(ordering_key="x").call(n) for n in range(1_000))
            assert watch.most == 1
            assert [lease.envelope.idempotency_key for lease in await claim(store, 1)] == ["0"]

    run(scenario)


def test_a_session_lost_between_two_parts_leaves_nothing(postgres_url: str) -> None:
    async def scenario() -> None:
        watch = _Watch()
        async with opened(postgres_url, trace=watch.see) as store:
            app, charge = _declare(store)
            await app.open()
            held = _Held(postgres_url, "150")
            sending = asyncio.ensure_future(app.send_many(charge.call(n) for n in range(1_000)))
            await watch.two.wait()
            terminate_sessions(postgres_url)
            with pytest.raises(StoreUnavailableError):
                await sending
            held.let_go()
            assert await store.count() == {}

    run(scenario)


def test_a_session_lost_before_the_first_part_costs_nothing_but_time(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            app, charge = _declare(store)
            await app.open()
            await app.send_many(charge.call(n) for n in range(1_000))
            terminate_sessions(postgres_url)
            await app.send_many(charge.call(n) for n in range(1_000, 2_000))
            assert (await store.count())["default"].scheduled == 2_000

    run(scenario)


def test_a_caller_that_gives_up_in_the_middle_of_a_batch_leaves_nothing(postgres_url: str) -> None:
    async def scenario() -> None:
        watch = _Watch()
        async with opened(postgres_url, trace=watch.see) as store:
            app, charge = _declare(store)
            await app.open()
            held = _Held(postgres_url, "150")
            sending = asyncio.ensure_future(app.send_many(charge.call(n) for n in range(1_000)))
            await watch.two.wait()
            sending.cancel()
            held.let_go()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert await store.count() == {}
            assert len(await app.send_many(charge.call(n) for n in range(1_000))) == 1_000

    run(scenario)


@pytest.mark.parametrize("number", [300, 1_200])
def test_senders_of_the_same_keys_in_opposite_order_both_succeed(postgres_url: str, number: int) -> None:
    """The server ends one of them as a deadlock; it puts its messages once more, in the order of their keys."""

    async def scenario() -> None:
        app = App(postgres_url)
        await app.migrate()

        @app.task(key="{key}")
        async def send(key: str) -> None: ...

        async with app:
            for turn in range(3):
                calls = [send.call(f"{turn}-{n}") for n in range(number)]
                one, other = await asyncio.gather(app.send_many(calls), app.send_many(calls[::-1]))
                assert [receipt.id for receipt in one] == [receipt.id for receipt in reversed(other)]
                assert sum(not receipt.duplicate for receipt in (*one, *other)) == number

    run(scenario)
