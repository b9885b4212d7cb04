"""A message ends when its time is over, even without workers for its type; a dead letter has a redrive deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import App, Context, DeadNotice, Rate, Reject, RetentionOverError, Run, limits, never
from onefold.clock import MICROSECONDS, give_way
from onefold.store import Query, State
from onefold.testing import drain
from onefold.worker.expirer import Expirer

if TYPE_CHECKING:
    from conftest import World


@pytest.mark.parametrize("where", ["task", "send"])
def test_what_expires_at_once_never_runs(where: str, world: World) -> None:
    """``expires=0`` counts even on a clock that stands still between send and claim; None keeps a message for ever."""
    app = world.app()
    ran: list[int] = []

    @app.task(expires=0 if where == "task" else None)
    async def note(number: int) -> None:
        ran.append(number)

    async def scenario() -> None:
        async with world.running(app):
            sent = await (note.send(1) if where == "task" else note.options(expires=timedelta(0)).send(1))
            for_ever = await note.options(expires=None).send(2)
            await app.work(until_idle=True)
            record = await world.record(app, sent)
            assert record.failure is not None
            assert (record.state, record.failure.reason) == (State.DEAD, "expired")
            assert (await world.record(app, for_ever)).state is State.DONE
            assert ran == [2]

    asyncio.run(scenario())


def declare(app: App) -> list[Callable[[], Any]]:
    """Declare one task for each kind of waiting, and return functions that send two messages to each."""

    @app.task
    async def plain(n: int) -> None: ...

    @app.task(ordering_key="{n}")
    async def ordered(n: int) -> None: ...

    @app.task(max_running=1)
    async def capped(n: int) -> None: ...

    @app.task(rate_each=Rate(1, per=10.0), max_running_each=1, gate="{n}")
    async def rated(n: int) -> None: ...

    @app.task(priority=5)
    async def urgent(n: int) -> None: ...

    @app.workflow
    async def flow(run: Run, n: int) -> None: ...

    tasks: list[Any] = [plain, ordered, capped, rated, urgent, flow]
    sends = [lambda task=task, n=n: task.send(n) for task in tasks for n in (1, 1)]
    return [*sends, lambda: ordered.options(ordering_key="numbered", sequence=7).send(1)]


def test_a_message_of_a_type_that_no_worker_has_expires(world: World) -> None:
    """Whatever it waits for, it becomes an announced dead letter an hour after its time, and not before."""
    sender, worker = world.app(), world.app()
    sends = declare(sender)
    told: list[str] = []

    @worker.task
    async def own(n: int) -> None: ...

    @worker.on_dead
    async def tell(notice: DeadNotice) -> None:
        told.append(notice.reason)

    async def scenario() -> None:
        async with world.running(sender, worker):
            expirer = Expirer(worker.store, world.clock, worker.registry.types(), "w", worker.announce)
            receipts = [await send() for send in sends]
            mine = await own.send(1)
            world.clock.advance(timedelta(days=7, minutes=59))
            assert await expirer.look() == 0
            young = await sends[0]()
            world.clock.advance(timedelta(minutes=2))
            for _ in range(len(receipts)):
                await expirer.look()
                world.clock.advance(60.0)
            found = {record.envelope.id: record for record in await worker.find(Query())}
            for receipt in receipts:
                record = found[receipt.id]
                assert record.state is State.DEAD, record
                assert record.failure is not None
                assert record.failure.reason == "expired"
            # The younger message is handed back unharmed; expiring the worker's own types is left to its normal claims.
            assert (found[young.id].state, found[young.id].attempt) == (State.SCHEDULED, 0)
            assert found[mine.id].state is State.SCHEDULED
            await drain(worker, advance=False)
            assert told.count("expired") == len(receipts) + 1

    asyncio.run(scenario())


def test_a_worker_looks_for_them_by_itself(world: World) -> None:
    """The worker looks for expired messages once a minute, beside its other work."""
    sender, worker = world.app(), world.app()

    @sender.task
    async def gone(n: int) -> None: ...

    async def scenario() -> None:
        async with world.running(sender, worker):
            sent = await gone.send(1)
            working = asyncio.create_task(worker.work())
            async with asyncio.timeout(20):
                while (await world.record(sender, sent)).state is not State.DEAD:
                    world.clock.advance(timedelta(days=1))
                    await give_way()
            worker.stop_working()
            world.clock.advance(60.0)
            await working

    asyncio.run(scenario())


def test_a_saga_of_another_app_is_left_to_its_own_workers(world: World) -> None:
    """Only the workers of its app can undo what it has begun."""
    sender, worker = world.app(), world.app()

    @sender.step(undo=never("nothing to do"))
    async def step(ctx: Context) -> None: ...

    @sender.saga
    async def book(run: Run) -> None:
        await run.step(step)

    async def scenario() -> None:
        async with world.running(sender, worker):
            sent = await book.send()
            world.clock.advance(timedelta(days=30))
            expirer = Expirer(worker.store, world.clock, worker.registry.types(), "w", worker.announce)
            assert await expirer.look() == 0
            assert (await world.record(sender, sent)).state is State.SCHEDULED

    asyncio.run(scenario())


def test_a_page_of_old_messages_is_gone_through_and_young_ones_are_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that stay on the page, such as those that never expire, do not hide the messages behind them."""
    monkeypatch.setattr(limits, "PAGE", 3)
    sender, worker = world.app(), world.app()

    @sender.task(expires=None, key_window=timedelta(days=400))
    async def for_ever(n: int) -> None: ...

    @sender.task
    async def gone(n: int) -> None: ...

    async def scenario() -> None:
        async with world.running(sender, worker):
            for n in range(7):
                await for_ever.send(n)
            await gone.send(1)
            world.clock.advance(timedelta(days=8))
            for n in range(9):
                await for_ever.send(n)
            expirer = Expirer(worker.store, world.clock, worker.registry.types(), "w", worker.announce)
            assert [await expirer.look() for _ in range(3)] == [0, 0, 1]
            # The last page ended with young messages, so the next search starts at the first page again.
            assert expirer._after == ""

    asyncio.run(scenario())


