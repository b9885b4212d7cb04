"""A secret in a payload, a result or a URL never shows: not in logs, not in errors, not in what objects print."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import io
import json
import logging
import shlex
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
    Run,
    StoreUnavailableError,
    TransportError,
    never,
)
from onefold.errors import DecodeError
from onefold.logs import escaped
from onefold.message.codec import Signature
from onefold.store.open import open_store
from onefold.store.postgres import PostgresStore
from onefold.tasks.task import Task

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

CANARY = "c4n4ry-9f1d"


#: Text that tries to look like a second line and another field, and to control a terminal.
FORGED = f"{CANARY}\n2026-11-18 05:00:00 ERROR onefold worker_died worker=prod \x1b[2J\u202e\x9b2J"


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
    """Return everything that any logger wrote at DEBUG, with exceptions."""
    caplog.set_level(logging.DEBUG)
    for name in ("onefold", "asyncio", "psycopg", "psycopg.pool"):
        caplog.set_level(logging.DEBUG, logger=name)
    formatter = logging.Formatter()
    return lambda: "\n".join(formatter.format(record) for record in caplog.records)


async def raised_by(verb: Callable[[], Awaitable[Any]], kind: type[Exception]) -> str:
    """Return everything that an exception shows: its text, and its traceback with all causes."""
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
    """Fault 33: programs log the results of ``app.find``."""
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
    """Fault 33: at send, at receipt, and in the dead letter of a wrong message."""

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
    """Fault 33: as argument and as result, even if the value's own exception contains it."""

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


MISTYPED = [
    "redis://user:{}@localhost",
    "postgresql+asyncpg://user:{}@localhost/db",
    "mysql://h/db?password={}",
    "postgresql:/app:{}@db/shop",
    "postgresql//app:{}@db/shop",
    "app:{}@db/shop",
    "mysql://app:S3@{}@db/shop",
    "host=db user=app password='a {}' dbname=shop",
    "Postgresql://app:{}@db/shop",
    "sqlite://app:{}@x",
    "postgresql://app:{}@db:notaport/shop",
    "postgresql://app:{}@[::1/shop",
    "postgresql://app:p/{}@127.0.0.1:1/shop",
    "postgresql://app:p@{}@127.0.0.1:1/shop",
    "postgresql+asyncpg://app:p/{}@db/shop",
    "postgres ://app:{}@db/shop",
    "redis://:x:{}@h",
]


@pytest.mark.parametrize("url", MISTYPED)
def test_a_mistyped_url_is_not_repeated(url: str, logs: Callable[[], str]) -> None:
    """Fault 33: its password may be anywhere in it, so errors, their causes and logs show no part of it."""

    async def attempt() -> None:
        store = open_store(url.format(CANARY))
        if isinstance(store, PostgresStore):
            store._patience = 0.05
        await App(store=store).open()

    assert CANARY not in asyncio.run(raised_by(attempt, OnefoldError)) + logs()


