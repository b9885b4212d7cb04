"""Arguments that are new to one version of the code, in messages that another version sends or handles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pydantic
import pytest

from onefold import App, Context, Query, Run, State, UnknownArgumentError
from onefold.message.codec import Signature
from onefold.testing import FakeClock
from onefold.testing.transport import MemoryTransport


def signature(function: Callable[..., Any]) -> Signature:
    return Signature(function, skip=0)


def payload(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    made = signature(function)
    return made.encode(made.bind(args, kwargs))[0]


def old(n: int) -> None: ...


def new(n: int, extra: str = "x", *, many: list[int] = [1], flag: bool | int = 1) -> None: ...  # noqa: B006


def test_an_argument_equal_to_its_default_is_not_part_of_the_message() -> None:
    """So older workers can read the messages of newer senders, whether the argument was given or not."""
    assert payload(new, 7) == payload(new, 7, "x", many=[1], flag=1) == payload(old, 7) == b'{"n":7}'
    assert payload(new, 7, "y") == b'{"n":7,"extra":"y"}'
    assert signature(new).decode(b'{"n":7}') == {"n": 7, "extra": "x", "many": [1], "flag": 1}


@pytest.mark.parametrize(("given", "written"), [(True, b"true"), (1.0, b"1.0"), (0, b"0")])
def test_a_value_that_only_compares_equal_to_the_default_is_sent(given: Any, written: bytes) -> None:
    """True equals 1, but is another value."""

    def takes(value: Any = 1, values: list[Any] = [1]) -> None: ...  # noqa: B006

    assert payload(takes, given) == b'{"value":' + written + b"}"
    assert payload(takes, 1, [given]) == b'{"values":[' + written + b"]}"


def test_a_negative_zero_is_not_the_default() -> None:
    def takes(value: float = 0.0) -> None: ...

    assert (payload(takes, 0.0), payload(takes, -0.0)) == (b"{}", b'{"value":-0.0}')


def test_fingerprints_are_what_they_were_before_the_argument_was_added() -> None:
    """A second send by newer code is a duplicate of the first by older code, not another payload."""

    def prints(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
        made = signature(function)
        return made.encode(made.bind(args, kwargs))[1]

    assert prints(old, 7) == prints(new, 7) == prints(new, 7, "x", flag=1)
    assert prints(old, 7) != prints(new, 7, "y")


def test_a_default_without_a_json_form_is_never_equal_to_anything() -> None:
    def takes(n: int, value: Any = object()) -> None: ...  # noqa: B008

    assert payload(takes, 7, "x") == b'{"n":7,"value":"x"}'


class Forbids(msgspec.Struct, forbid_unknown_fields=True):
    n: int


class Model(pydantic.BaseModel, extra="forbid"):
    n: int


@pytest.mark.parametrize("kind", [Forbids, Model])
def test_a_field_inside_an_argument_is_unknown_too(kind: Any) -> None:
    def takes(value: Any) -> None: ...

    takes.__annotations__["value"] = kind
    with pytest.raises(UnknownArgumentError, match=r"value|payload_inline"):
        signature(takes).decode(b'{"value":{"n":1,"later":2}}')


class Shop:
    """Two builds of one app on one store: the newer one has one more argument everywhere."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        self.transport = MemoryTransport()
        self.ran: list[tuple[str, Any]] = []
        self.old, self.new = (self._build(url, newer=newer) for newer in (False, True))

    def _build(self, url: str, *, newer: bool) -> App:
        app = App(url, clock=self.clock)
        ran, by = self.ran, "new" if newer else "old"

        async def done(n: int, extra: str) -> int:
            ran.append((by, (n, extra)))
            return n

        if newer:

            @app.task(key="{n}")
            async def work(n: int, extra: str = "x") -> int:
                return await done(n, extra)

            @app.task(ordering_key="{n}")
            async def lined(n: int, extra: str = "x") -> int:
                return await done(n, extra)

            @app.workflow
            async def flow(run: Run, n: int, extra: str = "x") -> int:
                return await run.step(done, n, extra)

            @app.saga
            async def trip(run: Run, n: int, extra: str = "x") -> None:
                ran.append((by, (n, extra)))

            @app.on("placed")
            async def told(ctx: Context, event: NewEvent) -> None:
                await done(event.n, event.extra)

            app.topic("placed", NewEvent)
        else:

            @app.task(key="{n}", name="work")
            async def old_work(n: int) -> int:
                return await done(n, "-")

            @app.task(ordering_key="{n}", name="lined", gate_name=None)
            async def old_lined(n: int) -> int:
                return await done(n, "-")

            @app.workflow(name="flow")
            async def old_flow(run: Run, n: int) -> int:
                return await run.step(done, n, "-")

            @app.saga(name="trip")
            async def old_trip(run: Run, n: int) -> None:
                ran.append((by, (n, "-")))

            @app.on("placed", name="told")
            async def old_told(ctx: Context, event: OldEvent) -> None:
                await done(event.n, "-")

            app.topic("placed", OldEvent)
        return app


