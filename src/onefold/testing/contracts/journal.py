"""Journals: the owner records under its fence; other messages, callers and operators may record certain lines."""

from __future__ import annotations

import asyncio

import pytest

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.errors import LeaseLostError, LimitError, SignalError
from onefold.store import Done, Lease, Parked, Query, State
from onefold.store.journal_lines import Line, LineKind, Note
from onefold.testing.contracts.bench import ACT, AGAIN, DEAD, DONE, FAILURE, LEASE, Bench, Contract, scenario

WAITING = Parked(None, seen=0)


def result(name: str, value: bytes = b"1") -> Line:
    return Line(name, LineKind.RESULT, value, fingerprint=b"print")


def signal(id_: str, name: str = "paid", value: bytes = b"7") -> Line:
    return Line(f"{name}/{id_}", LineKind.SIGNAL, value)


async def lines(bench: Bench, id_: str) -> list[tuple[str, str, bytes]]:
    return [(step.name, step.kind.name, step.value) for step in await bench.store.steps(id_)]


async def parked(bench: Bench, outcome: Parked = WAITING, **fields: object) -> Lease:
    """Send a message, claim it and park it, while nothing else is due."""
    lease = await bench.leased(**fields)  # type: ignore[arg-type]
    assert await bench.store.settle([(lease, outcome)]) == [True]
    return lease


