"""Put: what is stored, what is returned, and what a second send with the same idempotency key does.

The tests of the second send cover every case of the table in ``docs/guarantees.md``.
"""

from __future__ import annotations

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Done, PutOptions, State
from onefold.testing.contracts.bench import AGAIN, DEAD, DONE, Bench, Contract, scenario

_YEAR = 365 * limits.DAY


class PutContract(Contract):
    """The verb that stores messages."""

    @scenario
    async def test_a_stored_message_comes_back_as_it_was_sent(self, bench: Bench) -> None:
        sent = bench.message(
            "k",
            payload=b'{"cents":5}',
            schema_version=3,
            correlation_id="c-1",
            causation_id="c-0",
            deduplication_key="d",
            ordering_key="o",
            sequence=4,
            trace="00-aa-bb-01",
            tags={"tenant": "a"},
            retention=60 * MICROSECONDS,
            delay=2 * MICROSECONDS,
        )
        stored = (await bench.store.put([sent]))[0]
        assert (stored.id, stored.state, stored.duplicate, stored.clash) == (sent.id, State.SCHEDULED, False, False)
        record = await bench.record(sent.id)
        now, got = bench.clock.now(), record.envelope
        # The store replaces the delay and the deduplication window by times, and keeps the fingerprint with the key.
        times = {"created_at": now, "due_at": now + 2 * MICROSECONDS, "expires_at": now + 62 * MICROSECONDS}
        assert got == msgspec.structs.replace(sent, **times, delay=0, deduplicate_for=0, fingerprint=b"")
        assert (record.state, record.attempt, record.crashes, record.replay_count) == (State.SCHEDULED, 0, 0, 0)

    @scenario
    async def test_a_message_without_a_key_is_never_a_duplicate(self, bench: Bench) -> None:
        first, second = await bench.put(), await bench.put()
        assert first.id != second.id
        assert not second.duplicate
        assert len(await bench.claim()) == 2

    @scenario
    async def test_putting_nothing_is_harmless(self, bench: Bench) -> None:
        assert await bench.store.put([]) == []
        assert await bench.all_ids() == set()

    @scenario
    async def test_putting_the_same_message_again_changes_nothing(self, bench: Bench) -> None:
        """After a lost answer the sender repeats the put with the same id: the same message, not a duplicate."""
        for envelope in (bench.message("k"), bench.message(), bench.message(deduplication_key="d")):
            await bench.store.put([envelope])
            again = (await bench.store.put([envelope]))[0]
            assert (again.id, again.duplicate, again.clash) == (envelope.id, False, False)
            assert [lease.id for lease in await bench.claim()] == [envelope.id]

    @scenario
    async def test_putting_the_same_message_again_after_it_ended_does_not_revive_it(self, bench: Bench) -> None:
        for envelope in (bench.message("k"), bench.message(), bench.message(deduplication_key="d")):
            await bench.store.put([envelope])
            await bench.store.settle([(await bench.claim_only(), DONE)])
            again = (await bench.store.put([envelope]))[0]
            assert (again.id, again.duplicate, again.clash) == (envelope.id, False, False)
            assert await bench.claim() == []
            assert await bench.state(envelope.id) is State.DONE

    @scenario
    async def test_one_call_may_name_a_key_twice(self, bench: Bench) -> None:
        envelopes = [bench.message("k"), bench.message("k"), bench.message("k", payload=b"[2]"), bench.message("other")]
        stored = await bench.store.put(envelopes)
        assert [one.id for one in stored] == [envelopes[0].id] * 3 + [envelopes[3].id]
        assert [(one.duplicate, one.clash) for one in stored] == [
            (False, False),
            (True, False),
            (False, True),
            (False, False),
        ]
        assert await bench.all_ids() == {envelopes[0].id, envelopes[3].id}

    # A second send with the same key.

    @scenario
    async def test_second_send_while_the_first_is_scheduled_is_a_duplicate(self, bench: Bench) -> None:
        first, second = await bench.put("k"), await bench.put("k")
        assert (second.id, second.state, second.duplicate) == (first.id, State.SCHEDULED, True)
        assert await bench.all_ids() == {first.id}

    @scenario
    async def test_second_send_while_the_first_is_leased_is_a_duplicate(self, bench: Bench) -> None:
        first = await bench.leased("k")
        second = await bench.put("k")
        assert (second.id, second.state, second.duplicate) == (first.id, State.LEASED, True)
        assert await bench.claim() == []

    @scenario
    async def test_second_send_after_the_first_is_done_finds_its_result(self, bench: Bench) -> None:
        first = await bench.settled("k", Done(b'"paid"'))
        second = await bench.put("k")
        assert (second.id, second.state, second.duplicate) == (first.id, State.DONE, True)
        assert (await bench.record(second.id)).result == b'"paid"'
        assert await bench.claim() == []

    @scenario
    async def test_second_send_after_the_first_is_dead_reports_the_letter(self, bench: Bench) -> None:
        first = await bench.settled("k", DEAD)
        second = await bench.put("k")
        assert (second.id, second.state, second.duplicate) == (first.id, State.DEAD, True)
        assert await bench.claim() == []

    @scenario
    async def test_second_send_can_reopen_a_dead_letter(self, bench: Bench) -> None:
        first = await bench.settled("k", DEAD)
        second = await bench.put("k", options=PutOptions(if_dead="redrive"))
        assert (second.id, second.state, second.duplicate) == (first.id, State.SCHEDULED, True)
        reopened = await bench.claim_only()
        assert (reopened.id, reopened.replay_count) == (first.id, 1)
        assert reopened.fence > first.fence

    @scenario
    async def test_reopening_on_second_send_leaves_what_is_not_dead_alone(self, bench: Bench) -> None:
        redrive = PutOptions(if_dead="redrive")
        first = await bench.settled("k", DONE)
        second = await bench.put("k", options=redrive)
        assert (second.id, second.state, second.duplicate) == (first.id, State.DONE, True)
        waiting = await bench.settled("w", AGAIN)
        assert (await bench.put("w", options=redrive)).id == waiting.id
        assert (await bench.record(waiting.id)).replay_count == 0

    @scenario
    async def test_a_message_cancelled_before_it_ran_leaves_its_key_free(self, bench: Bench) -> None:
        first = await bench.put("k")
        assert await bench.move(first.id, State.CANCELLED)
        second = await bench.put("k", payload=b"[2]")
        assert second.id != first.id
        assert (second.state, second.duplicate, second.clash) == (State.SCHEDULED, False, False)

    @scenario
    async def test_a_message_cancelled_after_it_may_have_run_keeps_its_key(self, bench: Bench) -> None:
        first = await bench.leased("k")
        assert await bench.move(first.id, State.CANCELLED)
        second = await bench.put("k")
        assert (second.id, second.state, second.duplicate) == (first.id, State.CANCELLED, True)

    @scenario
    async def test_a_discarded_letter_leaves_its_key_free(self, bench: Bench) -> None:
        first = await bench.settled("k", DEAD)
        assert await bench.move(first.id, State.DISCARDED)
        second = await bench.put("k", payload=b"[2]")
        assert second.id != first.id
        assert (second.state, second.duplicate, second.clash) == (State.SCHEDULED, False, False)

    @scenario
    async def test_the_key_is_free_at_once_when_its_window_is_over(self, bench: Bench) -> None:
        """Whether or not a purge has run, and not a microsecond earlier."""
        first = await bench.settled("k", Done(b"1", key_window=100.0))
        bench.clock.advance(100.0 - 0.000001)
        assert (await bench.put("k")).duplicate
        bench.clock.advance(0.000001)
        second = await bench.put("k", payload=b"[2]")
        assert second.id != first.id
        assert (second.duplicate, second.clash) == (False, False)
        third = await bench.put("k", payload=b"[2]")
        assert (third.id, third.duplicate) == (second.id, True)

    @scenario
    async def test_the_window_starts_when_the_message_ended(self, bench: Bench) -> None:
        """While a message lives, its key does not expire."""
        first = await bench.put("k")
        bench.clock.advance(_YEAR)
        assert (await bench.put("k")).id == first.id
        await bench.store.settle([(await bench.claim_only(), Done(b"1", key_window=100.0))])
        bench.clock.advance(99.0)
        assert (await bench.put("k")).id == first.id

    @scenario
    async def test_another_payload_under_the_same_key_is_refused_and_stores_nothing(self, bench: Bench) -> None:
        first = await bench.put("k")
        second = await bench.put("k", payload=b"[2]")
        assert (second.id, second.clash, second.duplicate) == (first.id, True, False)
        assert await bench.all_ids() == {first.id}
        assert (await bench.record(first.id)).envelope.payload_inline == b"[1]"
        await bench.store.settle([(await bench.claim_only(), DONE)])
        assert (await bench.put("k", payload=b"[2]")).clash

    @scenario
    async def test_payloads_are_not_compared_across_schema_versions(self, bench: Bench) -> None:
        first = await bench.put("k")
        second = await bench.put("k", payload=b"[2]", schema_version=2)
        assert (second.id, second.duplicate, second.clash) == (first.id, True, False)

    @scenario
    async def test_a_key_is_unique_per_consumer_only(self, bench: Bench) -> None:
        first = await bench.put("k")
        second = await bench.put("k", message_type="other")
        assert second.id != first.id
        assert not second.duplicate
