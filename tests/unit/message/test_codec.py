"""Arguments and results: a handler gets exactly what was sent, or the sender or the handler gets an error."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import decimal
import enum
import inspect
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest
from msgspec.structs import asdict

from onefold import App, Context, limits
from onefold.errors import ConfigurationError, DeadError, DecodeError, EnvelopeError, LimitError
from onefold.message.codec import Signature
from onefold.testing.clock import FakeClock


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Item:
    sku: str
    count: int = 1


@dataclasses.dataclass
class Order:
    number: int
    items: list[Item]
    note: str | None = None
    colour: Colour = Colour.RED
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Address(msgspec.Struct):
    street: str
    zip_code: str = "00000"


class Row(TypedDict):
    name: str
    age: int


class Point(NamedTuple):
    x: int
    y: int


class Customer(pydantic.BaseModel):
    name: str
    born: dt.date | None = None
    addresses: list[str] = []


class Foreign:
    """A class with no JSON form."""


def signature(hint: Any, default: Any = ..., returns: Any = None) -> Signature:
    async def handler(a: Any) -> None: ...

    handler.__annotations__ = {"a": hint, "return": returns}
    if default is not ...:
        handler.__defaults__ = (default,)
    return Signature(handler, skip=0)


MOMENT = dt.datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)
VALUES: list[tuple[Any, Any]] = [
    (int, -7),
    (int, 2**70),
    (float, 1.5),
    (str, 'text "quoted" \\ ü 🙂 \x7f'),
    (bool, True),
    (type(None), None),
    (bytes, b"\x00\xff"),
    (int | None, None),
    (int | str, "7"),
    (list[int], [1, 2]),
    (tuple[int, str], (1, "a")),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (dict[str, float], {"b": 1.0, "a": 2.5}),
    (Colour, Colour.BLUE),
    (Level, Level.HIGH),
    (Literal["a", "b"], "b"),
    (Annotated[int, msgspec.Meta(gt=3)], 4),
    (dt.datetime, MOMENT),
    (dt.date, MOMENT.date()),
    (dt.timedelta, dt.timedelta(days=1, microseconds=5)),
    (uuid.UUID, uuid.UUID(int=7)),
    (decimal.Decimal, decimal.Decimal("1.10")),
    (Item, Item("a", 2)),
    (Order, Order(7, [Item("a"), Item("b", 2)], None, Colour.BLUE, {"deep": [{"x": 1}]})),
    (Address, Address("Main St")),
    (Row, {"name": "Ada", "age": 36}),
    (Point, Point(1, 2)),
    (Customer, Customer(name="Ada", born=dt.date(1815, 12, 10), addresses=["London"])),
    (list[Customer | None], [Customer(name="Ada"), None]),
    (Any, {"list": [1, "two", None, True, 2.5]}),
]


@pytest.mark.parametrize(("hint", "value"), VALUES, ids=[str(hint) for hint, _ in VALUES])
def test_an_argument_arrives_as_it_was_sent(hint: Any, value: Any) -> None:
    """A10: equal, and of the same type."""
    codec = signature(hint)
    arrived = codec.decode(codec.encode(codec.bind((value,), {}))[0])["a"]
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize(("hint", "value"), VALUES, ids=[str(hint) for hint, _ in VALUES])
def test_a_result_arrives_as_it_was_returned(hint: Any, value: Any) -> None:
    """B17: a duplicate gets exactly what the handler returned."""
    codec = signature(int, returns=hint)
    arrived = codec.decode_result(codec.encode_result(value))
    assert arrived == value
    assert type(arrived) is type(value)


WRONG: list[tuple[Any, Any, bytes]] = [
    (int, "7", b'"7"'),
    (int, 7.5, b"7.5"),
    (int, None, b"null"),
    (int, True, b"true"),
    (str, 7, b"7"),
    (list[int], ["a"], b'["a"]'),
    (Colour, "green", b'"green"'),
    (Literal["a"], "b", b'"b"'),
    (Annotated[int, msgspec.Meta(gt=3)], 3, b"3"),
    (dt.datetime, "tomorrow", b'"tomorrow"'),
    (uuid.UUID, "7", b'"7"'),
    (Item, {"count": 1}, b'{"count":1}'),
    (Item, Item("a", "many"), b'{"sku":"a","count":"many"}'),  # type: ignore[arg-type]
    (Address, {"zip_code": 7}, b'{"zip_code":7}'),
    (Row, {"name": "Ada"}, b'{"name":"Ada"}'),
    (Customer, {"name": 7}, b'{"name":7}'),
]


@pytest.mark.parametrize(("hint", "value", "encoded"), WRONG, ids=[f"{hint} {value}" for hint, value, _ in WRONG])
def test_a_wrong_argument_is_refused_at_send_and_at_receipt(hint: Any, value: Any, encoded: bytes) -> None:
    """A14: the same reader is used at both ends, and names the field."""
    codec = signature(hint)
    with pytest.raises(DecodeError) as at_send:
        codec.encode(codec.bind((value,), {}))
    with pytest.raises(DecodeError) as at_receipt:
        codec.decode(b'{"a":' + encoded + b"}")
    assert at_send.value.field.startswith("a")
    assert at_receipt.value.field.startswith("a")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"a":1,"b":2}', b'{"b":1}', b'{"a":1', b"\xff", b"null"])
def test_arguments_that_do_not_fit_the_signature_are_refused_at_receipt(data: bytes) -> None:
    """A14: missing, unknown or unreadable arguments never reach a handler."""
    with pytest.raises(DecodeError):
        signature(int).decode(data)


def test_the_bytes_are_the_same_in_whatever_order_the_arguments_were_given() -> None:
    """B25: fingerprints are computed from canonical bytes."""

    async def handler(a: int, b: dict[str, int]) -> None: ...

    codec = Signature(handler, skip=0)
    first = codec.encode(codec.bind((1, {"x": 1, "y": 2}), {}))
    assert codec.encode(codec.bind((), {"b": {"y": 2, "x": 1}, "a": 1})) == first


def test_a_default_that_was_left_out_is_not_part_of_the_fingerprint() -> None:
    """B25: a parameter with a default that is added later does not change the fingerprint of an old send."""

    async def before(a: int) -> None: ...
    async def after(a: int, b: str = "new", c: list[int] = [1]) -> None: ...  # noqa: B006

    old, new = Signature(before, skip=0), Signature(after, skip=0)
    fingerprint = old.encode(old.bind((1,), {}))[1]
    assert new.encode(new.bind((1,), {}))[1] == fingerprint
    same = {"b": "".join(["n", "ew"]), "c": [1]}
    assert new.encode(new.bind((1,), same))[1] == fingerprint
    assert new.encode(new.bind((1, "other"), {}))[1] != fingerprint
    assert new.encode(new.bind((1,), {"c": [1, 2]}))[1] != fingerprint


def _by_place(a: int, b: str = "b", c: int = 3) -> None: ...


def _by_name(a: int, *, b: str, c: int = 3) -> None: ...


@pytest.mark.parametrize("function", [_by_place, _by_name])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((1, "x"), {}),
        ((1, "x", 5), {}),
        ((1, "x", 5, 6), {}),
        ((1,), {"b": "x"}),
        ((1,), {"c": 5, "b": "x"}),
        ((), {"c": 5, "b": "x", "a": 1}),
        ((), {"b": "x"}),
        ((1,), {"a": 1, "b": "x"}),
        ((1,), {"b": "x", "d": 1}),
    ],
)
def test_arguments_are_bound_as_python_binds_them(
    function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    def outcome(bind: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
        try:
            return bind()
        except TypeError as error:
            return str(error)

    def as_python() -> dict[str, Any]:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    codec = Signature(function, skip=0)
    assert outcome(lambda: asdict(codec.bind(args, kwargs))) == outcome(as_python)


def test_a_narrowed_fingerprint_looks_at_the_named_arguments_only() -> None:
    """B25: ``fingerprint=("a",)``."""

    async def handler(a: int, b: int) -> None: ...

    codec = Signature(handler, skip=0, fingerprint=("a",))
    prints = [codec.encode(codec.bind(args, {}))[1] for args in ((1, 2), (1, 3), (2, 2))]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]
    with pytest.raises(ConfigurationError, match="'z'"):
        Signature(handler, skip=0, fingerprint=("z",))


def test_defaults_fill_in_for_what_an_older_sender_did_not_know() -> None:
    """A3: a parameter with a default may be added without a new version; mutable defaults are copied."""
    codec = signature(list[int], default=[1])
    first = codec.decode(b"{}")["a"]
    first.append(2)
    assert codec.decode(b"{}")["a"] == [1]


@pytest.mark.parametrize("hint", [Foreign, list[Foreign], dict[str, Foreign | None], complex, Callable[[int], int]])
def test_a_type_without_a_json_form_is_refused_when_it_is_declared(hint: Any) -> None:
    """P3: as an argument and as a result."""
    with pytest.raises(ConfigurationError):
        signature(hint)
    with pytest.raises(ConfigurationError):
        signature(int, returns=hint)


def test_a_default_that_cannot_be_kept_is_refused_when_it_is_declared() -> None:
    """P3: a shared mutable default would leak from one message into the next."""
    with pytest.raises(ConfigurationError):
        signature(Address, default=Address("Main St"))


def test_a_hint_that_cannot_be_found_is_refused_when_it_is_declared() -> None:
    """P3."""

    async def handler(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigurationError, match="Nowhere"):
        Signature(handler, skip=0)


def test_a_value_without_a_json_form_is_refused_at_send() -> None:
    """A10: nothing is ever pickled."""
    codec = signature(Any)
    for value in (Foreign(), object, lambda: None, 1j):
        with pytest.raises(DecodeError):
            codec.encode(codec.bind((value,), {}))


class Explosive:
    """Raises on any access."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Liar:
    def model_dump(self, mode: str) -> Any:
        raise KeyError(mode)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


