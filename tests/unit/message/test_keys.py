"""Keys: how they are made, that different work never gets the same key, and that they stay the same over time."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import itertools
import random
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onefold import App, limits
from onefold.clock import MICROSECONDS, SystemClock, new_id, system_random
from onefold.errors import ConfigurationError, EnvelopeError, LimitError
from onefold.message.envelope import UNKEYED, derived_key
from onefold.message.keys import from_function, from_template, upstream_key
from onefold.testing import FakeClock


class Colour(enum.Enum):
    RED = "red"
    NOTHING = None


@dataclasses.dataclass
class Order:
    number: int
    lines: list[str]


@dataclasses.dataclass
class Picky:
    number: int

    def __post_init__(self) -> None:
        if self.number != 42:
            raise ValueError("only 42")


class Unknown:
    """A type of which no example can be made."""


def template(text: str, **hints: Any) -> Callable[..., str]:
    made = from_template("charge", "key", text, hints)
    return lambda **arguments: made(arguments)


def test_a_template_writes_the_arguments() -> None:
    """B4: the key is the business identity."""
    assert template("{customer}:{invoice}", customer=str, invoice=int)(customer="ada", invoice=7) == "ada:7"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (7, "7"),
        (True, "True"),
        ("x", "x"),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (dt.date(2030, 1, 2), "2030-01-02"),
        (dt.datetime(2030, 1, 2, 3, 4, tzinfo=dt.UTC), "2030-01-02T03:04:00+00:00"),
        (Colour.RED, "red"),
    ],
)
def test_simple_values_are_written_the_same_way_every_time(value: Any, written: str) -> None:
    """B3: the key is the same in every process and version of Python."""
    assert template("k-{a}", a=Any)(a=value) == f"k-{written}"


@pytest.mark.parametrize("value", [None, 1.5, "", b"x", [1], {"a": 1}, Colour.NOTHING, object()])
def test_values_that_make_a_doubtful_key_are_refused(value: Any) -> None:
    """B4: None, floats, empty texts and containers."""
    with pytest.raises(EnvelopeError, match="a is an empty text or a") as refused:
        template("{a}:{b}", a=Any, b=Any)(a=value, b=1)
    assert refused.value.field == "idempotency_key"


def test_attributes_and_items_of_arguments_may_be_named() -> None:
    """B4."""
    key = template("{order.number}/{order.lines[0]}", order=Order)
    assert key(order=Order(7, ["a", "b"])) == "7/a"
    with pytest.raises(EnvelopeError, match=r"order\.lines\[0\]"):
        key(order=Order(7, []))
    with pytest.raises(EnvelopeError, match=r"order\.colour"):
        template("{order.colour}", order=Order)(order=Order(7, []))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("always", "names no argument"),
        ("", "names no argument"),
        ("{{a}}", "names no argument"),
        ("{c}", "names 'c'; the arguments are: a, b"),
        ("{}", "names ''"),
        ("{0}", "names '0'"),
        ("{a}{b}", "nothing between"),
        ("{a}-{b}{a}", "nothing between"),
        ("{a:>10}", "format codes"),
        ("{a!r}", "format codes"),
        ("{a", "is not a template"),
        ("a}", "is not a template"),
    ],
)
def test_a_template_that_cannot_make_good_keys_is_refused_when_it_is_declared(text: str, problem: str) -> None:
    """B4, P3: the error names the task and the template."""
    with pytest.raises(ConfigurationError) as refused:
        template(text, a=str, b=str)
    assert problem in str(refused.value)
    assert "charge" in str(refused.value)


def test_a_constant_subject_is_allowed() -> None:
    """A8: unlike a key, one subject may have many messages."""
    assert from_template("charge", "subject", "orders", {})({}) == "orders"


_separator = st.text(st.characters(codec="utf-8", exclude_characters="{}"), min_size=1, max_size=3)
_value = st.text(st.sampled_from(":/-% 20263a25\u2026é") | st.characters(codec="utf-8"), min_size=1, max_size=6)


@given(st.tuples(_value, _value, _value), st.tuples(_value, _value, _value), _separator, _separator)
def test_different_arguments_never_give_the_same_key(
    one: tuple[str, ...], other: tuple[str, ...], first: str, second: str
) -> None:
    """B4, B11: with any separator between the fields, and any text in them."""
    assume(one != other)
    key = template("{a}" + first + "{b}" + second + "{c}", a=str, b=str, c=str)
    assert key(**dict(zip("abc", one, strict=True))) != key(**dict(zip("abc", other, strict=True)))


@given(st.data(), _separator)
def test_the_same_text_cut_at_different_places_gives_different_keys(data: st.DataObject, separator: str) -> None:
    """B4: a value that contains the separator does not move the border between two fields."""
    pieces = data.draw(st.lists(_value, min_size=3, max_size=5))
    cut, other = data.draw(st.lists(st.integers(1, len(pieces) - 1), min_size=2, max_size=2, unique=True))
    key = template("{a}" + separator + "{b}", a=str, b=str)
    keys = [key(a=separator.join(pieces[:at]), b=separator.join(pieces[at:])) for at in (cut, other)]
    assert keys[0] != keys[1]


def test_escapes_of_two_separators_are_not_taken_for_each_other() -> None:
    """B4: a blank is %20, and an ellipsis must not become %2026."""
    key = template("{a} \u2026{b}", a=str, b=str)
    assert key(a=" 26", b="x") != key(a="\u2026", b="x")


def test_one_field_alone_is_written_as_it_is() -> None:
    """B4: with one field nothing can be confused, so nothing is escaped."""
    assert template("order:{a}", a=str)(a="50%:off") == "order:50%:off"


def test_a_key_function_is_given_the_arguments_by_name() -> None:
    """B4."""
    key = from_function("charge", lambda customer, invoice: f"{customer}/{invoice}", {"customer": str, "invoice": int})
    assert key({"customer": "ada", "invoice": 7}) == "ada/7"


counter = itertools.count()
UNSTABLE: dict[str, Callable[..., str]] = {
    "uuid4": lambda a: str(uuid.uuid4()),  # noqa: TID251
    "time": lambda a: f"{a}-{SystemClock().steady()}-{uuid.uuid1()}",
    "counter": lambda a: f"{a}-{next(counter)}",
    "message id": lambda a: new_id(0, system_random()),
    "chance": lambda a: f"{a}-{system_random().getrandbits(64)}",
}


@pytest.mark.parametrize("function", UNSTABLE.values(), ids=UNSTABLE.keys())
def test_a_key_function_that_does_not_come_from_the_arguments_is_refused_when_it_is_declared(
    function: Callable[..., str],
) -> None:
    """B3, B4: a new key per send would let every effect happen again."""
    app = App("sqlite:///:memory:")
    with pytest.raises(ConfigurationError, match="for the same arguments"):
        app.task(name="charge", key=function)(handler)


async def handler(a: int) -> None: ...


SAMPLEABLE: list[Any] = [
    int, str, bool, float, bytes, Any, uuid.UUID, dt.datetime, dt.date, dt.timedelta, Colour, Order, int | None,
    list[int], tuple[int, ...], set[str], dict[str, int], Literal["a"], Annotated[int, "note"], list[Order],
]  # fmt: skip


@pytest.mark.parametrize("hint", SAMPLEABLE, ids=str)
def test_an_unstable_function_is_found_at_once_for_every_type_an_example_can_be_made_of(hint: Any) -> None:
    """B4."""
    with pytest.raises(ConfigurationError):
        from_function("charge", UNSTABLE["counter"], {"a": hint})


@pytest.mark.parametrize("hint", [Unknown, list[Unknown], Picky], ids=str)
def test_an_unstable_function_over_other_types_is_found_at_the_first_send(hint: Any) -> None:
    """B4: before anything is stored."""
    key = from_function("charge", UNSTABLE["counter"], {"a": hint})
    with pytest.raises(ConfigurationError, match="for the same arguments"):
        key({"a": 1})
    stable = from_function("charge", lambda a: f"k{a}", {"a": hint})
    assert [stable({"a": 1}), stable({"a": 2})] == ["k1", "k2"]


def test_a_key_function_of_the_time_is_found_when_the_time_has_passed() -> None:
    """B4: such a function differs only later, so sends call it a second time now and then, less and less often."""
    clock, asked = FakeClock(), 0

    def by_the_second(a: int) -> str:
        nonlocal asked
        asked += 1
        return f"{a}-{clock.now() // MICROSECONDS}"

    key = from_function("charge", by_the_second, {"a": int})
    for number in range(1_000):
        key({"a": number})
    assert asked < 1_000 + 20
    clock.advance(1.0)
    calls = (key({"a": number}) for number in range(1_100))
    with pytest.raises(ConfigurationError, match="not from time or chance"):
        list(calls)


def test_a_key_function_that_cannot_use_the_example_is_tried_at_the_first_send() -> None:
    """B4: a ValueError for an invented value says nothing about real values."""
    key = from_function("charge", lambda a: f"{int(a)}-{next(counter)}", {"a": str})
    with pytest.raises(ConfigurationError, match="for the same arguments"):
        key({"a": "7"})


def test_a_key_that_is_not_text_is_refused() -> None:
    """B4."""
    key = from_function("charge", lambda a: a, {"a": int})
    with pytest.raises(EnvelopeError, match="returned int; return a str"):
        key({"a": 7})


def declared(key: Any) -> Any:
    return App("sqlite:///:memory:").task(name="charge", key=key)(take_text)


async def take_text(a: str) -> None: ...


def test_an_empty_or_too_long_key_is_refused() -> None:
    """A7, A13: bounded to the last byte."""
    task = declared("{a}")
    assert task.call("x" * limits.KEY_BYTES_MAX).envelope("id").idempotency_key == "x" * limits.KEY_BYTES_MAX
    with pytest.raises(LimitError, match="idempotency_key"):
        task.call("x" * (limits.KEY_BYTES_MAX + 1)).envelope("id")
    with pytest.raises(LimitError, match="idempotency_key"):
        declared(lambda a: "").call("x").envelope("id")
    with pytest.raises(LimitError, match="key"):
        task.options(key="")


def test_no_argument_can_make_a_key_that_means_no_key() -> None:
    """B1: such a message would silently escape deduplication."""
    for task in (declared("{a}"), declared(lambda a: a)):
        with pytest.raises(EnvelopeError, match="idempotency_key"):
            task.call(f"{UNKEYED}x")
    with pytest.raises(EnvelopeError, match=UNKEYED):
        declared("{a}").options(key=f"{UNKEYED}x")


def test_a_message_without_a_key_has_an_identity_that_nothing_else_matches() -> None:
    """A7: the id of the message is not a business key."""
    task = App("sqlite:///:memory:").task(name="charge")(take_text)
    one, other = task.call("x").envelope("id-1"), task.call("x").envelope("id-2")
    assert not one.keyed
    assert one.idempotency_key != other.idempotency_key
    assert declared("{a}").call("x").envelope("id").keyed


def test_the_subject_of_a_keyed_message_is_its_key_cut_to_size() -> None:
    """A8: in bytes, and never in the middle of a character."""
    key = "é" * (limits.KEY_BYTES_MAX // 2)
    subject = declared("{a}").call(key).envelope("id").subject
    assert subject == "é" * (limits.SUBJECT_BYTES_MAX // 2)


def test_children_without_a_key_are_named_after_their_parent_and_their_place() -> None:
    """B23: the same on every retry of the parent, different for every child."""
    task = App("sqlite:///:memory:").task(name="charge")(take_text)
    parent = task.call("x").envelope("parent-id")
    first = [task.call("x").envelope(f"run-1-{n}", parent=parent, index=n).idempotency_key for n in range(3)]
    again = [task.call("x").envelope(f"run-2-{n}", parent=parent, index=n).idempotency_key for n in range(3)]
    assert first == again == [derived_key("child", f"parent-id/{n}") for n in range(3)]
    assert len(set(first)) == 3


def test_a_child_belongs_to_its_parents_request_and_names_its_cause() -> None:
    """A5, A6: correlation is inherited, causation is the parent."""
    task = App("sqlite:///:memory:").task(name="charge")(take_text)
    parent = task.options(correlation_id="request-1", trace="00-1-2-01").call("x").envelope("parent-id")
    child = task.call("x").envelope("child-id", parent=parent)
    assert (child.correlation_id, child.causation_id, child.trace) == ("request-1", "parent-id", "00-1-2-01")
    assert (parent.correlation_id, parent.causation_id) == ("request-1", "parent-id")


def test_an_upstream_key_is_stable_and_tells_effects_and_tasks_apart() -> None:
    """A15, B21."""
    key = upstream_key("shop", "charge", "order-7", "stripe")
    assert key == upstream_key("shop", "charge", "order-7", "stripe")
    others = {
        upstream_key("shop", "charge", "order-7", "mail"),
        upstream_key("shop", "refund", "order-7", "stripe"),
        upstream_key("shop", "charge", "order-8", "stripe"),
        upstream_key("shop", "charge\0order", "-7", "stripe"),
        upstream_key("staging", "charge", "order-7", "stripe"),
    }
    assert len(others | {key}) == 6
    assert len(key) < 64
    assert "order-7" not in key
    with pytest.raises(ConfigurationError):
        upstream_key("shop", "charge", "order-7", "Stripe payments")


def test_message_ids_sort_by_time_and_do_not_repeat() -> None:
    """A5: version 7 UUIDs."""
    chance = random.Random(7)
    ids = [new_id(1_893_456_000_000_000 + n * 1_000, chance) for n in range(1_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert all(uuid.UUID(one).version == 7 and uuid.UUID(one).variant == uuid.RFC_4122 for one in ids)