class JournalContract(Contract):
    """The journal of a message."""

    # Shown to operators.

    @scenario
    async def test_a_message_parked_because_of_a_failure_shows_it_until_it_goes_on(self, bench: Bench) -> None:
        waits = await parked(bench, Parked(None, seen=0, awaits=0, failure=FAILURE))
        for found in (await bench.record(waits.id), *await bench.store.find(Query(states=(State.PARKED,)))):
            assert (found.envelope.id, found.failure) == (waits.id, FAILURE)
        assert await bench.move(waits.id, State.SCHEDULED)
        assert (await bench.record(waits.id)).failure is None
        again = await bench.claim_only()
        assert await bench.store.settle([(again, WAITING)]) == [True]
        assert (await bench.record(waits.id)).failure is None

    @scenario
    async def test_parking_forgives_attempts_unless_it_is_because_of_a_failure(self, bench: Bench) -> None:
        lease = await bench.leased()
        await bench.store.settle([(lease, AGAIN)])
        for outcome, attempt in ((Parked(0.0, seen=0, awaits=0, failure=FAILURE), 2), (Parked(0.0, 0, 0), 1)):
            bench.clock.advance(AGAIN.delay)
            lease = await bench.claim_only()
            assert lease.attempt == 2
            await bench.store.settle([(lease, outcome)])
            assert (await bench.record(lease.id)).attempt == attempt - 1
        assert (await bench.claim_only()).attempt == 1

    # With the claim.

    @scenario
    async def test_a_run_is_claimed_with_its_journal(self, bench: Bench) -> None:
        types = ("task", "task@1")
        await bench.put(pinned=True)
        (fresh,) = await bench.claim(types=types)
        await bench.store.record(fresh, [result("b"), result("a")])
        await bench.store.record(fresh.id, [signal("1")])
        await bench.store.settle([(fresh, Parked(0.0, seen=0, awaits=0, steps=(Line("c", LineKind.TIMER, b"0.0"),)))])
        told = await bench.put(pinned=True)
        await bench.store.record(told.id, [signal("1")])
        journals = {lease.id: lease.journal or () for lease in await bench.claim(types=types)}
        assert [step.name for step in journals[fresh.id]] == ["b", "a", "paid/1", "c"]
        assert [step.name for step in journals[told.id]] == ["paid/1"]
        for id_, journal in journals.items():
            assert journal == tuple(await bench.store.steps(id_))

    @scenario
    async def test_a_journal_with_a_large_value_does_not_come_with_the_claim(self, bench: Bench) -> None:
        fits, large, parts = limits.CLAIMED_VALUE_BYTES_MAX, limits.CLAIMED_VALUE_BYTES_MAX + 1, 2_000_000
        for size in (fits, large, parts):
            await bench.put(pinned=True)
            (lease,) = await bench.claim(types=("task@1",))
            await bench.store.record(lease, [result("a"), result("b", b"x" * size)])
            await bench.store.settle([(lease, Parked(0.0, seen=0, awaits=0))])
            (again,) = await bench.claim(types=("task@1",))
            whole = tuple(await bench.store.steps(lease.id))
            assert [len(step.value) for step in whole] == [1, size]
            assert again.journal == (whole if size == fits else None)

    # By the owner.

    @scenario
    async def test_what_the_owner_records_is_read_in_its_order(self, bench: Bench) -> None:
        lease = await bench.leased()
        assert await bench.store.steps(lease.id) == []
        first = await bench.store.record(lease, [result("a"), result("b", b"2")])
        bench.clock.advance(5)
        await bench.store.record(lease, [Line("a", LineKind.TIMER, b"3")])
        found = await bench.store.steps(lease.id)
        assert [(s.name, s.kind, s.value, s.fingerprint) for s in found] == [
            ("a", LineKind.RESULT, b"1", b"print"),
            ("b", LineKind.RESULT, b"2", b"print"),
            ("a", LineKind.TIMER, b"3", b""),
        ]
        assert first == found[:2]
        assert found[2].at - found[0].at == 5 * MICROSECONDS
        assert [s.seq for s in found] == sorted({s.seq for s in found})

    @scenario
    async def test_the_first_line_of_a_name_and_kind_stands(self, bench: Bench) -> None:
        lease = await bench.leased()
        await bench.store.record(lease, [result("a", b"1")])
        bench.clock.advance(1)
        stands, new = await bench.store.record(lease, [result("a", b"2"), result("b", b"3")])
        assert (stands.value, new.value) == (b"1", b"3")
        assert stands == (await bench.store.steps(lease.id))[0]
        assert await lines(bench, lease.id) == [("a", "RESULT", b"1"), ("b", "RESULT", b"3")]

    @scenario
    async def test_a_stale_lease_records_nothing(self, bench: Bench) -> None:
        stale = await bench.leased()
        bench.clock.advance(LEASE)
        fresh = await bench.claim_only()
        with pytest.raises(LeaseLostError, match=stale.id):
            await bench.store.record(stale, [result("a")])
        async with bench.store.transaction() as transaction:
            with pytest.raises(LeaseLostError):
                await transaction.record(stale, [result("a")])
        assert await bench.store.steps(stale.id) == []
        assert await bench.store.record(fresh, [result("a")])

    @scenario
    async def test_a_stale_lease_costs_only_itself(self, bench: Bench) -> None:
        stale = await bench.leased()
        bench.clock.advance(LEASE)
        await bench.claim_only()
        others = [await bench.leased() for _ in range(5)]
        asked = [bench.store.record(lease, [result("a")]) for lease in (*others[:2], stale, *others[2:])]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(answer, LeaseLostError) for answer in answers] == [False, False, True, False, False, False]
        assert [await lines(bench, lease.id) for lease in others] == [[("a", "RESULT", b"1")]] * 5

    @scenario
    async def test_what_is_recorded_in_a_transaction_stays_only_with_it(self, bench: Bench) -> None:
        lease = await bench.leased()
        waiting = await parked(bench)

        async def fail() -> None:
            async with bench.store.transaction() as transaction:
                await transaction.record(lease, [result("a")])
                await transaction.record(waiting.id, [signal("1")])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await bench.store.steps(lease.id) == await bench.store.steps(waiting.id) == []
        assert await bench.state(waiting.id) is State.PARKED
        async with bench.store.transaction() as transaction:
            await transaction.record(lease, [result("a")])
            await transaction.record(waiting.id, [signal("1")])
        assert await lines(bench, lease.id) == [("a", "RESULT", b"1")]
        assert await bench.state(waiting.id) is State.SCHEDULED

    @scenario
    async def test_a_large_value_is_kept_in_parts(self, bench: Bench) -> None:
        """H3: a result above one mebibyte is stored apart from its line."""
        lease = await bench.leased()
        large = b'"' + b"x" * (2 * limits.STEP_BYTES_INLINE + 7) + b'"'
        (stands,) = await bench.store.record(lease, [result("large", large)])
        assert stands.value == large
        (again,) = await bench.store.record(lease, [result("large", b"1")])
        assert again.value == large
        await bench.store.record(lease, [result("limit", b"y" * limits.STEP_BYTES_INLINE)])
        found = await bench.store.steps(lease.id)
        assert [step.value for step in found] == [large, b"y" * limits.STEP_BYTES_INLINE]

    # By others.

    @scenario
    async def test_others_may_record_only_what_concerns_them(self, bench: Bench) -> None:
        lease = await bench.leased()
        for kind in LineKind:
            step = Line("a", kind, b"1")
            if kind in (LineKind.SIGNAL, LineKind.CHILD, LineKind.TIMER):
                assert await bench.store.record(lease.id, [step])
            else:
                with pytest.raises(ValueError, match="owner"):
                    await bench.store.record(lease.id, [step])
        assert len(await bench.store.steps(lease.id)) == 3

    @scenario
    async def test_nothing_is_recorded_for_a_message_that_ended_for_good(self, bench: Bench) -> None:
        done = await bench.settled(None, DONE)
        cancelled = await bench.put()
        await bench.move(cancelled.id, State.CANCELLED)
        for id_ in (done.id, cancelled.id):
            assert await bench.store.record(id_, [signal("1")]) == []
            assert await bench.store.steps(id_) == []

    @scenario
    async def test_a_signal_to_a_message_that_is_not_there_is_refused(self, bench: Bench) -> None:
        for id_ in (bench.message().id, "no-such-message"):
            with pytest.raises(SignalError):
                await bench.store.record(id_, [signal("1")])
            # The result of a child may arrive after its parent is gone.
            assert await bench.store.record(id_, [Line("c#1", LineKind.CHILD, b"{}")]) == []
            assert await bench.store.steps(id_) == []

    @scenario
    async def test_a_signal_to_a_run_that_is_sent_with_it_reaches_the_one_that_holds_the_key(
        self, bench: Bench
    ) -> None:
        ended = await bench.settled("ended", DONE)
        sender, late = await bench.leased("sender"), await bench.leased("late")
        first = await bench.put("k")
        again, over = bench.message("k"), bench.message("ended")
        told = Done(b"1", (again,), notes=(Note(again.id, signal("1"), started=True),))
        assert await bench.store.settle([(sender, told)]) == [True]
        assert [step.name for step in await bench.store.steps(first.id)] == ["paid/1"]
        unheard = Done(b"1", (over,), notes=(Note(over.id, signal("1"), started=True),))
        with pytest.raises(SignalError):
            await bench.store.settle([(late, unheard)])
        assert await bench.store.steps(ended.id) == []
        assert await bench.state(late.id) is State.LEASED

    @scenario
    async def test_a_dead_letter_is_told_and_knows_when_it_is_redriven(self, bench: Bench) -> None:
        dead = await bench.settled(None, DEAD)
        assert await bench.store.record(dead.id, [signal("1")])
        assert await bench.move(dead.id, State.SCHEDULED)
        assert (await bench.claim_only()).id == dead.id
        assert await lines(bench, dead.id) == [("paid/1", "SIGNAL", b"7")]

    @scenario
    async def test_a_signal_sent_twice_is_one(self, bench: Bench) -> None:
        lease = await parked(bench, Parked(None, 0, awaits=2))
        other = await bench.another()
        for store in (bench.store, other, bench.store):
            (stands,) = await store.record(lease.id, [signal("1")])
            assert stands.value == b"7"
        assert await bench.state(lease.id) is State.PARKED
        assert len(await bench.store.steps(lease.id)) == 1
        (first,) = await other.record(lease.id, [signal("1", value=b"8")])
        assert first.value == b"7"

    @scenario
    async def test_signals_lie_in_the_order_of_their_coming(self, bench: Bench) -> None:
        lease = await bench.leased()
        for number in (3, 1, 2):
            await bench.store.record(lease.id, [signal(str(number))])
        assert [step.name for step in await bench.store.steps(lease.id)] == ["paid/3", "paid/1", "paid/2"]

    @scenario
    async def test_a_mailbox_has_a_limit(self, bench: Bench) -> None:
        lease = await bench.leased()
        await bench.store.record(lease.id, [signal(str(n)) for n in range(limits.SIGNALS_MAX)])
        with pytest.raises(LimitError, match="signal"):
            await bench.store.record(lease.id, [signal("one more")])
        assert len(await bench.store.steps(lease.id)) == limits.SIGNALS_MAX

    # Operators.

    @scenario
    async def test_an_operator_records_for_a_message_that_waits(self, bench: Bench) -> None:
        lease = await parked(bench, Parked(None, 0, awaits=0))
        async with bench.store.transaction() as transaction:
            (stands,) = await transaction.record(lease.id, [Line("mail", LineKind.EFFECT, b"1")], act=ACT)
            (again,) = await transaction.record(lease.id, [Line("mail", LineKind.EFFECT, b"2")], act=ACT)
        assert (stands.value, again.value) == (b"1", b"1")
        assert (await bench.record(lease.id)).fence > lease.fence
        claimed = await bench.claim_only()
        assert claimed.id == lease.id
        async with bench.store.transaction() as transaction:
            assert await transaction.record(lease.id, [result("a")], act=ACT) == []
        dead = await bench.settled(None, DEAD)
        async with bench.store.transaction() as transaction:
            assert await transaction.record(dead.id, [result("a")], act=ACT)
        assert await bench.state(dead.id) is State.DEAD

    @scenario
    async def test_an_operator_takes_a_saga_from_the_worker_that_runs_it(self, bench: Bench) -> None:
        """The request to undo it is recorded for every message that is alive, and for no other."""
        undo = Line("undo#0", LineKind.UNDO, b"{}")
        lease = await bench.leased()
        async with bench.store.transaction() as transaction:
            (stands,) = await transaction.record(lease.id, [undo], act=ACT)
        assert (stands.name, stands.kind) == (undo.name, LineKind.UNDO)
        with pytest.raises(LeaseLostError):
            await bench.store.record(lease, [result("late")])
        claimed = await bench.claim_only()
        assert (claimed.id, claimed.fence > lease.fence) == (lease.id, True)
        waits = await parked(bench, Parked(3_600.0, 0, awaits=0))
        async with bench.store.transaction() as transaction:
            assert await transaction.record(waits.id, [undo], act=ACT)
        assert (await bench.claim_only()).id == waits.id
        dead = await bench.settled(None, DEAD)
        async with bench.store.transaction() as transaction:
            assert await transaction.record(dead.id, [undo], act=ACT) == []

    @scenario
    async def test_an_operator_lets_a_parked_message_go_on(self, bench: Bench) -> None:
        lease = await parked(bench, Parked(None, 0, awaits=0))
        assert await bench.move(lease.id, State.SCHEDULED)
        assert not await bench.move(lease.id, State.SCHEDULED)
        assert (await bench.claim_only()).id == lease.id

    @scenario
    async def test_a_run_goes_back_to_a_step(self, bench: Bench) -> None:
        lease = await bench.leased()
        sent = Line("c#1", LineKind.SENT, b"{}")
        await bench.store.record(lease, [result("a#1"), Line("b#1!0.0", LineKind.RETRY, b"{}"), result("b#1"), sent])
        await bench.store.record(lease.id, [signal("1"), Line("c#1", LineKind.CHILD, b"{}")])
        await bench.store.record(lease, [result("d#1")])
        async with bench.store.transaction() as transaction:
            assert await transaction.rewind(lease.id, "nothing#1", ACT) == []
            forgotten = await transaction.rewind(lease.id, "b#1", ACT)
        assert sorted(step.name for step in forgotten) == ["b#1", "b#1!0.0", "c#1", "c#1", "d#1"]
        assert [(name, kind) for name, kind, _ in await lines(bench, lease.id)] == [
            ("a#1", "RESULT"),
            ("paid/1", "SIGNAL"),
            ("restart#1", "RESTART"),
        ]
        with pytest.raises(LeaseLostError):
            await bench.store.record(lease, [result("b#1")])
        assert (await bench.claim_only()).fence > lease.fence

    @scenario
    async def test_what_is_done_does_not_go_back(self, bench: Bench) -> None:
        lease = await bench.leased()
        await bench.store.record(lease, [result("a#1")])
        await bench.store.settle([(lease, DONE)])
        async with bench.store.transaction() as transaction:
            assert await transaction.rewind(lease.id, "a#1", ACT) == []
        assert len(await bench.store.steps(lease.id)) == 1

    @scenario
    async def test_a_dead_run_goes_back_and_is_redriven(self, bench: Bench) -> None:
        lease = await bench.leased()
        await bench.store.record(lease, [result("a#1"), result("b#1")])
        await bench.store.settle([(lease, DEAD)])
        async with bench.store.transaction() as transaction:
            assert [step.name for step in await transaction.rewind(lease.id, "b#1", ACT)] == ["b#1"]
            assert await transaction.move([lease.id], State.SCHEDULED, ACT) == [lease.id]
        assert (await bench.claim_only()).id == lease.id

    # The rest of a message's life.

    @scenario
    async def test_a_journal_goes_with_its_message(self, bench: Bench) -> None:
        lease, other = await bench.leased(), await bench.leased()
        large = b"x" * (limits.STEP_BYTES_INLINE + 1)
        await bench.store.record(lease, [result("a"), result("large", large)])
        await bench.store.record(other, [result("a")])
        await bench.store.settle([(lease, DONE)])
        bench.clock.advance(limits.KEY_WINDOW + 1)
        async with bench.store.transaction() as transaction:
            await transaction.purge()
        assert await bench.store.steps(lease.id) == []
        assert await lines(bench, other.id) == [("a", "RESULT", b"1")]

    @scenario
    async def test_a_pinned_message_is_taken_only_by_its_version(self, bench: Bench) -> None:
        """H6: this holds after a redrive as well."""
        stored = await bench.put(pinned=True, schema_version=2)
        assert await bench.claim(types=("task", "task@1", "task@3")) == []
        (lease,) = await bench.claim(types=("task@2", "other"))
        assert (lease.id, lease.envelope.message_type, lease.envelope.pinned) == (stored.id, "task", True)
        await bench.store.settle([(lease, DEAD)])
        assert await bench.move(stored.id, State.SCHEDULED)
        assert await bench.claim(types=("task", "task@1")) == []
        assert [one.id for one in await bench.claim(types=("task@2",))] == [stored.id]
        assert [one.envelope.id for one in await bench.store.find(Query(message_type="task"))] == [stored.id]

    @scenario
    async def test_a_restore_shuts_out_owners_and_leaves_what_is_parked(self, bench: Bench) -> None:
        lease, waiting = await bench.leased(), await parked(bench)
        await bench.store.restored()
        with pytest.raises(LeaseLostError):
            await bench.store.record(lease, [result("a")])
        assert await bench.state(waiting.id) is State.PARKED
        await bench.store.record(waiting.id, [signal("1")])
        assert {one.id for one in await bench.claim()} == {lease.id, waiting.id}
