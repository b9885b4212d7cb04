"""Sagas whose steps and undos exceed their timeouts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from onefold import RetryPolicy, Run, SagaStatus, State, StepStatus

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

ONCE = RetryPolicy(max_attempts=1)
BY = {"actor": "ada", "reason": "stock is back"}


def test_an_undo_whose_saga_is_resumed_has_its_whole_time_again(bench: Bench) -> None:
    """It timed out while its queue had no worker; if the time counted from its send, it would be stuck at once."""
    calls: list[str] = []

    @bench.app.step(timeout=60)  # type: ignore[type-var]  # a task is declared as a step; the types know functions only
    @bench.app.task(queue="stock")
    async def put_back() -> None:
        calls.append("put back")

    @bench.app.step(undo=put_back, retry=ONCE)
    async def reserve() -> None:
        raise ValueError

    @bench.app.saga
    async def order(run: Run) -> None:
        await run.step(reserve)

    async def status(id_: str) -> SagaStatus:
        found = await bench.app.saga_status(id_)
        assert found is not None
        return found.status

    async def scenario() -> None:
        receipt = await order.send()
        for _ in range(2):
            await bench.app.work(queues=["default"], until_idle=True)
            bench.clock.advance(61)
            await bench.app.work(queues=["default"], until_idle=True)
            assert await status(receipt.id) is SagaStatus.STUCK
            assert await bench.app.resume(receipt.id, **BY)
            await bench.app.work(queues=["default"], until_idle=True)
            bench.clock.advance(30)
            await bench.app.work(queues=["default"], until_idle=True)
            assert (await bench.record(receipt)).state is State.PARKED
        await bench.app.work(queues=["stock"], until_idle=True)
        await bench.work()
        assert await status(receipt.id) is SagaStatus.COMPENSATED
        assert calls == ["put back"]

    bench.run(scenario)


@pytest.mark.parametrize("then", ["timeout", "error"])
def test_a_local_step_that_was_given_up_is_unknown(sqlite_bench: Bench, then: str) -> None:
    """Its effect may have happened, even if a later try failed for another reason."""
    tries: list[int] = []

    async def refund() -> None: ...

    @sqlite_bench.app.step(undo=refund, timeout=0.01, retry=RetryPolicy(max_attempts=2, base=60.0, fixed=True))
    async def pay() -> None:
        tries.append(1)
        if then == "error" and len(tries) > 1:
            raise ValueError
        await asyncio.Event().wait()

    @sqlite_bench.app.saga
    async def order(run: Run) -> None:
        await run.step(pay)

    async def scenario() -> None:
        receipt = await order.send()
        for _ in range(3):
            await sqlite_bench.work()
            sqlite_bench.clock.advance(61)
        found = await sqlite_bench.app.saga_status(receipt.id)
        assert found is not None
        assert [step.status for step in found.steps] == [StepStatus.UNKNOWN]
        assert len(tries) == 2

    sqlite_bench.run(scenario)