UNKEEPABLE: dict[str, tuple[Callable[[], Any], type[EnvelopeError]]] = {
    "not serialisable": (Foreign, DecodeError),
    "raises in __repr__": (Explosive, DecodeError),
    "raises in model_dump": (Liar, DecodeError),
    "holds itself": (endless, DecodeError),
    "not finite": (lambda: [float("nan")], EnvelopeError),
    "lone surrogate": (lambda: "\ud800", DecodeError),
    "NUL": (lambda: ["\0"], DecodeError),
    "non-string key": (lambda: {1: 2}, DecodeError),
    "too large": (lambda: "x" * (limits.RESULT_BYTES_MAX - 1), LimitError),
    "too long a number": (lambda: 10**limits.JSON_DIGITS_MAX, LimitError),
}


@pytest.mark.parametrize(("make", "error"), UNKEEPABLE.values(), ids=UNKEEPABLE.keys())
def test_a_result_that_cannot_be_kept_is_one_typed_error(make: Callable[[], Any], error: type[EnvelopeError]) -> None:
    """Fault 22: the error names the result, whatever the value does when it is accessed."""
    with pytest.raises(error) as refused:
        signature(int, returns=Any).encode_result(make())
    assert refused.value.field.startswith("result")


def test_a_result_of_just_the_largest_size_is_kept() -> None:
    """Fault 22: one byte more is refused."""
    assert (
        len(signature(int, returns=str).encode_result("x" * (limits.RESULT_BYTES_MAX - 2))) == limits.RESULT_BYTES_MAX
    )


