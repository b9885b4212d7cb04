"""Gates: caps, rates, turns and priorities hold across all claimers."""

from __future__ import annotations

import asyncio

from onefold import limits
from onefold.store import HandBack, Parked, State
from onefold.store.gates import Gating, Rate
from onefold.testing.contracts.bench import AGAIN, DEAD, DONE, LEASE, Bench, Contract, scenario
from onefold.testing.contracts.lines import CAP, LineContract, SequenceContract, keys, put_many


class CapContract(Contract):
    """Caps on running messages, and rates at which they start."""

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
    async def test_claims_at_the_same_moment_stay_below_the_cap_together(self, bench: Bench) -> None:
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
    async def test_a_claim_that_names_no_limit_of_a_gate_has_none(self, bench: Bench) -> None:
        await put_many(bench, 10, gate="task:")
        assert len(await bench.claim()) == 10

    @scenario
    async def test_a_parked_message_takes_no_place(self, bench: Bench) -> None:
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


class FairContract(Contract):
    """Turns among gates, and priorities."""

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
    async def test_one_place_goes_round_among_the_waiting_gates(self, bench: Bench) -> None:
        one = [Gating(name="task", max_running=1)]
        for tenant in "abc":
            await put_many(bench, 4, prefix=tenant, gate=f"task:{tenant}")
        seen: list[str] = []
        for _ in range(6):
            (lease,) = await bench.claim(gatings=one)
            seen.append(keys([lease])[0][0])
            assert await bench.claim(gatings=one) == []
            await bench.store.settle([(lease, DONE)])
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
    async def test_a_higher_priority_comes_first(self, bench: Bench) -> None:
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
    """Every part of the contract of gates."""
