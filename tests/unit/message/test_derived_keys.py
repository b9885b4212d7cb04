"""Keys that onefold derives: no sender can take one first, to suppress or fail the message that it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from onefold import App, Context, DeadNotice, EnvelopeError, Query, Reject, Run, limits
from onefold.message.envelope import Envelope, to_json
from onefold.testing import FakeClock, MemoryTransport, drain

FAR = timedelta(days=365)
#: Keys that a sender may try: in the form of onefold's own, or in that form without the mark.
_REFUSED = ["derived:child/x/0", "derived:", "unkeyed:x", "(schedule) tick@2030-01-01T00:00:00+00:00"]


class Scene:
    """An app with a task whose arguments name the sender, and the keys of all messages stored."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        self.app = App(url, clock=self.clock)
        self.ran: list[str] = []

        @self.app.task
        async def child(by: str) -> None:
            self.ran.append(by)

        self.child = child

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def within() -> None:
            async with self.app:
                await scenario()

        asyncio.run(within())

    async def keys_of(self, name: str) -> list[str]:
        found = await self.app.find(Query(message_type=name))
        return [one.envelope.idempotency_key for one in found]

    async def squat(self, task: Any, key: str, *arguments: Any) -> None:
        """Send a message under a key, due far in the future, as a sender that wants to suppress another message."""
        await task.options(key=key.removeprefix("derived:"), delay=FAR).send(*arguments)
        await task.options(key=key.rpartition("/")[2], delay=FAR).send(*arguments)
        with pytest.raises(EnvelopeError):
            await task.options(key=key, delay=FAR).send(*arguments)


@pytest.fixture
def scene(sqlite_url: str) -> Scene:
    """An app on an empty database."""
    return Scene(sqlite_url)


def test_a_child_cannot_be_suppressed_or_killed(scene: Scene) -> None:
    """A sender that knows the parent's id sends the child's message, or another one, under the child's key."""

    @scene.app.task
    async def parent(ctx: Context, by: str) -> None:
        ctx.send(scene.child, by)

    async def scenario() -> None:
        parents = [await parent.send(by) for by in ("same", "other")]
        for one in parents:
            await scene.child.options(key=f"{one.id}/0", delay=FAR).send("same")
        await scene.app.work(until_idle=True)
        assert scene.ran == ["same", "other"]
        assert {f"derived:child/{one.id}/0" for one in parents} <= set(await scene.keys_of("child"))
        assert not [letter async for letter in scene.app.dead_letters()]

    scene.run(scenario)


def test_a_subscribers_copy_cannot_be_suppressed(scene: Scene) -> None:
    """A sender that knows the event's id sends the subscriber a message under the key of the copy."""
    placed = scene.app.topic("order.placed", int)
    billed: list[int] = []

    @scene.app.on(placed)
    async def bill(order: int) -> None:
        billed.append(order)

    async def scenario() -> None:
        await scene.app.subscribe()
        event = await placed.publish(7)
        await scene.squat(bill, f"derived:event/{event.id}", 7)
        await scene.app.work(until_idle=True)
        assert billed == [7]

    scene.run(scenario)


def test_a_notice_of_a_dead_letter_cannot_be_suppressed(scene: Scene) -> None:
    """A sender that knows which message will die notifies the hook first."""
    told: list[str] = []

    @scene.app.task
    async def fails() -> None:
        raise Reject("never")

    @scene.app.on_dead
    async def alert(letter: DeadNotice) -> None:
        told.append(letter.message_id)

    async def scenario() -> None:
        receipt = await fails.send()
        other = DeadNotice(
            message_id="x", message_type="x", queue="x", reason="", error_type="", error_message="", attempt=1, fence=2
        )
        await scene.squat(alert, f"derived:dead/{receipt.id}:2", other)
        await drain(scene.app, advance=False)
        assert told == [receipt.id]

    scene.run(scenario)


def test_a_batch_cannot_be_refused_by_a_key_of_one_of_its_messages(scene: Scene) -> None:
    """Messages without a key are named after the batch and their place, in a form that senders cannot use."""

    async def scenario() -> None:
        await scene.squat(scene.child, "derived:batch/monday#0", "other")
        calls = [scene.child.call("first"), scene.child.call("second")]
        first = await scene.app.send_many(calls, batch_key="monday")
        again = await scene.app.send_many(calls, batch_key="monday")
        assert [one.duplicate for one in (*first, *again)] == [False, False, True, True]
        await scene.app.work(until_idle=True)
        assert sorted(scene.ran) == ["first", "second"]

    scene.run(scenario)


