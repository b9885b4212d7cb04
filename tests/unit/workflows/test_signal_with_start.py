"""Signals to a run that may not have been started yet, and signals that reach no run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    App,
    Batch,
    ConfigurationError,
    Context,
    KeyReuseError,
    Receipt,
    Run,
    SignalError,
    State,
    SyncApp,
    SyncContext,
    TransactionOpenError,
    Workflow,
)
from onefold.store.journal_lines import LineKind

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

#: An id in the form of a message's id, which no message has.
NOWHERE = "01a1ef1f-7729-7007-a3bf-22076d12333e"


def declare(app: App) -> Workflow[[str], Any]:
    """Declare a workflow with a key, which returns the signal it gets."""

    @app.workflow(key="{user}")
    async def onboard(run: Run, user: str) -> Any:
        return await run.signal("confirmed")

    return onboard


def places(bench: Bench, onboard: Workflow[[str], Any]) -> dict[str, Callable[[str], Awaitable[Any]]]:
    """Return the ways to start or signal a run, by the place of the call; each takes the user."""
    app = bench.app

    def confirm(user: str) -> Any:
        return app.signal_with_start(onboard.call(user), "confirmed", user)

    @app.task
    async def handler(user: str) -> None:
        await confirm(user)

    @app.task
    async def with_rows(ctx: Context, user: str) -> None:
        await bench.insert(ctx, user)
        ctx.signal_with_start(onboard.call(user), "confirmed", user)

    @app.task
    def in_thread(ctx: SyncContext, user: str) -> None:
        ctx.signal_with_start(onboard.call(user), "confirmed", user)

    @app.task(batch=10)
    async def batch(batch: Batch[str]) -> None:
        for item in batch:
            batch.signal_with_start(onboard.call(item.value), "confirmed", item.value)
            item.done()

    async def step(ctx: Context, user: str) -> None:
        ctx.signal_with_start(onboard.call(user), "confirmed", user)

    @app.workflow
    async def in_step(run: Run, user: str) -> None:
        await run.step(step, user)

    @app.workflow
    async def at_the_end(run: Run, user: str) -> None:
        run.signal_with_start(onboard.call(user), "confirmed", user)

    @app.workflow
    async def before_a_wait(run: Run, user: str) -> str:
        receipt = await confirm(user)
        await run.sleep(1)
        return str(receipt.id)

    async def transaction(user: str) -> None:
        async with app.transaction() as tx:
            tx.signal_with_start(onboard.call(user), "confirmed", user)

    tasks: list[Any] = [handler, with_rows, in_thread, batch, in_step, at_the_end, before_a_wait]
    return {"outside": confirm, "transaction": transaction, **{one.name: one.send for one in tasks}}


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_a_run_is_started_or_told_wherever_that_is_done(bench: Bench, held: bool) -> None:
    """One commit starts the run if its key is free, and otherwise signals the run that holds the key."""
    onboard = declare(bench.app)
    ways = places(bench, onboard)

    async def scenario() -> None:
        first: dict[str, Receipt[Any]] = {}
        for place in ways if held else ():
            first[place] = await onboard.send(place)
        await bench.work()
        for place, way in ways.items():
            await way(place)
        await bench.work()
        bench.clock.advance(2)
        await bench.work()
        for place in ways:
            receipt = await onboard.send(place)
            assert receipt.duplicate, place
            assert place not in first or receipt.id == first[place].id
            assert await receipt.result(timeout=0) == place
        runs = [one for one in await bench.messages() if one.envelope.message_type == "onboard"]
        assert len(runs) == len(ways)

    bench.run(scenario)


def test_a_receipt_names_the_first_message_once_that_is_known(bench: Bench) -> None:
    """Before the commit its own message may turn out a duplicate, so it has no id; without a key the id is known."""
    seen: list[str] = []

    @bench.app.task(key="{n}")
    async def keyed(n: int) -> None: ...

    @bench.app.task
    async def plain(n: int) -> None: ...

    @bench.app.workflow
    async def sender(run: Run) -> str:
        receipt = run.send(keyed, 1)
        await run.sleep(1)
        seen.append(receipt.id)
        await run.sleep(1)
        return receipt.id

    @bench.app.task
    async def hasty(n: int) -> str:
        return (await keyed.send(n)).id

    async def scenario() -> None:
        first = await keyed.send(1)
        async with bench.app.transaction() as tx:
            again, new = tx.send(keyed, 1), tx.send(plain, 1)
            with pytest.raises(TransactionOpenError, match="known after the commit"):
                _ = again.id
            assert "not stored yet" in repr(again)
            assert new.id
        assert (again.id, again.duplicate) == (first.id, True)
        receipt, failed = await sender.send(), await hasty.send(1)
        for _ in range(3):
            await bench.work()
            bench.clock.advance(2)
        assert await receipt.result(timeout=0) == first.id
        assert set(seen) == {first.id}
        assert (await bench.record(failed)).attempt > 0
        lines = [line for line in await bench.app.journal(receipt.id) if line.kind is LineKind.SENT]
        assert all(first.id.encode() in line.value for line in lines)

    bench.run(scenario)


def test_a_key_whose_run_has_ended_refuses_the_signal(bench: Bench) -> None:
    """The signal could not be received, and no other run may start: nothing of the commit stays."""
    onboard = declare(bench.app)

    @bench.app.task
    async def handler(ctx: Context) -> None:
        ctx.signal_with_start(onboard.call("ada"), "confirmed", 2)

    @bench.app.workflow
    async def parent(run: Run) -> None:
        run.signal_with_start(onboard.call("ada"), "confirmed", 3)
        await run.sleep(1)

    async def with_a_row() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "row")
            tx.signal_with_start(onboard.call("ada"), "confirmed", 2)

    async def scenario() -> None:
        await bench.app.signal_with_start(onboard.call("ada"), "confirmed", 1)
        await bench.work()
        with pytest.raises(SignalError, match="which has ended; use another key"):
            await bench.app.signal_with_start(onboard.call("ada"), "confirmed", 2)
        with pytest.raises(SignalError, match="which has ended"):
            await with_a_row()
        assert await bench.effects() == []
        for receipt in (await handler.send(), await parent.send()):
            await bench.work()
            record = await bench.record(receipt)
            assert record.state is State.DEAD
            assert record.failure is not None
            assert record.failure.reason == "no such run"

    bench.run(scenario)


def test_a_signal_to_an_id_that_the_store_does_not_have_is_an_error(bench: Bench) -> None:
    """Outside a commit at once; inside, the commit fails with the error, and a handler's message is a dead letter."""

    @bench.app.task
    async def handler(to: str) -> None:
        await bench.app.signal(to, "go")

    @bench.app.task
    async def with_rows(ctx: Context, to: str) -> None:
        await bench.insert(ctx, "row")
        ctx.signal(to, "go")

    @bench.app.workflow
    async def parent(run: Run, to: str) -> None:
        await bench.app.signal(to, "go")

    async def with_a_row(to: str) -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "row")
            tx.signal(to, "go")

    async def scenario() -> None:
        for to in (NOWHERE, "nowhere"):
            with pytest.raises(SignalError, match=f"no run with the id '{to}'"):
                await bench.app.signal(to, "go")
            with pytest.raises(SignalError):
                await with_a_row(to)
            for receipt in (await handler.send(to), await with_rows.send(to), await parent.send(to)):
                await bench.work()
                record = await bench.record(receipt)
                assert record.state is State.DEAD
                assert record.failure is not None
                assert record.failure.reason == "no such run"
        assert await bench.effects() == []

    bench.run(scenario)


