"""Transactions: the caller's rows, put messages and settlements commit together, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from onefold.errors import LeaseLostError
from onefold.store import Done, State
from onefold.testing.contracts.bench import ACT, DEAD, DONE, LEASE, Bench, Contract, scenario


class WrongError(Exception):
    """Raised on purpose inside a transaction."""


async def effects(bench: Bench) -> list[int]:
    """Return the rows of the caller's own table."""
    return [int(row[0]) for row in await bench.store.fetch("SELECT number FROM effect ORDER BY number")]


async def prepare(bench: Bench) -> None:
    """Make the caller's own table; statements use literals, because drivers write placeholders differently."""
    if not bench.store.capabilities.transactional:
        pytest.skip("the caller's rows are not in this store")
    async with bench.store.transaction() as transaction:
        await transaction.execute("CREATE TABLE effect (number INTEGER NOT NULL UNIQUE)")


class TransactionContract(Contract):
    """One commit, or nothing."""

    @scenario
    async def test_rows_sends_and_outcome_commit_together(self, bench: Bench) -> None:
        await prepare(bench)
        lease = await bench.leased("parent")
        child, sent = bench.message("child"), bench.message("sent")
        async with bench.store.transaction() as transaction:
            await transaction.execute("INSERT INTO effect VALUES (1)")
            assert await transaction.execute("SELECT number FROM effect") == [(1,)]
            await transaction.put([sent])
            assert await transaction.settle([(lease, Done(b"1", sends=(child,)))]) == [True]
        assert await effects(bench) == [1]
        assert await bench.state(lease.id) is State.DONE
        assert {one.id for one in await bench.claim()} == {child.id, sent.id}

    @scenario
    async def test_a_transaction_that_raises_leaves_nothing_behind(self, bench: Bench) -> None:
        await prepare(bench)
        lease = await bench.leased("parent")
        dead = await bench.settled("dead", DEAD)
        before = await bench.record(lease.id)
        child, sent = bench.message("child"), bench.message("sent")

        async def everything_and_then_fail() -> None:
            async with bench.store.transaction() as transaction:
                await transaction.execute("INSERT INTO effect VALUES (1)")
                await transaction.put([sent])
                assert await transaction.settle([(lease, Done(b"1", sends=(child,)))]) == [True]
                assert await transaction.move([dead.id], State.SCHEDULED, ACT) == [dead.id]
                assert await transaction.register("queue", "mail", b"1", version=0)
                raise WrongError

        with pytest.raises(WrongError):
            await everything_and_then_fail()
        assert await effects(bench) == []
        assert await bench.record(lease.id) == before
        assert await bench.state(dead.id) is State.DEAD
        assert await bench.store.registered("queue", "mail") is None
        assert (await bench.find(child.id), await bench.find(sent.id)) == (None, None)
        assert not (await bench.put("child")).duplicate
        assert await bench.store.settle([(lease, DONE)]) == [True]

    @scenario
    async def test_a_stale_lease_takes_the_rows_of_its_handler_with_it(self, bench: Bench) -> None:
        """As the worker does with a lost lease: the settlement is refused, so everything is rolled back."""
        await prepare(bench)
        stale = await bench.leased("k")
        bench.clock.advance(LEASE)
        fresh = await bench.claim_only()
        for lease, number in ((stale, 1), (fresh, 2), (stale, 3)):
            try:
                async with bench.store.transaction() as transaction:
                    await transaction.execute(f"INSERT INTO effect VALUES ({number})")
                    if not (await transaction.settle([(lease, DONE)]))[0]:
                        raise LeaseLostError("taken over")
            except LeaseLostError:
                assert lease is stale
        assert await effects(bench) == [2]

    @scenario
    async def test_a_failed_statement_of_the_caller_rolls_everything_back(self, bench: Bench) -> None:
        await prepare(bench)
        lease = await bench.leased("k")

        async def write_twice() -> None:
            async with bench.store.transaction() as transaction:
                await transaction.settle([(lease, DONE)])
                await transaction.execute("INSERT INTO effect VALUES (1)")
                await transaction.execute("INSERT INTO effect VALUES (1)")

        with pytest.raises(Exception, match=r"(?i)unique"):
            await write_twice()
        assert await effects(bench) == []
        assert await bench.state(lease.id) is State.LEASED
        assert await bench.store.settle([(lease, DONE)]) == [True]

    @scenario
    async def test_a_message_is_invisible_before_its_commit(self, bench: Bench) -> None:
        other = await bench.another()
        sent = bench.message("k")
        async with bench.store.transaction() as transaction:
            await transaction.put([sent])
            assert await bench.claim(store=other) == []
            assert await bench.find(sent.id) is None
        assert [lease.id for lease in await bench.claim(store=other)] == [sent.id]

    @scenario
    async def test_put_in_a_transaction_knows_what_it_put_before(self, bench: Bench) -> None:
        first = bench.message("k")
        async with bench.store.transaction() as transaction:
            await transaction.put([first])
            second = (await transaction.put([bench.message("k")]))[0]
            assert (second.id, second.duplicate) == (first.id, True)
            assert (await transaction.put([bench.message("k", payload=b"[2]")]))[0].clash
        assert await bench.all_ids() == {first.id}

    @scenario
    async def test_purge_rolls_back_too(self, bench: Bench) -> None:
        lease = await bench.settled("k", Done(b"1", key_window=1.0))
        bench.clock.advance(1.0)

        async def purge_and_fail() -> None:
            async with bench.store.transaction() as transaction:
                assert (await transaction.purge()).messages == 1
                raise WrongError

        with pytest.raises(WrongError):
            await purge_and_fail()
        assert await bench.state(lease.id) is State.DONE

    @scenario
    async def test_a_transaction_cancelled_at_any_moment_leaves_the_store_usable(self, bench: Bench) -> None:
        """A handler may be cancelled while its transaction begins, works or commits; the next transaction must work."""
        await prepare(bench)

        async def work(number: int) -> None:
            async with bench.store.transaction() as transaction:
                await transaction.execute(f"INSERT INTO effect VALUES ({number})")
                await transaction.put([bench.message(f"cancelled-{number}")])

        finished = 0
        for turns in range(12):
            task = asyncio.create_task(work(turns))
            for _ in range(turns):
                await one_turn()
            task.cancel()
            await asyncio.wait([task])
            finished += not task.cancelled()
            assert not (await bench.put(f"next-{turns}")).duplicate
            async with bench.store.transaction() as transaction:
                await transaction.execute(f"INSERT INTO effect VALUES ({100 + turns})")
        kept = [number for number in await effects(bench) if number < 100]
        for number in range(12):
            assert (await bench.put(f"cancelled-{number}")).duplicate is (number in kept)
        assert len(kept) >= finished


async def one_turn() -> None:
    """Let every task that is ready run one step."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()
