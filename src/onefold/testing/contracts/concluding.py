"""Conclude: a transaction that ends with its settlements, all or nothing."""

from __future__ import annotations

import asyncio

import pytest

from onefold.errors import KeyReuseError, LeaseLostError, StoreError
from onefold.store import Done, Lease, State
from onefold.testing.contracts.bench import DONE, LEASE, Bench, Contract, scenario
from onefold.testing.contracts.transactions import WrongError, effects, one_turn, prepare


class ConcludeContract(Contract):
    """The end of a handler's own transaction."""

    @scenario
    async def test_conclude_settles_and_commits_at_once(self, bench: Bench) -> None:
        await prepare(bench)
        lease = await bench.leased("parent")
        child = bench.message("child")
        async with bench.store.transaction() as transaction:
            await transaction.execute("INSERT INTO effect VALUES (1)")
            await transaction.conclude([(lease, Done(b"1", sends=(child,)))])
            # Other connections see it, although the block has not ended.
            assert await effects(bench) == [1]
            assert await bench.state(lease.id) is State.DONE
        assert [one.id for one in await bench.claim()] == [child.id]

    @scenario
    async def test_conclude_without_settlements_commits(self, bench: Bench) -> None:
        await prepare(bench)
        async with bench.store.transaction() as transaction:
            await transaction.execute("INSERT INTO effect VALUES (1)")
            await transaction.conclude([])
        assert await effects(bench) == [1]

    @scenario
    async def test_conclude_with_a_stale_lease_rolls_everything_back(self, bench: Bench) -> None:
        await prepare(bench)
        stale = await bench.leased("k")
        bench.clock.advance(LEASE)
        fresh = await bench.claim_only()
        sent = bench.message("sent")

        async def conclude(*leases: Lease) -> None:
            async with bench.store.transaction() as transaction:
                await transaction.execute("INSERT INTO effect VALUES (1)")
                await transaction.put([sent])
                await transaction.conclude([(lease, DONE) for lease in leases])

        for leases in ((stale,), (fresh, stale)):
            with pytest.raises(LeaseLostError, match=stale.id):
                await conclude(*leases)
            assert await effects(bench) == []
            assert await bench.find(sent.id) is None
            assert (await bench.record(fresh.id)).fence == fresh.fence
        await conclude(fresh)
        assert await effects(bench) == [1]

    @scenario
    async def test_conclude_that_cannot_send_rolls_everything_back(self, bench: Bench) -> None:
        await prepare(bench)
        await bench.put("taken", queue="mail")
        lease = await bench.leased("k")

        async def conclude() -> None:
            async with bench.store.transaction() as transaction:
                await transaction.execute("INSERT INTO effect VALUES (1)")
                clash = bench.message("taken", payload=b"[2]")
                await transaction.conclude([(lease, Done(b"1", sends=(clash,)))])

        with pytest.raises(KeyReuseError):
            await conclude()
        assert await effects(bench) == []
        assert await bench.store.settle([(lease, DONE)]) == [True]

    @scenario
    async def test_nothing_can_be_done_in_a_transaction_that_was_concluded(self, bench: Bench) -> None:
        await prepare(bench)
        lease = await bench.leased("k")

        async def go_on() -> None:
            async with bench.store.transaction() as transaction:
                await transaction.conclude([(lease, DONE)])
                with pytest.raises(StoreError):
                    await transaction.execute("INSERT INTO effect VALUES (1)")
                with pytest.raises(StoreError):
                    await transaction.put([bench.message("late")])
                raise WrongError

        with pytest.raises(WrongError):
            await go_on()
        assert await effects(bench) == []
        assert await bench.state(lease.id) is State.DONE

    @scenario
    async def test_a_conclusion_that_is_cancelled_leaves_all_or_nothing(self, bench: Bench) -> None:
        await prepare(bench)

        async def work(lease: Lease, number: int) -> None:
            async with bench.store.transaction() as transaction:
                await transaction.execute(f"INSERT INTO effect VALUES ({number})")
                await transaction.conclude([(lease, DONE)])

        for turns in range(12):
            lease = await bench.leased()
            task = asyncio.create_task(work(lease, turns))
            for _ in range(turns):
                await one_turn()
            task.cancel()
            await asyncio.wait([task])
            async with bench.store.transaction() as transaction:
                await transaction.execute(f"INSERT INTO effect VALUES ({100 + turns})")
            done = await bench.state(lease.id) is State.DONE
            assert done is (turns in await effects(bench))
            assert done or task.cancelled()
            await bench.store.settle([(lease, DONE)])

    @scenario
    async def test_many_transactions_at_once_each_commit_or_leave_nothing(self, bench: Bench) -> None:
        """Some lose their lease, fail or are cancelled; the transactions that share a commit with them succeed."""
        await prepare(bench)
        await bench.store.put([bench.message() for _ in range(40)])
        stale = await bench.claim(10)
        bench.clock.advance(LEASE)
        leases = await bench.claim()

        async def work(number: int, lease: Lease) -> None:
            async with bench.store.transaction() as transaction:
                await transaction.execute(f"INSERT INTO effect VALUES ({number})")
                if number % 5 == 0:
                    raise WrongError
                if number % 5 == 1:
                    await transaction.execute(f"INSERT INTO effect VALUES ({number})")
                await transaction.conclude([(lease, DONE)])

        all_leases = [*leases, *stale]
        tasks = [asyncio.create_task(work(number, lease)) for number, lease in enumerate(all_leases)]
        for number, task in enumerate(tasks):
            if number % 5 == 2:
                await one_turn()
                task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        kept = set(await effects(bench))
        for number, (lease, answer) in enumerate(zip(all_leases, answers, strict=True)):
            mine = number < len(leases)
            settled = mine and await bench.state(lease.id) is State.DONE
            assert (number in kept) is settled
            if number % 5 in (3, 4):
                assert settled is mine
                assert answer is None if mine else isinstance(answer, LeaseLostError)
            elif number % 5 in (0, 1):
                assert not settled
                assert isinstance(answer, Exception)
