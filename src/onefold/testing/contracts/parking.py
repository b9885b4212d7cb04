"""Parked messages and their wake-ups; children, which tell their parents how they ended."""

from __future__ import annotations

import asyncio

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Dead, Done, Parked, Query, State
from onefold.store.journal_lines import Note
from onefold.testing.contracts.bench import DEAD, DONE, FAILURE, LEASE, Bench, Contract, scenario
from onefold.testing.contracts.journal import lines, parked, result, signal


class ParkContract(Contract):
    """Messages that wait without a worker."""

    # Parking.

    @scenario
    async def test_a_parked_message_has_no_owner_until_its_time(self, bench: Bench) -> None:
        lease = await parked(bench, Parked(60.0, 0))
        record = await bench.record(lease.id)
        assert (record.state, record.attempt, record.worker) == (State.PARKED, 0, None)
        assert [one.envelope.id for one in await bench.store.find(Query(states=(State.PARKED,)))] == [lease.id]
        assert await bench.store.find(Query(states=(State.SCHEDULED, State.LEASED))) == []
        counts = (await bench.store.count())["default"]
        assert (counts.parked, counts.scheduled, counts.leased) == (1, 0, 0)
        assert await bench.store.extend([lease], lease=LEASE) == [False]
        assert await bench.store.settle([(lease, DONE)]) == [False]
        bench.clock.advance(59)
        assert await bench.claim() == []
        bench.clock.advance(1)
        again = await bench.claim_only()
        assert (again.id, again.attempt, again.wake) == (lease.id, 1, 0)
        assert await bench.state(lease.id) is State.LEASED

    @scenario
    async def test_what_others_record_wakes_it(self, bench: Bench) -> None:
        lease = await parked(bench)
        bench.clock.advance(10 * limits.DAY)
        assert await bench.claim() == []
        assert await bench.store.record(lease.id, [signal("1")])
        assert await bench.state(lease.id) is State.SCHEDULED
        assert (await bench.claim_only()).wake == 1

    @scenario
    async def test_it_is_woken_once_when_all_has_come_that_it_awaits(self, bench: Bench) -> None:
        lease = await parked(bench, Parked(None, 0, awaits=3))
        await bench.store.record(lease.id, [signal("1")])
        await bench.store.record(lease.id, [signal("2")])
        assert await bench.claim() == []
        await bench.store.record(lease.id, [signal("3"), signal("4")])
        assert (await bench.claim_only()).wake == 4

    @scenario
    async def test_what_came_before_it_parked_is_not_overlooked(self, bench: Bench) -> None:
        """The lost wake-up, in the order in which a naive park would lose it."""
        lease = await bench.leased()
        await bench.store.record(lease.id, [signal("1")])
        assert await bench.store.settle([(lease, Parked(None, lease.wake))]) == [True]
        assert await bench.state(lease.id) is State.SCHEDULED
        again = await bench.claim_only()
        assert again.wake == 1
        assert await bench.store.settle([(again, Parked(None, again.wake))]) == [True]
        assert await bench.state(lease.id) is State.PARKED

    @scenario
    async def test_nothing_wakes_what_waits_for_time_or_a_person(self, bench: Bench) -> None:
        lease = await parked(bench, Parked(60.0, 0, awaits=0))
        await bench.store.record(lease.id, [signal("1")])
        assert await bench.state(lease.id) is State.PARKED
        bench.clock.advance(60)
        assert (await bench.claim_only()).wake == 1

    @scenario
    async def test_a_due_time_that_has_passed_is_not_put_off_by_a_wake(self, bench: Bench) -> None:
        lease = await parked(bench, Parked(1.0, 0))
        bench.clock.advance(5)
        other = await bench.put()
        await bench.store.record(lease.id, [signal("1")])
        assert [one.id for one in await bench.claim()] == [lease.id, other.id]

    @scenario
    async def test_parking_costs_no_attempt_forgives_crashes_and_ends_expiry(self, bench: Bench) -> None:
        id_ = await bench.crashed(retention=100 * MICROSECONDS)
        lease = await bench.claim_only()
        assert (lease.crashes, lease.envelope.expires_at > 0) == (1, True)
        await bench.store.settle([(lease, Parked(200.0, lease.wake))])
        bench.clock.advance(200)
        again = await bench.claim_only()
        assert (again.id, again.attempt, again.crashes, again.envelope.expires_at) == (id_, 1, 0, 0)

    @scenario
    async def test_what_parks_takes_its_lines_sends_and_notes_along(self, bench: Bench) -> None:
        listener = await parked(bench)
        child = bench.message("child")
        lease = await bench.leased()
        new = await bench.put("new")
        told = (Note(listener.id, signal("1")), Note(new.id, signal("2")))
        outcome = Parked(None, 0, steps=(result("a"),), sends=(child,), notes=told, failure=FAILURE)
        assert await bench.store.settle([(lease, outcome)]) == [True]
        assert await lines(bench, lease.id) == [("a", "RESULT", b"1")]
        assert await bench.state(child.id) is State.SCHEDULED
        assert await bench.state(listener.id) is State.SCHEDULED
        assert len(await bench.store.steps(new.id)) == 1
        assert [one.failure for one in await bench.store.attempts(lease.id)] == [FAILURE]

    @scenario
    async def test_a_stale_park_leaves_nothing(self, bench: Bench) -> None:
        listener = await parked(bench)
        stale = await bench.leased()
        bench.clock.advance(LEASE)
        fresh = await bench.claim_only()
        child = bench.message("child")
        outcome = Parked(None, 0, steps=(result("a"),), sends=(child,), notes=(Note(listener.id, signal("1")),))
        assert await bench.store.settle([(stale, outcome)]) == [False]
        assert await bench.store.steps(stale.id) == await bench.store.steps(listener.id) == []
        assert await bench.find(child.id) is None
        assert await bench.store.settle([(fresh, outcome)]) == [True]

    @scenario
    async def test_handing_back_what_was_woken_leaves_it_claimable(self, bench: Bench) -> None:
        lease = await parked(bench)
        await bench.store.record(lease.id, [signal("1")])
        woken = await bench.claim_only()
        bench.clock.advance(LEASE)  # its lease runs out, as after the death of its worker
        again = await bench.claim_only()
        assert (again.id, again.fence, again.wake) == (lease.id, woken.fence + 1, 1)

    @scenario
    async def test_no_wake_up_is_lost_in_a_race(self, bench: Bench) -> None:
        """Two stores park and record at the same time, again and again."""
        other = await bench.another()
        for number in range(15):
            lease = await bench.leased()
            telling = (other.record(lease.id, [signal(f"{number}/{n}")]) for n in range(3))
            parking = bench.store.settle([(lease, Parked(None, lease.wake, awaits=3))])
            won, *_ = await asyncio.gather(parking, *telling)
            assert won == [True]
            again = await bench.claim_only()
            assert (again.id, again.wake) == (lease.id, 3)
            assert len(await bench.store.steps(lease.id)) == 3
            await bench.store.settle([(again, DONE)])

    # Children.

    @scenario
    async def test_the_end_of_a_child_is_told_to_its_parent_in_the_same_commit(self, bench: Bench) -> None:
        parent = await parked(bench, Parked(None, 0, awaits=2))
        done = await bench.settled(None, Done(b'"paid"'), reply_to=f"{parent.id}/charge#1")
        assert await bench.state(parent.id) is State.PARKED
        dead = await bench.settled(None, Dead(FAILURE), reply_to=f"{parent.id}/charge#2")
        assert await bench.state(parent.id) is State.SCHEDULED
        found = await lines(bench, parent.id)
        assert [(name, kind) for name, kind, _ in found] == [("charge#1", "CHILD"), ("charge#2", "CHILD")]
        assert b'"paid"' in found[0][2]
        assert done.id.encode() in found[0][2]
        assert b"no such order" in found[1][2]
        assert dead.id.encode() in found[1][2]

    @scenario
    async def test_a_child_that_a_person_ends_is_told_too(self, bench: Bench) -> None:
        parent = await parked(bench, Parked(None, 0, awaits=2))
        cancelled = await bench.put(reply_to=f"{parent.id}/a#1")
        assert await bench.move(cancelled.id, State.CANCELLED)
        dead = await bench.settled(None, DEAD, reply_to=f"{parent.id}/b#1")
        assert await bench.move(dead.id, State.DISCARDED)
        found = await lines(bench, parent.id)
        assert [name for name, _, _ in found] == ["a#1", "b#1"]
        assert await bench.state(parent.id) is State.SCHEDULED

    @scenario
    async def test_a_redriven_child_tells_of_its_second_end(self, bench: Bench) -> None:
        parent = await bench.leased()
        child = await bench.settled(None, DEAD, reply_to=f"{parent.id}/a#1")
        assert await bench.move(child.id, State.SCHEDULED)
        again = await bench.claim_only()
        assert await bench.store.settle([(again, DONE)]) == [True]
        assert [name for name, _, _ in await lines(bench, parent.id)] == ["a#1", "a#1@1"]

    @scenario
    async def test_a_stale_child_tells_nothing(self, bench: Bench) -> None:
        parent = await parked(bench)
        stale = await bench.leased(reply_to=f"{parent.id}/a#1")
        bench.clock.advance(LEASE)
        await bench.claim_only()
        assert await bench.store.settle([(stale, DONE)]) == [False]
        assert await bench.store.steps(parent.id) == []

    @scenario
    async def test_a_child_ends_although_its_parent_is_gone(self, bench: Bench) -> None:
        parent = await bench.settled(None, DONE)
        for reply_to in (f"{parent.id}/a#1", f"{bench.message().id}/a#1", "unknown/a#1"):
            child = await bench.settled(None, DONE, reply_to=reply_to)
            assert await bench.state(child.id) is State.DONE
        assert await bench.store.steps(parent.id) == []

    @scenario
    async def test_many_children_wake_their_parent_once(self, bench: Bench) -> None:
        number = 200
        parent = await parked(bench, Parked(None, 0, awaits=number))
        children = [bench.message(reply_to=f"{parent.id}/a#{n}") for n in range(number)]
        await bench.store.put(children)
        leases = await bench.claim(number)
        half = number // 2
        for some in (leases[:half], leases[half:-1]):
            await bench.store.settle([(lease, DONE) for lease in some])
        assert await bench.claim() == []
        other = await bench.another()
        await other.settle([(leases[-1], DONE)])
        assert (await bench.claim_only()).wake == number
