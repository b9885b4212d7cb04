"""D7: a hook gets a message about every dead letter, which leaves in the commit of the letter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from onefold import Context, DeadNotice, Envelope, Query, Reject, RetryPolicy, Run, State, SyncApp, SyncContext, limits
from onefold.supervisor.hand_back import Death, settle_dead_process
from onefold.testing.clock import FakeClock
from onefold.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


async def work_through(bench: Bench) -> None:
    """Handle all due messages, and those that dead letters have sent."""
    while await bench.work():
        pass


def test_a_hook_is_told_of_a_letter_and_commits_like_any_handler(bench: Bench) -> None:
    told: list[DeadNotice] = []

    @bench.app.task(key="{number}")
    async def fails(number: int) -> None:
        raise Reject(f"no such order: {number}")

    @bench.app.on_dead
    async def alert(ctx: Context, letter: DeadNotice) -> None:
        told.append(letter)
        await bench.insert(ctx, letter.message_id)

    async def scenario() -> None:
        receipt = await fails.send(7)
        await work_through(bench)
        (letter,) = told
        assert (letter.message_id, letter.message_type, letter.queue) == (receipt.id, "fails", "default")
        assert (letter.reason, letter.error_type, letter.error_message) == (
            "rejected",
            "onefold.errors.Reject",
            "no such order: 7",
        )
        assert await bench.effects() == [receipt.id]
        (hook,) = [one for one in await bench.messages() if one.envelope.message_type == "alert"]
        assert (hook.state, hook.envelope.causation_id) == (State.DONE, receipt.id)
        assert hook.envelope.idempotency_key == f"derived:dead/{receipt.id}:{letter.fence}"

    bench.run(scenario)


def test_a_letter_that_dies_again_is_told_of_again(bench: Bench) -> None:
    told: list[int] = []

    @bench.app.task
    async def fails() -> None:
        raise Reject("never")

    @bench.app.on_dead
    def alert(letter: DeadNotice) -> None:
        told.append(letter.fence)

    async def scenario() -> None:
        receipt = await fails.send()
        await work_through(bench)
        assert await bench.app.redrive([receipt.id], actor="ada", reason="try again") == [receipt.id]
        await work_through(bench)
        assert len(told) == 2
        assert told[0] < told[1]

    bench.run(scenario)


def test_a_hook_that_fails_leaves_the_letter_and_gets_no_notice_of_its_own(bench: Bench) -> None:
    """Its message is retried and becomes a letter itself, which would otherwise go on for ever."""
    runs: list[str] = []

    @bench.app.task
    async def fails() -> None:
        raise Reject("never")

    @bench.app.on_dead(retry=RetryPolicy(max_attempts=2), name="pager")
    def alert(ctx: SyncContext, letter: DeadNotice) -> None:
        runs.append(letter.message_type)
        raise ValueError("the pager is down")

    async def scenario() -> None:
        await fails.send()
        await work_through(bench)
        bench.clock.advance(limits.RETRY_CAP)
        await work_through(bench)
        assert runs == ["fails", "fails"]
        letters = {one.message.message_type async for one in bench.app.dead_letters()}
        assert letters == {"fails", "pager"}
        assert len(await bench.messages()) == 2

    bench.run(scenario)


@pytest.mark.parametrize("broken", ["on_send", "store"])
def test_a_hook_that_cannot_be_sent_does_not_keep_the_letter_from_being_written(
    sqlite_bench: Bench, broken: str
) -> None:
    """Neither an exception while its message is made nor a clash of its key prevents the letter."""
    app = sqlite_bench.app

    @app.task
    async def fails() -> None:
        raise Reject("never")

    @app.on_dead
    async def alert(letter: DeadNotice) -> None: ...

    @app.on_send
    def breaks(envelope: Envelope) -> Envelope:
        if broken == "on_send" and envelope.message_type == "alert":
            raise ValueError("no tenant")
        return envelope

    async def scenario() -> None:
        receipt = await fails.send()
        if broken == "store":
            notice = DeadNotice(
                message_id="x",
                message_type="x",
                queue="x",
                reason="x",
                error_type="",
                error_message="",
                attempt=1,
                fence=1,
            )
            await alert.options(key=f"{receipt.id}:2", delay=3_600).send(notice)
        await sqlite_bench.work()
        assert (await sqlite_bench.record(receipt)).state is State.DEAD

    sqlite_bench.run(scenario)


@pytest.mark.parametrize("kind", ["refuse", "lose"])
def test_letter_and_hook_are_one_commit(sqlite_bench: Bench, kind: str) -> None:
    """Whether or not the answer arrives, there is one letter and one message about it."""
    app = sqlite_bench.app

    @app.task
    async def fails() -> None:
        raise Reject("never")

    @app.on_dead
    async def alert(letter: DeadNotice) -> None: ...

    async def scenario() -> None:
        app._store = FaultyStore(app.store, [Fault(kind, verb="settle")])  # type: ignore[arg-type]
        await fails.send()
        await work_through(sqlite_bench)
        states = {one.envelope.message_type: one.state for one in await sqlite_bench.messages()}
        assert states == {"fails": State.DEAD, "alert": State.DONE}
        assert len(await sqlite_bench.messages()) == 2

    sqlite_bench.run(scenario)


def test_a_run_that_dies_is_told_of(sqlite_bench: Bench) -> None:
    told: list[str] = []

    @sqlite_bench.app.workflow
    async def flow(run: Run) -> None:
        raise Reject("never")

    @sqlite_bench.app.on_dead
    async def alert(letter: DeadNotice) -> None:
        told.append(letter.message_type)

    async def scenario() -> None:
        await flow.send()
        await work_through(sqlite_bench)
        assert told == ["flow"]

    sqlite_bench.run(scenario)


def test_a_quarantine_by_the_supervisor_is_told_of(sqlite_bench: Bench) -> None:
    """C22: the worker that held it is dead, so the supervisor sends the message."""
    app = sqlite_bench.app

    @app.task
    async def kills() -> None: ...

    @app.on_dead
    async def alert(letter: DeadNotice) -> None: ...

    async def scenario() -> None:
        receipt = await kills.send()
        for _ in range(limits.QUARANTINE_AFTER_SUPERVISED):
            (lease,) = await app.store.claim(["default"], types=["kills"], limit=1, lease=30, worker="dead")
            death = Death("dead", {(lease.id, lease.fence): "it died"})
            assert await settle_dead_process(app.store, death, lambda _: limits.KEY_WINDOW, app.announce) == 1
        assert (await sqlite_bench.record(receipt)).state is State.DEAD
        (told,) = [one for one in await sqlite_bench.messages() if one.envelope.message_type == "alert"]
        assert told.state is State.SCHEDULED

    sqlite_bench.run(scenario)


def test_the_synchronous_app_has_it_too(tmp_path: Path) -> None:
    """P6: with options and without."""
    told: list[str] = []
    with SyncApp(f"sqlite:///{tmp_path}/onefold.db", clock=FakeClock()) as app:

        @app.task
        def fails() -> None:
            raise Reject("never")

        @app.on_dead(queue="alerts")
        def alert(letter: DeadNotice) -> None:
            told.append(letter.reason)

        receipt = fails.send()
        while app.work(until_idle=True):
            pass
        assert told == ["rejected"]
        assert app.progress(receipt.id) is None
        assert app.count()["default"].oldest_dead_at is not None
        assert [one.envelope.queue for one in app.find(Query(message_type="alert"))] == ["alerts"]
