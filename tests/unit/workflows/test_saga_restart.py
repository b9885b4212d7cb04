"""A restart of a saga leaves no undo that could run afterwards, and cancels the messages of the steps it forgets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from onefold import App, Receipt, Reject, RestartError, RetryPolicy, Run, SagaStatus, State, StepStatus, never
from onefold.store import Query, Record
from onefold.store.journal_lines import LineKind

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

ONCE = RetryPolicy(max_attempts=1)
LATER = RetryPolicy(base=60.0, fixed=True, max_attempts=3)
BY = {"actor": "ada", "reason": "the card works now"}
STOCK = {"queue": "stock", "retry": LATER}


class Order:
    """A saga that reserves with a command and pays; reserving and its undo change the seat."""

    def __init__(self, app: App, **stock: Any) -> None:
        self.app = app
        self.calls: list[str] = []
        #: The functions that raise, by name.
        self.failing: set[str] = {"pay"}

        def call(name: str) -> None:
            self.calls.append(name)
            if name in self.failing:
                raise Reject(name) if name == "pay" else ConnectionError(name)

        @app.task(**{**STOCK, **stock})
        async def put_back(order: int) -> None:
            call("put back")

        @app.step(undo=put_back, timeout=None)
        @app.task(**{**STOCK, **stock})
        async def reserve(order: int) -> None:
            call("reserve")

        @app.step(undo=never("nothing was paid"), retry=ONCE)
        async def pay(order: int) -> None:
            call("pay")

        @app.saga
        async def book(run: Run, order: int) -> str:
            await run.step(reserve, order)
            await run.step(pay, order)
            return "booked"

        self.book = book

    async def fail(self) -> Receipt[str]:
        """Let a saga fail at its payment, and its undo be sent, once."""
        receipt = await self.book.send(1)
        for queue in ("default", "stock", "default"):
            await self.app.work(queues=[queue], until_idle=True)
        return receipt

    async def sent(self, name: str) -> list[Record]:
        """Return the messages of a task, oldest first."""
        return [one for one in await self.app.find(Query()) if one.envelope.message_type == name]


def test_a_saga_does_not_go_back_while_its_undo_is_called(bench: Bench) -> None:
    """Neither from behind the step that is being undone, nor from the step itself, before the undo has ended."""
    seats: set[int] = set()
    released, go_on = asyncio.Event(), asyncio.Event()
    failing = [True]

    async def release(order: int) -> None:
        seats.discard(order)
        released.set()
        await go_on.wait()

    @bench.app.step(undo=release)
    async def hold(order: int) -> None:
        seats.add(order)

    @bench.app.step(undo=never("nothing was paid"), retry=ONCE)
    async def pay(order: int) -> None:
        if failing:
            failing.clear()
            raise Reject("no money")

    @bench.app.saga
    async def book(run: Run, order: int) -> str:
        await run.step(hold, order)
        await run.step(pay, order)
        return "booked"

    async def scenario() -> None:
        receipt = await book.send(1)
        working = asyncio.ensure_future(bench.work())
        await released.wait()
        before = await bench.app.journal(receipt.id)
        assert ("undo:hold#1", LineKind.UNDOING) in [(line.name, line.kind) for line in before]
        with pytest.raises(RestartError, match=r"undo:hold#1.*restart from there or from before it"):
            await bench.app.restart(receipt.id, from_step="pay#1", **BY)
        with pytest.raises(RestartError, match=r"a worker is undoing it.*try again when"):
            await bench.app.restart(receipt.id, from_step="hold#1", **BY)
        assert await bench.app.journal(receipt.id) == before
        go_on.set()
        await working
        status = await bench.app.saga_status(receipt.id)
        assert status is not None
        assert status.status is SagaStatus.COMPENSATED
        assert await bench.app.restart(receipt.id, from_step="hold#1", **BY)
        await bench.work()
        assert await receipt.result() == "booked"
        assert seats == {1}

    bench.run(scenario)


def test_a_saga_does_not_go_back_behind_an_undo_that_was_begun_and_waits(bench: Bench) -> None:
    """The undo failed and will be retried; half of it may have happened."""
    calls: list[str] = []

    async def release(order: int) -> None:
        calls.append("release")
        raise ConnectionError

    @bench.app.step(undo=bench.app.step(retry=LATER)(release))
    async def hold(order: int) -> None:
        calls.append("hold")

    @bench.app.step(undo=never("nothing was paid"), retry=ONCE)
    async def pay(order: int) -> None:
        if calls.count("hold") == 1:
            raise Reject("no money")

    @bench.app.saga
    async def book(run: Run, order: int) -> str:
        await run.step(hold, order)
        await run.step(pay, order)
        return "booked"

    async def scenario() -> None:
        receipt = await book.send(1)
        await bench.work()
        with pytest.raises(RestartError, match="undo:hold#1"):
            await bench.app.restart(receipt.id, from_step="pay#1", **BY)
        assert await bench.app.restart(receipt.id, from_step="hold#1", **BY)
        bench.clock.advance(3_600)
        await bench.work()
        assert await receipt.result() == "booked"
        assert calls == ["hold", "release", "hold"]

    bench.run(scenario)


@pytest.mark.parametrize("waits", ["for its turn", "for its retry"])
def test_a_restart_takes_back_an_undo_that_waits(bench: Bench, waits: str) -> None:
    """Otherwise it would release, after the saga has completed, the seat that was reserved again."""
    order = Order(bench.app)

    async def scenario() -> None:
        receipt = await order.fail()
        if waits == "for its retry":
            order.failing.add("put back")
            await bench.app.work(queues=["stock"], until_idle=True)
        order.failing.clear()
        calls = len(order.calls)
        assert await bench.app.restart(receipt.id, from_step="reserve#1", **BY)
        assert [one.state for one in await order.sent("put_back")] == [State.CANCELLED]
        bench.clock.advance(3_600)
        await bench.work()
        assert await receipt.result() == "booked"
        assert order.calls[calls:] == ["reserve", "pay"]

    bench.run(scenario)


def test_a_saga_does_not_go_back_while_its_undo_runs_as_a_command(bench: Bench) -> None:
    """A worker runs it, and its calls cannot be taken back."""
    order = Order(bench.app)

    async def scenario() -> None:
        receipt = await order.fail()
        (lease,) = await bench.app.store.claim(["stock"], types=["put_back"], limit=1, lease=60, worker="other")
        with pytest.raises(RestartError, match=rf"undo:reserve#1 is running as message {lease.id}.*cancel it first"):
            await bench.app.restart(receipt.id, from_step="reserve#1", **BY)
        status = await bench.app.saga_status(receipt.id)
        assert status is not None
        assert status.status is SagaStatus.COMPENSATING
        assert status.steps[0].undo_status is StepStatus.RUNNING

    bench.run(scenario)


def test_a_restart_closes_the_letter_of_an_undo_that_died(bench: Bench) -> None:
    """A redrive of that letter would release the seat that was reserved again."""
    order = Order(bench.app, retry=ONCE)
    order.failing.add("put back")

    async def scenario() -> None:
        receipt = await order.fail()
        await bench.work()
        status = await bench.app.saga_status(receipt.id)
        assert status is not None
        assert status.status is SagaStatus.STUCK
        order.failing.clear()
        assert await bench.app.restart(receipt.id, from_step="reserve#1", **BY)
        (letter,) = await order.sent("put_back")
        assert letter.state is State.DISCARDED
        assert await bench.app.redrive([letter.envelope.id], **BY) == []
        await bench.work()
        assert await receipt.result() == "booked"

    bench.run(scenario)


@pytest.mark.parametrize("kind", ["workflow", "saga"])
def test_a_restart_takes_back_a_forward_command(bench: Bench, kind: str) -> None:
    """It waits in its queue; with the one that is sent again, the work would be done twice."""
    calls: list[str] = []
    undo = never("nothing is left of it")

    @bench.app.step(undo=undo, timeout=None)  # type: ignore[type-var]  # as above: a task
    @bench.app.task(queue="stock")
    async def reserve() -> None:
        calls.append("reserve")

    @bench.app.step(undo=undo)
    async def begin() -> None:
        calls.append("begin")

    async def book(run: Run) -> str:
        await run.step(begin)
        await run.step(reserve)
        return "booked"

    declared = bench.app.saga(book) if kind == "saga" else bench.app.workflow(book)

    async def scenario() -> None:
        receipt = await declared.send()
        await bench.app.work(queues=["default"], until_idle=True)
        assert await bench.app.restart(receipt.id, from_step="begin#1", **BY)
        states = [one.state for one in await bench.messages() if one.envelope.message_type == "reserve"]
        assert states == [State.CANCELLED]
        await bench.work()
        assert await receipt.result() == "booked"
        assert calls == ["begin", "begin", "reserve"]

    bench.run(scenario)


def test_a_restart_joins_a_child_with_a_key_of_its_own(bench: Bench) -> None:
    """It is the same work under the same key, so it is neither cancelled nor done twice."""
    calls: list[str] = []

    @bench.app.task(queue="stock", key="{order}")
    async def reserve(order: int) -> str:
        calls.append("reserve")
        return "reserved"

    @bench.app.workflow
    async def book(run: Run, order: int) -> str:
        return await run.child(reserve, order)

    async def scenario() -> None:
        receipt = await book.send(1)
        await bench.app.work(queues=["default"], until_idle=True)
        assert await bench.app.restart(receipt.id, from_step="reserve#1", **BY)
        await bench.app.work(queues=["default"], until_idle=True)
        await bench.app.work(queues=["stock"], until_idle=True)
        bench.clock.advance(60)
        await bench.work()
        assert await receipt.result() == "reserved"
        assert calls == ["reserve"]

    bench.run(scenario)


def test_a_saga_that_was_undone_does_not_go_back_to_a_command_whose_key_would_stop_it(bench: Bench) -> None:
    """Its key is held by a done command, so it would count as done although it was undone."""
    order = Order(bench.app, key="{order}")

    async def scenario() -> None:
        receipt = await order.fail()
        await bench.work()
        with pytest.raises(RestartError, match=r"reserve#1 has a key of its own, '1'.*send the saga anew"):
            await bench.app.restart(receipt.id, from_step="reserve#1", **BY)

    bench.run(scenario)
