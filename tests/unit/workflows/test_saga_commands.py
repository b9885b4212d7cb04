"""Sagas whose steps are tasks of other services: answers that come twice, late or never, and undos that fail."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import Context, Reject, RetryPolicy, Run, SagaError, SagaStatus, State, StepStatus
from onefold.store.journal_lines import Line, LineKind
from onefold.testing import drain
from onefold.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

ONCE = RetryPolicy(max_attempts=1)
BY = {"actor": "ada", "reason": "looked"}


class Shop:
    """A saga whose steps are tasks on another queue, as those of another service are."""

    def __init__(self, bench: Bench, *, keyed: bool = False) -> None:
        self.bench = bench
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        app = bench.app

        def task(name: str) -> Any:
            async def handle(ctx: Context, order: str) -> str:
                self.calls.append(name)
                if self.failing.get(name, 0) > 0:
                    self.failing[name] -= 1
                    raise Reject(f"{name} does not work")
                await bench.insert(ctx, f"{name} {order}")
                return name

            key = f"{{order}}:{name}" if keyed else None
            return app.task(name=name, queue="stock", retry=ONCE, key=key)(handle)

        self.release, self.refund = task("release"), task("refund")
        self.reserve = app.step(undo=self.release)(task("reserve"))
        self.charge = app.step(undo=self.refund, timeout=timedelta(seconds=20))(task("charge"))

        @app.saga(retry=ONCE)
        async def fulfil(run: Run, order: str) -> str:
            reserved = await run.step(self.reserve, order)
            charged = await run.child(self.charge, order)
            return f"{reserved} {charged}"

        self.fulfil = fulfil

    async def orchestrate(self) -> None:
        """Work on the saga only, not on its commands."""
        await self._work("default")

    async def serve(self) -> None:
        await self._work("stock")

    async def _work(self, queue: str) -> None:
        # Not alone, so that it does not purge: the tests read cancelled commands.
        await self.bench.app.work_as(WorkerSettings("shop", [queue], until_idle=True, alone=False))

    async def commands(self) -> dict[str, Any]:
        return {one.envelope.message_type: one for one in await self.bench.messages()}


def test_a_duplicate_reply_advances_nothing(bench: Bench) -> None:
    """Fault 37: the first answer of a command counts."""
    shop = Shop(bench)

    async def scenario() -> None:
        receipt = await shop.fulfil.send("7")
        await shop.orchestrate()
        await shop.serve()
        (reply,) = [one for one in await bench.app.journal(receipt.id) if one.kind is LineKind.CHILD]
        for _ in range(3):
            await bench.app.store.record(receipt.id, [Line(reply.name, LineKind.CHILD, reply.value)])
            await shop.orchestrate()
        sent = [one.name for one in await bench.app.journal(receipt.id) if one.kind is LineKind.SENT]
        assert sent == ["reserve#1", "charge#1"]
        await drain(bench.app)
        assert (await receipt.result(), shop.calls) == ("reserve charge", ["reserve", "charge"])

    bench.run(scenario)


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
def test_a_command_that_is_not_answered_in_time_is_taken_back_and_undone(bench: Bench, keyed: bool) -> None:
    """I8, fault 37: no answer is a failure, the time counts from the send, and a late answer changes nothing."""
    shop = Shop(bench, keyed=keyed)

    async def scenario() -> None:
        receipt = await shop.fulfil.send("7")
        await shop.orchestrate()
        await shop.serve()
        await shop.orchestrate()
        bench.clock.advance(19.0)
        await shop.orchestrate()
        assert (await bench.app.saga_status(receipt.id)).status is SagaStatus.COMPLETING  # type: ignore[union-attr]
        bench.clock.advance(2.0)
        await shop.orchestrate()
        saga = await bench.app.saga_status(receipt.id)
        assert saga is not None
        assert saga.cause is not None
        assert "did not end within 20 s" in saga.cause.error_message
        assert (saga.steps[1].status, saga.steps[1].undo_status) == (StepStatus.UNKNOWN, StepStatus.RUNNING)
        commands = await shop.commands()
        assert commands["charge"].state is State.CANCELLED
        await drain(bench.app)
        assert shop.calls == ["reserve", "refund", "release"]
        commands = await shop.commands()
        assert commands["refund"].envelope.correlation_id == receipt.id
        assert commands["refund"].envelope.causation_id == f"workflow:{receipt.id}/undo:charge#1"
        assert commands["refund"].envelope.queue == "stock"
        with pytest.raises(SagaError, match="timed out"):
            await receipt.result()

    bench.run(scenario)


def test_a_reply_that_comes_with_the_timeout_counts_or_does_not_but_never_half(bench: Bench) -> None:
    """Fault 37: the answer was there when the saga looked, so it counts, even after the deadline."""
    shop = Shop(bench)

    async def scenario() -> None:
        receipt = await shop.fulfil.send("7")
        await shop.orchestrate()
        await shop.serve()
        bench.clock.advance(3600.0)
        await drain(bench.app)
        assert await receipt.result() == "reserve charge"

    bench.run(scenario)


def test_a_command_that_failed_is_undone_too(bench: Bench) -> None:
    """It may have had an effect before it failed."""
    shop = Shop(bench)
    shop.failing["charge"] = 1

    async def scenario() -> None:
        receipt = await shop.fulfil.send("7")
        await drain(bench.app)
        assert shop.calls == ["reserve", "charge", "refund", "release"]
        assert await bench.effects() == ["refund 7", "release 7", "reserve 7"]
        # The command of an undone saga cannot be redriven.
        assert (await shop.commands())["charge"].state is State.DISCARDED
        with pytest.raises(SagaError, match="charge does not work"):
            await receipt.result()

    bench.run(scenario)


def test_a_dead_undo_command_is_redriven_when_its_saga_is_resumed(bench: Bench) -> None:
    shop = Shop(bench)
    shop.failing.update(charge=1, refund=2)

    async def scenario() -> None:
        receipt = await shop.fulfil.send("7")
        await drain(bench.app)
        for number in (1, 2):
            assert (await bench.app.saga_status(receipt.id)).status is SagaStatus.STUCK  # type: ignore[union-attr]
            assert shop.calls.count("refund") == number
            assert await bench.app.resume(receipt.id, **BY)
            await drain(bench.app)
        assert shop.calls == ["reserve", "charge", "refund", "refund", "refund", "release"]
        assert await bench.effects() == ["refund 7", "release 7", "reserve 7"]
        assert (await bench.app.saga_status(receipt.id)).status is SagaStatus.COMPENSATED  # type: ignore[union-attr]

    bench.run(scenario)