class OldEvent(msgspec.Struct, forbid_unknown_fields=True):
    n: int


class NewEvent(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    n: int
    extra: str = "x"


async def send_everything(app: App, extra: str) -> None:
    for number, name in enumerate(("work", "lined", "flow", "trip")):
        await app.tasks[name].send(number, extra)
    event = NewEvent(9, extra)
    await app.tasks["placed"].send(event)


def test_an_older_worker_handles_messages_of_newer_senders_with_defaults(store_url: str) -> None:
    """Tasks, lines, workflows, sagas and events: nothing waits, nothing dies."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.old.migrate()
        async with shop.old, shop.new:
            await shop.old.work(until_idle=True)
            await send_everything(shop.new, "x")
            await shop.old.work(until_idle=True)
            assert sorted(shop.ran) == [("old", (n, "-")) for n in (0, 1, 2, 3, 9)]
            assert {one.state for one in await shop.new.find(Query())} == {State.DONE}

    asyncio.run(scenario())


def test_an_older_worker_leaves_an_unknown_argument_to_a_newer_one(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No attempt is used up, no saga is undone, the log says it once, and the newer worker handles them all."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.old.migrate()
        async with shop.old, shop.new:
            await shop.new.work(until_idle=True)
            await send_everything(shop.new, "y")
            for _ in range(4):
                await shop.old.work(until_idle=True)
                shop.clock.advance(timedelta(hours=1))
            assert shop.ran == []
            waiting = [one for one in await shop.new.find(Query()) if one.envelope.message_type != "placed"]
            assert {(one.state, one.attempt, one.crashes) for one in waiting} == {(State.SCHEDULED, 0, 0)}
            assert len(waiting) == 5
            await shop.new.work(until_idle=True)
            assert sorted(shop.ran) == [("new", (n, "y")) for n in (0, 1, 2, 3, 9)]
            assert {one.state for one in await shop.new.find(Query())} == {State.DONE}

    with caplog.at_level(logging.WARNING, "onefold"):
        asyncio.run(scenario())
    told = [one.getMessage() for one in caplog.records if "unsupported_version" in one.getMessage()]
    assert len(told) <= 5
    assert all("message_id=" in one for one in told)


def test_an_unknown_argument_that_no_worker_ever_knows_expires(sqlite_url: str) -> None:
    """As for newer versions: it is tried less and less often, and is a dead letter when its time is over."""
    shop = Shop(sqlite_url)

    async def scenario() -> None:
        async with shop.old, shop.new:
            receipt = await shop.new.tasks["work"].send(1, "y")
            looks = 0
            for _ in range(7 * 24 + 1):
                before = (await shop.old.find(Query(ids=(receipt.id,))))[0].fence
                await shop.old.work(until_idle=True)
                looks += (await shop.old.find(Query(ids=(receipt.id,))))[0].fence != before
                shop.clock.advance(timedelta(hours=1))
            await shop.old.work(until_idle=True)
            (letter,) = [letter async for letter in shop.old.dead_letters()]
            assert letter.failure.reason == "expired"
            assert looks <= 180
            assert [one.failure.reason for one in await letter.attempts()] == ["expired"]

    asyncio.run(scenario())


def test_an_entry_of_a_broker_with_an_unknown_argument_waits_too(store_url: str) -> None:
    """Its key cannot be computed before its arguments are known, so its letter waits for a newer worker."""
    shop = Shop(store_url)
    for app in (shop.old, shop.new):
        app.receive(shop.transport, "in", types=["work"])

    async def scenario() -> None:
        await shop.old.migrate()
        async with shop.old, shop.new:
            call = shop.new.tasks["work"].call(4, "y")
            await shop.transport.publish([msgspec.structs.replace(call.envelope("theirs"), queue="in")])
            await shop.old.work(until_idle=True)
            assert [letter async for letter in shop.old.dead_letters()] == []
            shop.clock.advance(timedelta(minutes=5))
            await shop.new.work(until_idle=True)
            assert shop.ran == [("new", (4, "y"))]

    asyncio.run(scenario())
