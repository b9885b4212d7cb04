"""Purge: first bodies, then messages with their keys; never more than the limit, never a message that is alive."""

from __future__ import annotations

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Dead, Done, Purged, PutOptions, State
from onefold.testing.contracts.bench import DONE, FAILURE, Bench, Contract, scenario

_SHORT = Done(b'"paid"', key_window=100.0, body_retention=10.0)


async def _purge(bench: Bench, limit: int = limits.PURGE_BATCH) -> Purged:
    async with bench.store.transaction() as transaction:
        return await transaction.purge(limit=limit)


class PurgeContract(Contract):
    """The removal of bodies, messages, keys and what people did."""

    @scenario
    async def test_a_kept_key_outlives_its_body_and_still_answers_with_the_result(self, bench: Bench) -> None:
        lease = await bench.settled("k", _SHORT)
        bench.clock.advance(10.0 - 0.000001)
        assert (await _purge(bench)).total == 0
        assert (await bench.record(lease.id)).envelope.payload_inline == b"[1]"
        bench.clock.advance(0.000001)
        purged = await _purge(bench)
        assert (purged.bodies, purged.messages) == (1, 0)
        record = await bench.record(lease.id)
        assert (record.state, record.result, record.envelope.payload_inline) == (State.DONE, b'"paid"', None)
        second = await bench.put("k")
        assert (second.id, second.state, second.duplicate) == (lease.id, State.DONE, True)
        assert (await bench.put("k", payload=b"[2]")).clash
        assert (await _purge(bench)).total == 0

    @scenario
    async def test_a_message_goes_when_its_key_window_is_over(self, bench: Bench) -> None:
        lease = await bench.settled("k", _SHORT)
        bench.clock.advance(10.0)
        await _purge(bench)
        bench.clock.advance(90.0 - 0.000001)
        assert (await _purge(bench)).total == 0
        assert (await bench.put("k")).duplicate
        bench.clock.advance(0.000001)
        assert (await _purge(bench)).messages == 1
        assert await bench.find(lease.id) is None
        assert not (await bench.put("k")).duplicate

    @scenario
    async def test_a_purge_that_comes_late_takes_everything_at_once(self, bench: Bench) -> None:
        lease = await bench.settled("k", Dead(FAILURE, key_window=100.0, body_retention=10.0))
        bench.clock.advance(1_000.0)
        assert (await _purge(bench)).messages == 1
        assert await bench.find(lease.id) is None
        assert await bench.store.attempts(lease.id) == []
        assert (await _purge(bench)).total == 0

    @scenario
    async def test_a_key_that_went_to_a_new_message_survives_the_purge_of_the_old_one(self, bench: Bench) -> None:
        old = await bench.settled("k", _SHORT)
        bench.clock.advance(100.0)
        new = await bench.put("k")
        assert (await _purge(bench)).messages == 1
        assert await bench.find(old.id) is None
        second = await bench.put("k")
        assert (second.id, second.duplicate) == (new.id, True)

    @scenario
    async def test_nothing_alive_is_purged(self, bench: Bench) -> None:
        lease = await bench.leased("leased")
        scheduled = await bench.put("scheduled")
        bench.clock.advance(10 * 365 * limits.DAY)
        assert (await _purge(bench)).total == 0
        assert await bench.all_ids() == {lease.id, scheduled.id}
        assert (await bench.put("scheduled")).duplicate

    @scenario
    async def test_purging_keeps_to_its_limit_and_takes_the_oldest_first(self, bench: Bench) -> None:
        leases = []
        for number in range(5):
            leases.append(await bench.settled(f"k{number}", _SHORT))
            bench.clock.advance(1.0)
        bench.clock.advance(10.0)
        assert [(await _purge(bench, limit=2)).bodies for _ in range(4)] == [2, 2, 1, 0]
        bench.clock.advance(100.0)
        assert (await _purge(bench, limit=2)).messages == 2
        assert await bench.all_ids() == {lease.id for lease in leases[2:]}
        assert [(await _purge(bench, limit=2)).messages for _ in range(3)] == [2, 1, 0]

    @scenario
    async def test_a_letter_without_its_body_cannot_be_redriven(self, bench: Bench) -> None:
        lease = await bench.settled("k", Dead(FAILURE, key_window=100.0, body_retention=10.0))
        bench.clock.advance(10.0)
        assert (await _purge(bench)).bodies == 1
        assert not await bench.move(lease.id, State.SCHEDULED)
        second = await bench.put("k", options=PutOptions(if_dead="redrive"))
        assert (second.id, second.state, second.duplicate) == (lease.id, State.DEAD, True)
        assert await bench.claim() == []
        assert (await bench.record(lease.id)).failure == FAILURE

    @scenario
    async def test_a_freed_key_of_a_cancelled_or_discarded_message_goes_with_it(self, bench: Bench) -> None:
        cancelled = await bench.put("a")
        await bench.move(cancelled.id, State.CANCELLED)
        discarded = await bench.settled("b", Dead(FAILURE))
        await bench.move(discarded.id, State.DISCARDED)
        assert (await _purge(bench)).messages == 2
        assert await bench.all_ids() == set()
        assert not (await bench.put("a")).duplicate
        assert not (await bench.put("b")).duplicate

    @scenario
    async def test_expired_deduplication_keys_and_register_entries_go_too(self, bench: Bench) -> None:
        first = await bench.settled(None, DONE, deduplication_key="d", deduplicate_for=60 * MICROSECONDS)
        async with bench.store.transaction() as transaction:
            soon = bench.clock.now() + 60 * MICROSECONDS
            await transaction.register("worker", "a", b"1", version=0, expires_at=soon)
            await transaction.register("worker", "b", b"1", version=0)
        assert (await _purge(bench)).total == 0
        assert (await bench.put(deduplication_key="d")).id == first.id
        bench.clock.advance(60.0)
        assert (await _purge(bench)).register == 1
        assert await bench.store.registered("worker", "b") is not None
        assert not (await bench.put(deduplication_key="d")).duplicate

    @scenario
    async def test_what_people_did_is_kept_for_its_time_and_outlives_the_message(self, bench: Bench) -> None:
        letters = [await bench.settled(f"k{number}", Dead(FAILURE)) for number in range(3)]
        for letter in letters:
            await bench.move(letter.id, State.DISCARDED)
        purged = await _purge(bench)
        assert (purged.messages, purged.acts) == (3, 0)
        bench.clock.advance(limits.ACT_RETENTION - 0.000001)
        assert (await _purge(bench)).acts == 0
        bench.clock.advance(0.000001)
        assert [(await _purge(bench, limit=2)).acts for _ in range(3)] == [2, 1, 0]
