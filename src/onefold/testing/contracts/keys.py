"""Deduplication keys, which coalesce triggers for a while, and batch keys, which cover many messages at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.errors import KeyReuseError
from onefold.message.envelope import Envelope
from onefold.store import PutOptions, State, Stored
from onefold.testing.contracts.bench import DEAD, DONE, Bench, Contract, scenario
from onefold.testing.model import Model

_BATCH = PutOptions(batch_key="b")
_MINUTE = 60 * MICROSECONDS


def _batch(bench: Bench, count: int = 3, payload: bytes = b"[1]") -> list[Envelope]:
    """Make a batch as the app does: a message without its own key is named after the batch and its place in it."""
    return [bench.message(f"b#{number}", payload=payload) for number in range(count)]


#: Idempotency key, deduplication key and payload of the messages of one put, in which the order of messages matters.
_Sent = tuple[str | None, str | None, bytes]
_MIXED: dict[str, Sequence[_Sent]] = {
    "window first": [("k", "d", b"[1]"), ("k", None, b"[1]")],
    "window last": [("k", None, b"[1]"), ("k", "d", b"[1]")],
    "two windows": [("k", "d", b"[1]"), ("k", "e", b"[1]"), ("k", None, b"[1]")],
    "clash behind a window": [("k", "d", b"[1]"), ("k", None, b"[2]")],
    "clash before a window": [("k", None, b"[1]"), ("k", "d", b"[2]")],
    "not stored, so its key is free": [("k", "d", b"[1]"), ("l", "d", b"[1]"), ("l", None, b"[2]")],
    "between messages without a key": [(None, None, b"1"), ("k", "d", b"1"), (None, "d", b"1"), ("k", None, b"1")],
    "each waits for the one before": [(f"k{(number + 1) // 2}", f"d{number // 2}", b"[1]") for number in range(60)],
    "one task, each key twice": [
        (f"k{number % 50}", None, b"[1]" if number < 50 else b"[2]") for number in reversed(range(100))
    ],
}


def _messages(bench: Bench, sent: Sequence[_Sent]) -> list[Envelope]:
    return [
        bench.message(key, payload=payload, deduplication_key=window, deduplicate_for=_MINUTE)
        for key, window, payload in sent
    ]


def _told(stored: Stored) -> tuple[str, bool, bool]:
    return stored.id, stored.duplicate, stored.clash


class KeyContract(Contract):
    """Deduplication keys, batch keys, and all kinds of keys together."""

    @scenario
    async def test_a_deduplication_key_coalesces_for_its_window_whatever_the_payload(self, bench: Bench) -> None:
        first = await bench.put(deduplication_key="d", deduplicate_for=_MINUTE)
        bench.clock.advance(59.999999)
        second = await bench.put(deduplication_key="d", deduplicate_for=_MINUTE, payload=b"[2]")
        assert (second.id, second.state, second.duplicate) == (first.id, State.SCHEDULED, True)
        assert await bench.all_ids() == {first.id}
        bench.clock.advance(0.000001)
        third = await bench.put(deduplication_key="d", deduplicate_for=_MINUTE)
        assert (third.duplicate, third.id != first.id) == (False, True)
        fourth = await bench.put(deduplication_key="d", deduplicate_for=_MINUTE)
        assert (fourth.id, fourth.duplicate) == (third.id, True)

    @scenario
    async def test_a_deduplication_window_outlasts_the_message(self, bench: Bench) -> None:
        first = await bench.settled(None, DONE, deduplication_key="d", deduplicate_for=_MINUTE)
        second = await bench.put(deduplication_key="d", deduplicate_for=_MINUTE)
        assert (second.id, second.state, second.duplicate) == (first.id, State.DONE, True)

    @scenario
    async def test_a_trigger_that_was_taken_back_does_not_swallow_the_next(self, bench: Bench) -> None:
        first = await bench.put(deduplication_key="d", deduplicate_for=_MINUTE)
        assert await bench.move(first.id, State.CANCELLED)
        second = await bench.put(deduplication_key="d", deduplicate_for=_MINUTE)
        assert (second.duplicate, second.id != first.id) == (False, True)

    @scenario
    async def test_a_deduplication_key_belongs_to_one_consumer(self, bench: Bench) -> None:
        await bench.put(deduplication_key="d")
        assert not (await bench.put(deduplication_key="d", message_type="other")).duplicate

    @scenario
    async def test_the_two_kinds_of_keys_have_namespaces_of_their_own(self, bench: Bench) -> None:
        await bench.put("same")
        assert not (await bench.put("other", deduplication_key="same")).duplicate

    @scenario
    async def test_the_idempotency_key_wins_over_the_deduplication_key(self, bench: Bench) -> None:
        by_key = await bench.put("k")
        by_window = await bench.put("other", deduplication_key="d")
        third = await bench.put("k", deduplication_key="d")
        assert (third.id, third.duplicate) == (by_key.id, True)
        clashing = await bench.put("k", payload=b"[2]", deduplication_key="d")
        assert (clashing.id, clashing.clash) == (by_key.id, True)
        assert await bench.all_ids() == {by_key.id, by_window.id}

    @scenario
    async def test_a_message_that_is_not_stored_takes_no_key(self, bench: Bench) -> None:
        await bench.put("k", deduplication_key="d")
        assert (await bench.put("unused", deduplication_key="d")).duplicate
        assert not (await bench.put("unused", payload=b"[2]")).duplicate
        assert (await bench.put("k", deduplication_key="untaken")).duplicate
        assert (await bench.put("k", deduplication_key="untaken", payload=b"[2]")).clash
        assert not (await bench.put(deduplication_key="untaken")).duplicate

    @scenario
    async def test_a_key_window_over_does_not_open_the_other_key(self, bench: Bench) -> None:
        """The deduplication window ends while the message lives; its idempotency key still finds it."""
        first = await bench.put("k", deduplication_key="d", deduplicate_for=_MINUTE)
        bench.clock.advance(60.0)
        second = await bench.put("k", deduplication_key="d", deduplicate_for=_MINUTE)
        assert (second.id, second.duplicate) == (first.id, True)

    # Several kinds in one put.

    @scenario
    async def test_messages_of_one_put_are_judged_in_their_order(self, bench: Bench) -> None:
        """For all combinations of keys the answers are the same as when the messages are put one by one."""
        for name, sent in _MIXED.items():
            await self._put_as_the_model_says(bench, name, _messages(bench, sent))

    @scenario
    async def test_expired_keys_are_taken_in_order_too(self, bench: Bench) -> None:
        """In one put, the first message of each key takes it over from the message that held it before."""
        for name, sent in _MIXED.items():
            before = {key: None for key, _, _ in sent if key is not None}
            old = await bench.store.put([bench.message(key, payload=b"[0]") for key in before])
            for one in old:
                assert await bench.move(one.id, State.CANCELLED)
            await self._put_as_the_model_says(bench, name, _messages(bench, sent), kept={one.id for one in old})

    async def _put_as_the_model_says(
        self, bench: Bench, name: str, messages: list[Envelope], kept: frozenset[str] | set[str] = frozenset()
    ) -> None:
        model = Model(now=bench.clock.now())
        expected = [_told(model.put(one, PutOptions())) for one in messages]
        assert [_told(one) for one in await bench.store.put(messages)] == expected, name
        assert await bench.all_ids() - kept == set(model.messages), name
        # The next list of messages finds an empty store.
        for one in model.messages:
            assert await bench.move(one, State.CANCELLED)
        bench.clock.advance(60.0)
        async with bench.store.transaction() as transaction:
            await transaction.purge()

    @scenario
    async def test_senders_at_once_with_and_without_a_window_store_one_message(self, bench: Bench) -> None:
        """They share a commit, and still one key gives one message."""
        for number in range(20):
            key, window = f"k{number}", f"d{number}"
            sent = _messages(bench, [(f"other{number}", None, b"[1]"), (key, window, b"[1]"), (key, None, b"[1]")])
            answers = await asyncio.gather(*(bench.store.put([one]) for one in sent))
            (first,), (second,), (third,) = answers
            assert (first.duplicate, second.duplicate + third.duplicate) == (False, 1)
            assert second.id == third.id
        assert len(await bench.all_ids()) == 40

    @scenario
    async def test_a_dead_letter_is_redriven_once_for_a_put_that_names_it_twice(self, bench: Bench) -> None:
        """The first of them reopens it, and the second is a duplicate of a living message."""
        letter = await bench.settled("k", DEAD)
        twice = _messages(bench, [("k", "d", b"[1]"), ("k", None, b"[1]")])
        answers = await bench.store.put(twice, PutOptions(if_dead="redrive"))
        assert [(one.id, one.duplicate, one.state) for one in answers] == [(letter.id, True, State.SCHEDULED)] * 2
        assert (await bench.record(letter.id)).replay_count == 1

    @scenario
    async def test_a_message_that_is_put_again_gives_its_key_to_no_other(self, bench: Bench) -> None:
        """The answer is lost; before the send is repeated, the message is cancelled and another one takes its key."""
        first = bench.message("k", deduplication_key="d", deduplicate_for=_MINUTE)
        assert await bench.move((await bench.store.put([first]))[0].id, State.CANCELLED)
        assert await bench.move((await bench.put("k", deduplication_key="d")).id, State.CANCELLED)
        (again,) = await bench.store.put([first])
        assert (again.id, again.duplicate) == (first.id, False)
        others = [await bench.put(), await bench.put("other")]
        for fresh in (await bench.put("k"), await bench.put(deduplication_key="d")):
            assert (fresh.duplicate, fresh.clash) == (False, False)
            assert fresh.id not in {first.id, *(one.id for one in others)}

    @scenario
    async def test_the_idempotency_key_wins_within_one_put_too(self, bench: Bench) -> None:
        """Even if the deduplication key was held before, and the idempotency key was taken by the same put."""
        await bench.put(deduplication_key="d", deduplicate_for=_MINUTE)
        first, second = await bench.store.put(_messages(bench, [("k", None, b"[1]"), ("k", "d", b"[1]")]))
        assert (second.id, second.duplicate) == (first.id, True)

    # Batches.

    @scenario
    async def test_a_batch_is_stored_whole_and_the_second_time_is_all_duplicates(self, bench: Bench) -> None:
        first = await bench.store.put(_batch(bench), _BATCH)
        assert [one.duplicate for one in first] == [False] * 3
        second = await bench.store.put(_batch(bench), _BATCH)
        assert [one.duplicate for one in second] == [True] * 3
        assert [one.id for one in second] == [one.id for one in first]
        assert await bench.all_ids() == {one.id for one in first}

    @scenario
    async def test_a_batch_key_with_another_content_is_refused_and_stores_nothing(self, bench: Bench) -> None:
        first = await bench.store.put(_batch(bench), _BATCH)
        for other in (_batch(bench, payload=b"[2]"), _batch(bench, count=2), _batch(bench, count=4)):
            with pytest.raises(KeyReuseError):
                await bench.store.put(other, _BATCH)
        keys = [f"fresh{number}" for number in range(3)]
        for fresh in ([bench.message("fresh")], [bench.message(key) for key in keys]):
            with pytest.raises(KeyReuseError):
                await bench.store.put(fresh, _BATCH)
        assert await bench.all_ids() == {one.id for one in first}
        assert not (await bench.put("fresh")).duplicate

    @scenario
    async def test_a_batch_key_is_free_when_its_time_is_over(self, bench: Bench) -> None:
        """A batch with other content may take the key then, whether or not a purge has run."""
        await bench.store.put([bench.message("x")], _BATCH)
        bench.clock.advance(limits.KEY_WINDOW - 0.000001)
        with pytest.raises(KeyReuseError):
            await bench.store.put([bench.message("y")], _BATCH)
        bench.clock.advance(0.000001)
        assert not (await bench.store.put([bench.message("y")], _BATCH))[0].duplicate
        with pytest.raises(KeyReuseError):
            await bench.store.put([bench.message("z")], _BATCH)

    @scenario
    async def test_one_message_with_a_taken_key_fails_the_batch_and_stores_nothing(self, bench: Bench) -> None:
        single = await bench.put("mine")
        for payload in (b"[1]", b"[2]"):
            batch = [bench.message("x"), bench.message("mine", payload=payload), bench.message("y")]
            with pytest.raises(KeyReuseError):
                await bench.store.put(batch, _BATCH)
        assert await bench.all_ids() == {single.id}
        for key in ("x", "y"):
            assert not (await bench.put(key, payload=b"[3]")).duplicate
        assert not any(one.duplicate for one in await bench.store.put(_batch(bench), _BATCH))

    @scenario
    async def test_a_refused_batch_takes_its_whole_transaction_with_it(self, bench: Bench) -> None:
        await bench.put("mine")

        async def send() -> None:
            async with bench.store.transaction() as transaction:
                await transaction.put([bench.message("before")])
                await transaction.put([bench.message("x"), bench.message("mine")], _BATCH)

        with pytest.raises(KeyReuseError):
            await send()
        assert len(await bench.all_ids()) == 1
