"""Intake and relay between brokers and the store, with a broker in memory: what is received, refused and published.

Tests that depend on the answers of a store run on every store; tests of reading and declaring, on SQLite.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from onefold import (
    App,
    ConfigurationError,
    Context,
    DecodeError,
    Envelope,
    Query,
    State,
    StoreError,
    SyncApp,
    limits,
)
from onefold.brokers.admission import REFUSED
from onefold.brokers.transport import Outage
from onefold.clock import MICROSECONDS, give_way, system_random
from onefold.message.envelope import SCHEDULED, UNKEYED, from_json, to_json
from onefold.store.records import Record
from onefold.testing import FakeClock, Fault, FaultyStore, MemoryTransport, drain


def envelope(**changes: Any) -> Envelope:
    fields: dict[str, Any] = {
        "id": "theirs-1",
        "message_type": "charge",
        "queue": "orders",
        "idempotency_key": "order-7",
        "correlation_id": "correlation",
        "causation_id": "causation",
        "subject": "order 7",
        "payload_inline": b'{"order":7}',
    }
    return Envelope(**{**fields, **changes})


class Shop:
    """An app that receives from ``orders`` and has a task for its entries."""

    def __init__(self, url: str, **inlet: Any) -> None:
        self.clock = FakeClock()
        self.broker = MemoryTransport()
        self.app = App(url, clock=self.clock)
        self.charged: list[Envelope] = []
        self.noted: list[Envelope] = []

        @self.app.task(key="order-{order}", queue="money")
        async def charge(ctx: Context, order: int, cents: int = 100) -> int:
            self.charged.append(ctx.message)
            return order

        @self.app.task
        async def note(ctx: Context, order: int) -> None:
            self.noted.append(ctx.message)

        self.charge = charge
        self.app.receive(self.broker, "orders", **inlet)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def within() -> None:
            await self.app.migrate()
            async with self.app:
                await scenario()

        asyncio.run(within())

    async def publish(self, *envelopes: Envelope) -> None:
        await self.broker.publish(envelopes)
        await self.work()

    async def work(self) -> None:
        await drain(self.app, advance=False)

    async def letters(self) -> list[Any]:
        return [letter async for letter in self.app.dead_letters()]

    async def records(self) -> list[Record]:
        return await self.app.find(Query())


def test_what_is_received_is_a_message_of_this_app(store_url: str) -> None:
    """J6, A2: it has its own id and queue, the sender's key, subject and correlation, and the sender's id as cause."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.publish(envelope(tags={"tenant": "a"}, trace="trace"))
        (message,) = shop.charged
        assert message.id != "theirs-1"
        assert (message.queue, message.idempotency_key, message.subject) == ("money", "order-7", "order 7")
        assert (message.correlation_id, message.causation_id) == ("correlation", "theirs-1")
        assert (message.tags, message.trace) == ({"tenant": "a"}, "trace")
        assert shop.broker.waiting("orders") == 0

    shop.run(scenario)


def test_a_send_of_the_same_work_from_here_is_a_duplicate(store_url: str) -> None:
    """B25: fingerprints are computed from the arguments, with and without a default, whichever program sent them."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.publish(envelope(payload_inline=b'{ "cents": 100, "order": 7 }'))
        receipt = await shop.charge.send(7)
        assert receipt.duplicate
        await shop.publish(envelope(id="theirs-2", payload_inline=b'{"order":7}'))
        assert len(shop.charged) == 1
        assert await shop.letters() == []

    shop.run(scenario)


def test_a_message_without_a_key_is_known_by_its_id(store_url: str) -> None:
    """J6: an entry that a relay publishes twice is handled once; two messages are two."""
    shop = Shop(store_url)

    async def scenario() -> None:
        first, second = (
            envelope(id=name, message_type="note", idempotency_key=f"{UNKEYED}{name}") for name in ("a", "b")
        )
        await shop.publish(first, second, first)
        await shop.publish(second)
        assert [message.idempotency_key for message in shop.noted] == ["a", "b"]

    shop.run(scenario)


def test_the_same_key_with_another_payload_is_a_dead_letter(store_url: str) -> None:
    """B25: refused at receipt as it is at send, with the entry in the letter, and acknowledged."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.publish(envelope(), envelope(id="theirs-2", payload_inline=b'{"order":7,"cents":8}'))
        assert [message.causation_id for message in shop.charged] == ["theirs-1"]
        (letter,) = await shop.letters()
        assert (letter.message.message_type, letter.failure.reason) == (REFUSED, "key reuse")
        assert from_json(kept(letter)).payload_inline == b'{"order":7,"cents":8}'
        assert shop.broker.waiting("orders") == 0

    shop.run(scenario)