def test_a_letter_is_redriven_in_its_time_and_not_later_though_no_purge_came_by(world: World) -> None:
    """Both deadlines are shown by name: until when it can be redriven, and until when its key is held."""
    app = world.app()

    @app.task(key="{n}")
    async def refuse(n: int) -> None:
        raise Reject("no")

    async def scenario() -> None:
        async with world.running(app):
            early, late = await refuse.send(1), await refuse.send(2)
            await app.work(until_idle=True)
            record = await world.record(app, late)
            died_at = world.clock.now()
            assert record.redrive_until == died_at + round(limits.DEAD_RETENTION * MICROSECONDS)
            assert record.kept_until == died_at + round(limits.KEY_WINDOW * MICROSECONDS)
            letters = {letter.id: letter async for letter in app.dead_letters()}
            letter = letters[late.id]
            shown = await letter.as_dict()
            assert letter.redrive_until is not None
            assert letter.kept_until is not None
            assert shown["redrive_until"] == letter.redrive_until.isoformat()
            assert shown["kept_until"] == letter.kept_until.isoformat()
            assert letter.kept_until - letter.redrive_until == timedelta(days=9)
            world.clock.advance(limits.DEAD_RETENTION - 1)
            assert await app.redrive([early.id], actor="ada", reason="fixed") == [early.id]
            world.clock.advance(1)
            await too_late(app, late.id, letter)
            async with app.store.transaction() as transaction:
                await transaction.purge()
            assert (await world.record(app, late)).redrive_until is None
            await too_late(app, late.id, letter)
            assert (await refuse.send(2)).duplicate

    async def too_late(app: App, id_: str, letter: Any) -> None:
        with pytest.raises(RetentionOverError, match=id_):
            await app.redrive([id_], actor="ada", reason="fixed")
        with pytest.raises(RetentionOverError, match="send the message again"):
            await letter.redrive(actor="ada", reason="fixed")
        assert (await world.record(app, id_)).state is State.DEAD

    asyncio.run(scenario())
