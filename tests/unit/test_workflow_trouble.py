"""Workflows whose surroundings misbehave: replies that come too late, clocks that are set back.

Both were found by the simulation; see ``onefold.testing.journeys``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from onefold import Context, Run, State
from onefold.step import StepKind

if TYPE_CHECKING:
    from conftest import Bench


def test_a_child_from_before_a_restart_does_not_answer_for_its_successor(bench: Bench) -> None:
    """H8: after the restart another child was sent, and its end is the one that counts, whoever reports first."""

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
        (sent,) = [json.loads(line.value)["id"] for line in lines if line.kind is StepKind.SENT]
        assert [line.name for line in lines if line.kind is StepKind.CHILD] == ["leaf#1", "leaf#1@r1"]
        assert await receipt.result() == sent

    bench.run(scenario)


def test_a_clock_that_is_set_back_does_not_bring_a_sleep_back(bench: Bench) -> None:
    """Fault 11, H2: a sleep after which the run went on is over, whatever the clock says now."""

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
    """Fault 11, H2: what the run did in the branches of a later gather says that the sleep is over."""

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
    """H2: what another branch of the same gather did says nothing about it."""

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