def one_key_for_one_order(url: str) -> None:
    """A sender that chooses keys freely can neither have an order charged twice nor prevent the charge of another."""
    shop = Shop(url)

    async def scenario() -> None:
        await shop.publish(
            envelope(id="a", idempotency_key="anything"),
            envelope(id="b", idempotency_key="order-8", payload_inline=b'{"order":666}'),
            envelope(id="c", idempotency_key="order-8", payload_inline=b'{"order":"eight"}'),
            envelope(id="d", idempotency_key="order-8", schema_version=2, payload_inline=b'{"order":8}'),
        )
        for order in (7, 8):
            receipt = await shop.charge.send(order)
            assert not receipt.duplicate
        await shop.work()
        assert [message.idempotency_key for message in shop.charged] == ["order-7", "order-8"]
        letters = {from_json(kept(one)).id: one.failure for one in await shop.letters()}
        assert {id_: failure.reason for id_, failure in letters.items()} == {
            "a": "key mismatch",
            "b": "key mismatch",
            "c": "malformed",
        }
        assert letters["a"].error_type == "onefold.errors.KeyMismatchError"
        assert "'anything', but charge makes 'order-7'" in letters["a"].error_message

    shop.run(scenario)


def test_the_key_of_a_task_that_makes_one_is_made_here(store_url: str) -> None:
    """B25: an entry with another key is refused; it does not run and takes no key."""
    one_key_for_one_order(store_url)


@pytest.mark.parametrize("key", [f"{UNKEYED}theirs-1", "theirs-1"], ids=["no key", "its id as its key"])
def test_a_key_that_is_missing_is_made_from_the_arguments(store_url: str, key: str) -> None:
    """B25: an event without a key leaves with its id in the key's place; a send from here is the same work."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.publish(envelope(idempotency_key=key))
        assert [message.idempotency_key for message in shop.charged] == ["order-7"]
        assert (await shop.charge.send(7)).duplicate
        assert await shop.letters() == []

    shop.run(scenario)


def test_a_sender_of_an_older_version_need_not_know_how_keys_are_made_now(sqlite_url: str) -> None:
    """Fault 25: during a rolling deployment its messages are accepted, with the key made here."""
    shop = Shop(sqlite_url)

    @shop.app.task(name="refund", version=2, key="refund-{order}")
    async def refund(ctx: Context, order: int) -> None:
        shop.charged.append(ctx.message)

    async def scenario() -> None:
        await shop.publish(envelope(message_type="refund", schema_version=1, idempotency_key="old-7"))
        assert [message.idempotency_key for message in shop.charged] == ["refund-7"]
        assert (await refund.send(7)).duplicate

    shop.run(scenario)


def test_a_newer_version_of_a_task_that_makes_keys_waits_outside(sqlite_url: str) -> None:
    """Fault 25: how it makes keys is unknown here, so it is left in the broker; a newer worker receives it."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        await shop.publish(envelope(schema_version=2, idempotency_key="v2-7"))
        shop.clock.advance(2 * limits.UNKNOWN_TYPE_SECONDS)
        await shop.work()
        (record,) = await shop.records()
        assert (record.state, record.envelope.message_type) == (State.SCHEDULED, REFUSED)
        newer = App(sqlite_url, clock=shop.clock)
        newer.receive(MemoryTransport(), "orders")
        seen: list[str] = []

        @newer.task(name="charge", version=2, key="v2-{order}", queue="money")
        async def charge(ctx: Context, order: int) -> None:
            seen.append(ctx.idempotency_key)

        shop.clock.advance(60.0)
        async with newer:
            await drain(newer, advance=False)
        assert seen == ["v2-7"]

    shop.run(scenario)


