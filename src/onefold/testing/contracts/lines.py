"""Lines: messages with one ordering key run one at a time and in order, across all claimers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from onefold import limits
from onefold.store import Again, Lane, Lease, Parked, State
from onefold.store.gates import Gating
from onefold.testing.contracts.bench import AGAIN, DEAD, DONE, LEASE, Bench, Contract, scenario

CAP = Gating(name="task", max_running=3)


def keys(leases: Sequence[Lease]) -> list[str]:
    return [lease.envelope.idempotency_key for lease in leases]


async def put_many(bench: Bench, number: int, prefix: str = "k", **fields: Any) -> None:
    await bench.store.put([bench.message(f"{prefix}{n}", **fields) for n in range(number)])


class LineContract(Contract):
    """One message of a line at a time, in order."""

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
    async def test_a_number_that_is_ended_by_a_lease_without_a_gate_lets_the_next_come(self, bench: Bench) -> None:
        """A supervisor settles messages of a dead process by leases that it makes from their records."""
        for number in (1, 2):
            await bench.store.put([bench.message(f"k{number}", ordering_key="a", sequence=number)])
        (first,) = await bench.claim()
        await bench.store.settle([(replace(first, gate=None), DEAD)])
        (second,) = await bench.claim()
        assert (keys([second]), second.gap) == (["k2"], False)

    @scenario
    async def test_a_message_that_waits_for_its_next_attempt_holds_its_line(self, bench: Bench) -> None:
        await put_many(bench, 2, ordering_key="a")
        (first,) = await bench.claim()
        await bench.store.settle([(first, AGAIN)])
        assert await bench.claim() == []
        bench.clock.advance(6)
        assert keys(await bench.claim()) == ["k0"]

    @scenario
    async def test_a_failed_message_may_be_passed_over_and_comes_back(self, bench: Bench) -> None:
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
    async def test_claims_at_the_same_moment_get_one_of_a_line(self, bench: Bench) -> None:
        stores = [bench.store, *[await bench.another() for _ in range(3)]]
        await put_many(bench, 12, ordering_key="a")
        for n in range(12):
            claims = [bench.claim(5, store=store, worker=f"w{n}") for n, store in enumerate(stores)]
            leases = [lease for some in await asyncio.gather(*claims) for lease in some]
            assert keys(leases) == [f"k{n}"]
            await bench.store.settle([(leases[0], DONE)])

    @scenario
    async def test_a_message_that_cannot_be_handled_here_holds_its_line(self, bench: Bench) -> None:
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
    """Sequence numbers instead of the order of sends."""

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
    async def test_a_message_that_waited_long_enough_is_claimed_with_the_gap(self, bench: Bench) -> None:
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
    async def test_a_cancelled_message_leaves_no_gap(self, bench: Bench) -> None:
        first = await bench.put("n1", ordering_key="a", sequence=1)
        await bench.put("n2", ordering_key="a", sequence=2)
        assert await bench.move(first.id, State.CANCELLED)
        assert keys(await bench.claim()) == ["n2"]

    @scenario
    async def test_a_message_that_was_passed_over_is_not_missing(self, bench: Bench) -> None:
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