def test_a_trigger_cannot_be_suppressed(scene: Scene) -> None:
    """A sender that knows the trigger and its time takes the carrier's key."""
    soon = scene.app.debounce(scene.child, key="{by}", wait=60.0, at_most=3_600.0)

    async def scenario() -> None:
        key = f"derived:debounce/child:x@{scene.clock.moment.isoformat()}"
        await scene.squat(scene.app.tasks["child.debounced"], key, "child:other")
        await soon.trigger("x")
        scene.clock.advance(60.0)
        await scene.app.work(until_idle=True)
        assert scene.ran == ["x"]

    scene.run(scenario)


def test_children_and_signals_of_a_run_cannot_be_suppressed(scene: Scene) -> None:
    """A sender that knows the run's id takes the keys of the messages that the run sends, and those of its signals."""

    @scene.app.workflow
    async def waits(run: Run) -> str:
        return str(await run.signal("go"))

    async def step(ctx: Context, other: str) -> None:
        ctx.send(scene.child, "of the step")
        ctx.signal(other, "go", "from the step")

    @scene.app.workflow
    async def sends(run: Run, other: str) -> None:
        await run.child(scene.child, "of the run")
        await run.step(step, other)

    async def scenario() -> None:
        waiting = await waits.send()
        receipt = await sends.send(waiting.id)
        for place in ("step", "step#1", "child", "child#1"):
            await scene.child.options(key=f"workflow:{receipt.id}/{place}/0", delay=FAR).send("other")
        for key in (f"derived:signal/workflow:{receipt.id}/step#1/0", f"derived:signal/{receipt.id}/0"):
            with pytest.raises(EnvelopeError, match="id: begins with 'derived:'"):
                await scene.app.signal(waiting.id, "go", "forged", id=key)
        await drain(scene.app, advance=False)
        assert sorted(scene.ran) == ["of the run", "of the step"]
        assert await waiting.result() == "from the step"
        assert not [letter async for letter in scene.app.dead_letters()]

    scene.run(scenario)


@pytest.mark.parametrize("key", _REFUSED)
def test_a_sender_cannot_give_a_key_that_onefold_gives(scene: Scene, key: str) -> None:
    """In an option, a template, a function or a signal's id, wherever it is sent; the error names the field."""

    @scene.app.task(key="{name}")
    async def by_template(name: str) -> None: ...

    @scene.app.task(key=lambda name: str(name))
    async def by_function(name: str) -> None: ...

    failures: list[str] = []

    @scene.app.task
    async def signals(ctx: Context) -> None:
        try:
            ctx.signal("run", "go", id=key)
        except EnvelopeError as error:
            failures.append(error.field)

    async def scenario() -> None:
        for send in (
            lambda: scene.child.options(key=key),
            lambda: by_template.call(key),
            lambda: by_function.call(key),
        ):
            with pytest.raises(EnvelopeError, match=r"idempotency_key: begins with .* let it begin otherwise"):
                send()
        with pytest.raises(EnvelopeError, match=r"^id: begins with"):
            await scene.app.signal("run", "go", id=key)
        async with scene.app.transaction() as tx:
            with pytest.raises(EnvelopeError, match=r"^id: begins with"):
                tx.signal("run", "go", id=key)
        await signals.send()
        await scene.app.work(until_idle=True)
        assert failures == ["id"]

    scene.run(scenario)


@pytest.mark.parametrize("key", _REFUSED)
def test_a_broker_cannot_deliver_a_key_that_onefold_gives(scene: Scene, key: str) -> None:
    """It is kept as a dead letter, and the targeted message runs; as a sender's id it is no key either."""
    broker = MemoryTransport()
    scene.app.receive(broker, "in", types=["child"])
    sent = Envelope(
        id="theirs",
        message_type="child",
        queue="in",
        idempotency_key=key,
        correlation_id="c",
        causation_id="c",
        subject="s",
        payload_inline=b'{"by":"wire"}',
        created_at=1,
    )

    async def scenario() -> None:
        broker.add("in", to_json(sent).replace(b'"theirs"', b'"%s"' % key.encode()))
        if not key.startswith("unkeyed:"):
            broker.add("in", to_json(sent))
        await drain(scene.app, advance=False)
        letters = [letter async for letter in scene.app.dead_letters()]
        assert {letter.failure.reason for letter in letters} == {"malformed"}
        assert len(letters) == (1 if key.startswith("unkeyed:") else 2)
        assert scene.ran == []

    scene.run(scenario)


def test_a_window_of_keys_covers_two_days_after_the_last_chance_of_the_message() -> None:
    """The smallest allowed window is the sum behind the default: message time, dead letter time, and two days."""
    app = App("sqlite:///never-opened.db")
    for days, expires in ((22.9, 7), (15.9, None)):
        with pytest.raises(Exception, match="must cover"):

            @app.task(key_window=timedelta(days=days), expires=None if expires is None else timedelta(days=expires))
            async def short() -> None: ...

    @app.task(key_window=limits.KEY_WINDOW, expires=limits.MESSAGE_RETENTION)
    async def enough() -> None: ...