@pytest.mark.parametrize(
    ("body", "keys"),
    [(b'{"id":7}', ["placed-7"]), (b'{"other":7}', ["anything"])],
    ids=["read", "not to be read here"],
)
def test_the_key_of_an_event_is_made_here_too_if_it_can_be_read(sqlite_url: str, body: bytes, keys: list[str]) -> None:
    """A topic also passes on entries that it cannot read, with the key that they came with."""
    app, broker = App(sqlite_url, clock=FakeClock()), MemoryTransport()
    app.topic("order.placed", Placed, key="placed-{event.id}")
    app.receive(broker, "orders")

    async def scenario() -> None:
        async with app:
            for key in ("anything", "placed-7"):
                await broker.publish([envelope(message_type="order.placed", idempotency_key=key, payload_inline=body)])
            await drain(app, advance=False)
            found = await app.find(Query(message_type="order.placed"))
            letters = [one.failure.reason async for one in app.dead_letters()]
        assert [one.envelope.idempotency_key for one in found][: len(keys)] == keys
        assert letters == (["key mismatch"] if keys == ["placed-7"] else [])

    asyncio.run(scenario())


class Placed(msgspec.Struct):
    """An event."""

    id: int


class Refused(msgspec.Struct):
    """The contents of a letter."""

    source: str
    entry: str
    body: bytes
    size: int


def kept(letter: Any) -> bytes:
    """Return the entry in a letter."""
    return msgspec.json.decode(letter.message.payload_inline, type=Refused).body


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown type waits for a few minutes instead of an hour."""
    monkeypatch.setattr(limits, "UNKNOWN_TYPE_SECONDS", 300.0)


MALFORMED = [
    b"",
    b"\xff\xfe\x00",
    b"{}",
    b"null",
    b"[" * 10_000,
    b'{"id": 1}',
    to_json(envelope())[:-1],
    to_json(envelope()).replace(b'"order 7"', b'"order\\u0000"'),
    to_json(envelope()).replace(b"charge", b"Charge;--"),
    to_json(envelope(idempotency_key=f"{SCHEDULED}nightly 2030-01-01")),
    to_json(envelope(id=f"{SCHEDULED}nightly 2030-01-01", idempotency_key=f"{UNKEYED}x")),
]


def test_what_cannot_be_read_is_kept_as_a_dead_letter_with_its_bytes(store_url: str) -> None:
    """Fault 24: at once, for good, one letter each; entries behind it are handled, and none is delivered again."""
    shop = Shop(store_url)

    async def scenario() -> None:
        for body in MALFORMED:
            shop.broker.add("orders", body)
        await shop.publish(envelope())
        assert len(shop.charged) == 1
        letters = await shop.letters()
        assert [letter.failure.reason for letter in letters] == ["malformed"] * len(MALFORMED)
        assert [kept(letter) for letter in letters] == MALFORMED
        assert {letter.message.subject for letter in letters} == {"orders"}
        assert shop.broker.waiting("orders") == 0
        pulled = shop.broker.calls["pull"]
        await shop.work()
        assert shop.broker.calls["pull"] == pulled + 1

    shop.run(scenario)


def test_an_entry_that_was_refused_and_comes_again_is_one_letter(store_url: str) -> None:
    """Fault 24: the worker died after the letter was put and before the entry was acknowledged."""
    shop = Shop(store_url)

    async def scenario() -> None:
        shop.broker.add("orders", b"{}")
        ack, shop.broker.ack = shop.broker.ack, _fail  # type: ignore[method-assign]
        with pytest.raises(Died):
            await shop.work()
        shop.broker.ack = ack  # type: ignore[method-assign]
        shop.broker.expire()
        await shop.work()
        assert len(await shop.letters()) == 1
        assert shop.broker.waiting("orders") == 0

    shop.run(scenario)


class Died(BaseException):
    """Ends a worker; not an ``Exception``, which a worker would take for a failure of its transport."""


async def _fail(*_: object) -> None:
    raise Died


def test_an_entry_that_is_too_large_leaves_its_beginning_and_says_where_it_is(sqlite_url: str) -> None:
    """Faults 23 and 24."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        body = to_json(envelope()) + b" " * limits.ENVELOPE_BYTES_MAX
        shop.broker.add("orders", body)
        await shop.work()
        (letter,) = await shop.letters()
        assert letter.failure.reason == "malformed"
        assert f"has {len(body)} bytes" in letter.failure.error_message
        assert "entry 0 of 'orders'" in letter.failure.error_message
        assert kept(letter) == body[: limits.REFUSED_BYTES_MAX]

    shop.run(scenario)