def test_a_store_that_goes_away_takes_no_secret_into_the_log(
    bench: Bench, logs: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 33: while the worker waits and retries."""
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


def test_no_text_of_an_error_is_logged(bench: Bench, logs: Callable[[], str]) -> None:
    """Fault 33: only its type, in whatever kind of handler; the text is in the dead letter."""
    app = bench.app
    once = RetryPolicy(max_attempts=1)

    @app.task(retry=once)
    async def task(secret: str) -> None:
        raise ValueError(f"card {secret} was declined")

    @app.workflow(retry=once)
    async def workflow(run: Run, secret: str) -> None:
        raise ValueError(f"card {secret} was declined")

    @app.step(undo=never("nothing to do"), retry=once)
    async def step(ctx: Context, secret: str) -> None:
        raise ValueError(f"card {secret} was declined")

    async def undo(ctx: Context, secret: str) -> None:
        raise ValueError(f"card {secret} cannot be given back")

    @app.step(undo=undo, retry=once)
    async def taken(ctx: Context, secret: str) -> None: ...

    @app.saga(retry=once)
    async def saga(run: Run, secret: str) -> None:
        await run.step(step, secret)

    @app.saga(retry=once)
    async def stuck(run: Run, secret: str) -> None:
        await run.step(taken, secret)
        raise ValueError(f"card {secret} was declined")

    @app.task(retry=once)
    async def late(ctx: Context, secret: str) -> None:
        async def fail() -> None:
            raise ValueError(f"card {secret} was declined")

        ctx.after(fail)

    async def scenario() -> None:
        for one in (task, workflow, saga, stuck, late):
            await one.send(FORGED)
        for _ in range(12):
            await bench.work()
            bench.clock.advance(600)
        for event in ("dead message_id", "step_failed", "saga_undone", "saga_stuck", "late_work_failed"):
            assert event in logs()
        assert CANARY not in logs()
        letters = [letter async for letter in app.dead_letters()]
        assert {CANARY in letter.failure.error_message for letter in letters} == {True}

    bench.run(scenario)


@pytest.mark.parametrize("driver", ["context", "connection"])
def test_the_values_of_a_row_that_postgresql_refuses_are_told_nowhere(
    postgres_url: str, logs: Callable[[], str], driver: str
) -> None:
    """Fault 33: the server quotes them as DETAIL, in errors of ``ctx.execute`` and of a lent connection alike."""
    app = App(postgres_url)

    @app.task(retry=RetryPolicy(max_attempts=1))
    async def pay(ctx: Context, number: int, card: str) -> None:
        if driver == "context":
            await ctx.execute("INSERT INTO cards VALUES (%s, %s)", card, "x" * number)
        else:
            connection: Any = await ctx.connection()
            await connection.execute("INSERT INTO cards VALUES (%s, %s)", (card, "x" * number))

    async def scenario() -> None:
        await app.migrate()
        async with app:
            async with app.transaction() as tx:
                await tx.execute("CREATE TABLE cards (n text PRIMARY KEY, t text CHECK (length(t) < 5))")
            for number in (1, 2, 9):
                await pay.send(number, CANARY)
                await app.work(until_idle=True)
            failures = [letter.failure async for letter in app.dead_letters()]
            assert len(failures) == 2
            assert "constraint" in failures[0].error_message
            assert CANARY not in "".join(one.error_message + one.stack for one in failures) + logs()

    asyncio.run(scenario())


class Model(pydantic.BaseModel):
    d: dict[str, int] = {}
    k: Literal["a"] = "a"

    @pydantic.field_validator("k", mode="before")
    @classmethod
    def check_k(cls, value: Any) -> Any:
        if value != "a":
            raise ValueError(f"no {value}")
        return value


def of_enum(kind: Colour) -> None: ...


def of_model(m: Model) -> None: ...


def of_mapping(d: dict[int, int]) -> None: ...


TALKATIVE = [
    (of_enum, {"kind": CANARY}),
    (of_enum, {"kind": f"x - at `{CANARY}"}),
    (of_enum, {"kind": f"x - at `$.{CANARY}` - at `$.kind`"}),
    (of_model, {"m": {"d": {FORGED: "x"}}}),
    (of_model, {"m": {"k": CANARY}}),
    (of_mapping, {"d": {CANARY: 1}}),
    (of_enum, {"kind": "red", FORGED: 1}),
]


@pytest.mark.parametrize(("function", "arguments"), TALKATIVE)
def test_what_cannot_be_decoded_is_told_without_values_and_keys(function: Any, arguments: Any) -> None:
    """Fault 33: validators quote values, and keys of mappings and unknown arguments come from the sender."""
    with pytest.raises(DecodeError) as raised:
        Signature(function, skip=0).decode(msgspec.json.encode(arguments))
    assert CANARY not in str(raised.value)
    assert str(raised.value).isprintable()


def test_texts_of_senders_cannot_forge_a_field_or_a_line_of_the_log(bench: Bench, logs: Callable[[], str]) -> None:
    """Fault 33: a key, a subject or an id that looks like several values is quoted."""
    app = bench.app
    forged = 'x error=None message_id="other" worker_died'

    @app.task(retry=RetryPolicy(max_attempts=1))
    async def fail() -> None:
        raise ValueError

    async def scenario() -> None:
        call = fail.options(key=forged, subject=forged, correlation_id=forged)
        await call.send()
        await call.send()
        await bench.work()

    bench.run(scenario)
    lines = [line for line in logs().splitlines() if "worker_died" in line]
    assert {line.split()[0] for line in lines} == {"duplicate_skipped", "dead"}
    for line in lines:
        fields = dict(part.split("=", 1) for part in shlex.split(line)[1:])
        assert fields["idempotency_key"] == forged
        assert fields["message_id"] != "other"


def test_every_value_that_is_logged_is_one_value() -> None:
    """Fault 33: quoting is done in one place, for texts, errors with texts, objects and tracebacks."""

    class Hostile:
        def __str__(self) -> str:
            return FORGED

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    try:
        logger.error("event a=%s b=%s c=%s d=%d", FORGED, Hostile(), ValueError(CANARY), 7)
        logger.error("event e=%s", TransportError(f"the server said {FORGED}"))
        try:
            try:
                raise KeyError(FORGED)
            except KeyError:
                raise ValueError(FORGED) from None
        except ValueError:
            logger.exception("broken f=%s", "plain")
    finally:
        logger.removeHandler(handler)
    first, second, third, *stack = stream.getvalue().splitlines()
    assert all(line.isprintable() for line in (first, second, third, *stack))
    assert first.endswith("c=ValueError d=7")
    assert second.startswith('event e="TransportError: the server said ')
    assert third == "broken f=plain"
    assert "test_secrets.py" in stack[0]
    assert stack[-1] == "builtins.ValueError"
    assert CANARY not in "".join(stack)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("order-7", "order-7"),
        ("ä:7/x", "ä:7/x"),
        ("", '""'),
        ("a b", '"a b"'),
        ("a=b", '"a=b"'),
        ('a"b', '"a\\"b"'),
        ("a\nb", '"a\\nb"'),
        ("a\x1b[2J", '"a\\u001b[2J"'),
        ("a\x9b", '"a\\u009b"'),
        ("a\u202eb", '"a\\u202eb"'),
    ],
)
def test_a_value_is_quoted_only_if_it_must_be(text: str, shown: str) -> None:
    """Plain keys are shown unquoted; a quoted text reads back unchanged."""
    assert escaped(text) == shown
    if shown.startswith('"'):
        assert json.loads(shown) == text
