"""The helper that tries every undo of a saga finds wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from onefold import Context, Reject, Run
from onefold.testing import try_undos

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


def declare(bench: Bench, *, careless: bool = False, failing: bool = False) -> Any:
    """Return a saga with two steps to the outside, the second of which is a task, and the effects outside."""
    left: list[str] = []

    async def give_back(name: str) -> None:
        if careless or name in left:
            left.remove(name)

    @bench.app.step(undo=give_back)
    async def take(name: str) -> None:
        left.append(name)

    @bench.app.task(queue="other")
    async def put_back(ctx: Context, name: str) -> None:
        if failing:
            raise Reject("it gives up")
        await ctx.execute(bench.sql("DELETE FROM effect WHERE name = ?"), name)

    @bench.app.step(undo=put_back)
    @bench.app.task(queue="other")
    async def reserve(ctx: Context, name: str) -> None:
        await bench.insert(ctx, name)

    @bench.app.saga
    async def fulfil(run: Run, name: str) -> None:
        await run.step(take, name)
        await run.step(reserve, name)

    return fulfil, left


def test_every_undo_is_tried_after_every_step_and_twice(bench: Bench) -> None:
    """O3."""
    fulfil, left = declare(bench)

    async def check(trial: int) -> None:
        assert f"trial {trial}" not in left
        assert f"trial {trial}" not in await bench.effects()

    async def scenario() -> None:
        assert await try_undos(bench.app, lambda trial: fulfil.call(f"trial {trial}"), check) == 4
        assert (left, await bench.effects()) == (["trial 0"], ["trial 0"])

    bench.run(scenario)


@pytest.mark.parametrize("wrong", [{"careless": True}, {"failing": True}], ids=["not twice", "not at all"])
def test_an_undo_that_cannot_cope_is_named(sqlite_bench: Bench, wrong: dict[str, bool]) -> None:
    fulfil, _ = declare(sqlite_bench, **wrong)

    async def check(trial: int) -> None: ...

    async def scenario() -> None:
        with pytest.raises(AssertionError, match=r"when (take|reserve)#1 fails before .* stuck"):
            await try_undos(sqlite_bench.app, lambda trial: fulfil.call(f"trial {trial}"), check)

    sqlite_bench.run(scenario)