def test_a_large_entry_of_an_unknown_type_says_that_it_is_not_kept_whole(sqlite_url: str) -> None:
    """Fault 24: it is an envelope, but too large to be kept beside the letter about it."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        large = b'{"text":"%s"}' % (b"x" * (limits.PAYLOAD_BYTES_MAX - 20))
        refund, note = (envelope(message_type=name, payload_inline=large) for name in ("refund", "note"))
        await shop.publish(refund, note)
        (letter,) = [one for one in await shop.letters() if one.message.message_type == REFUSED]
        assert "too large to keep" in letter.failure.error_message
        # An entry of a known type is received, however large.
        assert any(one.envelope.message_type == "note" for one in await shop.records())

    shop.run(scenario)


@pytest.mark.usefixtures("_impatient")
def test_an_unknown_type_waits_for_a_newer_worker_and_then_is_a_dead_letter(store_url: str) -> None:
    """Fault 18: it uses up no attempt; redriven after the code has learned the type, it is done."""
    shop = Shop(store_url)
    refunded: list[int] = []

    async def scenario() -> None:
        await shop.publish(envelope(message_type="refund"))
        assert await shop.letters() == []
        (waiting,) = await shop.records()
        assert (waiting.state, waiting.attempt) == (State.SCHEDULED, 0)
        await drain(shop.app)
        (letter,) = await shop.letters()
        assert letter.failure.reason == "unknown type"
        waited = (await shop.app.store.now() - waiting.envelope.created_at) / MICROSECONDS
        assert limits.UNKNOWN_TYPE_SECONDS <= waited < limits.UNKNOWN_TYPE_SECONDS + 60

        @shop.app.task
        async def refund(order: int) -> None:
            refunded.append(order)

        await letter.redrive(actor="ada", reason="there is a task for it now")
        await shop.work()
        assert refunded == [7]

    shop.run(scenario)


@pytest.mark.parametrize("types", [["refund"], []])
@pytest.mark.usefixtures("_impatient")
def test_only_what_is_wanted_is_taken(types: list[str], sqlite_url: str) -> None:
    """A4: ``types`` limits the intake to some types."""
    shop = Shop(sqlite_url, types=types)

    async def scenario() -> None:
        await shop.publish(envelope())
        await drain(shop.app)
        assert shop.charged == []
        assert [letter.failure.reason for letter in await shop.letters()] == ["unknown type"]

    shop.run(scenario)


@pytest.mark.usefixtures("_impatient")
def test_letters_cannot_be_sent_from_outside(sqlite_url: str) -> None:
    """A4, fault 29: onefold's own message types are unknown there."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        await shop.publish(envelope(message_type=REFUSED))
        await drain(shop.app)
        (letter,) = await shop.letters()
        assert letter.failure.reason == "unknown type"
        assert from_json(kept(letter)).message_type == REFUSED

    shop.run(scenario)


def test_ids_of_others_mean_nothing_here(store_url: str) -> None:
    """B4: two messages may come with one id, even with that of a message that is here."""
    shop = Shop(store_url)

    async def scenario() -> None:
        receipt = await shop.charge.send(1)
        await shop.publish(
            envelope(id=receipt.id),
            envelope(id=receipt.id, idempotency_key="order-8", payload_inline=b'{"order":8}'),
        )
        assert sorted(message.idempotency_key for message in shop.charged) == ["order-1", "order-7", "order-8"]

    shop.run(scenario)


def test_bodies_of_others_are_read_by_a_function(sqlite_url: str) -> None:
    """A2: the function returns what the body means, including its key; a body that it cannot read is a letter."""

    def read_order(body: bytes) -> Envelope:
        try:
            order = msgspec.json.decode(body, type=dict[str, int])["number"]
        except (msgspec.MsgspecError, KeyError) as error:
            raise DecodeError("order", str(error)) from error
        return envelope(id=f"order-{order}", idempotency_key=f"order-{order}", payload_inline=b'{"order":%d}' % order)

    shop = Shop(sqlite_url, read=read_order)

    async def scenario() -> None:
        for body in (b'{"number":7}', b'{"number":7}', b'{"size":1}'):
            shop.broker.add("orders", body)
        await shop.work()
        assert [message.idempotency_key for message in shop.charged] == ["order-7"]
        assert [kept(letter) for letter in await shop.letters()] == [b'{"size":1}']

    shop.run(scenario)


