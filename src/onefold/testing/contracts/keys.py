"""Deduplication keys, which coalesce triggers for a while, and batch keys, which cover many messages at once."""

from __future__ import annotations

import pytest

from onefold.clock import MICROSECONDS
from onefold.envelope import Envelope
from onefold.errors import KeyReuseError
from onefold.store import PutOptions, State
from onefold.testing.contracts.bench import DONE, Bench, Contract, scenario

_BATCH = PutOptions(batch_key="b")
_MINUTE = 60 * MICROSECONDS


def _batch(bench: Bench, count: int = 3, payload: bytes = b"[1]") -> list[Envelope]:
    """Make a batch as the app does: a message without a key of its own is named after the batch and its place."""
    return [bench.message(f"b#{number}", payload=payload) for number in range(count)]


class KeyContract(Contract):
    """The other two kinds of keys."""

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
        """The deduplication window ends while the message lives: its idempotency key still answers."""
        first = await bench.put("k", deduplication_key="d", deduplicate_for=_MINUTE)
        bench.clock.advance(60.0)
        second = await bench.put("k", deduplication_key="d", deduplicate_for=_MINUTE)
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
        with pytest.raises(KeyReuseError):
            await bench.store.put([bench.message("fresh")], _BATCH)
        assert await bench.all_ids() == {one.id for one in first}
        assert not (await bench.put("fresh")).duplicate

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
