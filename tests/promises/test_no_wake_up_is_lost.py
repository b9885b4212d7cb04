"""A parked run continues once its signals or children have come, even if they come at the moment it parks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from onefold import App, Run, Workflow
from onefold.store import State

if TYPE_CHECKING:
    from conftest import World


def test_signals_that_race_with_parking_are_all_heard(world: World) -> None:
    waiting, telling = world.app(), world.app()

    @waiting.workflow
    async def collect(run: Run, number: int) -> int:
        return sum([await run.signal("item", type=int) for _ in range(number)])

    async def tell(run_id: str, number: int) -> None:
        for value in range(number):
            await telling.signal(run_id, "item", value, id=str(value))

    async def scenario() -> None:
        async with world.running(waiting, telling):
            receipts = [await collect.send(5) for _ in range(8)]
            running = asyncio.create_task(waiting.work())
            await asyncio.gather(*(tell(receipt.id, 5) for receipt in receipts))
            waiting.stop_working()
            await running
            await waiting.work(until_idle=True)
            for receipt in receipts:
                assert (await world.record(waiting, receipt)).state is State.DONE
                assert await receipt.result() == sum(range(5))

    asyncio.run(scenario())


def test_children_that_end_while_their_parent_parks_are_all_counted(world: World) -> None:
    apps = [world.app(), world.app()]

    def declare(app: App) -> Workflow[[], int]:
        @app.task
        async def leaf(number: int) -> int:
            return number

        @app.workflow
        async def gather(run: Run) -> int:
            return sum(await run.gather(*(run.child(leaf, n) for n in range(20))))

        return gather

    gather, _ = [declare(app) for app in apps]

    async def scenario() -> None:
        async with world.running(*apps):
            receipts = [await gather.send() for _ in range(5)]
            await asyncio.gather(*(app.work(until_idle=True) for app in apps))
            # One worker may stop as idle before the other is done, so one more run handles what is left.
            await apps[0].work(until_idle=True)
            records = [await world.record(apps[0], receipt) for receipt in receipts]
            assert [record.state for record in records] == [State.DONE] * 5
            assert [await receipt.result() for receipt in receipts] == [190] * 5

    asyncio.run(scenario())
