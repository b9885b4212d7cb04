"""A secret in a payload, a result or a URL never shows: not in logs, not in errors, not in what objects print."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pydantic
import pytest

from onefold import (
    App,
    Context,
    DeadError,
    KeyReuseError,
    OnefoldError,
    Reject,
    Retry,
    RetryPolicy,
    StoreUnavailableError,
)
from onefold.errors import ConfigurationError, DecodeError
from onefold.stores import masked
from onefold.stores.postgres import PostgresStore
from onefold.task import Task

if TYPE_CHECKING:
    from conftest import Bench

CANARY = "c4n4ry-9f1d"


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Card:
    number: str
    limit: int = 0


class Account(pydantic.BaseModel):
    number: int
    owner: str = ""


class Tagged(msgspec.Struct, tag="known"):
    text: str = ""


class Other(msgspec.Struct, tag="other"):
    text: str = ""


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Everything any logger says at DEBUG, with the exceptions in it."""
    caplog.set_level(logging.DEBUG)
    for name in ("onefold", "asyncio", "psycopg", "psycopg.pool"):
        caplog.set_level(logging.DEBUG, logger=name)
    formatter = logging.Formatter()
    return lambda: "\n".join(formatter.format(record) for record in caplog.records)


async def raised_by(verb: Callable[[], Awaitable[Any]], kind: type[Exception]) -> str:
    """Return all that an exception shows: its text, and what a traceback prints of it and of its causes."""
    with pytest.raises(kind) as raised:
        await verb()
    error = raised.value
    shown = [str(error), repr(error)]
    for one in traceback.TracebackException.from_exception(error).format(chain=True):
        shown += [line for line in one.splitlines() if not line.startswith("    ")]
    return "\n".join(shown)


def declare(app: App) -> Task[[int, str], str]:
    @app.task(key="{order}", retry=RetryPolicy(max_attempts=2))
    async def charge(ctx: Context, order: int, secret: str) -> str:
        if order == 1:
            raise Retry("the bank is closed", after=1)
        if order == 2:
            raise Reject("no such card")
        return secret

    return charge


def test_nothing_is_logged_or_printed_of_payloads_and_results(bench: Bench, logs: Callable[[], str]) -> None:
    """Fault 33: through success, retry, death, a duplicate and a redrive."""
    charge = declare(bench.app)

    async def scenario() -> None:
        shown: list[object] = [bench.app, charge, charge.call(7, CANARY), charge.options(delay=1)]
        done, failing, dead = [await charge.send(order, CANARY) for order in (7, 1, 2)]
        shown += [done, failing, dead]
        for _ in range(3):
            await bench.work()
            bench.clock.advance(60)
        assert await done.result() == CANARY
        shown.append(await charge.send(7, CANARY))
        shown += [letter async for letter in bench.app.dead_letters()]
        shown += [record.envelope for record in await bench.messages()]
        async with bench.app.transaction() as tx:
            shown.append(tx)
        assert await bench.app.redrive([dead.id], actor="ada", reason="fixed")
        await bench.work()
        assert await raised_by(dead.result, DeadError) != ""
        texts = [repr(one) + str(one) for one in shown]
        texts.append(await raised_by(dead.result, DeadError))
        texts.append(await raised_by(lambda: charge.send(7, f"other {CANARY}"), KeyReuseError))
        assert not [text for text in texts if CANARY in text]
        assert "duplicate_skipped" in logs()
        assert "retry message_id" in logs()
        assert "dead message_id" in logs()
        assert CANARY not in logs()

    bench.run(scenario)


def test_nothing_is_printed_of_the_result_in_a_record(bench: Bench) -> None:
    """Fault 33: what ``app.find`` returns ends up in logs."""
    charge = declare(bench.app)

    async def scenario() -> None:
        sent = await charge.send(7, CANARY)
        await bench.work()
        assert CANARY not in repr(await bench.record(sent))

    bench.run(scenario)


WRONG: dict[str, tuple[Any, Any, bytes]] = {
    "int": (int, CANARY, b'"%s"'),
    "enum": (Colour, CANARY, b'"%s"'),
    "literal": (Literal["red"], CANARY, b'"%s"'),
    "dataclass": (Card, {"number": "1", "limit": CANARY}, b'{"number":"1","limit":"%s"}'),
    "pydantic": (Account, {"number": CANARY}, b'{"number":"%s"}'),
    "list of pydantic": (list[Account], [{"number": CANARY}], b'[{"number":"%s"}]'),
    "tag": (Tagged | Other, {"type": CANARY}, b'{"type":"%s"}'),
    "constraint": (int, [CANARY], b'["%s"]'),
}


