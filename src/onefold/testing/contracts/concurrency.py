"""Several stores on one database: of calls at the same time one wins, and all callers get the same answer."""

from __future__ import annotations

import asyncio

import pytest

from onefold.errors import KeyReuseError, StoreError
from onefold.store import PutOptions, State, Stored
from onefold.testing.contracts.bench import ACT, DEAD, DONE, LEASE, Bench, Contract, scenario
from onefold.testing.faults import HastyClock

#: A wake-up that was missed in this many attempts does not work.
_RINGS_MAX = 2_000


class ConcurrencyContract(Contract):
    """Calls from several stores at the same time."""

    @scenario
    async def test_of_concurrent_puts_of_one_key_one_wins(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        for number in range(10):
            answers = await asyncio.gather(*(stores[n % 2].put([bench.message(f"k{number}")]) for n in range(8)))
            stored = [one for answer in answers for one in answer]
            assert [one.duplicate for one in stored].count(False) == 1
            assert len({one.id for one in stored}) == 1
        assert len(await bench.claim()) == 10

    @scenario
    async def test_of_concurrent_puts_of_one_deduplication_key_one_wins(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        for number in range(5):
            answers = await asyncio.gather(
                *(stores[n % 2].put([bench.message(deduplication_key=f"d{number}")]) for n in range(8))
            )
            stored = [one for answer in answers for one in answer]
            assert [one.duplicate for one in stored].count(False) == 1
            assert len({one.id for one in stored}) == 1
        assert len(await bench.claim()) == 5

    @scenario
    async def test_a_freed_key_goes_to_exactly_one_sender(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        for number in range(5):
            first = await bench.put(f"k{number}")
            await bench.move(first.id, State.CANCELLED)
            answers = await asyncio.gather(*(stores[n % 2].put([bench.message(f"k{number}")]) for n in range(6)))
            stored = [one for answer in answers for one in answer]
            assert [one.duplicate for one in stored].count(False) == 1
            assert len({one.id for one in stored} - {first.id}) == 1
        assert len(await bench.claim()) == 5

    @scenario
    async def test_puts_of_the_same_keys_in_other_orders_do_not_block_each_other(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        names = [f"k{number}" for number in range(20)]
        answers = await asyncio.gather(
            *(
                stores[n % 2].put([bench.message(key) for key in (names if n < 2 else reversed(names))])
                for n in range(4)
            )
        )
        assert sum(not one.duplicate for answer in answers for one in answer) == 20
        assert len(await bench.all_ids()) == 20

    @scenario
    async def test_puts_of_one_transaction_may_be_under_way_together(self, bench: Bench) -> None:
        if not bench.store.capabilities.shared:
            pytest.skip("only where a server stores what is put")
        await bench.put("taken")
        freed = await bench.put("freed")
        await bench.move(freed.id, State.CANCELLED)
        keys = ("new", "taken", "freed")
        async with bench.store.transaction() as transaction:
            answers = await asyncio.gather(
                *(transaction.put([*map(bench.message, keys)]) for _ in range(3)),
                *(transaction.put([bench.message(f"{n}", deduplication_key="d")]) for n in range(3)),
                transaction.put([bench.message("both", deduplication_key="e")]),
                transaction.put([bench.message("both", deduplication_key="f"), bench.message("more")]),
            )
        by_key = [*zip(*answers[:3], strict=True), *zip(*answers[3:6], strict=True), (answers[6][0], answers[7][0])]
        assert [[one.duplicate for one in those].count(False) for those in by_key] == [1, 0, 1, 1, 1]
        assert [len({one.id for one in those}) for those in by_key] == [1, 1, 1, 1, 1]
        assert len(await bench.claim()) == 6

    @scenario
    async def test_of_concurrent_puts_of_one_batch_one_is_stored(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        options = PutOptions(batch_key="b")

        async def put(number: int) -> list[Stored]:
            try:
                return await stores[number % 2].put([bench.message(f"b#{n}") for n in range(3)], options)
            except KeyReuseError:
                return []

        answers = await asyncio.gather(*(put(number) for number in range(4)))
        assert all(answers)
        assert sum(not one.duplicate for answer in answers for one in answer) == 3
        assert len(await bench.all_ids()) == 3

    @scenario
    async def test_concurrent_claims_never_get_the_same_message(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        ids = [one.id for one in await bench.store.put([bench.message() for _ in range(60)])]
        claims = await asyncio.gather(*(bench.claim(5, store=stores[n % 2], worker=f"w{n}") for n in range(16)))
        claimed = [lease.id for leases in claims for lease in leases]
        claimed += [lease.id for lease in await bench.claim()]
        assert sorted(claimed) == sorted(ids)

    @scenario
    async def test_concurrent_claims_of_leases_that_ran_out_never_get_the_same_message(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        await bench.store.put([bench.message() for _ in range(30)])
        old = {lease.id: lease.fence for lease in await bench.claim()}
        bench.clock.advance(LEASE)
        claims = await asyncio.gather(*(bench.claim(5, store=stores[n % 2], worker=f"w{n}") for n in range(8)))
        leases = [lease for some in claims for lease in some] + await bench.claim()
        assert sorted(lease.id for lease in leases) == sorted(old)
        assert all(lease.fence > old[lease.id] and lease.crashes == 1 for lease in leases)

    @scenario
    async def test_of_concurrent_settles_of_one_lease_one_wins(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]
        for number in range(5):
            lease = await bench.leased(f"k{number}")
            won = await asyncio.gather(
                *(stores[n % 2].settle([(lease, DONE if n % 4 < 2 else DEAD)]) for n in range(8))
            )
            assert won.count([True]) == 1
            winner = DONE if won.index([True]) % 4 < 2 else DEAD
            assert await bench.state(lease.id) is (State.DONE if winner is DONE else State.DEAD)

    @scenario
    async def test_either_the_holder_settles_or_the_operator_cancels(self, bench: Bench) -> None:
        other = await bench.another()
        for number in range(5):
            lease = await bench.leased(f"k{number}")
            settled, cancelled = await asyncio.gather(
                bench.store.settle([(lease, DONE)]), bench.move(lease.id, State.CANCELLED, store=other)
            )
            assert settled == [not cancelled]
            assert await bench.state(lease.id) is (State.CANCELLED if cancelled else State.DONE)

    @scenario
    async def test_of_concurrent_redrives_one_reopens(self, bench: Bench) -> None:
        other = await bench.another()
        dead = await bench.settled("k", DEAD)
        moved = await asyncio.gather(
            *(bench.move(dead.id, State.SCHEDULED, store=store) for store in (bench.store, other, bench.store, other))
        )
        assert moved.count(True) == 1
        assert (await bench.claim_only()).replay_count == 1

    @scenario
    async def test_a_letter_that_is_closed_meanwhile_is_not_taken_for_redriven(self, bench: Bench) -> None:
        sender, third = await bench.another(), await bench.another()
        dead = await bench.settled("k", DEAD)
        again = bench.message("k")
        async with bench.store.transaction() as transaction:
            assert await transaction.move([dead.id], State.DISCARDED, ACT) == [dead.id]
            sending = asyncio.ensure_future(sender.put([again], PutOptions(if_dead="redrive")))
            for _ in range(5):  # lets the sender run as far as it can
                await third.now()
        assert await sending == [Stored(again.id, State.SCHEDULED)]
        assert (await bench.claim_only()).id == again.id

    @scenario
    async def test_of_concurrent_writers_to_the_register_one_wins(self, bench: Bench) -> None:
        stores = [bench.store, await bench.another()]

        async def write(number: int, version: int) -> bool:
            async with stores[number % 2].transaction() as transaction:
                return await transaction.register("k", "n", str(number).encode(), version=version)

        for _ in range(4):
            known = await bench.store.registered("k", "n")
            wrote = await asyncio.gather(*(write(n, known.version if known else 0) for n in range(6)))
            assert wrote.count(True) == 1
            entry = await bench.store.registered("k", "n")
            assert entry is not None
            assert entry.value == str(wrote.index(True)).encode()

    # Opening, migrating, waiting.

    @scenario
    async def test_migrating_again_applies_nothing_and_loses_nothing(self, bench: Bench) -> None:
        stored = await bench.put("k")
        assert await bench.store.migrate() == []
        assert await bench.state(stored.id) is State.SCHEDULED

    def test_concurrent_migrations_apply_each_step_once(self) -> None:
        """Several processes of one deployment start at the same moment on an empty database."""

        async def start() -> None:
            stores = [self.make_store(HastyClock()) for _ in range(4)]
            try:
                await asyncio.gather(*(store.migrate() for store in stores))
                for store in stores:
                    assert await store.migrate() == []
                    await store.open()
                    assert await store.count() == {}
            finally:
                for store in stores:
                    await store.close()

        asyncio.run(start())

    @scenario
    async def test_a_closed_store_says_so_and_opens_again(self, bench: Bench) -> None:
        stored = await bench.put("k")
        await bench.store.close()
        await bench.store.close()
        with pytest.raises(StoreError):
            await bench.put("other")
        await bench.store.open()
        await bench.store.open()
        assert await bench.state(stored.id) is State.SCHEDULED

    @scenario
    async def test_what_was_put_is_there_for_the_next_process(self, bench: Bench) -> None:
        stored = await bench.put("k")
        await bench.store.close()
        other = await bench.another()
        assert [lease.id for lease in await bench.claim(store=other)] == [stored.id]

    @scenario
    async def test_waiting_ends_by_itself_or_when_a_message_comes(self, bench: Bench) -> None:
        await bench.store.wait(["default"], timeout=0.01)
        senders = [bench.store]
        if bench.store.capabilities.notifies:
            senders.append(await bench.another())
        for sender in senders:
            await bench.store.wait(["default"], timeout=0.01)
            waiting = asyncio.create_task(bench.store.wait(["default"], timeout=600.0))
            for _ in range(_RINGS_MAX):
                await sender.put([bench.message()])
                if waiting.done():
                    break
            assert waiting.done()
            await waiting
