"""A signal of the wrong type parks its run until an operator drops or replaces the signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from onefold import Run, SagaStatus, State, UnreadableSignalError, never
from onefold.store import Query

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

BY = {"actor": "ada", "reason": "the form was wrong"}


@pytest.mark.parametrize("how", ["drop", "replace"])
def test_a_signal_of_the_wrong_type_parks_the_run_until_a_person_acts(bench: Bench, how: str) -> None:
    """The run neither dies nor loses later signals."""

    @bench.app.workflow
    async def collect(run: Run) -> list[int]:
        return [await run.signal("amount", type=int), await run.signal("amount", type=int)]

    async def scenario() -> None:
        app, receipt = bench.app, await collect.send()
        await bench.work()
        assert await app.signal(receipt.id, "amount", "abc", id="1")
        await bench.work()
        record = await bench.record(receipt)
        assert record.state is State.PARKED
        assert record.failure is not None
        assert record.failure.reason == "unreadable signal"
        assert UnreadableSignalError.__name__ in record.failure.error_type
        for number in (2, 3):
            await app.signal(receipt.id, "amount", number, id=str(number))
            await bench.work()
        assert await app.resume(receipt.id, **BY)
        await bench.work()
        assert (await bench.record(receipt)).state is State.PARKED
        chronicle = await app.chronicle(receipt.id)
        assert chronicle is not None
        assert [letter.id for letter in chronicle.mailbox] == ["1", "2", "3"]
        if how == "drop":
            assert await app.drop_signal(receipt.id, "amount", "1", **BY)
        else:
            assert await app.replace_signal(receipt.id, "amount", "1", 1, **BY)
        assert not await app.drop_signal(receipt.id, "amount", "1", **BY)
        await bench.work()
        assert await receipt.result(timeout=0) == ([2, 3] if how == "drop" else [1, 2])
        table = "onefold_act" if bench.url.startswith("sqlite") else "onefold.act"
        acts = await app.store.fetch(f"SELECT kind, actor, reason FROM {table} ORDER BY at")
        assert acts == [("resume", *BY.values()), ("resolve", *BY.values())]
        chronicle = await app.chronicle(receipt.id)
        assert chronicle is not None
        assert [(entry.name, entry.kind) for entry in chronicle.entries] == [("amount#1", "wait")]

    bench.run(scenario)


def test_only_a_signal_that_was_not_received_can_be_dropped(bench: Bench) -> None:
    """A received signal is part of the run's decisions; a restart from that wait takes it back."""

    @bench.app.workflow
    async def collect(run: Run) -> list[Any]:
        return [await run.signal("amount"), await run.signal("go")]

    async def scenario() -> None:
        app, receipt = bench.app, await collect.send()
        await app.signal(receipt.id, "amount", 1, id="1")
        await app.signal(receipt.id, "amount", 2, id="2")
        await bench.work()
        assert not await app.drop_signal(receipt.id, "amount", "1", **BY)
        assert not await app.replace_signal(receipt.id, "amount", "1", 5, **BY)
        assert not await app.drop_signal(receipt.id, "amount", "nothing", **BY)
        assert await app.restart(receipt.id, from_step="amount#1", **BY)
        assert await app.drop_signal(receipt.id, "amount", "1", **BY)
        await app.signal(receipt.id, "go", 3)
        await bench.work()
        assert await receipt.result(timeout=0) == [2, 3]

    bench.run(scenario)


def test_a_saga_with_an_unreadable_signal_can_be_undone(bench: Bench) -> None:
    """The steps before the signal are undone, although no operator has answered it."""
    calls: list[str] = []

    async def release() -> None:
        calls.append("release")

    @bench.app.step(undo=release)
    async def hold() -> None:
        calls.append("hold")

    @bench.app.step(undo=never("it is only a note"))
    async def note(amount: int) -> None: ...

    @bench.app.saga
    async def book(run: Run) -> None:
        await run.step(hold)
        await run.step(note, await run.signal("amount", type=int))

    async def scenario() -> None:
        receipt = await book.send()
        await bench.app.signal(receipt.id, "amount", "abc")
        await bench.work()
        assert [one.state for one in await bench.app.find(Query(ids=(receipt.id,)))] == [State.PARKED]
        assert await bench.app.cancel(receipt.id, **BY)
        await bench.work()
        status = await bench.app.saga_status(receipt.id)
        assert status is not None
        assert status.status is SagaStatus.COMPENSATED
        assert calls == ["hold", "release"]

    bench.run(scenario)
