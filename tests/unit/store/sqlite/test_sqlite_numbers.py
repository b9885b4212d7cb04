"""Numbers of messages on SQLite: the order of ids, ids with the same number, and leases of messages that are gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest

from onefold import StoreError
from onefold.clock import MICROSECONDS, Ids, SystemClock
from onefold.message.envelope import Envelope
from onefold.store import Act, Done, HandBack, Query, State
from onefold.store.journal_lines import Line, LineKind
from onefold.store.sqlite import SQLiteStore, numbers
from onefold.store.sqlite.numbers import number_of
from onefold.store.sqlite.session import TRIES
from onefold.testing.contracts import Bench
from onefold.testing.contracts.bench import DEAD, DONE

_ACT = Act(actor="ada", reason="a test")
_HEAD = "01b8dac5-b400-726b-b2a7-"


def forged(number: int) -> str:
    """Return one of many ids with the same number."""
    return f"{_HEAD}{number:012x}"


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Bench]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        bench = Bench(lambda clock: SQLiteStore(str(path), clock=clock, synchronous="OFF"), stack)
        bench.store = await bench.another()
        yield bench


@dataclass(frozen=True)
class Known:
    """A lease of which only this is known."""

    id: str
    fence: int


def message(bench: Bench, id_: str, **fields: object) -> Envelope:
    return bench.message(f"key of {id_}", id=id_, **fields)


def test_numbers_are_in_the_order_of_ids() -> None:
    ids = Ids(SystemClock(), random.Random(3))
    made = [ids.make() for _ in range(3_000)]
    given = [number_of(id_) for id_ in made]
    assert sorted(made) == [id_ for _, id_ in sorted(zip(given, made, strict=True))]
    assert len(set(given)) == len(made)


@pytest.mark.parametrize(
    "id_",
    [
        str(UUID(int=0)),
        str(UUID(int=2**128 - 1)),
        str(UUID(int=2**127 + 12345)),
        "00000000000040008000000000000000",
        "",
        "order:17",
        "x" * 36,
        "Ä\ud800",
    ],
)
def test_every_id_has_a_number_that_sqlite_can_count_on_from(id_: str) -> None:
    assert 0 <= number_of(id_) <= 2**63 - 1 - TRIES


def test_an_id_without_a_free_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "second_number_of", number_of)

    async def main() -> None:
        async with opened(tmp_path / "onefold.db") as bench:
            for number in range(TRIES + 1):
                await bench.store.put([message(bench, forged(number))])
            with pytest.raises(StoreError, match="with a new id"):
                await bench.store.put([message(bench, forged(TRIES + 1))])

    asyncio.run(main())


def test_messages_whose_ids_begin_alike_are_told_apart_in_every_verb(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "onefold.db") as bench:
            # More than the numbers that begin the ids: the last ones get numbers by their digests.
            store, ids = bench.store, [forged(number) for number in range(TRIES + 4)]
            # A part in one put, the others one by one.
            await store.put([message(bench, id_) for id_ in ids[:5]])
            for id_ in ids[5:]:
                await store.put([message(bench, id_)])
            # Put again they are the same messages; under another id their keys are taken.
            again = await store.put([message(bench, id_) for id_ in reversed(ids)])
            assert [(one.id, one.duplicate) for one in again] == [(id_, False) for id_ in reversed(ids)]
            (twice,) = await store.put([bench.message(f"key of {ids[3]}")])
            assert (twice.id, twice.duplicate) == (ids[3], True)
            assert await bench.all_ids() == set(ids)
            for id_ in ids:
                assert [one.envelope.id for one in await store.find(Query(ids=(id_,)))] == [id_]

            leases = {lease.id: lease for lease in await bench.claim(100)}
            assert set(leases) == set(ids)
            # By leases without a number of their own as well, as they come from another process.
            assert await store.extend([Known(ids[1], leases[ids[1]].fence)], lease=60.0) == [True]
            assert await store.settle([(leases[ids[2]], DONE), (leases[ids[3]], DEAD), (leases[ids[4]], DEAD)]) == [
                True, True, True,
            ]  # fmt: skip
            await store.settle([(leases[ids[5]], HandBack())])
            line = Line("a", LineKind.RESULT, b"1")
            assert [one.name for one in await store.record(leases[ids[6]], [line])] == ["a"]
            assert await store.steps(ids[6])
            assert await store.steps(ids[7]) == []
            async with store.transaction() as transaction:
                assert await transaction.move([ids[3]], State.SCHEDULED, _ACT) == [ids[3]]
                assert await transaction.move([ids[4]], State.DISCARDED, _ACT) == [ids[4]]
                assert await transaction.move([ids[8]], State.CANCELLED, _ACT) == [ids[8]]
                assert set(await transaction.lock(ids)) == set(ids)
            stand = {one.envelope.id: one.state for one in await store.find(Query(limit=100))}
            changed = {2: State.DONE, 3: State.SCHEDULED, 4: State.DISCARDED, 5: State.SCHEDULED, 8: State.CANCELLED}
            assert stand == {id_: changed.get(number, State.LEASED) for number, id_ in enumerate(ids)}

    asyncio.run(main())


def test_pages_of_messages_whose_ids_begin_alike_are_complete(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "onefold.db") as bench:
            ids = [forged(number) for number in (7, 3, 9, 1)]
            await bench.store.put([message(bench, id_) for id_ in ids])
            seen: list[str] = []
            while page := await bench.store.find(Query(after=seen[-1] if seen else "", limit=1)):
                seen += [one.envelope.id for one in page]
            assert sorted(seen) == sorted(ids)

    asyncio.run(main())


def test_a_lease_of_a_message_that_is_gone_does_not_meet_another_under_its_number(tmp_path: Path) -> None:
    """Both have the same fence and the same number; the ids tell them apart."""

    async def main() -> None:
        async with opened(tmp_path / "onefold.db") as bench:
            await bench.store.put([message(bench, forged(1))])
            (stale,) = await bench.claim()
            await bench.store.settle([(stale, Done(b"1", key_window=1.0, body_retention=1.0))])
            bench.clock.advance(2.0)
            async with bench.store.transaction() as transaction:
                assert (await transaction.purge()).messages == 1
            await bench.store.put([message(bench, forged(2))])
            (fresh,) = await bench.claim()
            assert fresh.fence == stale.fence
            assert getattr(fresh, "seq", None) == getattr(stale, "seq", 0)
            assert await bench.store.extend([stale], lease=30.0) == [False]
            assert await bench.store.settle([(stale, DONE)]) == [False]
            assert await bench.store.report([(stale, None)]) == [False]
            assert await bench.state(fresh.id) is State.LEASED

    asyncio.run(main())


def test_messages_of_a_line_run_in_the_order_of_their_sends_though_the_clock_is_set_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "onefold.db") as bench:
            keys = []
            for number in range(4):
                bench.clock.jump(-60.0)
                keys.append(f"k{number}")
                await bench.store.put(
                    [bench.message(keys[-1], ordering_key="account", gate="task:account", due_at=1 * MICROSECONDS)]
                )
            ran = []
            while leases := await bench.claim(10):
                ran += [lease.envelope.idempotency_key for lease in leases]
                await bench.store.settle([(lease, DONE) for lease in leases])
            assert ran == keys

    asyncio.run(main())
