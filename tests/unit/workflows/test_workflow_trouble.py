"""Workflows under unusual conditions: answers that come too late, clocks that are set back.

Both were found by the simulation; see ``onefold.testing.world.journeys``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from onefold import Context, Run, State
from onefold.store.journal_lines import LineKind

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


def test_a_child_from_before_a_restart_does_not_answer_for_its_successor(bench: Bench) -> None:
    """H8: after the restart another child was sent, whose end counts, whichever child reports first."""

    @bench.app.task(queue="later")
    async def leaf(ctx: Context) -> str:
        return ctx.message.id

    @bench.app.workflow
    async def parent(run: Run) -> str:
        return await run.child(leaf)

    async def scenario() -> None:
        receipt = await parent.send()
        await bench.app.work(queues=["default"], until_idle=True)
        await bench.app.restart(receipt.id, from_step="leaf#1", actor="ada", reason="again")
        await bench.app.work(queues=["default"], until_idle=True)
        await bench.app.work(queues=["later"], until_idle=True, concurrency=1)
        await bench.work()
        lines = await bench.app.journal(receipt.id)
        (sent,) = [json.loads(line.value)["id"] for line in lines if line.kind is LineKind.SENT]
        assert [line.name for line in lines if line.kind is LineKind.CHILD] == ["leaf#1", "leaf#1@r1"]
        assert await receipt.result() == sent

    bench.run(scenario)


def test_a_clock_that_is_set_back_does_not_bring_a_sleep_back(bench: Bench) -> None:
    """Fault 11, H2: once the run has continued after a sleep, the sleep is over, whatever the clock says."""

    async def note() -> None: ...

    @bench.app.workflow
    async def nap(run: Run) -> str:
        await run.sleep(60)
        await run.step(note)
        return await run.signal("go", type=str)

    async def scenario() -> None:
        receipt = await nap.send()
        await bench.work()
        bench.clock.advance(60)
        await bench.work()
        bench.clock.jump(-3_600)
        await bench.app.signal(receipt.id, "go", "gone")
        bench.clock.advance(1)
        await bench.work()
        assert (await bench.record(receipt)).state is not State.PARKED, await bench.app.store.attempts(receipt.id)
        assert await receipt.result() == "gone"

    bench.run(scenario)


@pytest.mark.parametrize("shape", ["gather", "nested", "second gather"])
def test_a_clock_that_is_set_back_does_not_bring_back_a_sleep_before_branches(bench: Bench, shape: str) -> None:
    """Fault 11, H2: the steps of a later gather show that the sleep before it is over."""

    async def note() -> None: ...

    async def inner(run: Run) -> str:
        await run.step(note)
        return await run.signal("go", type=str)

    async def outer(run: Run) -> str:
        if shape == "nested":
            await run.sleep(60)
        (answer,) = await run.gather(inner(run))
        return answer

    async def nothing() -> None: ...

    @bench.app.workflow
    async def nap(run: Run) -> str:
        if shape == "second gather":
            await run.gather(nothing(), nothing())
        if shape != "nested":
            await run.sleep(60)
        (answer,) = await run.gather(outer(run))
        return answer

    async def scenario() -> None:
        receipt = await nap.send()
        await bench.work()
        bench.clock.advance(60)
        await bench.work()
        bench.clock.jump(-3_600)
        await bench.app.signal(receipt.id, "go", "gone")
        bench.clock.advance(1)
        await bench.work()
        assert await receipt.result() == "gone"

    bench.run(scenario)


def test_a_sleep_beside_a_branch_that_goes_on_is_not_over(bench: Bench) -> None:
    """H2: the steps of another branch of the same gather do not show that the sleep is over."""

    async def note() -> None: ...

    async def beside(run: Run) -> str:
        await run.step(note)
        return await run.signal("go", type=str)

    @bench.app.workflow
    async def nap(run: Run) -> str:
        _, answer = await run.gather(run.sleep(60), beside(run))
        return answer

    async def scenario() -> None:
        receipt = await nap.send()
        await bench.work()
        await bench.app.signal(receipt.id, "go", "gone")
        await bench.work()
        assert (await bench.record(receipt)).state is State.PARKED
        bench.clock.advance(60)
        await bench.work()
        assert await receipt.result() == "gone"

    bench.run(scenario)