def test_arguments_that_do_not_fit_are_a_dead_letter_of_their_own_task(sqlite_url: str) -> None:
    """C9: the envelope is fine, so it is a message like any other, and its handler does not run."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        await shop.publish(envelope(message_type="note", payload_inline=b'{"order":"seven"}'))
        (letter,) = await shop.letters()
        assert (letter.message.message_type, letter.failure.reason) == ("note", "contract")

    shop.run(scenario)


def test_a_message_of_a_newer_version_waits_for_a_newer_worker(sqlite_url: str) -> None:
    """Fault 25."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        await shop.publish(envelope(message_type="note", schema_version=2))
        (record,) = await shop.records()
        assert (record.state, record.attempt, record.envelope.message_type) == (State.SCHEDULED, 0, "note")

    shop.run(scenario)


def test_what_changes_messages_at_send_changes_those_received_too(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)

    @shop.app.on_send
    def tag(message: Envelope) -> Envelope:
        if message.message_type == REFUSED or message.subject == "poison":
            raise ValueError("not this one")
        return msgspec.structs.replace(message, tags={"seen": "yes"})

    async def scenario() -> None:
        await shop.publish(envelope(message_type="note", idempotency_key="poison", subject="poison"), envelope())
        assert [message.tags for message in shop.charged] == [{"seen": "yes"}]
        await drain(shop.app)
        (letter,) = await shop.letters()
        assert "not this one" in letter.failure.error_message

    shop.run(scenario)


