"""A claim reads the journals of the runs it takes, but never more lines than it may hold in memory."""

from __future__ import annotations

import asyncio

import pytest

from onefold import App, Run, limits
from onefold.store import Again, Lease, Query, State
from onefold.store.journal_lines import Line, LineKind
from onefold.testing import FakeClock


@pytest.mark.parametrize("most", [2, 3, 4, 5, 6, 7])
def test_a_journal_of_which_not_every_line_was_read_is_not_handed_out(
    store_url: str, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(limits, "CLAIMED_LINES_MAX", most)
    app = App(store_url, clock=FakeClock())

    @app.workflow
    async def flow(run: Run) -> None: ...

    async def claim() -> list[Lease]:
        return await app.store.claim(["default"], types=["flow@1"], limit=10, lease=30.0, worker="w")

    async def scenario() -> None:
        await app.migrate()
        async with app:
            for _ in range(3):
                await flow.send()
            for lease in await claim():
                await app.store.record(lease, [Line(name, LineKind.RESULT, b"1") for name in ("b", "a")])
                await app.store.settle([(lease, Again(0.0, None, counted=False))])
            claimed = await claim()
            # The last line that was read may be followed by others of the same journal.
            whole = 3 if most > 6 else (most - 1) // 2
            assert [lease.journal is not None for lease in claimed] == [number < whole for number in range(3)]
            for lease in claimed[:whole]:
                assert lease.journal == tuple(await app.store.steps(lease.id))

    asyncio.run(scenario())


def test_a_damaged_journal_does_not_keep_the_runs_beside_it_from_being_claimed(sqlite_url: str) -> None:
    clock = FakeClock()
    app = App(sqlite_url, clock=clock)

    @app.workflow(key="{number}")
    async def flow(run: Run, number: int) -> int:
        await run.sleep(60)
        return number

    async def scenario() -> None:
        await app.migrate()
        async with app:
            damaged, sound = [await flow.send(number) for number in range(2)]
            await app.work(until_idle=True)
            async with app.transaction() as transaction:
                await transaction.execute("UPDATE onefold_step SET name = CAST(x'ff' AS TEXT) WHERE seq = 1")
            clock.advance(60)
            await app.work(until_idle=True)
            assert await sound.result() == 1
            (record,) = await app.store.find(Query(ids=(damaged.id,)))
            assert record.state is State.SCHEDULED

    asyncio.run(scenario())