def test_a_result_that_cannot_be_kept_fails_the_attempt_and_undoes_the_effect(store_url: str) -> None:
    """Fault 22: the handler's rows and sends are gone, the message has the reason, the worker continues."""
    app = App(store_url, clock=FakeClock())

    @app.task
    async def other() -> str:
        return "still working"

    @app.task
    async def careless(ctx: Context, what: str) -> Any:
        await ctx.execute("INSERT INTO effect VALUES (1)")
        ctx.send(other)
        return UNKEEPABLE[what][0]()

    async def main() -> None:
        await app.migrate()
        async with app:
            async with app.transaction() as tx:
                await tx.execute("CREATE TABLE effect (id INTEGER)")
            for sent in await app.send_many(careless.call(what) for what in UNKEEPABLE):
                await app.work(until_idle=True)
                with pytest.raises(DeadError, match="result") as dead:
                    await sent.result()
                assert dead.value.reason == "contract"
            assert await app.store.fetch("SELECT count(*) FROM effect") == [(0,)]
            assert (await app.count())["default"].scheduled == 0
            after = await other.send()
            await app.work(until_idle=True)
            assert await after.result() == "still working"

    run(main)


def test_a_message_whose_arguments_no_longer_fit_goes_straight_to_the_dead_letters(sqlite_url: str) -> None:
    """A14: refused at receipt, it is dead with the reason ``contract`` after one attempt; the handler did not run."""
    ran: list[Any] = []
    clock = FakeClock()

    def declare(hint: Any, url: str) -> tuple[App, Any]:
        app = App(url, clock=clock)

        async def handler(a: Any) -> None:
            ran.append(a)

        handler.__annotations__ = {"a": hint, "return": None}
        return app, app.task(handler)

    async def main() -> None:
        before, old = declare(str, sqlite_url)
        async with before:
            sent = await old.send("seven")
        after, _ = declare(int, sqlite_url)
        async with after:
            await after.work(until_idle=True)
            letters = [letter async for letter in after.dead_letters()]
        assert [letter.id for letter in letters] == [sent.id]
        assert letters[0].failure.reason == "contract"
        assert letters[0].failure.error_message.startswith("a: ")
        assert ran == []

    run(main)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(within())
