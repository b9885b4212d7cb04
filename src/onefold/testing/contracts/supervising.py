"""The verbs of a supervisor of processes: lanes, crashes that were observed, and the messages a worker holds."""

from __future__ import annotations

from dataclasses import dataclass

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.store import Again, Attempt, HandBack, Lane, Query, State
from onefold.testing.contracts.bench import DEAD, DONE, FAILURE, LEASE, Bench, Contract, scenario

_TICK = 0.000001


@dataclass(frozen=True, slots=True)
class _Known:
    """The parts of a lease that a supervisor knows: the id and the fence."""

    id: str
    fence: int


async def _ids(bench: Bench, **conditions: object) -> list[str]:
    return [one.envelope.id for one in await bench.store.find(Query(**conditions))]  # type: ignore[arg-type]


class SuperviseContract(Contract):
    """Crashes are counted, and messages that crashed workers run apart from the others."""

    # Lanes.

    @scenario
    async def test_the_main_lane_takes_only_what_no_worker_died_with(self, bench: Bench) -> None:
        crashed = await bench.crashed()
        fine = await bench.put()
        assert [lease.id for lease in await bench.claim(lane=Lane.MAIN)] == [fine.id]
        assert await bench.claim(lane=Lane.MAIN) == []
        assert [(lease.id, lease.crashes) for lease in await bench.claim(lane=Lane.ANY)] == [(crashed, 1)]

    @scenario
    async def test_the_probation_lane_takes_only_what_a_worker_died_with(self, bench: Bench) -> None:
        crashed = await bench.crashed()
        bench.clock.advance(1.0)
        fine, other = await bench.put(), await bench.put(message_type="other")
        assert await bench.claim(lane=Lane.PROBATION, queues=("mail",)) == []
        assert await bench.claim(lane=Lane.PROBATION, types=("other",)) == []
        lease = (await bench.claim(lane=Lane.PROBATION, queues=("mail", "default")))[0]
        assert (lease.id, lease.crashes, lease.attempt, lease.worker) == (crashed, 1, 1, "grace")
        assert (await bench.record(crashed)).fence == lease.fence
        assert await bench.claim(lane=Lane.PROBATION) == []
        assert await bench.store.settle([(lease, DONE)]) == [True]
        assert {one.id for one in await bench.claim(types=("task", "other"))} == {fine.id, other.id}

    @scenario
    async def test_the_probation_lane_takes_the_longest_due_first_and_at_most_its_limit(self, bench: Bench) -> None:
        ids = []
        for _ in range(3):
            lease = await bench.leased()
            await bench.store.settle([(lease, Again(10.0, None, counted=False, crashed=True))])
            ids.append(lease.id)
            bench.clock.advance(1.0)
        assert await bench.claim(lane=Lane.PROBATION) == []
        bench.clock.advance(10.0)
        assert [lease.id for lease in await bench.claim(2, lane=Lane.PROBATION)] == ids[:2]
        assert [lease.id for lease in await bench.claim(2, lane=Lane.PROBATION)] == ids[2:]

    @scenario
    async def test_in_a_lane_a_message_counts_as_started_at_once(self, bench: Bench) -> None:
        """Workers do not mark a suspect as started in a lane, so every lease that runs out counts as a crash."""
        id_ = (await bench.put("k")).id
        assert [one.crashes for one in await bench.claim(lane=Lane.MAIN)] == [0]
        for crashes in range(1, limits.SUSPECT_AFTER + 3):
            bench.clock.advance(LEASE)
            assert await bench.claim(lane=Lane.MAIN) == []
            assert [(one.id, one.crashes) for one in await bench.claim(lane=Lane.PROBATION)] == [(id_, crashes)]

    # Crashes that were observed.

    @scenario
    async def test_again_after_a_crash_counts_the_crash_and_keeps_the_failure(self, bench: Bench) -> None:
        """The crash is recorded at once instead of after the lease, and uses up no attempt."""
        first = await bench.leased("k")
        at = bench.clock.now()
        again = Again(5.0, FAILURE, counted=False, crashed=True)
        assert await bench.store.settle([(first, again)]) == [True]
        record = await bench.record(first.id)
        assert (record.state, record.attempt, record.crashes, record.worker) == (State.SCHEDULED, 0, 1, None)
        assert await bench.store.attempts(first.id) == [Attempt(1, first.fence, at, "grace", FAILURE, 5.0)]
        assert await bench.claim() == []
        bench.clock.advance(5.0)
        second = await bench.claim_only()
        assert (second.attempt, second.crashes) == (1, 1)
        assert await bench.store.settle([(first, again)]) == [False]
        assert await bench.store.settle([(second, Again(0.0, FAILURE, counted=True, crashed=True))]) == [True]
        third = await bench.claim_only()
        assert (third.attempt, third.crashes) == (2, 2)

    @scenario
    async def test_a_lease_is_extended_by_its_id_and_fence_alone(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        known = [_Known(lease.id, lease.fence), _Known(lease.id, lease.fence + 1), _Known("no-such-message", 1)]
        bench.clock.advance(LEASE - _TICK)
        assert await bench.store.extend(known, lease=LEASE) == [True, False, False]
        bench.clock.advance(LEASE - _TICK)
        assert await bench.claim() == []
        bench.clock.advance(_TICK)
        assert (await bench.claim_only()).id == lease.id

    # The messages that a worker holds.

    @scenario
    async def test_find_by_worker_returns_what_it_holds(self, bench: Bench) -> None:
        for queue in ("default", "default", "mail"):
            await bench.put(queue=queue)
        ada = [lease.id for lease in await bench.claim(1, worker="ada")]
        grace = sorted(one.id for one in await bench.claim(worker="grace", queues=("default", "mail")))
        found = await bench.store.find(Query(worker="grace"))
        assert [one.envelope.id for one in found] == grace
        assert {(one.state, one.worker) for one in found} == {(State.LEASED, "grace")}
        assert await _ids(bench, worker="ada") == ada
        assert await _ids(bench, worker="unknown") == []
        assert len(await _ids(bench, worker="grace", queue="mail")) == 1
        assert await _ids(bench, worker="grace", states=(State.SCHEDULED,)) == []
        assert await _ids(bench, worker="grace", limit=1) == grace[:1]
        assert await _ids(bench, worker="grace", after=grace[0]) == grace[1:]

    @scenario
    async def test_what_a_worker_let_go_of_is_no_longer_its_own(self, bench: Bench) -> None:
        for outcome in (DONE, DEAD, HandBack(), Again(60.0, None)):
            lease = await bench.leased()
            assert await _ids(bench, worker="grace") == [lease.id]
            await bench.store.settle([(lease, outcome)])
            assert await _ids(bench, worker="grace") == []
            await bench.move(lease.id, State.CANCELLED)  # so that the next claim does not return it

    @scenario
    async def test_find_by_crashes_returns_the_living_that_workers_died_with(self, bench: Bench) -> None:
        once = await bench.crashed("once")
        await bench.store.settle([(await bench.claim_only(), Again(600.0, None, counted=False))])
        twice = await bench.crashed("twice", times=2)
        held = await bench.claim_only()
        await bench.put("fine", delay=MICROSECONDS)
        ended = await bench.crashed("ended")
        await bench.store.settle([(await bench.claim_only(), DONE)])
        assert await _ids(bench, crashes=1) == sorted([once, twice])
        assert await _ids(bench, crashes=2) == [twice]
        assert await _ids(bench, crashes=3) == []
        assert await _ids(bench, crashes=1, states=(State.SCHEDULED,)) == [once]
        assert await _ids(bench, crashes=1, states=(State.DONE,)) == []
        assert await _ids(bench, crashes=1, worker="grace") == [held.id]
        assert await _ids(bench, crashes=3, worker="grace") == []
        assert await _ids(bench, crashes=1, queue="mail") == []
        assert await _ids(bench, crashes=1, limit=1) == sorted([once, twice])[:1]
        assert await _ids(bench, crashes=1, after=max(once, twice)) == []
        assert (await bench.record(ended)).crashes == 1

    # After a restore from backup.

    @scenario
    async def test_after_a_restore_no_earlier_owner_can_write(self, bench: Bench) -> None:
        """The backup lacks some claims, so without the leap the next claim could give a fence that is still in use."""
        waiting = await bench.put("waiting", delay=MICROSECONDS)
        dead, done = await bench.settled("dead", DEAD), await bench.settled("done", DONE)
        held, other = await bench.leased("held"), await bench.leased("other")
        new = await bench.put("new")
        ids = (waiting.id, dead.id, done.id, held.id, other.id, new.id)
        fences = {id_: (await bench.record(id_)).fence for id_ in ids}
        assert await bench.store.restored() == 2
        for id_, fence in fences.items():
            assert (await bench.record(id_)).fence == fence + limits.FENCE_LEAP
        record = await bench.record(held.id)
        assert (record.state, record.worker, record.attempt, record.crashes) == (State.SCHEDULED, None, 0, 0)
        assert await bench.store.extend([held, other], lease=LEASE) == [False, False]
        assert await bench.store.settle([(held, DONE), (other, DEAD)]) == [False, False]
        again = {lease.id: lease for lease in await bench.claim()}
        assert set(again) == {held.id, other.id, new.id}
        assert (again[held.id].crashes, again[held.id].fence > held.fence + limits.FENCE_LEAP) == (0, True)
        assert await bench.store.settle([(again[held.id], DONE)]) == [True]
        assert await bench.move(dead.id, State.SCHEDULED)
        assert (await bench.record(dead.id)).fence > dead.fence + limits.FENCE_LEAP
        assert (await bench.record(done.id)).result == DONE.result
        assert await bench.store.restored() == 2
