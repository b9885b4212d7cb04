"""The operator's verbs, the read side, the register, and the table of legal moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from onefold import limits
from onefold.clock import MICROSECONDS, give_way
from onefold.store import MOVES, Again, Done, HandBack, Lease, Outcome, Parked, Query, Registered, State
from onefold.testing.contracts.bench import ACT, DEAD, DONE, LEASE, PARKED, Bench, Contract, scenario


class OperatorContract(Contract):
    """The verbs of operators."""

    @scenario
    async def test_redrive_reopens_a_letter_above_the_fence_that_ended_it(self, bench: Bench) -> None:
        dead = await bench.settled("k", DEAD)
        bench.clock.advance(10.0)
        assert await bench.move(dead.id, State.SCHEDULED)
        record = await bench.record(dead.id)
        assert (record.state, record.attempt, record.replay_count) == (State.SCHEDULED, 0, 1)
        assert record.fence > dead.fence
        assert (record.failure, record.ended_at) == (None, None)
        lease = await bench.claim_only()
        assert (lease.attempt, lease.crashes, lease.replay_count) == (1, 0, 1)
        assert lease.fence > dead.fence
        await bench.store.settle([(lease, DEAD)])
        assert [one.fence for one in await bench.store.attempts(dead.id)] == [dead.fence, lease.fence]
        assert await bench.move(dead.id, State.SCHEDULED)
        assert (await bench.claim_only()).replay_count == 2

    @scenario
    async def test_a_lock_says_where_messages_stand(self, bench: Bench) -> None:
        ended = [await bench.settled("done", DONE), await bench.settled("dead", DEAD)]
        parked = await bench.settled("parked", PARKED)
        leased = await bench.leased("leased")
        scheduled = (await bench.put("scheduled")).id
        unknown = bench.message().id
        asked = [scheduled, leased.id, parked.id, ended[0].id, ended[1].id, unknown, "no id at all"]
        async with bench.store.transaction() as transaction:
            states = await transaction.lock(asked)
            assert await transaction.lock([]) == {}
        known = (State.SCHEDULED, State.LEASED, State.PARKED, State.DONE, State.DEAD)
        assert states == dict(zip(asked, known, strict=False))

    @scenario
    async def test_a_locked_message_does_not_change_before_the_commit(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        async with bench.store.transaction() as transaction:
            assert await transaction.lock([lease.id]) == {lease.id: State.LEASED}
            settling = asyncio.ensure_future(bench.store.settle([(lease, DONE)]))
            await give_way()
            assert await transaction.move([lease.id], State.CANCELLED, ACT) == [lease.id]
        assert await settling == [False]
        assert (await bench.record(lease.id)).state is State.CANCELLED

    @scenario
    async def test_redriving_twice_reopens_once(self, bench: Bench) -> None:
        dead = await bench.settled("k", DEAD)
        async with bench.store.transaction() as transaction:
            assert await transaction.move([dead.id, dead.id], State.SCHEDULED, ACT) == [dead.id]
        assert not await bench.move(dead.id, State.SCHEDULED)
        assert len(await bench.claim()) == 1
        assert not await bench.move(dead.id, State.SCHEDULED)

    @scenario
    async def test_a_redriven_message_has_its_own_time_again(self, bench: Bench) -> None:
        dead = await bench.settled("k", DEAD, retention=60 * MICROSECONDS)
        bench.clock.advance(1_000.0)
        await bench.move(dead.id, State.SCHEDULED)
        lease = await bench.claim_only()
        assert lease.envelope.expires_at == bench.clock.now() + 60 * MICROSECONDS

    @scenario
    async def test_a_letter_that_lost_its_key_to_another_message_cannot_be_redriven(self, bench: Bench) -> None:
        """Otherwise two messages with one key would be alive, and the effect could happen twice."""
        dead = await bench.settled("k", DEAD)
        bench.clock.advance(limits.KEY_WINDOW)
        newer = await bench.put("k")
        assert newer.id != dead.id
        assert not await bench.move(dead.id, State.SCHEDULED)
        assert [lease.id for lease in await bench.claim()] == [newer.id]

    @scenario
    async def test_a_letter_is_redriven_in_its_time_only_whether_or_not_a_purge_came_by(self, bench: Bench) -> None:
        """It shows its deadline, which is before its key becomes free."""
        early, late = await bench.settled("k", DEAD), await bench.settled("l", DEAD)
        until = bench.clock.now() + round(limits.DEAD_RETENTION * MICROSECONDS)
        record = await bench.record(late.id)
        assert record.redrive_until == until
        assert record.kept_until is not None
        assert record.kept_until > until
        bench.clock.advance(limits.DEAD_RETENTION - 1)
        assert await bench.move(early.id, State.SCHEDULED)
        assert (await bench.record(early.id)).redrive_until is None
        bench.clock.advance(1.0)
        assert not await bench.move(late.id, State.SCHEDULED)
        assert await bench.state(late.id) is State.DEAD

    @scenario
    async def test_a_discarded_letter_is_closed_for_good(self, bench: Bench) -> None:
        dead = await bench.settled("k", DEAD)
        assert await bench.move(dead.id, State.DISCARDED)
        assert await bench.state(dead.id) is State.DISCARDED
        assert (await bench.record(dead.id)).fence > dead.fence
        assert not await bench.move(dead.id, State.DISCARDED)
        assert not await bench.move(dead.id, State.SCHEDULED)

    @scenario
    async def test_a_cancelled_message_never_runs(self, bench: Bench) -> None:
        stored = await bench.put("k")
        before = await bench.record(stored.id)
        assert await bench.move(stored.id, State.CANCELLED)
        record = await bench.record(stored.id)
        assert (record.state, record.ended_at) == (State.CANCELLED, bench.clock.now())
        assert record.fence > before.fence
        assert await bench.claim() == []
        assert not await bench.move(stored.id, State.CANCELLED)

    @scenario
    async def test_cancelling_a_running_message_shuts_its_holder_out(self, bench: Bench) -> None:
        lease = await bench.leased("k")
        assert await bench.move(lease.id, State.CANCELLED)
        assert (await bench.record(lease.id)).fence > lease.fence
        child = bench.message("child")
        assert await bench.store.extend([lease], lease=LEASE) == [False]
        assert await bench.store.settle([(lease, Done(b"1", sends=(child,)))]) == [False]
        assert await bench.state(lease.id) is State.CANCELLED
        assert await bench.find(child.id) is None
        bench.clock.advance(LEASE)
        assert await bench.claim() == []

    @scenario
    async def test_a_move_returns_those_for_which_it_was_legal(self, bench: Bench) -> None:
        dead, done = await bench.settled("a", DEAD), await bench.settled("b", DONE)
        also_dead = await bench.settled("c", DEAD)
        async with bench.store.transaction() as transaction:
            moved = await transaction.move([done.id, dead.id, "no-such-message", also_dead.id], State.SCHEDULED, ACT)
        assert sorted(moved) == sorted([dead.id, also_dead.id])
        assert await bench.state(done.id) is State.DONE

    @scenario
    async def test_no_operator_can_declare_a_message_done_dead_or_leased(self, bench: Bench) -> None:
        stored = await bench.put("k")
        for to in (State.DONE, State.DEAD, State.LEASED):
            with pytest.raises(ValueError, match=to.name):
                await bench.move(stored.id, to)
        assert await bench.state(stored.id) is State.SCHEDULED

    @scenario
    async def test_exactly_the_legal_moves_are_possible(self, bench: Bench) -> None:
        """Every pair of states is tried with every verb that could lead there, and compared with ``MOVES``."""
        for origin in (None, *State):
            for to in State:
                id_, lease = await _bring_to(bench, origin)
                possible = await _try(bench, id_, lease, to)
                assert possible is ((origin, to) in MOVES), f"{origin!r} to {to!r}: {possible}"
                if not possible and origin is not None:
                    assert await bench.state(id_) is origin
                if possible:
                    assert await bench.state(id_) is to
                if await bench.find(id_) is not None:
                    await bench.move(id_, State.CANCELLED)  # so that the next claim does not return it

    # Reading.

    @scenario
    async def test_find_returns_what_every_condition_allows(self, bench: Bench) -> None:
        dead = await bench.settled("a", DEAD, correlation_id="c-1")
        done = await bench.settled("b", DONE, correlation_id="c-1")
        mail = (await bench.put(queue="mail", message_type="other")).id
        waiting = (await bench.put(delay=MICROSECONDS)).id

        async def ids(**conditions: object) -> set[str]:
            return {one.envelope.id for one in await bench.store.find(Query(**conditions))}  # type: ignore[arg-type]

        assert await ids() == {dead.id, done.id, mail, waiting}
        assert await ids(ids=(done.id, "no-such-message", mail)) == {done.id, mail}
        assert await ids(ids=()) == set()
        assert await ids(states=(State.DEAD,)) == {dead.id}
        assert await ids(states=(State.DEAD, State.DONE)) == {dead.id, done.id}
        assert await ids(states=(State.CANCELLED,)) == set()
        assert await ids(queue="mail") == {mail}
        assert await ids(message_type="other") == {mail}
        assert await ids(correlation_id="c-1") == {dead.id, done.id}
        assert await ids(correlation_id="c-1", states=(State.DEAD,)) == {dead.id}
        assert await ids(states=(State.DEAD,), queue="mail") == set()
        assert await ids(queue="default", states=(State.SCHEDULED,)) == {waiting}

    @scenario
    async def test_a_chain_is_found_with_its_first_message_and_with_what_was_sent_in_vain(self, bench: Bench) -> None:
        first = bench.message("a")
        (stored,) = await bench.store.put([first])
        child = bench.message("b", correlation_id=first.id)
        bench.clock.advance(1)
        stranger = bench.message("c", correlation_id="elsewhere", causation_id=first.id)
        await bench.store.put([child, stranger])
        for _ in range(2):
            await bench.store.put([bench.message("b", correlation_id="another")])
        found = {one.envelope.id: one.suppressed for one in await bench.store.find(Query(correlation_id=stored.id))}
        assert found == {first.id: 0, child.id: 2}
        assert await bench.store.find(Query(correlation_id=stranger.id)) == []

    @scenario
    async def test_find_by_ids_heeds_the_other_conditions_too(self, bench: Bench) -> None:
        dead = (await bench.settled("a", DEAD)).id
        mail = (await bench.put(queue="mail", message_type="other")).id
        ids = (dead, mail)
        for query, expected in (
            (Query(ids=ids, states=(State.DEAD,)), [dead]),
            (Query(ids=ids, queue="mail"), [mail]),
            (Query(ids=ids, message_type="other"), [mail]),
            (Query(ids=ids, correlation_id=dead), [dead]),
            (Query(ids=ids, worker="grace"), []),
            (Query(ids=ids, crashes=1), []),
            (Query(ids=ids, after=min(ids)), [max(ids)]),
        ):
            assert [one.envelope.id for one in await bench.store.find(query)] == expected

    @scenario
    async def test_pages_follow_the_ids_and_miss_nothing(self, bench: Bench) -> None:
        ids = []
        for number in range(7):
            bench.clock.advance(1.0)
            ids.append((await bench.settled(f"k{number}", DEAD)).id)
        for states in (None, (State.DEAD,)):
            seen: list[str] = []
            while page := await bench.store.find(Query(states=states, after=seen[-1] if seen else "", limit=3)):
                assert len(page) <= 3
                seen += [record.envelope.id for record in page]
            assert seen == ids

    @scenario
    async def test_what_is_open_is_found_by_its_states_page_by_page(self, bench: Bench) -> None:
        """Each set of states has the way to its messages that passes the fewest of the others."""
        await bench.settled("done", DONE)
        held = (await bench.leased("leased")).id
        parked = []
        for number in range(3):
            bench.clock.advance(0.01)
            parked.append(await _ended_run(bench, f"parked{number}", Parked(3_600.0, 0)))
        waiting = [(await bench.put(f"later{number}", delay=MICROSECONDS)).id for number in range(3)]

        async def pages(*states: State, **conditions: object) -> list[str]:
            seen: list[str] = []
            asked = Query(states=states, limit=2, **conditions)  # type: ignore[arg-type]
            while page := await bench.store.find(replace(asked, after=seen[-1] if seen else "")):
                seen += [record.envelope.id for record in page]
            return seen

        assert await pages(State.LEASED) == [held]
        assert await pages(State.PARKED) == parked
        assert await pages(State.SCHEDULED) == waiting
        assert await pages(State.SCHEDULED, State.LEASED, State.PARKED) == sorted([held, *parked, *waiting])
        assert await pages(State.SCHEDULED, State.PARKED, message_type="flow") == parked
        assert await pages(State.SCHEDULED, State.PARKED, runs=True) == parked
        assert await pages(State.SCHEDULED, State.PARKED, queue="mail") == []

    @scenario
    async def test_runs_are_found_whatever_their_state(self, bench: Bench) -> None:
        text = '"pinned":true'  # in the text of a header it says nothing
        for outcome in (DONE, DEAD):
            await bench.settled(f"plain {outcome}", outcome, reply_to=text)
        done, dead = [await _ended_run(bench, f"run {outcome}", outcome) for outcome in (DONE, DEAD)]
        await bench.put("plain", reply_to=text)
        waits = (await bench.put("run", message_type="flow", pinned=True, reply_to=text)).id

        async def ids(*states: State) -> list[str]:
            return [one.envelope.id for one in await bench.store.find(Query(states=states or None, runs=True))]

        assert await ids() == sorted([done, dead, waits])
        assert await ids(State.DONE) == [done]
        assert await ids(State.DEAD) == [dead]
        assert await ids(State.SCHEDULED, State.PARKED) == [waits]
        assert [one.envelope.id for one in await bench.store.find(Query(ids=(waits, done), runs=True))] == [done, waits]

    # The register.

    @scenario
    async def test_the_register_writes_only_over_the_version_that_was_read(self, bench: Bench) -> None:
        assert await bench.store.registered("queue", "mail") is None
        assert await _register(bench, b"1", version=0)
        assert not await _register(bench, b"2", version=0)
        first = await bench.store.registered("queue", "mail")
        assert first is not None
        assert first.value == b"1"
        assert await _register(bench, b"3", version=first.version)
        assert not await _register(bench, b"4", version=first.version)
        second = await bench.store.registered("queue", "mail")
        assert second is not None
        assert (second.value, second.version > first.version) == (b"3", True)
        assert not await _register(bench, None, version=first.version)
        assert await _register(bench, None, version=second.version)
        assert await bench.store.registered("queue", "mail") is None
        assert not await _register(bench, b"5", version=second.version)

    @scenario
    async def test_an_expired_entry_is_as_good_as_absent(self, bench: Bench) -> None:
        expires_at = bench.clock.now() + 10 * MICROSECONDS
        assert await _register(bench, b"1", version=0, expires_at=expires_at)
        bench.clock.advance(10.0 - 0.000001)
        known = await bench.store.registered("queue", "mail")
        assert known is not None
        assert known.value == b"1"
        bench.clock.advance(0.000001)
        assert await bench.store.registered("queue", "mail") is None
        assert not await _register(bench, b"2", version=known.version)
        assert await _register(bench, b"3", version=0)
        taken = await bench.store.registered("queue", "mail")
        assert isinstance(taken, Registered)
        assert taken.value == b"3"

    @scenario
    async def test_entries_of_the_register_are_told_apart_by_kind_and_name(self, bench: Bench) -> None:
        for kind, name in (("queue", "mail"), ("queue", "default"), ("worker", "mail")):
            async with bench.store.transaction() as transaction:
                assert await transaction.register(kind, name, f"{kind} {name}".encode(), version=0)
        entry = await bench.store.registered("worker", "mail")
        assert entry is not None
        assert entry.value == b"worker mail"

    @scenario
    async def test_now_is_the_clock_by_which_everything_is_dated(self, bench: Bench) -> None:
        """C19: what is due is decided by the store's clock, not by that of the machine that asks."""
        now = await bench.store.now()
        assert now == bench.clock.now()
        stored = await bench.put("k")
        assert (await bench.record(stored.id)).envelope.created_at == now
        bench.clock.advance(5.0)
        assert await bench.store.now() == now + 5 * MICROSECONDS

    @scenario
    async def test_entries_returns_what_has_not_expired_of_one_kind(self, bench: Bench) -> None:
        assert await bench.store.entries("queue") == {}
        expires_at = bench.clock.now() + 10 * MICROSECONDS
        async with bench.store.transaction() as transaction:
            await transaction.register("queue", "mail", b"1", version=0)
            await transaction.register("queue", "soon", b"2", version=0, expires_at=expires_at)
            await transaction.register("worker", "mail", b"3", version=0)
        entries = await bench.store.entries("queue")
        assert {name: one.value for name, one in entries.items()} == {"mail": b"1", "soon": b"2"}
        assert entries["mail"] == await bench.store.registered("queue", "mail")
        bench.clock.advance(10.0)
        assert set(await bench.store.entries("queue")) == {"mail"}