def test_a_store_that_refuses_one_of_a_batch_takes_the_others(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 24: the refused entry is kept as a letter, whatever the reason, and holds up no other."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        put = shop.app.store.put

        async def pick(envelopes: Any, *options: Any) -> Any:
            if any(one.subject == "poison" for one in envelopes):
                raise StoreError("it cannot be stored")
            return await put(envelopes, *options)

        monkeypatch.setattr(shop.app.store, "put", pick)
        poison = envelope(idempotency_key="order-1", payload_inline=b'{"order":1}', subject="poison")
        await shop.publish(poison, envelope())
        assert [message.subject for message in shop.charged] == ["order 7", "poison"]

    shop.run(scenario)


def test_while_the_store_is_away_nothing_is_acknowledged(store_url: str) -> None:
    """Fault 34: pulled entries are given back, and handled when the store is back."""
    shop = Shop(store_url)

    async def scenario() -> None:
        shop.app._store = FaultyStore(shop.app.store, [Fault("refuse", at, "put") for at in (1, 2, 3)])
        await shop.broker.publish([envelope()])
        for _ in range(3):
            await shop.app.work(until_idle=True)
            assert (shop.broker.calls["ack"], shop.broker.waiting("orders")) == (0, 1)
        await shop.app.work(until_idle=True)
        assert len(shop.charged) == 1
        assert shop.broker.waiting("orders") == 0

    shop.run(scenario)


async def let_pass(clock: FakeClock, seconds: int | float) -> None:
    """Let time pass, half a second at a time, and let all tasks run in between."""
    for _ in range(round(2 * seconds)):
        clock.advance(0.5)
        for _ in range(10):
            await give_way()


def test_a_broker_that_is_away_is_asked_ever_less_often_and_then_taken_from(sqlite_url: str) -> None:
    """Fault 34: an hour of it, on the test's own clock."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        await shop.broker.publish([envelope()])
        shop.broker.away = True
        (intake,) = shop.app._intakes()
        running = asyncio.create_task(intake.run())
        await let_pass(shop.clock, 3_600)
        asked = shop.broker.calls["pull"]
        assert 3_600 / limits.TRANSPORT_PAUSE_SECONDS_MAX <= asked < 2_400, asked
        shop.broker.away = False
        await let_pass(shop.clock, limits.TRANSPORT_PAUSE_SECONDS_MAX)
        while shop.broker.waiting("orders"):
            await give_way()
        running.cancel()
        await asyncio.wait([running])
        await shop.work()
        assert len(shop.charged) == 1

    shop.run(scenario)


def test_a_worker_that_is_stopped_gives_back_what_it_has_pulled(sqlite_url: str) -> None:
    """Fault 40: the pull was under way; other workers get the entries at once, not when the lease is over."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        pull, asked, go = shop.broker.pull, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **options: Any) -> Any:
            asked.set()
            await go.wait()
            return await pull(*args, **options)

        shop.broker.pull = slow  # type: ignore[method-assign]
        await shop.broker.publish([envelope()])
        working = asyncio.create_task(shop.app.work())
        await asked.wait()
        shop.app.stop_working()
        asyncio.get_running_loop().call_later(0.05, go.set)
        await working
        shop.broker.pull = pull  # type: ignore[method-assign]
        assert (shop.charged, shop.broker.waiting("orders")) == ([], 1)
        await shop.work()
        assert len(shop.charged) == 1

    shop.run(scenario)


# out


class Publisher:
    """An app that relays ``order.placed`` to ``orders``."""

    def __init__(self, url: str, **topic: Any) -> None:
        self.clock = FakeClock()
        self.broker = MemoryTransport()
        self.app = App(url, clock=self.clock)
        self.placed = self.app.topic("order.placed", int, **topic)
        self.relay = self.app.relay(self.placed, to=self.broker, stream="orders")

    run = Shop.run

    def published(self) -> list[Envelope]:
        return [from_json(body) for body in self.broker.bodies("orders")]


def test_an_event_is_relayed_under_its_own_name_id_and_key(store_url: str) -> None:
    """J6, A2: receivers recognise it, and the message that caused it."""
    shop = Publisher(store_url, key="order-{event}")

    async def scenario() -> None:
        await shop.app.subscribe()
        receipt = await shop.placed.options(correlation_id="visit", tags={"tenant": "a"}).publish(7)
        await drain(shop.app)
        (sent,) = shop.published()
        assert (sent.id, sent.message_type, sent.queue) == (receipt.id, "order.placed", "orders")
        assert (sent.idempotency_key, sent.correlation_id) == ("order-7", "visit")
        assert (sent.payload_inline, sent.tags) == (b"7", {"tenant": "a"})
        assert sent.created_at > 0

    shop.run(scenario)


def test_an_event_without_a_key_leaves_with_its_id_as_its_key(sqlite_url: str) -> None:
    """J6: receivers of any kind can recognise a repeat by the key alone."""
    shop = Publisher(sqlite_url)

    async def scenario() -> None:
        await shop.app.subscribe()
        receipt = await shop.placed.publish(7)
        by_hand = await shop.relay.send(8)
        await drain(shop.app)
        found = {(one.id, one.idempotency_key) for one in shop.published()}
        assert found == {(receipt.id, receipt.id), (by_hand.id, by_hand.id)}

    shop.run(scenario)


def test_ordered_events_are_relayed_in_their_order(store_url: str) -> None:
    """J5: one after the other for each key, independent of other keys."""
    shop = Publisher(store_url, ordering_key="{event}")

    async def scenario() -> None:
        await shop.app.subscribe()
        for number in range(5):
            await shop.placed.options(ordering_key="lamp", tags={"number": str(number)}).publish(1)
        await drain(shop.app)
        assert [one.tags and one.tags["number"] for one in shop.published()] == ["0", "1", "2", "3", "4"]

    shop.run(scenario)


def test_while_the_broker_is_away_no_attempt_is_used_up_and_it_is_asked_ever_less_often(store_url: str) -> None:
    """Fault 34, C9: forty minutes of it; the events wait in the store, and leave when it is back."""
    shop = Publisher(store_url)

    async def scenario() -> None:
        await shop.app.subscribe()
        shop.broker.away = True
        await shop.placed.publish(7)
        for _ in range(40):
            await drain(shop.app, advance=False)
            shop.clock.advance(60.0)
        asked = shop.broker.calls["publish"]
        assert 20 <= asked <= 50, asked
        records = await shop.app.find(Query(message_type="order.placed.to.orders"))
        assert [(one.state, one.attempt) for one in records] == [(State.SCHEDULED, 0)]
        shop.broker.away = False
        shop.clock.advance(60.0)
        await drain(shop.app)
        assert len(shop.published()) == 1

    shop.run(scenario)


def test_a_broker_that_refuses_for_good_makes_a_dead_letter_after_the_attempts(sqlite_url: str) -> None:
    """C6, fault 34: an error that only an operator can fix makes a dead letter like any other."""
    shop = Publisher(sqlite_url)

    async def scenario() -> None:
        await shop.app.subscribe()

        async def refuse(envelopes: Any) -> None:
            raise RuntimeError("no")

        shop.broker.publish = refuse  # type: ignore[method-assign]
        await shop.placed.publish(7)
        await drain(shop.app)
        (letter,) = [letter async for letter in shop.app.dead_letters()]
        assert (letter.failure.reason, len(await letter.attempts())) == ("attempts exhausted", limits.ATTEMPTS_DEFAULT)

    shop.run(scenario)


def test_a_relay_of_one_app_is_received_by_another(tmp_path: Any) -> None:
    """J9: two services, two stores, one stream; subscribers of the second handle the events of the first."""
    shop = Publisher(f"sqlite:///{tmp_path}/shop.db", key="{event}")
    billing = App(f"sqlite:///{tmp_path}/billing.db", clock=shop.clock)
    billing.receive(shop.broker, "orders")
    billed: list[int] = []

    @billing.on("order.placed")
    async def bill(order: int) -> None:
        billed.append(order)

    async def scenario() -> None:
        await shop.app.subscribe()
        await billing.migrate()
        async with billing:
            for order in (7, 8, 7):
                await shop.placed.publish(order)
            await drain(shop.app)
            await drain(billing)
        assert sorted(billed) == [7, 8]

    shop.run(scenario)


@pytest.mark.parametrize("topic", [{}, {"key": "{event}"}], ids=["without a key", "with a key"])
def test_a_circle_of_relays_comes_to_an_end(topic: Any, sqlite_url: str) -> None:
    """J6: an event that comes back is recognised by its key, which stays the same all the way."""
    shop = Publisher(sqlite_url, **topic)
    shop.app.receive(shop.broker, "orders")

    async def scenario() -> None:
        await shop.app.subscribe()
        await shop.placed.publish(7)
        for _ in range(6):
            await drain(shop.app)
        assert 1 <= len(shop.published()) <= 2
        assert shop.broker.waiting("orders") == 0

    shop.run(scenario)


# declaring


def test_what_cannot_be_meant_is_refused_at_declaration() -> None:
    """L4, fault 29."""
    app, broker = App("sqlite:///:memory:"), MemoryTransport()
    app.receive(broker, "orders")
    with pytest.raises(ConfigurationError, match="received twice"):
        app.receive(broker, "orders")
    for name in ("", "Orders", "a b", "{orders}", "orders\r\n", "x" * 64, "../orders"):
        with pytest.raises(ConfigurationError, match="stream name"):
            app.receive(broker, name)
        with pytest.raises(ConfigurationError, match="stream name"):
            app.relay("order.placed", to=broker, stream=name)
    with pytest.raises(ConfigurationError, match="message type name"):
        app.receive(broker, "other", types=["Order Placed"])
    with pytest.raises(ConfigurationError, match=r"write \['a'\]"):
        app.receive(broker, "other", types="a")
    with pytest.raises(ConfigurationError, match="event name"):
        app.relay("Order Placed", to=broker, stream="orders")


def test_an_app_without_an_event_loop_declares_them_too(tmp_path: Any) -> None:
    app, broker = SyncApp(f"sqlite:///{tmp_path}/shop.db"), MemoryTransport()
    placed = app.topic("order.placed", int)
    app.relay(placed, to=broker, stream="orders")
    app.receive(broker, "orders")
    with app:
        app.subscribe()
        placed.publish(7)
        app.work(until_idle=True)
    assert len(broker.bodies("orders")) == 1


def test_nothing_of_a_payload_is_logged_or_printed(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 33: neither of received entries nor of refused ones."""
    shop = Shop(sqlite_url)
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        shop.broker.add("orders", b'{"password":"CANARY"}')
        await shop.publish(envelope(payload_inline=b'{"order":"CANARY"}'))
        shop.broker.expire()
        shop.broker.add("orders", b"CANARY")
        (delivery,) = await shop.broker.pull("orders", limit=1, lease=1)
        logging.getLogger("onefold").warning("%s %r", delivery, delivery)

    shop.run(scenario)
    assert "refused source=orders" in caplog.text
    assert "CANARY" not in caplog.text


def test_a_pause_is_as_long_again_as_the_outage_up_to_its_limit() -> None:
    clock = FakeClock()
    outage = Outage(clock, system_random(), 1.0, 60.0)
    for away, full in ((0, 1), (0, 1), (0.5, 1), (4, 4), (30, 30), (1_000, 60)):
        clock.advance(away)
        for _ in range(20):  # however many callers notice the outage
            assert full / 2 <= outage.pause() <= full + 6
    outage.end()
    assert outage.pause() <= 1.0
