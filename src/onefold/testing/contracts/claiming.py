"""Claim and extend: which messages a claim returns, in which order, for how long and under which fence."""

from __future__ import annotations

import pytest

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Counts, HandBack, Lease, State
from onefold.testing.contracts.bench import AGAIN, DONE, LEASE, Bench, Contract, scenario

_HOUR, _YEAR = 3_600.0, 365 * limits.DAY
_TICK = 0.000001


class ClaimContract(Contract):
    """The right to run a message."""

    @scenario
    async def test_a_lease_tells_everything_a_run_needs(self, bench: Bench) -> None:
        stored = await bench.put("k", tags={"tenant": "a"})
        before = await bench.record(stored.id)
        bench.clock.advance(3.0)
        lease = (await bench.claim(worker="grace"))[0]
        assert lease.fence > before.fence
        assert (lease.id, lease.attempt, lease.crashes, lease.replay_count) == (stored.id, 1, 0, 0)
        assert (lease.claimed_at, lease.worker) == (bench.clock.now(), "grace")
        assert lease.envelope == before.envelope
        after = await bench.record(stored.id)
        assert (after.state, after.fence, after.worker, after.attempt) == (State.LEASED, lease.fence, "grace", 0)

    @scenario
    async def test_the_longest_due_is_claimed_first(self, bench: Bench) -> None:
        late = await bench.put(delay=3 * MICROSECONDS)
        soon = await bench.put(delay=1 * MICROSECONDS)
        middle = await bench.put(due_at=bench.clock.now() + 2 * MICROSECONDS)
        bench.clock.advance(10.0)
        assert [(await bench.claim(1))[0].id for _ in range(3)] == [soon.id, middle.id, late.id]

    @scenario
    async def test_nothing_is_claimed_before_it_is_due(self, bench: Bench) -> None:
        await bench.put(delay=5 * MICROSECONDS)
        await bench.put(due_at=bench.clock.now() + 5 * MICROSECONDS)
        bench.clock.advance(5.0 - _TICK)
        assert await bench.claim() == []
        bench.clock.advance(_TICK)
        assert len(await bench.claim()) == 2

    @scenario
    async def test_a_claim_takes_at_most_its_limit_and_nothing_twice(self, bench: Bench) -> None:
        ids = {(await bench.put()).id for _ in range(5)}
        first, second, third = await bench.claim(2), await bench.claim(2), await bench.claim(2)
        assert (len(first), len(second), len(third)) == (2, 2, 1)
        assert {lease.id for lease in first + second + third} == ids
        assert await bench.claim() == []

    @scenario
    async def test_only_known_types_are_claimed(self, bench: Bench) -> None:
        """A worker that does not know a task leaves it for one that does, as in a rolling deploy."""
        unknown = await bench.put(message_type="new-task")
        known = await bench.put()
        assert [lease.id for lease in await bench.claim()] == [known.id]
        assert await bench.state(unknown.id) is State.SCHEDULED
        assert [lease.id for lease in await bench.claim(types=("task", "new-task"))] == [unknown.id]

    @scenario
    async def test_the_longest_due_is_claimed_first_whatever_its_type_and_priority(self, bench: Bench) -> None:
        """A step of priority counts as a while waited; types that are not asked for are not in the way."""
        types = ("a", "b", "c", "d@2")
        step = limits.PRIORITY_STEP_SECONDS
        sent: dict[str, float] = {}
        for number in range(24):
            kind, priority = types[number * 7 % 4], (0, 0, 1, 3)[number * 5 % 4]
            name, _, version = kind.partition("@")
            stored = await bench.put(
                message_type=name, schema_version=int(version or 1), pinned=bool(version), priority=priority
            )
            sent[stored.id] = bench.clock.now() - priority * step * MICROSECONDS
            await bench.put(message_type="unknown", priority=number % 10)
            bench.clock.advance(step / 5 + number * _TICK)
        taken: list[str] = []
        while leases := await bench.claim(5, types=types):
            taken += [lease.id for lease in leases]
        assert taken == sorted(sent, key=lambda one: sent[one])
        assert len(await bench.claim(types=("unknown",))) == 24

    @scenario
    async def test_only_the_named_queues_are_claimed_from(self, bench: Bench) -> None:
        other = await bench.put(queue="mail")
        mine = await bench.put()
        assert [lease.id for lease in await bench.claim()] == [mine.id]
        assert await bench.claim(queues=("empty",)) == []
        await bench.put()
        both = await bench.claim(queues=("default", "mail"))
        assert len(both) == 2
        assert other.id in {lease.id for lease in both}

    @scenario
    async def test_the_limit_holds_over_several_queues(self, bench: Bench) -> None:
        for queue in ("default", "mail", "default", "mail"):
            await bench.put(queue=queue)
        assert len(await bench.claim(3, queues=("default", "mail"))) == 3
        assert len(await bench.claim(3, queues=("default", "mail"))) == 1

    @scenario
    async def test_the_fence_rises_with_every_change_of_owner(self, bench: Bench) -> None:
        """The steps are claim, hand back, claim, settle again, claim, lease runs out, claim."""
        stored = await bench.put()
        fences = [(await bench.record(stored.id)).fence]

        async def claimed() -> Lease:
            lease = await bench.claim_only()
            fences.append(lease.fence)
            return lease

        await bench.store.settle([(await claimed(), HandBack())])
        fences.append((await bench.record(stored.id)).fence)
        await bench.store.settle([(await claimed(), AGAIN)])
        fences.append((await bench.record(stored.id)).fence)
        bench.clock.advance(5.0)
        await claimed()
        bench.clock.advance(LEASE)
        await claimed()
        assert fences == sorted(set(fences))

    # Leases that run out.

    @scenario
    async def test_a_lease_that_ran_out_is_claimed_again_and_counted_as_a_crash(self, bench: Bench) -> None:
        first = await bench.leased("k")
        bench.clock.advance(LEASE - _TICK)
        assert await bench.claim() == []
        bench.clock.advance(_TICK)
        second = await bench.claim_only()
        assert second.id == first.id
        assert second.fence > first.fence
        assert (second.attempt, second.crashes) == (1, 1)
        bench.clock.advance(LEASE)
        third = await bench.claim_only()
        assert (third.attempt, third.crashes) == (1, 2)
        assert await bench.store.attempts(first.id) == []

    @scenario
    async def test_a_suspect_is_blamed_for_a_crash_only_after_it_began(self, bench: Bench) -> None:
        """A dead worker's other messages are not to blame; a worker marks a suspect as started before running it."""
        await bench.put("k")
        for crashes in range(limits.SUSPECT_AFTER):
            assert (await bench.claim_only()).crashes == crashes
            bench.clock.advance(LEASE)
        suspect = await bench.claim_only()
        bench.clock.advance(LEASE)
        innocent = await bench.claim_only()
        assert (suspect.crashes, innocent.crashes) == (limits.SUSPECT_AFTER, limits.SUSPECT_AFTER)
        assert await bench.store.extend([suspect, innocent], lease=LEASE, starting=True) == [False, True]
        assert await bench.store.extend([innocent], lease=LEASE) == [True]
        bench.clock.advance(LEASE)
        guilty = await bench.claim_only()
        assert guilty.crashes == limits.SUSPECT_AFTER + 1
        bench.clock.advance(LEASE)
        assert (await bench.claim_only()).crashes == limits.SUSPECT_AFTER + 1

    @scenario
    async def test_a_lost_lease_can_be_neither_extended_nor_settled(self, bench: Bench) -> None:
        stale = await bench.leased("k")
        bench.clock.advance(LEASE)
        fresh = await bench.claim_only()
        before = await bench.record(stale.id)
        assert await bench.store.extend([stale], lease=1_000.0) == [False]
        assert await bench.store.settle([(stale, DONE)]) == [False]
        assert await bench.record(stale.id) == before
        bench.clock.advance(LEASE)
        assert [lease.id for lease in await bench.claim()] == [fresh.id]

    @scenario
    async def test_an_expired_lease_that_was_not_taken_over_may_still_settle(self, bench: Bench) -> None:
        """Time only decides when another worker may try; refusing the settlement would only waste the work."""
        lease = await bench.leased("k")
        bench.clock.advance(_HOUR)
        assert await bench.store.settle([(lease, DONE)]) == [True]
        assert await bench.state(lease.id) is State.DONE
        assert await bench.claim() == []

    @scenario
    async def test_an_expired_lease_may_settle_after_others_looked_but_took_something_else(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        other = await bench.put(message_type="other")
        bench.clock.advance(_HOUR)
        assert [one.id for one in await bench.claim(types=("other",))] == [other.id]
        assert await bench.store.settle([(lease, DONE)]) == [True]
        assert await bench.state(lease.id) is State.DONE

    @scenario
    async def test_a_lease_that_ran_out_is_left_to_workers_of_its_queue_and_type(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        bench.clock.advance(LEASE)
        assert await bench.claim(types=("other",)) == []
        assert await bench.claim(queues=("mail",)) == []
        assert (await bench.claim_only()).id == lease.id

    @scenario
    async def test_extending_counts_from_now_and_keeps_the_message(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        for _ in range(3):
            bench.clock.advance(LEASE - _TICK)
            assert await bench.store.extend([lease], lease=LEASE) == [True]
            assert await bench.claim() == []
        bench.clock.advance(LEASE)
        assert (await bench.claim_only()).crashes == 1

    @scenario
    async def test_extending_answers_each_lease_in_order(self, bench: Bench) -> None:
        assert await bench.store.extend([], lease=LEASE) == []
        settled, lost = await bench.settled("done", DONE), await bench.leased("lost")
        bench.clock.advance(LEASE)
        found_again = await bench.claim_only()
        kept = await bench.leased("kept")
        leases = [settled, kept, lost, found_again]
        assert await bench.store.extend(leases, lease=LEASE) == [False, True, False, True]

    @scenario
    async def test_extending_keeps_owner_fence_and_attempt(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        before = await bench.record(lease.id)
        bench.clock.advance(1.0)
        await bench.store.extend([lease], lease=LEASE)
        assert await bench.record(lease.id) == before

    @scenario
    async def test_a_jump_of_the_wall_clock_takes_no_lease_away(self, bench: Bench) -> None:
        """On one machine leases follow the steady clock; a shared store has a server with a clock of its own."""
        if bench.store.capabilities.shared:
            pytest.skip("the server's clock is not the test's to set")
        lease = await bench.leased("k")
        for jump in (_HOUR, -_HOUR, _YEAR, -_YEAR, -_HOUR, _HOUR, -_YEAR, _YEAR):
            bench.clock.jump(jump)
            assert await bench.claim() == []
            assert await bench.store.extend([lease], lease=LEASE) == [True]
        bench.clock.jump(_YEAR)
        bench.clock.advance(LEASE - _TICK)
        assert await bench.claim() == []
        bench.clock.advance(_TICK)
        assert (await bench.claim_only()).id == lease.id

    @scenario
    async def test_counts_say_how_many_wait_run_and_are_dead(self, bench: Bench) -> None:
        assert await bench.store.count() == {}
        await bench.leased()
        for _ in range(2):
            await bench.put()
        await bench.put(queue="mail", delay=MICROSECONDS)
        assert await bench.store.count() == {
            "default": Counts(scheduled=2, leased=1, dead=0),
            "mail": Counts(scheduled=1, leased=0, dead=0),
        }
