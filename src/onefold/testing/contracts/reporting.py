"""Report: what a handler reports counts only while it holds the message."""

from __future__ import annotations

from onefold.store import Dead, Done, Progress, Said, State
from onefold.testing.contracts.bench import ACT, AGAIN, DONE, FAILURE, LEASE, Bench, Contract, scenario


async def _progress(bench: Bench, id_: str) -> Progress | None:
    return (await bench.store.progress([id_, "no-such-message"])).get(id_)


async def _shown(bench: Bench, id_: str) -> tuple[float, str] | None:
    found = await _progress(bench, id_)
    return None if found is None else (found.percent, found.message)


class ReportContract(Contract):
    """Progress and beats, guarded by the fence."""

    @scenario
    async def test_what_a_handler_says_can_be_read_while_it_runs(self, bench: Bench) -> None:
        """G2: percentage, text and time of the report, by the store's clock."""
        lease = await bench.leased()
        assert await bench.store.progress([lease.id]) == {}
        at = bench.clock.now()
        assert await bench.store.report([(lease, Said(12.5, "a third\nof ten"))]) == [True]
        expected = Progress("task", lease.fence, True, 12.5, "a third\nof ten", at, at)
        assert await _progress(bench, lease.id) == expected

    @scenario
    async def test_a_beat_leaves_what_was_said_before(self, bench: Bench) -> None:
        """G3: a beat shows that the handler is moving, without new progress."""
        lease = await bench.leased()
        assert await bench.store.report([(lease, Said())]) == [True]
        first = await _progress(bench, lease.id)
        assert first is not None
        assert (first.percent, first.message, first.at, first.beat_at) == (0.0, "", None, bench.clock.now())
        said_at = bench.clock.now()
        await bench.store.report([(lease, Said(50.0, "half"))])
        bench.clock.advance(3.0)
        await bench.store.report([(lease, Said())])
        second = await _progress(bench, lease.id)
        assert second == Progress("task", lease.fence, True, 50.0, "half", said_at, bench.clock.now())

    @scenario
    async def test_asking_writes_nothing(self, bench: Bench) -> None:
        lease = await bench.leased()
        assert await bench.store.report([(lease, None)]) == [True]
        assert await bench.store.report([]) == []
        assert await bench.store.progress([lease.id]) == {}

    @scenario
    async def test_a_stale_owner_changes_nothing_and_is_told(self, bench: Bench) -> None:
        """G2: the progress of a new owner is not overwritten."""
        old = await bench.leased()
        await bench.store.report([(old, Said(90.0, "nearly"))])
        bench.clock.advance(LEASE)
        (new,) = await bench.claim()
        assert await _shown(bench, old.id) is None, "the new owner has said nothing yet"
        assert await bench.store.report([(old, Said(99.0, "still here")), (new, Said(1.0, "again"))]) == [False, True]
        assert await bench.store.report([(old, Said(100.0, "done"))]) == [False]
        assert await bench.store.report([(old, None), (new, None)]) == [False, True]
        assert await _shown(bench, new.id) == (1.0, "again")

    @scenario
    async def test_a_beat_of_a_new_owner_forgets_what_the_old_one_said(self, bench: Bench) -> None:
        old = await bench.leased()
        await bench.store.report([(old, Said(90.0, "nearly"))])
        bench.clock.advance(LEASE)
        (new,) = await bench.claim()
        await bench.store.report([(new, Said())])
        assert await _shown(bench, new.id) == (0.0, "")

    @scenario
    async def test_the_last_word_may_come_after_the_end(self, bench: Bench) -> None:
        """G2: the settled owner may still report; after a retry, until the next claim."""
        done, again, dead = await bench.leased(), await bench.leased(), await bench.leased()
        assert all(await bench.store.settle([(done, DONE), (again, AGAIN), (dead, Dead(FAILURE))]))
        said = Said(100.0, "the last word")
        answers = await bench.store.report([(done, said), (again, said), (dead, said)])
        assert answers == [True, False, True]
        for lease in (done, again, dead):
            found = await _progress(bench, lease.id)
            assert found is not None
            assert (found.percent, found.running) == (100.0, False)

    @scenario
    async def test_a_cancelled_message_is_not_its_owners_any_more(self, bench: Bench) -> None:
        """G4: the report tells the worker that its message was cancelled."""
        lease = await bench.leased()
        assert await bench.move(lease.id, State.CANCELLED)
        assert await bench.store.report([(lease, None)]) == [False]
        assert await bench.store.report([(lease, Said(10.0))]) == [False]
        assert await bench.store.progress([lease.id]) == {}

    @scenario
    async def test_progress_goes_with_its_message(self, bench: Bench) -> None:
        lease = await bench.leased()
        await bench.store.report([(lease, Said(10.0))])
        assert all(await bench.store.settle([(lease, Done(b"1", key_window=100.0, body_retention=100.0))]))
        bench.clock.advance(100.0)
        async with bench.store.transaction() as transaction:
            await transaction.purge()
        assert await bench.store.progress([lease.id]) == {}

    @scenario
    async def test_what_tells_of_a_dead_letter_leaves_with_it(self, bench: Bench) -> None:
        """D7: the message that announces a dead letter is stored in the same commit, and only if the lease was held."""
        stale, lease = await bench.leased(), await bench.leased()
        assert await bench.move(stale.id, State.CANCELLED)
        lost, told = bench.message(), bench.message()
        settled = [(stale, Dead(FAILURE, sends=(lost,))), (lease, Dead(FAILURE, sends=(told,)))]
        assert await bench.store.settle(settled) == [False, True]
        assert await bench.find(lost.id) is None
        assert (await bench.record(told.id)).state is State.SCHEDULED

    @scenario
    async def test_counts_say_since_when_there_are_dead_letters(self, bench: Bench) -> None:
        """D9: per queue, the time of the oldest dead letter."""
        first, second = await bench.leased(), await bench.leased()
        at = bench.clock.now()
        await bench.store.settle([(second, Dead(FAILURE))])
        bench.clock.advance(5.0)
        await bench.store.settle([(first, Dead(FAILURE))])
        counts = (await bench.store.count())["default"]
        assert (counts.dead, counts.oldest_dead_at) == (2, at)
        async with bench.store.transaction() as transaction:
            await transaction.move([second.id], State.DISCARDED, ACT)
        assert (await bench.store.count())["default"].oldest_dead_at == at + 5_000_000

    @scenario
    async def test_a_result_is_read_for_the_whole_window_and_not_after_it(self, bench: Bench) -> None:
        """G1: whether or not a purge has run."""
        lease = await bench.settled("k", Done(b'"paid"', key_window=100.0, body_retention=10.0))
        bench.clock.advance(100.0 - 0.000001)
        assert (await bench.record(lease.id)).result == b'"paid"'
        bench.clock.advance(0.000001)
        assert (await bench.record(lease.id)).result is None