def test_one_bad_signal_does_not_fail_its_neighbours(bench: Bench) -> None:
    """Several handlers are settled in one commit; only the one with the unknown run fails."""
    onboard = declare(bench.app)

    @bench.app.task
    async def handler(to: str) -> None:
        await bench.app.signal(to, "confirmed", "yes")

    async def scenario() -> None:
        runs = [await onboard.send(str(n)) for n in range(5)]
        await bench.work()
        sent = [await handler.send(to) for to in (NOWHERE, *(run.id for run in runs))]
        await bench.work()
        assert [(await bench.record(one)).state for one in sent] == [State.DEAD] + [State.DONE] * 5
        assert [await run.result(timeout=0) for run in runs] == ["yes"] * 5

    bench.run(scenario)


def test_a_signal_to_a_run_that_has_ended_is_not_heard(bench: Bench) -> None:
    """Outside a commit the answer says so; inside, the signal is dropped, because a run may end at any moment."""
    onboard = declare(bench.app)

    @bench.app.task
    async def handler(to: str) -> None:
        await bench.app.signal(to, "confirmed")

    async def scenario() -> None:
        run = await bench.app.signal_with_start(onboard.call("ada"), "confirmed", 1)
        await bench.work()
        assert not await bench.app.signal(run.id, "confirmed")
        receipt = await handler.send(run.id)
        await bench.work()
        assert (await bench.record(receipt)).state is State.DONE

    bench.run(scenario)


def test_a_run_that_was_started_with_other_arguments_is_not_told(bench: Bench) -> None:
    """With other arguments the key means other work."""

    @bench.app.workflow(key="{user}")
    async def onboard(run: Run, user: str, plan: str) -> Any:
        return await run.signal("confirmed")

    @bench.app.task
    async def plain() -> None: ...

    async def scenario() -> None:
        first = await onboard.send("ada", "free")
        with pytest.raises(KeyReuseError):
            await bench.app.signal_with_start(onboard.call("ada", "paid"), "confirmed")
        assert not [line for line in await bench.app.journal(first.id) if line.kind is LineKind.SIGNAL]
        with pytest.raises(ConfigurationError, match="plain is no workflow"):
            await bench.app.signal_with_start(plain.call(), "confirmed")
        async with bench.app.transaction() as tx:
            with pytest.raises(ConfigurationError, match="plain is no workflow"):
                tx.signal_with_start(plain.call(), "confirmed")

    bench.run(scenario)


def test_two_signals_with_one_id_are_one(bench: Bench) -> None:
    """So a sender may repeat the whole call."""
    onboard = declare(bench.app)

    async def scenario() -> None:
        for _ in range(2):
            receipt = await bench.app.signal_with_start(onboard.call("ada"), "confirmed", 1, id="click-1")
        lines = await bench.app.journal(receipt.id)
        assert [line.name for line in lines] == ["confirmed/click-1"]

    bench.run(scenario)


def test_code_that_blocks_starts_or_tells_a_run_too(store_url: str) -> None:
    """Outside a transaction, and inside one."""
    app = SyncApp(store_url)
    app.migrate()
    with app:
        onboard = declare(app.app)
        first = app.signal_with_start(onboard.call("ada"), "confirmed", 1)
        with app.transaction() as tx:
            again = app.signal_with_start(onboard.call("ada"), "other", 2)
            more = tx.signal_with_start(onboard.call("bob"), "confirmed", 3)
        assert (again.id, again.duplicate, more.duplicate) == (first.id, True, False)
        app.work(until_idle=True)
        assert (first.result(timeout=0), more.result(timeout=0)) == (1, 3)
