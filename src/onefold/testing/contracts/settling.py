"""Settle: how claims end, what is stored, and that only the fence decides whether a settlement counts."""

from __future__ import annotations

import itertools

import pytest

from onefold.clock import MICROSECONDS
from onefold.errors import KeyReuseError
from onefold.store import Again, Attempt, Dead, Done, HandBack, Lease, Outcome, State
from onefold.testing.contracts.bench import AGAIN, DEAD, DONE, FAILURE, LEASE, Bench, Contract, scenario

_SNOOZED, _CRASHED = Again(5.0, None, counted=False), Again(5.0, FAILURE, counted=False, crashed=True)
_OUTCOMES: tuple[Outcome, ...] = (DONE, AGAIN, DEAD, HandBack(), _SNOOZED, _CRASHED)


class SettleContract(Contract):
    """The end of a claim."""

    @scenario
    async def test_done_keeps_result_fence_and_times(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        bench.clock.advance(2.0)
        assert await bench.store.settle([(lease, Done(b'"paid"', key_window=100.0))]) == [True]
        record = await bench.record(lease.id)
        now = bench.clock.now()
        assert (record.state, record.result, record.failure) == (State.DONE, b'"paid"', None)
        assert (record.fence, record.attempt, record.crashes) == (lease.fence, 0, 0)
        assert (record.ended_at, record.kept_until) == (now, now + 100 * MICROSECONDS)
        assert (record.worker, await bench.claim()) == (None, [])
        assert await bench.store.attempts(lease.id) == []

    @scenario
    async def test_again_waits_its_delay_and_counts_an_attempt(self, bench: Bench) -> None:
        first = await bench.leased("k")
        bench.clock.advance(1.0)
        assert await bench.store.settle([(first, Again(5.0, FAILURE))]) == [True]
        record = await bench.record(first.id)
        assert (record.state, record.attempt, record.worker) == (State.SCHEDULED, 1, None)
        assert record.envelope.due_at == bench.clock.now() + 5 * MICROSECONDS
        failed_at = bench.clock.now()
        bench.clock.advance(5.0 - 0.000001)
        assert await bench.claim() == []
        bench.clock.advance(0.000001)
        second = await bench.claim_only()
        assert (second.id, second.attempt, second.crashes) == (first.id, 2, 0)
        assert await bench.store.attempts(first.id) == [Attempt(1, first.fence, failed_at, "grace", FAILURE, 5.0)]

    @scenario
    async def test_again_uncounted_uses_up_no_attempt(self, bench: Bench) -> None:
        first = await bench.settled("k", Again(5.0, None, counted=False))
        bench.clock.advance(5.0)
        second = await bench.claim_only()
        assert (second.id, second.attempt) == (first.id, 1)
        assert await bench.store.attempts(first.id) == []
        await bench.store.settle([(second, Again(0.0, FAILURE, counted=False))])
        assert (await bench.claim_only()).attempt == 1
        assert [one.failure for one in await bench.store.attempts(first.id)] == [FAILURE]

    @scenario
    async def test_dead_keeps_the_failure_and_every_attempt(self, bench: Bench) -> None:
        first = await bench.settled("k", Again(0.0, FAILURE))
        second = await bench.claim_only()
        assert await bench.store.settle([(second, Dead(FAILURE, key_window=100.0))]) == [True]
        record = await bench.record(first.id)
        now = bench.clock.now()
        assert (record.state, record.failure, record.result) == (State.DEAD, FAILURE, None)
        assert (record.fence, record.attempt, record.replay_count) == (second.fence, 2, 0)
        assert (record.ended_at, record.kept_until) == (now, now + 100 * MICROSECONDS)
        assert record.envelope.payload_inline == b"[1]"
        attempts = await bench.store.attempts(first.id)
        assert [(one.attempt, one.fence, one.delay) for one in attempts] == [
            (1, first.fence, 0.0),
            (2, second.fence, None),
        ]
        assert await bench.claim() == []

    @scenario
    async def test_handing_back_is_as_if_it_had_never_been_claimed(self, bench: Bench) -> None:
        first = await bench.leased("k")
        due_at = first.envelope.due_at
        assert await bench.store.settle([(first, HandBack())]) == [True]
        record = await bench.record(first.id)
        assert (record.state, record.attempt, record.crashes, record.worker) == (State.SCHEDULED, 0, 0, None)
        assert record.envelope.due_at == due_at
        second = await bench.claim_only()
        assert (second.id, second.attempt, second.crashes) == (first.id, 1, 0)
        assert await bench.store.attempts(first.id) == []

    @scenario
    async def test_a_run_that_succeeds_later_keeps_the_number_of_failures(self, bench: Bench) -> None:
        first = await bench.settled("k", Again(0.0, FAILURE))
        await bench.store.settle([(await bench.claim_only(), DONE)])
        record = await bench.record(first.id)
        assert (record.state, record.attempt) == (State.DONE, 1)
        assert len(await bench.store.attempts(first.id)) == 1

    @scenario
    async def test_a_crash_is_kept_with_the_outcome(self, bench: Bench) -> None:
        first = await bench.leased("k")
        bench.clock.advance(LEASE)
        await bench.store.settle([(await bench.claim_only(), DONE)])
        assert (await bench.record(first.id)).crashes == 1

    # The fence.

    @scenario
    async def test_a_stale_lease_cannot_settle(self, bench: Bench) -> None:
        """Every outcome is refused: the new owner finds the message untouched and ends it."""
        for number, outcome in enumerate(_OUTCOMES):
            stale = await bench.leased(f"k{number}")
            bench.clock.advance(LEASE)
            fresh = await bench.claim_only()
            before = await bench.record(stale.id)
            assert await bench.store.settle([(stale, outcome)]) == [False]
            assert await bench.record(stale.id) == before
            assert await bench.store.attempts(stale.id) == []
            assert await bench.store.settle([(fresh, DONE)]) == [True]

    @scenario
    async def test_a_lease_settles_once(self, bench: Bench) -> None:
        """The answer was lost and the worker settles again: the second settlement changes nothing."""
        for number, outcome in enumerate(_OUTCOMES):
            lease = await bench.settled(f"k{number}", outcome)
            before = await bench.record(lease.id), await bench.store.attempts(lease.id)
            for second in _OUTCOMES:
                assert await bench.store.settle([(lease, second)]) == [False]
            assert before == (await bench.record(lease.id), await bench.store.attempts(lease.id))
            bench.clock.advance(LEASE)
            await bench.store.settle([(one, DONE) for one in await bench.claim()])

    @scenario
    async def test_a_lease_of_a_message_that_was_redriven_cannot_settle(self, bench: Bench) -> None:
        stale = await bench.settled("k", DEAD)
        assert await bench.move(stale.id, State.SCHEDULED)
        assert await bench.store.settle([(stale, DONE)]) == [False]
        fresh = await bench.claim_only()
        assert await bench.store.settle([(stale, DONE), (fresh, DONE)]) == [False, True]

    # Several at once.

    @scenario
    async def test_settling_several_answers_in_order_and_a_stale_one_costs_only_itself(self, bench: Bench) -> None:
        assert await bench.store.settle([]) == []
        stale = await bench.leased()
        bench.clock.advance(LEASE)
        await bench.store.settle([(await bench.claim_only(), DONE)])
        for _ in range(5):
            await bench.put()
        a, b, c, d, e = await bench.claim()
        settlements: list[tuple[Lease, Outcome]] = [
            (a, AGAIN),
            (stale, DONE),
            (b, DEAD),
            (c, HandBack()),
            (stale, DEAD),
            (d, DONE),
            (e, DONE),
        ]
        assert await bench.store.settle(settlements) == [True, False, True, True, False, True, True]
        states = [await bench.state(lease.id) for lease in (a, b, c, d, e)]
        assert states == [State.SCHEDULED, State.DEAD, State.SCHEDULED, State.DONE, State.DONE]

    @scenario
    async def test_a_stale_and_a_fresh_lease_of_one_message_are_told_apart(self, bench: Bench) -> None:
        """A worker that lost a message and claimed it again may settle both runs in one call."""
        expected = {Done: State.DONE, Again: State.SCHEDULED, Dead: State.DEAD, HandBack: State.SCHEDULED}
        for number, (old, new) in enumerate(itertools.product(_OUTCOMES, _OUTCOMES)):
            child = bench.message("child-of-a-stale-lease")
            stale_outcome = Done(b"2", sends=(child,)) if isinstance(old, Done) else old
            stale = await bench.leased(f"k{number}")
            bench.clock.advance(LEASE)
            fresh = await bench.claim_only()
            assert await bench.store.extend([stale, fresh], lease=LEASE) == [False, True]
            assert await bench.store.settle([(stale, stale_outcome), (fresh, new)]) == [False, True]
            record = await bench.record(fresh.id)
            assert record.state is expected[type(new)]
            assert record.result == (new.result if isinstance(new, Done) else None)
            failed = isinstance(new, Again | Dead) and new.failure is not None
            assert [one.fence for one in await bench.store.attempts(fresh.id)] == ([fresh.fence] if failed else [])
            assert await bench.find(child.id) is None
            await bench.move(fresh.id, State.CANCELLED)  # so that the next claim does not return it

    @scenario
    async def test_what_was_sent_goes_out_with_those_that_held_their_fence_only(self, bench: Bench) -> None:
        stale = await bench.leased()
        bench.clock.advance(LEASE)
        fresh = await bench.claim_only()
        await bench.put()
        other = await bench.claim_only()
        children = [bench.message(f"child-{number}") for number in range(3)]
        settlements = [
            (stale, Done(b"1", sends=(children[0],))),
            (fresh, Done(b"1", sends=(children[1], children[2]))),
            (other, DONE),
        ]
        assert await bench.store.settle(settlements) == [False, True, True]
        assert {lease.id for lease in await bench.claim()} == {children[1].id, children[2].id}
        assert await bench.find(children[0].id) is None

    @scenario
    async def test_what_was_sent_is_sent_once_although_the_run_was_repeated(self, bench: Bench) -> None:
        """Sends of a handler carry keys derived from its message, so a second run sends the same messages."""
        parent = await bench.settled("parent", Done(b"1", sends=(bench.message("parent/0"),)))
        child = await bench.claim_only()
        await bench.put()
        other = await bench.claim_only()
        assert await bench.store.settle([(other, Done(b"1", sends=(bench.message("parent/0"),)))]) == [True]
        assert await bench.claim() == []
        assert {parent.id, child.id, other.id} == await bench.all_ids()

    @scenario
    async def test_sending_under_a_key_of_another_payload_fails_the_settle_and_changes_nothing(
        self, bench: Bench
    ) -> None:
        await bench.put("taken", queue="mail")
        lease = await bench.leased()
        sends = (bench.message("fresh"), bench.message("taken", payload=b"[2]"))
        with pytest.raises(KeyReuseError):
            await bench.store.settle([(lease, Done(b"1", sends=sends))])
        assert await bench.state(lease.id) is State.LEASED
        assert await bench.find(sends[0].id) is None
        assert await bench.store.settle([(lease, DONE)]) == [True]