@pytest.mark.parametrize(("hint", "value", "encoded"), WRONG.values(), ids=WRONG.keys())
def test_nothing_is_said_of_a_wrong_value_but_where_it_is(
    bench: Bench, logs: Callable[[], str], hint: Any, value: Any, encoded: bytes
) -> None:
    """Fault 33: at send, at receipt, and in the dead letter that a wrong message becomes."""

    async def handler(a: Any) -> None: ...

    handler.__annotations__ = {"a": hint, "return": None}
    strict: Task[..., None] = bench.app.task(handler)
    before = App(bench.url, clock=bench.clock)

    async def older(a: Any) -> None: ...

    sender: Task[..., None] = before.task(name="handler")(older)

    async def send_wrong() -> None:
        await strict.send(value)

    async def scenario() -> None:
        at_send = await raised_by(send_wrong, DecodeError)
        assert CANARY not in at_send
        async with before:
            dead = await sender.send(msgspec.json.decode(encoded % CANARY.encode()))
        await bench.work()
        (letter,) = [letter async for letter in bench.app.dead_letters()]
        assert letter.id == dead.id
        failure = letter.failure
        assert failure.reason == "contract"
        assert failure.error_message.startswith("a")
        assert CANARY not in failure.error_message + failure.stack + repr(letter) + logs()

    bench.run(scenario)


def test_nothing_is_said_of_a_value_that_cannot_be_written(bench: Bench, logs: Callable[[], str]) -> None:
    """Fault 33: as argument and as result, also when the value explains itself in its exception."""

    class Talkative:
        def __repr__(self) -> str:
            return CANARY

        def model_dump(self, mode: str) -> Any:
            return {"number": CANARY, "more": object()}

    @bench.app.task
    async def give(a: Any) -> Any:
        return Talkative()

    async def send(value: Any) -> None:
        await give.send(value)

    async def scenario() -> None:
        for value in (Talkative(), [CANARY, object()], {CANARY: float("nan")}, {1: CANARY}, f"{CANARY}\0"):
            told = await raised_by(lambda value=value: send(value), OnefoldError)
            assert CANARY not in told.replace(f"payload_inline.a.{CANARY}", "(a key's name)")
        dead = await give.send(1)
        await bench.work()
        assert CANARY not in await raised_by(dead.result, DeadError) + logs()

    bench.run(scenario)


UNREACHABLE = [
    f"postgresql://user:{CANARY}@127.0.0.1:1/db?connect_timeout=1",
    f"postgresql://127.0.0.1:1/db?user=u&password={CANARY}&connect_timeout=1",
    f"postgresql://user:p%40{CANARY}%2F@127.0.0.1:1/db",
    f"postgresql://user:{CANARY}@[::1/db",
]


@pytest.mark.parametrize("url", UNREACHABLE, ids=["user", "option", "escaped", "malformed"])
def test_the_password_of_a_server_that_does_not_answer_shows_nowhere(url: str, logs: Callable[[], str]) -> None:
    """Fault 33: in no error and in no log."""

    async def scenario() -> None:
        for verb in (App.open, App.migrate):

            async def attempt(verb: Callable[[App], Awaitable[Any]] = verb) -> None:
                store = PostgresStore(url, patience=0.05)
                assert CANARY not in repr(store)
                await verb(App(store=store))

            assert CANARY not in await raised_by(attempt, OnefoldError)
        assert CANARY not in logs()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{CANARY}@localhost",
        f"postgresql+asyncpg://user:{CANARY}@localhost/db",
        f"mysql://h/db?password={CANARY}",
    ],
    ids=["user", "dialect", "option"],
)
def test_a_masked_url_has_no_password(url: str) -> None:
    """Fault 33: in the user's part and among the options."""
    assert CANARY not in masked(url)
    with pytest.raises(ConfigurationError) as refused:
        asyncio.run(App(url).open())
    assert CANARY not in str(refused.value)


def test_a_store_that_goes_away_takes_no_secret_into_the_log(
    bench: Bench, logs: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 33: while the worker waits and tries again."""
    charge = declare(bench.app)

    async def scenario() -> None:
        sent = await charge.send(7, CANARY)
        settle, failures = bench.app.store.settle, [StoreUnavailableError("away")] * 3

        async def unreliable(settlements: Any) -> list[bool]:
            if failures:
                raise failures.pop()
            return await settle(settlements)

        monkeypatch.setattr(bench.app.store, "settle", unreliable)
        await bench.work()
        assert await sent.result() == CANARY
        assert "store_unavailable doing=settle" in logs()
        assert CANARY not in logs()

    bench.run(scenario)
