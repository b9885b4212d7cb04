"""Gates: caps, rates, turns and priorities, whoever claims."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from onefold import limits
from onefold.gate import Gating, Rate
from onefold.store import Again, HandBack, Lane, Lease, Parked, State
from onefold.testing.contracts.bench import AGAIN, DEAD, DONE, LEASE, Bench, Contract, scenario

CAP = Gating(name="task", max_running=3)


def keys(leases: Sequence[Lease]) -> list[str]:
    return [lease.envelope.idempotency_key for lease in leases]


async def put_many(bench: Bench, number: int, prefix: str = "k", **fields: Any) -> None:
    await bench.store.put([bench.message(f"{prefix}{n}", **fields) for n in range(number)])


class CapContract(Contract):
    """How many may run and start."""

    @scenario
    async def test_no_more_are_claimed_than_may_run(self, bench: Bench) -> None:
        await put_many(bench, 10, gate="task:")
        first = await bench.claim(gatings=[CAP])
        assert keys(first) == ["k0", "k1", "k2"]
        assert {lease.gate for lease in first} == {"task:"}
        assert await bench.claim(gatings=[CAP], store=await bench.another()) == []
        await bench.store.settle([(first[0], DONE), (first[1], AGAIN)])
        assert keys(await bench.claim(gatings=[CAP])) == ["k3", "k4"]

    @scenario
    async def test_a_place_is_free_again_when_a_lease_has_run_out(self, bench: Bench) -> None:
        await put_many(bench, 10, gate="task:")
        await bench.claim(gatings=[CAP])
        bench.clock.advance(LEASE - 1)
        assert await bench.claim(gatings=[CAP]) == []
        bench.clock.advance(2)
        assert len(await bench.claim(gatings=[CAP])) == 3

    @scenario
    async def test_a_cap_of_the_name_holds_for_all_its_gates_and_one_of_each_for_each(self, bench: Bench) -> None:
        both = Gating(name="api", max_running=5, max_running_each=2)
        for tenant in "abcd":
            await put_many(bench, 5, prefix=tenant, gate=f"api:{tenant}")
        claimed = keys(await bench.claim(gatings=[both]))
        assert len(claimed) == 5
        assert max(sum(key[0] == tenant for key in claimed) for tenant in "abcd") == 2

    @scenario
    async def test_names_that_begin_alike_do_not_share_a_cap(self, bench: Bench) -> None:
        for name in ("mail", "mail-fast", "mail.x", "mail0"):
            await put_many(bench, 2, prefix=name, gate=f"{name}:")
        assert len(await bench.claim(gatings=[Gating(name="mail", max_running=1)])) == 7

    @scenario
    async def test_those_who_claim_at_the_same_moment_stay_below_the_cap_together(self, bench: Bench) -> None:
        stores = [bench.store, *[await bench.another() for _ in range(3)]]
        await put_many(bench, 40, gate="task:")
        for _ in range(10):
            claims = [bench.claim(5, store=store, gatings=[CAP], worker=f"w{n}") for n, store in enumerate(stores)]
            leases = [lease for some in await asyncio.gather(*claims) for lease in some]
            assert 1 <= len(leases) <= 3
            await bench.store.settle([(lease, DONE) for lease in leases])

    @scenario
    async def test_what_takes_a_place_is_claimed_only_when_it_can_begin(self, bench: Bench) -> None:
        await put_many(bench, 10, gate="task:")
        await put_many(bench, 5, prefix="line", ordering_key="free", gate="other:free")
        await put_many(bench, 5, prefix="plain")
        claimed = keys(await bench.claim(gatings=[CAP], at_once=2))
        assert sorted(claimed) == ["k0", "k1", "line0", *(f"plain{n}" for n in range(5))]
        assert await bench.claim(gatings=[CAP], at_once=0) == []

    @scenario
    async def test_who_knows_no_limit_of_a_gate_claims_without(self, bench: Bench) -> None:
        await put_many(bench, 10, gate="task:")
        assert len(await bench.claim()) == 10

    @scenario
    async def test_who_is_parked_does_not_run(self, bench: Bench) -> None:
        await put_many(bench, 4, gate="task:")
        first = await bench.claim(gatings=[CAP])
        await bench.store.settle([(first[0], Parked(None, seen=0))])
        assert keys(await bench.claim(gatings=[CAP])) == ["k3"]

    @scenario
    async def test_tokens_come_with_time_and_are_saved_up_to_the_burst(self, bench: Bench) -> None:
        rated = Gating(name="task", rate=Rate(6, per=60, burst=2))
        await put_many(bench, 50, gate="task:")
        taken = [len(await bench.claim(gatings=[rated])) for _ in range(2)]
        for seconds in (9, 2, 10, 1_000):
            bench.clock.advance(seconds)
            taken.append(len(await bench.claim(gatings=[rated], store=await bench.another())))
        assert taken == [2, 0, 0, 1, 1, 2]

    @scenario
    async def test_each_gate_has_tokens_of_its_own(self, bench: Bench) -> None:
        rated = Gating(name="task", rate=Rate(5, per=60), rate_each=Rate(2, per=60))
        for tenant in "abc":
            await put_many(bench, 4, prefix=tenant, gate=f"task:{tenant}")
        first = keys(await bench.claim(gatings=[rated]))
        assert len(first) == 5
        assert max(sum(key[0] == tenant for key in first) for tenant in "abc") == 2
        bench.clock.advance(12)
        assert len(await bench.claim(gatings=[rated])) == 1

    @scenario
    async def test_tokens_are_forgotten_once_the_bucket_is_full(self, bench: Bench) -> None:
        rated = Gating(name="task", rate=Rate(2, per=60))
        await put_many(bench, 10, gate="task:")
        await bench.claim(gatings=[rated])
        async with bench.store.transaction() as transaction:
            await transaction.purge()
        assert await bench.claim(gatings=[rated]) == []
        bench.clock.advance(61)
        async with bench.store.transaction() as transaction:
            await transaction.purge()
        assert len(await bench.claim(gatings=[rated], lease=600)) == 2


class LineContract(Contract):
    """One at a time, in order."""

    @scenario
    async def test_of_a_line_only_the_first_is_claimed(self, bench: Bench) -> None:
        await put_many(bench, 3, prefix="a", ordering_key="a")
        await put_many(bench, 3, prefix="b", ordering_key="b")
        for n in range(3):
            leases = await bench.claim()
            assert sorted(keys(leases)) == [f"a{n}", f"b{n}"]
            assert {lease.gate for lease in leases} == {"task:a", "task:b"}
            assert await bench.claim(store=await bench.another()) == []
            await bench.store.settle([(leases[0], DONE), (leases[1], DEAD)])

    @scenario
    async def test_who_waits_for_its_next_attempt_holds_its_line(self, bench: Bench) -> None:
        await put_many(bench, 2, ordering_key="a")
        (first,) = await bench.claim()
        await bench.store.settle([(first, AGAIN)])
        assert await bench.claim() == []
        bench.clock.advance(6)
        assert keys(await bench.claim()) == ["k0"]

    @scenario
    async def test_who_fails_may_be_passed_over_and_comes_back(self, bench: Bench) -> None:
        skip = [Gating(name="task", on_failure="skip")]
        await put_many(bench, 3, ordering_key="a")
        (first,) = await bench.claim(gatings=skip)
        await bench.store.settle([(first, AGAIN)])
        (second,) = await bench.claim(gatings=skip)
        assert keys([second]) == ["k1"]
        bench.clock.advance(6)
        assert await bench.claim(gatings=skip) == []
        await bench.store.settle([(second, DONE)])
        assert keys(await bench.claim(gatings=skip)) == ["k0"]

    @scenario
    async def test_a_delay_a_snooze_and_parking_hold_a_line_whatever_the_policy(self, bench: Bench) -> None:
        skip = [Gating(name="task", on_failure="skip")]
        await bench.put("first", ordering_key="a", delay=10_000_000)
        await bench.put("second", ordering_key="a")
        assert await bench.claim(gatings=skip) == []
        bench.clock.advance(11)
        for outcome in (Again(5.0, None, counted=False), Parked(5.0, seen=0)):
            (lease,) = await bench.claim(gatings=skip)
            assert keys([lease]) == ["first"]
            await bench.store.settle([(lease, outcome)])
            assert await bench.claim(gatings=skip) == []
            bench.clock.advance(6)

    @scenario
    async def test_a_line_goes_on_when_its_first_is_cancelled_or_its_lease_runs_out(self, bench: Bench) -> None:
        await put_many(bench, 3, ordering_key="a")
        (first,) = await bench.claim()
        assert await bench.move(first.id, State.CANCELLED)
        (second,) = await bench.claim()
        bench.clock.advance(LEASE + 1)
        (again,) = await bench.claim()
        assert (again.id, again.fence) == (second.id, second.fence + 1)

    @scenario
    async def test_a_redriven_message_joins_its_line_at_the_end(self, bench: Bench) -> None:
        await put_many(bench, 3, ordering_key="a")
        (first,) = await bench.claim()
        await bench.store.settle([(first, DEAD)])
        assert await bench.move(first.id, State.SCHEDULED)
        await bench.put("k3", ordering_key="a")
        seen: list[str] = []
        for _ in range(4):
            (lease,) = await bench.claim()
            seen += keys([lease])
            await bench.store.settle([(lease, DONE)])
        assert seen == ["k1", "k2", "k0", "k3"]

    @scenario
    async def test_those_who_claim_at_the_same_moment_get_one_of_a_line(self, bench: Bench) -> None:
        stores = [bench.store, *[await bench.another() for _ in range(3)]]
        await put_many(bench, 12, ordering_key="a")
        for n in range(12):
            claims = [bench.claim(5, store=store, worker=f"w{n}") for n, store in enumerate(stores)]
            leases = [lease for some in await asyncio.gather(*claims) for lease in some]
            assert keys(leases) == [f"k{n}"]
            await bench.store.settle([(leases[0], DONE)])

    @scenario
    async def test_who_cannot_be_handled_here_holds_its_line(self, bench: Bench) -> None:
        await bench.put("new", ordering_key="a", gate="both:a", message_type="newer")
        await bench.put("old", ordering_key="a", gate="both:a")
        assert await bench.claim() == []
        assert keys(await bench.claim(types=("task", "newer"))) == ["new"]

    @scenario
    async def test_a_suspect_holds_its_line_until_it_was_tried_alone(self, bench: Bench) -> None:
        await bench.crashed("first", ordering_key="a")
        await bench.put("second", ordering_key="a")
        await bench.put("third", gate="task:")
        assert keys(await bench.claim(lane=Lane.MAIN)) == ["third"]
        assert keys(await bench.claim(lane=Lane.PROBATION)) == ["first"]

    @scenario
    async def test_many_lines_that_wait_do_not_hide_one_that_does_not(self, bench: Bench) -> None:
        number = limits.GATES_PER_CLAIM + 20
        await bench.store.put([bench.message(ordering_key=f"{n:04}", delay=10**9) for n in range(number)])
        await bench.put("free", ordering_key="9999")
        assert keys(await bench.claim(1)) == ["free"]

    @scenario
    async def test_a_line_may_be_limited_too(self, bench: Bench) -> None:
        for key in "abcde":
            await put_many(bench, 2, prefix=key, ordering_key=key)
        first = await bench.claim(gatings=[CAP])
        assert len(first) == 3
        await bench.store.settle([(lease, DONE) for lease in first])
        assert len(await bench.claim(gatings=[CAP])) == 3


class SequenceContract(Contract):
    """Numbers instead of the order of sends."""

    @scenario
    async def test_numbers_decide_in_whatever_order_they_came(self, bench: Bench) -> None:
        for number in (3, 1, 2):
            await bench.put(f"n{number}", ordering_key="a", sequence=number)
        seen: list[str] = []
        for outcome in (DONE, DEAD, DONE):
            (lease,) = await bench.claim()
            seen += keys([lease])
            await bench.store.settle([(lease, outcome)])
        assert seen == ["n1", "n2", "n3"]

    @scenario
    async def test_a_missing_number_is_waited_for(self, bench: Bench) -> None:
        await bench.put("n2", ordering_key="a", sequence=2)
        assert await bench.claim() == []
        await bench.put("n1", ordering_key="a", sequence=1)
        (first,) = await bench.claim()
        assert (keys([first]), first.gap) == (["n1"], False)
        await bench.store.settle([(first, DONE)])
        (second,) = await bench.claim()
        assert (keys([second]), second.gap) == (["n2"], False)

    @scenario
    async def test_who_has_waited_long_enough_is_given_with_the_gap(self, bench: Bench) -> None:
        await bench.put("n3", ordering_key="a", sequence=3)
        bench.clock.advance(limits.GAP_SECONDS - 1)
        assert await bench.claim() == []
        bench.clock.advance(2)
        (lease,) = await bench.claim()
        assert (keys([lease]), lease.gap) == (["n3"], True)
        await bench.store.settle([(lease, DEAD)])
        await bench.put("n4", ordering_key="a", sequence=4)
        assert [one.gap for one in await bench.claim()] == [False]

    @scenario
    async def test_a_gap_may_be_told_at_once_or_skipped(self, bench: Bench) -> None:
        await bench.put("n5", ordering_key="a", sequence=5)
        await bench.put("n6", ordering_key="b", sequence=6, message_type="other")
        policies = [Gating(name="task", gap="retry"), Gating(name="other", gap="skip")]
        leases = await bench.claim(gatings=policies, types=("task", "other"))
        assert sorted((lease.envelope.idempotency_key, lease.gap) for lease in leases) == [("n5", True), ("n6", False)]

    @scenario
    async def test_who_is_cancelled_passes_its_number_on(self, bench: Bench) -> None:
        first = await bench.put("n1", ordering_key="a", sequence=1)
        await bench.put("n2", ordering_key="a", sequence=2)
        assert await bench.move(first.id, State.CANCELLED)
        assert keys(await bench.claim()) == ["n2"]

    @scenario
    async def test_who_is_passed_over_is_not_missing(self, bench: Bench) -> None:
        skip = [Gating(name="task", on_failure="skip")]
        for number in (1, 2, 3):
            await bench.put(f"n{number}", ordering_key="a", sequence=number)
        for expected in ("n1", "n2", "n3"):
            (lease,) = await bench.claim(gatings=skip)
            assert (keys([lease]), lease.gap) == ([expected], False)
            await bench.store.settle([(lease, AGAIN)])
        assert await bench.claim(gatings=skip) == []

    @scenario
    async def test_a_late_or_redriven_number_comes_at_once(self, bench: Bench) -> None:
        for number in (1, 2):
            (lease,) = [await bench.leased(f"n{number}", ordering_key="a", sequence=number)]
            await bench.store.settle([(lease, DEAD)])
        await bench.put("n3", ordering_key="a", sequence=3)
        assert await bench.move(lease.id, State.SCHEDULED)
        (lease,) = await bench.claim()
        assert (keys([lease]), lease.gap) == (["n2"], False)

    @scenario
    async def test_the_last_number_outlives_its_messages(self, bench: Bench) -> None:
        await bench.settled("n1", DONE, ordering_key="a", sequence=1)
        bench.clock.advance(limits.KEY_WINDOW + 1)
        for _ in range(3):
            async with bench.store.transaction() as transaction:
                await transaction.purge()
        await bench.put("n2", ordering_key="a", sequence=2)
        assert keys(await bench.claim()) == ["n2"]


class FairContract(Contract):
    """Whose turn it is."""

    @scenario
    async def test_gates_take_turns_however_many_wait_at_one(self, bench: Bench) -> None:
        await put_many(bench, 60, prefix="a", gate="task:a")
        await put_many(bench, 3, prefix="b", gate="task:b")
        await put_many(bench, 1, prefix="c", gate="task:c")
        first = keys(await bench.claim(7))
        assert sorted(first) == ["a0", "a1", "a2", "b0", "b1", "b2", "c0"]
        assert len(await bench.claim(100)) == 57

    @scenario
    async def test_gates_take_turns_from_claim_to_claim(self, bench: Bench) -> None:
        for tenant in "abc":
            await put_many(bench, 5, prefix=tenant, gate=f"task:{tenant}")
        seen = [keys(await bench.claim(1))[0][0] for _ in range(6)]
        assert sorted(seen[:3]) == sorted(seen[3:]) == ["a", "b", "c"]

    @scenario
    async def test_no_kind_of_message_starves_another(self, bench: Bench) -> None:
        await put_many(bench, 20, prefix="gated", gate="task:")
        await put_many(bench, 20, prefix="plain")
        for n in range(20):
            await bench.put(f"lined{n}", ordering_key=str(n))
        seen = {keys(await bench.claim(1))[0][:5] for _ in range(9)}
        assert seen == {"gated", "plain", "lined"}

    @scenario
    async def test_who_has_priority_comes_first(self, bench: Bench) -> None:
        for priority in (0, 5, 9, 0):
            await bench.put(f"p{priority}-{bench.clock.now()}", priority=priority)
            bench.clock.advance(1)
        assert [key[:2] for key in keys(await bench.claim(2))] == ["p9", "p5"]
        assert [key[:2] for key in keys(await bench.claim(2))] == ["p0", "p0"]

    @scenario
    async def test_priority_is_time_waited(self, bench: Bench) -> None:
        await bench.put("old")
        bench.clock.advance(9 * limits.PRIORITY_STEP_SECONDS + 1)
        await bench.put("urgent", priority=9)
        assert keys(await bench.claim(1)) == ["old"]

    @scenario
    async def test_priority_counts_within_a_gate(self, bench: Bench) -> None:
        one = [Gating(name="task", max_running=1)]
        for priority in (0, 3, 9):
            await bench.put(f"p{priority}", gate="task:", priority=priority)
            bench.clock.advance(1)
        seen: list[str] = []
        for _ in range(3):
            (lease,) = await bench.claim(gatings=one)
            seen += keys([lease])
            await bench.store.settle([(lease, DONE)])
        assert seen == ["p9", "p3", "p0"]

    @scenario
    async def test_what_is_not_due_is_not_claimed_whatever_its_priority(self, bench: Bench) -> None:
        await bench.put("later", priority=9, delay=10_000_000)
        await bench.put("gated", gate="task:", delay=10_000_000)
        assert await bench.claim() == []
        bench.clock.advance(11)
        assert len(await bench.claim()) == 2

    @scenario
    async def test_a_message_keeps_gate_and_priority_when_it_is_redriven(self, bench: Bench) -> None:
        lease = await bench.settled("k", DEAD, gate="task:x", priority=4)
        assert await bench.move(lease.id, State.SCHEDULED)
        again = await bench.claim_only()
        assert (again.gate, again.envelope.gate, again.envelope.priority) == ("task:x", "task:x", 4)

    @scenario
    async def test_a_message_without_a_gate_can_be_given_one(self, bench: Bench) -> None:
        for ordered in (False, True):
            leases = []
            for n in range(3):
                leases.append(await bench.leased(f"{ordered}{n}"))
                bench.clock.advance(0.001)
            assert {lease.gate for lease in leases} == {None}
            await bench.store.settle([(lease, HandBack("task:x", ordered)) for lease in leases])
            given = await bench.claim(gatings=[Gating(name="task", max_running=2)])
            assert keys(given) == [f"{ordered}{n}" for n in range(1 if ordered else 2)]
            assert [(lease.gate, lease.attempt) for lease in given] == [("task:x", 1)] * len(given)
            for one in leases:
                await bench.move(one.id, State.CANCELLED)


class GateContract(CapContract, LineContract, SequenceContract, FairContract):
    """All of it."""