async def _register(bench: Bench, value: bytes | None, *, version: int, expires_at: int | None = None) -> bool:
    async with bench.store.transaction() as transaction:
        return await transaction.register("queue", "mail", value, version=version, expires_at=expires_at)


async def _bring_to(bench: Bench, state: State | None) -> tuple[str, Lease]:
    """Return a message in this state, and the last lease on it."""
    if state is None:
        absent = bench.message()
        return absent.id, Lease(absent, 1, 1, 0, 0, bench.clock.now(), "grace")
    lease = await bench.leased()
    if state is State.SCHEDULED:
        await bench.store.settle([(lease, Again(0.0, None, counted=False))])
    elif state is State.PARKED:
        await bench.store.settle([(lease, PARKED)])
    elif state is State.DONE:
        await bench.store.settle([(lease, DONE)])
    elif state in (State.DEAD, State.DISCARDED):
        await bench.store.settle([(lease, DEAD)])
    if state in (State.CANCELLED, State.DISCARDED):
        await bench.move(lease.id, state)
    assert await bench.state(lease.id) is state
    return lease.id, lease


async def _try(bench: Bench, id_: str, lease: Lease, to: State) -> bool:
    """Try every verb that could lead to this state; return whether one worked."""
    if to is State.SCHEDULED:
        if await bench.find(id_) is None:
            await bench.store.put([lease.envelope])
            return await bench.find(id_) is not None
        again = await bench.store.settle([(lease, HandBack())]) + await bench.store.settle([(lease, Again(0.0, None))])
        return any(again) or await bench.move(id_, to)
    if to is State.LEASED:
        bench.clock.advance(LEASE)
        return [one.id for one in await bench.claim()] == [id_]
    outcomes: dict[State, Outcome] = {State.DONE: DONE, State.DEAD: DEAD, State.PARKED: PARKED}
    outcome = outcomes.get(to)
    if outcome is not None:
        return (await bench.store.settle([(lease, outcome)]))[0]
    return await bench.move(id_, to)


async def _ended_run(bench: Bench, key: str, outcome: Outcome) -> str:
    """Send a run of a workflow, claim it and settle it; return its id."""
    stored = await bench.put(key, message_type="flow", pinned=True)
    (lease,) = await bench.claim(types=("flow@1",))
    assert await bench.store.settle([(lease, outcome)]) == [True]
    return stored.id
